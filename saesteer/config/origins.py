"""Which model each dictionary was trained on, whether the served one is it, and the addresses that name dictionaries.

Models are compared by name, as that is all that files say: ``google/gemma-2-2b-it`` is an instruct model of
``gemma-2-2b``. A name that nobody knows, such as that of a fine-tune, is no proof of anything. Knows no weights.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

from saesteer.dictionaries.coder import CoderInfo
from saesteer.errors import ConfigError
from saesteer.language.address import PREFIX
from saesteer.loaders.neuronpedia import hub_id, models
from saesteer.planning.plan import Fit, Origin

_TUNED, _BASE = {"it", "instruct", "chat"}, {"base", "pt"}
_SILENT = {"meta", "hf"}  # Meta-Llama-3-8B is Llama-3-8B
_ALIASES = {"gpt2": "gpt2small"}
_BEST: tuple[Fit, ...] = ("same", "base", "declared", "other", "unknown")  # the first that holds is what is said


Infos = Mapping[str, CoderInfo]  # of dictionaries, by their keys


class _Model(NamedTuple):
    """A model's name in parts."""

    core: str  # gemma22b
    kind: str | None  # tuned or base, where the name says it


@cache
def _read(name: str) -> _Model:
    words = re.split("[-_ ]", (hub_id(name) or name).rstrip("/").rpartition("/")[2].lower())
    kind = "tuned" if _TUNED & {*words} else "base" if _BASE & {*words} else None
    core = "".join(word for word in words if word not in _TUNED | _BASE | _SILENT).replace(".", "")
    return _Model(_ALIASES.get(core, core), kind)


@cache
def fit(trained: str, served: str) -> Fit:
    """Whether a dictionary of one model belongs to another: ``same``, ``base``, ``other`` or ``unknown``.

    Args:
        trained: the model that the dictionary was trained on.
        served: a hub id or a folder, whose last part counts.
    """
    one, two = _read(trained), _read(served)
    if one.core == two.core:
        if one.kind == two.kind:
            return "same"
        if two.kind == "tuned" or (
            one.kind == "base" and two.kind is None
        ):  # Qwen3-8B is tuned, Qwen3-8B-Base its base
            return "base"
        return "other" if one.kind == "tuned" else "unknown"
    known = {_read(name).core for name in models()}
    return "other" if {one.core, two.core} <= known else "unknown"


def trained_on(name: str, info: CoderInfo) -> list[str]:
    """The names of a dictionary's model: in its files, and in its addresses, of which its own name may be one."""
    said = [info.model] if info.model else []
    own = [name.removeprefix(PREFIX)] if name.startswith(PREFIX) else []
    return [*said, *(address.partition("/")[0] for address in (*own, *info.addresses))]


def origin_of(name: str, info: CoderInfo, model: str | None, declared: Sequence[str]) -> Origin | None:
    """What is known about where a dictionary comes from; None where nobody says it.

    Args:
        name: in requests, which may be an address.
        info: its facts.
        model: the served model, a hub id or a folder; None: unknown.
        declared: models whose dictionaries fit, as the operator says.
    """
    trained = trained_on(name, info)
    if not trained:
        return None
    fits: list[tuple[Fit, str]] = [(fit(one, model) if model else "unknown", one) for one in trained]
    fits += [("declared", one) for one in trained for other in declared if fit(one, other) in ("same", "base")]
    best, of = min(fits, key=lambda found: _BEST.index(found[0]))
    return Origin(of, best)


def addresses_of(infos: Infos) -> dict[str, str]:
    """The key of the dictionary that each address names; of several with one address, the first.

    A dictionary's own name counts most: with it the operator declares an address.
    """
    found = {key: key for key in infos if key.startswith(PREFIX)}
    for key, info in infos.items():
        for address in info.addresses:
            found.setdefault(PREFIX + address, key)
    return found


def refuse_others(infos: Infos, model: str, declared: Sequence[str]) -> None:
    """Refuse a dictionary of another model, where its files and the served model's name leave no doubt.

    Raises:
        ConfigError: there is one, with the way to serve it all the same.
    """
    for name, info in infos.items():
        origin = origin_of(name, info, model, declared)
        if origin is not None and origin.fit == "other":
            found = f"was trained on {origin.model}, and this server's model is {model}"
            expected = (
                f"a dictionary of this model or its base; --dictionaries-of {origin.model} serves it all the same"
            )
            raise ConfigError(f"dictionary {name!r} {found}; expected {expected}")
