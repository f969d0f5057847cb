"""Modules: named specs, read from files at start. checks.py compares them with what the server has."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from saesteer.errors import ConfigError, SpecError
from saesteer.language.fields import Fields, closest, listing
from saesteer.language.spec import MAX_CHARACTERS, Return, Spec, from_json
from saesteer.planning.expand import steps


def read_modules(
    sources: Mapping[str, str | Fields], *, dictionaries: Iterable[str], vectors: Iterable[str]
) -> dict[str, Spec]:
    """The modules by name.

    Args:
        sources: name → path of a JSON file, or the spec as an object.
        dictionaries: names that a spec may use.
        vectors: names that a spec may use, as directions and as probes.

    Raises:
        ConfigError: a file that cannot be read, a wrong spec, one that asks for ``return``, an unknown name, or modules
            that use each other in a cycle or too deeply.
    """
    modules = {name: _read(name, source) for name, source in sources.items()}
    known = {"dictionary": set(dictionaries), "vector": set(vectors), "probe": set(vectors)}
    for name, spec in modules.items():
        for i, edit in enumerate(spec.edits):
            at = f"module {name!r}: saesteer.edits[{i}]"
            for kind, path, used in edit.mentions():
                if used not in (names := known.get(kind, {used})):
                    message = f"got {used!r}{closest(used, names)}, expected one of: {listing(names)}"
                    raise ConfigError(f"{at}.{path}: {message}")
            if edit.scope.messages is not None:
                message = "is not served in modules by this version, expected positions or flags"
                raise ConfigError(f"{at}.scope.messages: {message}")
        try:
            list(steps(spec.edits, modules, (name,)))
        except SpecError as exc:
            raise ConfigError(f"module {name!r}: {exc}") from exc
    return modules


def _read(name: str, source: str | Fields) -> Spec:
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
    with path.open(encoding="utf-8-sig") as stream:
        return stream.read(MAX_CHARACTERS + 1)  # the language refuses one character too many
