"""Modules at start: specs from files under a name, checked against the names that this server has.

Knows no tokens and no weights; whether a feature exists is seen when a request uses the module.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from saesteer.checks import closest, listing
from saesteer.edits import Scope
from saesteer.errors import ConfigError, SpecError
from saesteer.spec import MAX_CHARACTERS, Return, Spec, from_json
from saesteer.uses import steps


def read_modules(
    sources: Mapping[str, str | Mapping[str, Any]], *, dictionaries: Iterable[str], vectors: Iterable[str]
) -> dict[str, Spec]:
    """The modules by name.

    Args:
        sources: name → path of a JSON file, or the spec as an object.
        dictionaries: names that a spec may use.
        vectors: names that a spec may use, as directions and as probes.

    Raises:
        ConfigError: a file that cannot be read, a wrong spec, one that asks for ``return``, an unknown name, or modules
            that use each other in a circle or too deep.
    """
    modules = {name: _read(name, source) for name, source in sources.items()}
    known = {"dictionary": set(dictionaries), "vector": set(vectors), "probe": set(vectors)}
    for name, spec in modules.items():
        for i, edit in enumerate(spec.edits):
            gates = [(f"when[{n}].", gate) for n, gate in enumerate(getattr(edit, "when", ()))]
            for path, one in [("", edit), *gates]:
                _check_names(f"module {name!r}: saesteer.edits[{i}].{path}", one, known)
            if getattr(edit, "scope", Scope()).messages is not None:
                at = f"module {name!r}: saesteer.edits[{i}].scope.messages"
                raise ConfigError(f"{at}: is not served in modules by this version, expected positions or flags")
        try:
            list(steps(spec.edits, modules, (name,)))
        except SpecError as exc:
            raise ConfigError(f"module {name!r}: {exc}") from exc
    return modules


def _read(name: str, source: str | Mapping[str, Any]) -> Spec:
    place = f" ({source})" if isinstance(source, str) else ""
    try:
        spec = from_json(_text(Path(source).expanduser()) if isinstance(source, str) else source)
    except SpecError as exc:
        raise ConfigError(f"module {name!r}{place}: {exc}") from exc
    except (OSError, UnicodeDecodeError) as exc:
        reason = getattr(exc, "strerror", None) or exc
        raise ConfigError(f"module {name!r}{place}: cannot be read ({reason}); expected a spec as a JSON file") from exc
    if spec.returns != Return():
        raise ConfigError(f"module {name!r}{place}: asks for return, expected edits only")
    return spec


def _text(path: Path) -> str:
    with path.open(encoding="utf-8") as stream:
        return stream.read(MAX_CHARACTERS + 1)  # one too many is refused by the language


def _check_names(at: str, one: object, known: Mapping[str, set[str]]) -> None:
    for kind, names in known.items():
        name = getattr(one, kind, None)
        if isinstance(name, str) and name not in names:
            raise ConfigError(f"{at}{kind}: got {name!r}{closest(name, names)}, expected one of: {listing(names)}")
