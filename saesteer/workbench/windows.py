"""Which tokens of a text count where dictionaries are measured: the text in windows, and what is left out of each.

A window begins as the tokenizer begins a text, and then with a token whose text has a letter or a digit. Without BOS
the stream's norm is an outlier not on the first token alone, but on a whole run of newlines, ``====`` or ``----`` at
the beginning: 130 times the median in the embedded model. Knows no dictionary's weights and no file.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any

from saesteer.dictionaries.coder import CoderInfo
from saesteer.errors import ConfigError

_BLOCK_BYTES = 256 << 20  # size of the activations held at once
WINDOW = 512  # tokens read at once, each window as a text of its own


def beginning(oracle: Any) -> list[int]:
    """The tokens with which the tokenizer of a ``saesteer.hf.Model`` begins a text: BOS or none."""
    bos = oracle.tokenizer.bos_token_id
    return [bos] if oracle.tokenizer("x").input_ids[:1] == [bos] else []


def parts_of(oracle: Any, ids: Sequence[int]) -> list[slice]:
    """Where the windows of a text lie in its tokens; what lies between them, or before the first, is filler.

    Args:
        oracle: a ``saesteer.hf.Model``.
        ids: the tokens of the text, without those of ``beginning``, for which a window has room.
    """
    size = min(WINDOW, oracle.model.config.get_text_config().max_position_embeddings) - len(beginning(oracle))

    @cache
    def filler(token: int) -> bool:
        text = oracle.tokenizer.decode([token, token])  # twice: some tokenizers drop a space at the beginning
        # A part of a character (U+FFFD) and a token without a text may be a letter's.
        return bool(text) and not any(letter.isalnum() or letter == "\ufffd" for letter in text)

    found, start = [], 0
    while start < len(ids):
        if filler(ids[start]):
            start += 1
            continue
        found.append(slice(start, start + size))
        start += size
    return found


def first_counted(info: CoderInfo) -> int:
    """The first position of a window that counts: position 0 is an outlier, and a dictionary may leave out more."""
    return max(1, info.skip_first)


def blocks(info: CoderInfo, tokens: int) -> Iterator[slice]:
    """The positions of a window that count, a block at a time; at least one block, which is empty where none counts.

    Args:
        info: of the dictionary, whose activations of a block are held at once.
        tokens: of the window.
    """
    first, step = first_counted(info), max(1, _BLOCK_BYTES // (4 * info.features))
    for start in range(first, max(tokens, first + 1), step):
        yield slice(start, start + step)


def need_tokens(what: str, windows: Iterable[Sequence[int]], infos: Iterable[CoderInfo], least: int = 1) -> None:
    """Refuse a text that is too short before the model reads it, or what was found in a longer one would be replaced.

    Args:
        what: names the text.
        windows: its tokens, with those of ``beginning``.
        infos: of the dictionaries that are measured, at least one.
        least: how many tokens must count for each of them.

    Raises:
        ConfigError: fewer count.
    """
    first = max(map(first_counted, infos))
    if (tokens := sum(max(0, len(window) - first) for window in windows)) < least:
        found = f"{what} has {tokens} tokens that the dictionary does not leave alone"
        raise ConfigError(f"{found}; expected a longer one, with letters or digits")
