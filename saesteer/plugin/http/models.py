"""Modules as models: ``BASE:NAME`` in a body's ``model`` and in /v1/models. Knows names, and no spec.

A client that can choose nothing but a model's name steers this way. A model or an adapter with exactly that name comes
first. vLLM checks the name before anything else, and from there on the request names BASE, and keeps the module.
"""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from starlette.types import Scope

from saesteer.language.fields import closest
from saesteer.plugin.http.exchange import begun
from saesteer.plugin.names.versions import Names
from saesteer.plugin.wrap import Original, around

_MARK = ":"
_ADAPTER = b"x-amzn-sagemaker-adapter-identifier"
serving: list[Names] = []  # the names of this process's server, for what does not know the server


def has_default() -> bool:
    """Whether a default module steers requests without a spec."""
    return any(names.catalog.default for names in serving)


def _bases(models: Any) -> list[str]:
    return [*models.lora_requests, *(one.name for one in models.base_model_paths)]


def _modules() -> list[str]:
    """The modules that can be named so."""
    return [name for names in serving for name in names.catalog.modules if _MARK not in name]


@around
async def _checking(original: Original, self: Any, request: Any) -> Any:
    error, name, bases = await original(self, request), request.model, _bases(self.models)
    if not serving or not name or name in bases:
        return error
    base, _, module = name.rpartition(_MARK)
    known = _modules()
    if base and module in known and (base in bases or self._is_model_supported(base)):
        request.model = base
        begun().module = module
        return None
    if error is None:  # where vLLM accepts any name
        if base not in bases:
            return None
        message = f"The model `{name}` does not exist."
        error = self.create_error_response(message, "NotFoundError", HTTPStatus.NOT_FOUND, "model")
    near = closest(name, [*bases, *(f"{one}{_MARK}{module}" for one in bases for module in known)])
    error.error.message = f"{error.error.message.removesuffix('.')}{near}."
    return error


def with_model(scope: Scope, body: Any) -> Scope:
    """A request to /invocations with the module that its body's model names in the header that selects adapters there.

    SageMaker's library puts the header's value, or null, in place of the body's model.

    Args:
        scope: the request.
        body: its JSON.
    """
    name = body.get("model") if isinstance(body, Mapping) else None
    if not serving or not isinstance(name, str) or _MARK not in name:
        return scope
    if name in _bases(scope["app"].state.openai_serving_models):
        return scope
    base, _, module = name.rpartition(_MARK)
    others = [one for one in scope["headers"] if one[0] != _ADAPTER]
    named = dict(scope["headers"]).get(_ADAPTER, base.encode()) + f"{_MARK}{module}".encode()
    return {**scope, "headers": [*others, (_ADAPTER, named)]}


@around
async def _listing(original: Original, self: Any) -> Any:
    """Adds a card for each module, behind the first of the model's names; its other names and adapters work as well."""
    found = await original(self)
    first = found.data[0]
    found.data += [
        first.model_copy(update={"id": f"{first.id}{_MARK}{module}", "parent": first.id}) for module in _modules()
    ]
    return found
