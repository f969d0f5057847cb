"""`saesteer features`: the strongest features of a text, token by token, from Transformers; does not know vLLM."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from saesteer.commands.serve import check, resolve
from saesteer.commands.waiting import load_model
from saesteer.config.config import SaesteerConfig
from saesteer.dictionaries.coder import CoderInfo
from saesteer.errors import ConfigError

MAX_TOKENS = 4096


def run(console: Console, model: str, config: SaesteerConfig, text: str, *, top_k: int = 5, chat: bool = False) -> None:
    """Print a table for each dictionary.

    Args:
        console: where to print.
        model: a folder, a hub id or `demo`; it is loaded in float32.
        config: its dictionaries; `demo` uses its own if none is named.
        text: used as it is, or with `chat` as one user message in the model's chat template.
        top_k: features for each token.
        chat: see `text`.

    Raises:
        SaesteerError: the model or a dictionary is invalid, or the text is empty or too long.
    """
    oracle, names = open_model(model, config)
    ids = oracle.chat_ids(text) if chat else oracle.encode(text)
    if not 1 < len(ids) <= MAX_TOKENS:
        raise ConfigError(f"the text has {len(ids)} tokens, expected 2 to {MAX_TOKENS}")
    for name, layer in [(one, layer) for one in names for layer in oracle.layers_of(one)]:
        coder, site = oracle.coder(name, layer), oracle.info(name, layer).site_in
        table = Table("", "token", f"strongest features of {name}, at {site}", box=box.ROUNDED)
        for active in oracle.features(ids, name, layer=layer, top_k=top_k):
            if active:
                shown = "   ".join(_show(coder, one) for one in active)
                table.add_row(str(active[0].position), Text(repr(active[0].token)[1:-1]), Text(shown))
        console.print(table)


def open_model(model: str, config: SaesteerConfig) -> tuple[Any, Sequence[str]]:
    """The model on Transformers with its dictionaries, and their names: the requested ones, or the demo's.

    Raises:
        SaesteerError: the model or a dictionary is invalid, or there is no dictionary.
    """
    asked = list(config.dictionaries)
    place, config, _ = resolve(model, config)
    names = asked or list(config.dictionaries)
    if not names:
        raise ConfigError(f"no dictionary for {model!r}, expected --dictionary NAME=PATH_OR_REPO[@SITE]")
    refuse_across(check(place, config).infos)
    return load_model(place, {name: config.dictionaries[name] for name in names}), names


def refuse_across(infos: Mapping[str, CoderInfo]) -> None:
    """Refuse a cross-layer transcoder before a model is loaded: it is never whole in memory.

    Args:
        infos: of the dictionaries, by name.

    Raises:
        ConfigError: one of them is a cross-layer transcoder.
    """
    for name, info in infos.items():
        if info.targets is not None:
            what = f"dictionary {name!r} is a cross-layer transcoder, of which only rows are read"
            hint = "its features are clamped in unit raw, by a server or saesteer.hf"
            raise ConfigError(f"{what}; expected a dictionary of one layer here: {hint}")


def _show(coder: Any, one: Any) -> str:
    row = coder.info.row_of(one.feature)
    known = float(coder.max_act[row]) if coder.max_act is not None else 0.0
    return f"{one.feature} {one.value:.2f}" + (f" ({one.value / known:.0%})" if known > 0 else "")
