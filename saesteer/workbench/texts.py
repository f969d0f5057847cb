"""Files of texts or chats that show something or do not, and the tokens of each that count. Knows no engine.

A line of a .jsonl file is a JSON string, or a chat: a list of messages, or an object with ``messages``, the last of
which is the assistant's. What counts of a chat are the tokens of that answer, without what the template puts after it.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from saesteer.errors import ConfigError
from saesteer.workbench import separation
from saesteer.workbench.reading import tokens_of

MAX_BYTES = 64 << 20  # of a file
MAX_TOKENS = 4096  # of a text

Tokens = Literal["mean", "last", "second-last"]


class Line(NamedTuple):
    """A text or a chat."""

    number: int  # from 1
    text: str | list[Any]  # or the messages of a chat


class Text(NamedTuple):
    """Token ids, of which those from ``first`` on count."""

    ids: list[int]
    first: int

    def wanted(self, site: str, tokens: Tokens) -> dict[str, Any]:
        """What is read at a site: one row."""
        end = len(self.ids)
        begin, end = {"mean": (self.first, end), "last": (end - 1, end), "second-last": (end - 2, end - 1)}[tokens]
        return {"site": site, "scope": {"positions": [[begin, end]]}, "reduce": "mean"}


def read_lines(flag: str, file: Path) -> list[Line]:
    """The lines of a file that are not empty.

    Raises:
        ConfigError: it cannot be read, is too large, has too few of them, or one is neither a text nor a chat.
    """
    try:
        if (size := file.expanduser().stat().st_size) > MAX_BYTES:
            raise ConfigError(f"{flag} {file}: {size} bytes, expected at most {MAX_BYTES}")
        text = file.expanduser().read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as exc:
        reason = getattr(exc, "strerror", None) or "not UTF-8"
        raise ConfigError(f"{flag} {file}: cannot be read ({reason}); expected a text in UTF-8 on each line") from exc
    lines = [Line(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if len(lines) < separation.LEAST:
        raise ConfigError(f"{flag} {file}: {len(lines)} lines with a text, expected at least {separation.LEAST}")
    if file.suffix == ".jsonl":
        lines = [Line(number, _parsed(f"{flag} {file}: line {number}", str(line))) for number, line in lines]
    return lines


def _parsed(where: str, line: str) -> str | list[Any]:
    """What a line of JSON holds."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, dict):
        found = found.get("messages")
    last = found[-1] if isinstance(found, list) and found else None
    answer = last.get("content") if isinstance(last, dict) and last.get("role") == "assistant" else found
    if not isinstance(answer, str) or not answer.strip():
        raise ConfigError(f"{where} is no text or chat, expected a JSON string, or messages that end in an answer")
    assert isinstance(found, str | list)
    return found


def read_tokens(tokenizer: Any, file: Path, lines: Sequence[Line]) -> Iterator[Text]:
    """The tokens of each line.

    Raises:
        ConfigError: one is too short or too long, or the model's chat template does not render it.
    """
    for number, text in lines:
        if isinstance(text, str):
            found = Text(tokens_of(tokenizer, text), 1)  # the first token is an outlier
        else:
            found = _answer(tokenizer, f"{file}: line {number}", text)
        if not 1 < len(found.ids) <= MAX_TOKENS or found.first >= len(found.ids):
            raise ConfigError(f"{file}: line {number} has {len(found.ids)} tokens, expected 2 to {MAX_TOKENS}")
        yield found


def _answer(tokenizer: Any, where: str, chat: list[Any]) -> Text:
    """A chat up to the last token of its answer, and where the answer begins."""
    answer = chat[-1]["content"].strip()
    try:
        whole = tokenizer.apply_chat_template(chat, tokenize=False, continue_final_message=True).rstrip()
    except Exception as exc:  # a template raises what it likes
        raise ConfigError(f"{where}: the model's chat template does not render it ({type(exc).__name__})") from exc
    if not whole.endswith(answer):
        raise ConfigError(f"{where}: the model's chat template changes the answer, expected it to end the prompt")
    found = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    border = len(whole) - len(answer)
    return Text(list(found.input_ids), sum(end <= border for _, end in found.offset_mapping))
