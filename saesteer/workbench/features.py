"""`saesteer features`: the strongest features of a text, token by token, in the terminal.

An engine reads them, or Transformers where there is no vLLM; the answers of both are the same JSON.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from saesteer.commands.serve import check, need_vllm, resolve
from saesteer.commands.waiting import load_model, steps
from saesteer.config.assets import Assets
from saesteer.config.config import SaesteerConfig
from saesteer.errors import ConfigError
from saesteer.language.fields import Fields, Json
from saesteer.loaders import largest
from saesteer.workbench.reading import read, tokenizer_of, tokens_of
from saesteer.workbench.written import rounded

MAX_TOKENS = 4096

Backend = Literal["vllm", "hf"]


def choose(backend: str | None) -> Backend:
    """The backend of this name; without one, vLLM if it is installed.

    Raises:
        ConfigError: it has another name, or is not installed.
    """
    match backend:
        case "vllm":
            need_vllm()
            return "vllm"
        case "hf":
            return "hf"
        case None:
            return "vllm" if importlib.util.find_spec("vllm") else "hf"
    raise ConfigError(f"--backend {backend}: expected vllm or hf")


def run(
    console: Console,
    model: str,
    config: SaesteerConfig,
    text: str,
    *,
    top_k: int = 5,
    chat: bool = False,
    backend: Backend = "hf",
    verbose: bool = False,
) -> None:
    """Print a table for each dictionary.

    Args:
        console: where to print.
        model: a folder, a hub id or `demo`.
        config: its dictionaries; `demo` uses its own if none is named.
        text: used as it is, or with `chat` as one user message in the model's chat template.
        top_k: features for each token.
        chat: see `text`.
        backend: `vllm`: an engine in a process of its own; `hf`: Transformers, in float32.
        verbose: show vLLM's output.

    Raises:
        SaesteerError: the model or a dictionary is invalid, or the text is empty or too long.
    """
    place, config, options = _resolved(model, config)
    tokenizer = tokenizer_of(place)
    ids = tokens_of(tokenizer, text, chat=chat)
    if not 1 < len(ids) <= MAX_TOKENS:
        raise ConfigError(f"the text has {len(ids)} tokens, expected 2 to {MAX_TOKENS}")
    words = [tokenizer.decode([one]) for one in ids]
    assets = Assets.open(config)
    wanted = _wanted(assets, top_k)
    if backend == "hf" or any(info.targets for info in assets.infos.values()):  # whose encoders no engine holds
        oracle = load_model(place, config.dictionaries)
        entries = [_entry(oracle, ids, one) for one in wanted]
    else:
        with steps(console, hidden=verbose) as show:
            show("Reading the text")
            [answer] = read(place, config, options, [ids], [{"features": wanted}], verbose=verbose)
        entries = answer["features"]
    for entry in entries:
        console.print(_table(entry, assets, words))


def open_model(model: str, config: SaesteerConfig) -> tuple[Any, Sequence[str]]:
    """The model on Transformers with its dictionaries, and their names: the requested ones, or the demo's.

    Raises:
        SaesteerError: the model or a dictionary is invalid, or there is no dictionary.
    """
    place, config, _ = _resolved(model, config)
    return load_model(place, config.dictionaries), list(config.dictionaries)


def _resolved(model: str, config: SaesteerConfig) -> tuple[str, SaesteerConfig, Json]:
    """The model's place, the dictionaries that are asked for, or the demo's, and vLLM's options."""
    asked = list(config.dictionaries)
    place, config, options = resolve(model, config)
    names = asked or list(config.dictionaries)
    if not names:
        raise ConfigError(f"no dictionary for {model!r}, expected --dictionary NAME=PLACE[@SITE]")
    check(place, config)
    return place, replace(config, dictionaries={name: config.dictionaries[name] for name in names}), options


def _wanted(assets: Assets, top_k: int) -> list[Json]:
    """What a request reads: of every dictionary, all tokens but the first, which is an outlier."""
    found = []
    for name in assets.config.dictionaries:
        for layer in assets.sets.get(name, (None,)):
            count = assets.info(name, layer).features
            one: Json = {"dictionary": name, "top_k": min(top_k, count), "scope": {"skip_first": 1}}
            found.append(one if layer is None else one | {"layer": layer})
    return found


def _entry(oracle: Any, ids: Sequence[int], one: Fields) -> Json:
    """What an engine's answer has of a read."""
    name, layer = one["dictionary"], one.get("layer")
    rows = oracle.features(ids, name, layer=layer, top_k=one["top_k"])
    found = [{"position": n, "top": [(two.feature, two.value) for two in row]} for n, row in enumerate(rows, 1)]
    return {**one, "site": oracle.info(name, layer).site_in, "rows": found}


def _table(entry: Fields, assets: Assets, words: Sequence[str]) -> Table:
    """A row for each token with active features, coloured by the strongest, relative to the text's strongest."""
    info = assets.info(entry["dictionary"], entry.get("layer"))

    def shown(feature: int, value: float) -> str:
        known = largest(info, feature)
        return f"{feature} {value:.2f}" + (f" ({value / known:.0%})" if known else "")

    title = f"strongest features of {entry['dictionary']}, at {entry['site']}"
    table = rounded("", "token", escape(title))
    rows = [row for row in entry["rows"] if row["top"]]
    most = max((abs(value) for row in rows for _, value in row["top"]), default=0.0)
    for row in rows:
        strength = abs(row["top"][0][1]) / most if most else 0.0
        # From black to a strong blue that white letters stand out from.
        colour = f"rgb({int(20 * strength)},{int(70 * strength)},{int(160 * strength)})"
        word = Text(repr(words[row["position"]])[1:-1], style=f"on {colour}")
        table.add_row(str(row["position"]), word, Text("   ".join(shown(*one) for one in row["top"])))
    return table
