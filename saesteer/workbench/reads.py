"""What dictionaries read of texts: their active features, token by token. An engine runs the model, or Transformers.

Whoever measures features over a text goes through ``reads``, and does not know what runs the model.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from saesteer.commands.serve import resolve
from saesteer.config.config import SaesteerConfig
from saesteer.dictionaries.coder import CoderInfo, inputs
from saesteer.errors import ConfigError
from saesteer.labels.gather import Active
from saesteer.workbench.features import Backend
from saesteer.workbench.windows import beginning, blocks, need_tokens, parts_of

MAX_TOKENS = 10_000_000
CHARACTERS = 16  # read from the file for each wanted token; more than a token has


class Text(NamedTuple):
    """A part of a text file that the model reads as a text of its own."""

    ids: list[int]
    text: str = ""
    spans: Sequence[tuple[int, int]] = ()  # first character of each token in `text`, and the one after its last


class Asked(NamedTuple):
    """A dictionary in the model that was opened."""

    name: str
    layer: int | None  # of a set
    info: CoderInfo
    coder: Any  # the SparseCoder


def asked_of(oracle: Any, names: Sequence[str]) -> dict[str, Asked]:
    """The dictionaries of these names in a ``saesteer.hf.Model``, by their keys; a set has one for each layer."""
    pairs = [(name, layer) for name in names for layer in oracle.layers_of(name)]
    return {oracle.engine.catalog.key(*pair): Asked(*pair, oracle.info(*pair), oracle.coder(*pair)) for pair in pairs}


def read_text(file: Path, max_tokens: int, flag: str = "--text-file") -> str:
    """As much of a text file as makes this many tokens; ``flag`` names it.

    Raises:
        ConfigError: it cannot be read or is empty, or the number is out of range.
    """
    if not 1 <= max_tokens <= MAX_TOKENS:
        raise ConfigError(f"--max-tokens is {max_tokens}, expected 1 to {MAX_TOKENS}")
    try:
        with file.expanduser().open(encoding="utf-8-sig") as stream:
            text = stream.read(CHARACTERS * max_tokens)
    except (OSError, UnicodeDecodeError) as exc:
        reason = getattr(exc, "strerror", None) or exc
        raise ConfigError(f"{flag} {file}: cannot be read ({reason}); expected a text in UTF-8") from exc
    if not text.strip():
        raise ConfigError(f"{flag} {file}: is empty, expected a text")
    if "\0" in text:  # where SQLite, in which labels stand, ends a text
        raise ConfigError(f"{flag} {file}: has a NUL character, expected a text")
    return text


def windows_of(oracle: Any, text: str, max_tokens: int) -> list[list[int]]:
    """The text's tokens in windows, each of which begins as ``saesteer.workbench.windows`` says."""
    begin = beginning(oracle)
    ids = oracle.tokenizer(text, add_special_tokens=False, verbose=False).input_ids[:max_tokens]
    return [begin + ids[part] for part in parts_of(oracle, ids)]


def texts_of(
    oracle: Any, dictionaries: Mapping[str, Asked], file: Path, max_tokens: int, flag: str = "--text-file"
) -> list[Text]:
    """A text file, named by a flag, in windows, each of which begins as ``saesteer.workbench.windows`` says.

    Raises:
        ConfigError: the file cannot be read or is empty, the number is out of range, or no token counts for one of the
            dictionaries.
    """
    whole, begin = read_text(file, max_tokens, flag), beginning(oracle)
    found = oracle.tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids, spans = found.input_ids[:max_tokens], found.offset_mapping[:max_tokens]
    made = []
    for part in parts_of(oracle, ids):
        first, _ = spans[part.start]
        moved = [(0, 0)] * len(begin) + [(left - first, right - first) for left, right in spans[part]]
        made.append(Text(begin + ids[part], whole[first : spans[part][-1][1]], moved))
    need_tokens(f"{flag} {file}", [text.ids for text in made], [one.info for one in dictionaries.values()])
    return made


@contextmanager
def reads(
    backend: Backend, model: str, oracle: Any, dictionaries: Mapping[str, Asked], texts: Sequence[Text]
) -> Iterator[Iterator[Mapping[str, Active]]]:
    """The active features of each text, by the dictionary's key, without the first positions of the text.

    Args:
        backend: `vllm`: an engine in a process of its own, in the model's dtype; `hf`: the oracle, in float32.
        model: a folder, a hub id or `demo`.
        oracle: a ``saesteer.hf.Model`` of it that holds the dictionaries.
        dictionaries: by key; each text is read once for all of them.
        texts: as ``texts_of`` makes them.

    Raises:
        SaesteerError: the engine failed.
    """

    def active(streams: Mapping[str, Tensor]) -> Mapping[str, Active]:
        found = {}
        for key, one in dictionaries.items():  # a block of tokens at a time
            stream = inputs(one.info, streams)
            parts = blocks(one.info, len(stream))
            found[key] = Active.joined([Active.of(one.coder.encode(stream[part]), part.start) for part in parts])
        return found

    if backend == "hf":
        yield (active(oracle.streams(text.ids)) for text in texts)
        return
    from saesteer.workbench.reading import captured

    sites = sorted({one.info.read for one in dictionaries.values()})
    place, _, options = resolve(model, SaesteerConfig())
    with captured(place, sites, options, [text.ids for text in texts]) as found:
        yield map(active, found)
