"""Asks an engine, in a process of its own, what a model's forward passes hold. Does not know what that is for."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from saesteer.config.assets import Assets
from saesteer.config.config import LIMITS, SaesteerConfig
from saesteer.config.origins import trained_on
from saesteer.consumers.shards import shards
from saesteer.errors import SaesteerError
from saesteer.language.fields import Fields
from saesteer.models.tokens import chat_ids
from saesteer.plugin.job import Batch, Completion, run


def tokenizer_of(place: str) -> Any:
    """The tokenizer of a checked model."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(place)


def tokens_of(tokenizer: Any, text: str, *, chat: bool = False) -> list[int]:
    """A text's token ids, as it is or as one user message in the model's chat template.

    Raises:
        ConfigError: the tokenizer has no chat template.
    """
    return chat_ids(tokenizer, text, "leave out --chat") if chat else list(tokenizer(text).input_ids)


def questions(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """The token ids of texts as user messages; a model without a chat template continues them."""
    chat = bool(getattr(tokenizer, "chat_template", None))
    return [tokens_of(tokenizer, text, chat=chat) for text in texts]


def ask(
    place: str, config: SaesteerConfig, options: Fields, batches: Sequence[Batch], *, verbose: bool = False
) -> list[list[Completion]]:
    """The answers of an engine whose context is as long as these batches of token ids need.

    Args:
        place: the folder or hub id of the model.
        config: its dictionaries.
        options: of vLLM.
        batches: what is asked.
        verbose: show vLLM's output.

    Raises:
        SaesteerError: the engine failed.
    """
    once = {
        "enforce_eager": True,  # a minute of compiling is more than most answers take
        "max_model_len": max(batch.max_tokens + len(prompt) for batch in batches for prompt in batch.prompts),
    }
    dictionaries = config.to_json()["dictionaries"]
    return run(place, batches, dictionaries=dictionaries, options={**options, **once}, verbose=verbose)


def read(
    place: str,
    config: SaesteerConfig,
    options: Fields,
    prompts: Sequence[Sequence[int]],
    returns: Sequence[Fields],
    *,
    verbose: bool = False,
) -> list[Fields]:
    """What each prompt's answer has of its ``returns``.

    Args:
        place: the folder or hub id of the model.
        config: its dictionaries, which are loaded whole, and its ``reads``.
        options: of vLLM.
        prompts: token ids; each prompt is a request.
        returns: the ``return`` of each request.
        verbose: show vLLM's output.

    Raises:
        ConfigError: the engine refuses a dictionary or a read.
        SaesteerError: the engine failed.
    """
    sources = {name: replace(one, rows=False) for name, one in config.dictionaries.items()}
    models = {model for name, info in Assets.open(config).infos.items() for model in trained_on(name, info)}
    once = {
        "dictionaries_of": sorted(models),  # a read shows whether a dictionary belongs to the model
        "reads": list(config.reads),
        "max_read_mib": LIMITS["max_read_mib"][2],
    }
    batch = Batch(prompts, [{"return": dict(one)} for one in returns], max_tokens=1)
    whole = replace(config, dictionaries=sources)
    [answers] = ask(place, whole, {**options, **once}, [batch], verbose=verbose)
    return [one.saesteer for one in answers]


@contextmanager
def captured(
    place: str, sites: Sequence[str], options: Fields, prompts: Sequence[Sequence[int]]
) -> Iterator[Iterator[dict[str, Tensor]]]:
    """The tensors [tokens, d] of each prompt at some sites, float32, by the site's name; they wait on the disk.

    Args:
        place: the folder or hub id of the model.
        sites: canonical names.
        options: of vLLM.
        prompts: token ids.

    Raises:
        SaesteerError: the engine failed, or has lost rows.
    """
    with TemporaryDirectory(prefix="saesteer-") as folder:
        once = {
            "enable_prefix_caching": False,  # what is cached is not computed, and so not captured
            "capture": list(sites),
            "capture_folder": folder,
        }
        ask(place, SaesteerConfig(), {**options, **once}, [Batch(prompts, max_tokens=1)])
        yield tensors_of(Path(folder), sites, prompts)


def tensors_of(folder: Path, sites: Sequence[str], prompts: Sequence[Sequence[int]]) -> Iterator[dict[str, Tensor]]:
    """The tensors of each prompt, from the shards of an engine whose only requests these were.

    Raises:
        SaesteerError: a row is not there.
    """
    from safetensors import safe_open

    pieces: defaultdict[tuple[int, str], list[tuple[list[int], Path, str, int]]] = defaultdict(list)
    numbers: set[int] = set()
    for file, about in shards(folder):
        for piece in about["pieces"]:
            numbers.add(int(piece["request"]))
            for name, first in piece["first"].items():
                where = int(piece["request"]), about["tensors"][name]["site"]
                pieces[where].append((piece["positions"], file, name, first))
    order = sorted(numbers)  # vLLM counts requests
    for at, ids in enumerate(prompts):
        found = {}
        for site in sites:
            rows = sorted(pieces[order[at] if at < len(order) else -1, site])
            if [position for positions, *_ in rows for position in positions] != [*range(len(ids))]:
                raise SaesteerError(f"the engine has lost rows of {site} in text {at}; is the disk of {folder} full?")
            parts = []
            for positions, file, name, first in rows:
                with safe_open(file, "pt") as opened:
                    parts.append(opened.get_slice(name)[first : first + len(positions)])
            found[site] = torch.cat(parts).float()
        yield found
