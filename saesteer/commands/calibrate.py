"""`saesteer calibrate`: the largest activation of each feature over a text, saved next to the dictionary.

Asks the Transformers backend; does not know vLLM. ``saesteer.loaders.max_act`` saves the result and finds it again.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from saesteer.commands.features import open_model
from saesteer.commands.windows import beginning, first_counted, need_tokens, parts_of
from saesteer.config.config import SaesteerConfig
from saesteer.config.sets import opened
from saesteer.dictionaries.coder import SparseCoder, inputs
from saesteer.errors import ConfigError
from saesteer.loaders import alone, max_act
from saesteer.loaders.files import fetch

MAX_TOKENS = 10_000_000
CHARACTERS = 16  # read from the file for each wanted token; more than a token has
_BLOCK_BYTES = 256 << 20  # size of the activations held at once


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """The largest activations of one dictionary."""

    max_act: Tensor  # [F] float32, the largest |f|, in the dictionary's unit; 0 where a feature was never active
    tokens: int  # how many tokens counted


def run(
    console: Console, model: str, config: SaesteerConfig, file: Path, *, max_tokens: int = 100_000
) -> dict[str, Measured]:
    """Measure every dictionary over a text file, save the results and print them.

    Args:
        console: where to print.
        model: a folder, a hub id or `demo`; it is loaded in float32.
        config: its dictionaries are measured.
        file: plain text in UTF-8.
        max_tokens: how many tokens of the text to read.

    Raises:
        SaesteerError: the model, a dictionary or the text is invalid, no token of it counts, or nothing can be saved.
    """
    text = read_text(file, max_tokens)
    if not config.dictionaries:
        raise ConfigError("calibrate needs a dictionary: --dictionary NAME=PLACE[@SITE]")
    paths = {key: fetch(source.path) for key, source in opened(config.dictionaries)[0].items()}
    with ExitStack() as aside:
        for path in paths.values():
            aside.enter_context(max_act.set_aside(path))
        return _measure_all(console, model, config, paths, text, max_tokens)


def _measure_all(
    console: Console, model: str, config: SaesteerConfig, paths: dict[str, Path], text: str, max_tokens: int
) -> dict[str, Measured]:
    drafts = {key: alone(path) for key, path in paths.items()}
    oracle, names = open_model(model, config)
    asked = {
        oracle.engine.catalog.key(name, layer): (name, layer) for name in names for layer in oracle.layers_of(name)
    }
    windows = windows_of(oracle, text, max_tokens)
    need_tokens("the text", windows, [oracle.info(*one) for one in asked.values()])
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("Reading", total=len(windows))
        found = measure(oracle, asked, windows, lambda: progress.advance(task))
    for name, measured in found.items():
        site = oracle.info(*asked[name]).site_in
        place = max_act.write(paths[name], drafts[name], measured.max_act, tokens=measured.tokens, site=site)
        console.print(_told(name, measured), f"saved in {place}", soft_wrap=True, highlight=False, markup=False)
    return found


def measure(
    oracle: Any,
    asked: Mapping[str, tuple[str, int | None]],
    windows: Sequence[Sequence[int]],
    step: Callable[[], object],
) -> dict[str, Measured]:
    """Find the largest activations of dictionaries over windows of tokens, without the first positions of each window.

    Args:
        oracle: a ``saesteer.hf.Model``.
        asked: name and layer of each dictionary, by its key; the text is read once for all of them.
        windows: token ids.
        step: called after each window.
    """
    coders = {key: oracle.coder(*one) for key, one in asked.items()}
    found = {key: Measured(torch.zeros(coder.info.features), 0) for key, coder in coders.items()}
    infos = {key: oracle.info(*one) for key, one in asked.items()}
    for window in windows:
        streams = oracle.streams(window)
        for key, coder in coders.items():
            stream = inputs(infos[key], streams)[first_counted(coder.info) :]
            largest = torch.maximum(found[key].max_act, _largest(coder, stream))
            found[key] = Measured(largest, found[key].tokens + len(stream))
        step()
    return found


def _largest(coder: SparseCoder, stream: Tensor) -> Tensor:
    """The largest |activation| of each feature, for abstopk has signed ones; 0 where there is no token."""
    largest = torch.zeros(coder.info.features)
    step = max(1, _BLOCK_BYTES // (4 * coder.info.features))
    for start in range(0, len(stream), step):
        largest = torch.maximum(largest, coder.encode(stream[start : start + step]).abs().amax(dim=0).cpu())
    return largest


def read_text(file: Path, max_tokens: int, flag: str = "--text-file") -> str:
    """As much of a text file as makes this many tokens; ``flag`` names it.

    Raises:
        ConfigError: it cannot be read or is empty, or the number is out of range.
    """
    if not 1 <= max_tokens <= MAX_TOKENS:
        raise ConfigError(f"--max-tokens is {max_tokens}, expected 1 to {MAX_TOKENS}")
    try:
        with file.expanduser().open(encoding="utf-8") as stream:
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
    """The text's tokens in windows, each of which begins as ``saesteer.commands.windows`` says."""
    begin = beginning(oracle)
    ids = oracle.tokenizer(text, add_special_tokens=False, verbose=False).input_ids[:max_tokens]
    return [begin + ids[part] for part in parts_of(oracle, ids)]


def _told(name: str, found: Measured) -> str:
    active = found.max_act > 0
    seen = int(active.sum())
    never = len(found.max_act) - seen
    text = f"{name}: {seen:,} of {len(found.max_act):,} features were active on {found.tokens:,} tokens"
    if seen:
        text += f", maximum {float(found.max_act.max()):.3g}, median {float(found.max_act[active].median()):.3g}"
    if never:
        text += f". {never:,} were not: in unit max_act their values are 0; a longer text may activate them"
    return f"{text};"
