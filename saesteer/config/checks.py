"""Checks modules against what the server has, whenever they arrive. Knows no tokens, no weights and no engine.

A request's prompt is not known yet: the request checks what depends on it.
"""

from dataclasses import replace

from saesteer.errors import ConfigError, SpecError
from saesteer.language.fields import fail
from saesteer.language.spec import Return, Spec
from saesteer.planning.digests import names_in
from saesteer.planning.expand import steps
from saesteer.planning.plan import Catalog
from saesteer.planning.planner import plan

_LENGTHS = (1 << 20, 64, 8)  # prompt lengths; a module must mean something for at least one
_BY_PROMPT = ("empty_scope", "duplicate")  # what may be wrong for one prompt and right for another


def check_modules(catalog: Catalog) -> None:
    """Refuse a server's modules that no request could use, as if they had come over HTTP.

    The default module may not name a part of the answer where the catalog says that nothing tells it.

    Raises:
        ConfigError: names the module and the field; if modules use each other, the module that is itself wrong.
    """
    modules, with_parts = catalog.modules, replace(catalog, parts=True)
    # A module comes after those that it uses, since they name fewer.
    for name in sorted(modules, key=lambda name: len(names_in(modules[name].edits, modules))):
        _check_named(name, with_parts)
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
