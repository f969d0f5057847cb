"""Modules: named specs, read from files at start and checked against what the server has whenever they arrive.

Knows no tokens, no weights and no engine. A request's prompt is not known yet: the request checks what depends on it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from saesteer.errors import ConfigError, SpecError
from saesteer.language.fields import closest, fail, listing
from saesteer.language.spec import MAX_CHARACTERS, Return, Spec, from_json
from saesteer.planning.digests import names_in
from saesteer.planning.expand import steps
from saesteer.planning.plan import Catalog
from saesteer.planning.planner import plan

_LENGTHS = (1 << 20, 64, 8)  # prompt lengths; a module must mean something for at least one
_BY_PROMPT = ("empty_scope", "duplicate")  # what may be wrong for one prompt and right for another


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


def check_modules(catalog: Catalog) -> None:
    """Refuse a server's modules that no request could use, as if they had come over HTTP.

    Raises:
        ConfigError: names the module and the field; if modules use each other, the module that is itself wrong.
    """
    modules = catalog.modules
    # A module comes after those that it uses, since they name fewer.
    for name in sorted(modules, key=lambda name: len(names_in(modules[name].edits, modules))):
        _check_named(name, catalog)


def check_default(catalog: Catalog) -> None:
    """Refuse a server's default module that names a part of the answer, where it is known that nobody tells it.

    Raises:
        ConfigError: names the module and the field.
    """
    if catalog.default is not None:
        _check_named(catalog.default, catalog)


def check_module(spec: Spec, catalog: Catalog, where: str = "saesteer") -> None:
    """Refuse a module that no request could use.

    Args:
        spec: the module's spec.
        catalog: what the server has, with all of its modules.
        where: the name of the module in the error's field.

    Raises:
        SpecError: ``plan`` refuses it for each prompt, or it asks for ``return``.
    """
    if spec.returns != Return():
        fail(f"{where}.return", "not_served", "asks for return, expected edits only")
    # A module's own vectors get slots with it, and the server's default need not fit it: a request may leave that out.
    catalog = replace(catalog, inline_rows=None, default=None)
    try:
        list(steps(spec.edits, catalog.modules, ("",)))  # a request that uses it is one level further out
        for prompt_len in _LENGTHS:
            try:
                plan(spec, catalog, prompt_len)
                return
            except SpecError as error:
                if error.code not in _BY_PROMPT:
                    raise
    except SpecError as error:
        raise error.below(where) from None
    # No plan was complete for any of these prompts: check at least that every name is known.
    known = {"vector": catalog.vectors, "module": catalog.modules}
    for kind, name in names_in(spec.edits, {}):
        if name not in known[kind]:
            fail(where, "unknown_name", f"names the unknown {kind} {name!r}")


def _check_named(name: str, catalog: Catalog) -> None:
    try:
        check_module(catalog.modules[name], catalog)
    except SpecError as exc:
        raise ConfigError(f"module {name!r}: {exc}") from exc


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
    with path.open(encoding="utf-8-sig") as stream:
        return stream.read(MAX_CHARACTERS + 1)  # the language refuses one character too many
