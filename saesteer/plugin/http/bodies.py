"""Where a spec stands in the bodies of HTTP requests, and what vLLM drops of them. Knows vLLM's requests.

answers.py puts the field into answers.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from saesteer.config.config import KEY
from saesteer.errors import SpecError
from saesteer.language.fields import step
from saesteer.plugin.http.exchange import exchange, in_json
from saesteer.plugin.http.routes import misplaced, near
from saesteer.plugin.results.errors import SpecRefused
from saesteer.plugin.wrap import Original, around


def is_steered(request: Any) -> bool:
    """True if a request of the OpenAI API has a spec, in its body, also as a form's fields, in vllm_xargs or model."""
    # Forms: saesteer[edits][][op]
    names = (name.replace("]", "").split("[") for name, one in (request.model_extra or {}).items() if one is not None)
    arguments = getattr(request, "vllm_xargs", None) or ()
    of = exchange()
    return any(KEY in one for one in names) or KEY in arguments or (of is not None and of.module is not None)


def refuse_misplaced(request: Any, body: Mapping[str, Any] | None = None) -> None:
    """Refuse a spec that would be dropped in silence: under a misspelt key, or where none of vLLM's bodies is read.

    Args:
        request: vLLM's, to a route that serves the field.
        body: its fields, with those that vLLM does not know; None: the request has these as well.

    Raises:
        SpecRefused: it has one.
    """
    body = vars(request) | (request.model_extra or {}) if body is None else body
    refuse_near(body.keys() - vars(request))
    refuse_near(body.get("vllm_xargs"), "vllm_xargs")
    if found := misplaced(body, KEY, "edits"):
        name, key = found
        message = f"stands in {name}, where no spec is read; expected the field {KEY} beside the model"
        raise SpecRefused(SpecError(message, field=key, code="unknown_field"))


def refuse_near(keys: object, where: str = "") -> None:
    """Refuse a key near ``saesteer`` among those of an object, if it is one; ``where`` is its path.

    Raises:
        SpecRefused: it has one.
    """
    if isinstance(keys, Iterable) and (key := near(keys)) is not None:
        message = f"is no field of a request (did you mean {KEY}?)"
        raise SpecRefused(SpecError(message, field=step(where, key).removeprefix("."), code="unknown_field"))


@around
async def _chat(original: Original, *args: Any, **kwargs: Any) -> Any:
    return _reported(await original(*args, **kwargs))


@around
def _completion(original: Original, *args: Any, **kwargs: Any) -> Any:
    return _reported(original(*args, **kwargs))


def _reported(response: Any) -> Any:
    """Adds the reports to a response that no app sends."""
    found = exchange()
    if found is not None and not found.path and found.unsent and (choices := getattr(response, "choices", None)):
        found.report(response, choices, setattr)
    return response


@around
def _batch_request(original: Original, self: Any, messages: Any) -> Any:
    """Gives the request of each conversation the batch's field, even a null, which vLLM drops."""
    refuse_misplaced(self)
    request = original(self, messages)
    if KEY in (self.model_extra or ()):
        request.saesteer = self.model_extra[KEY]
    return request


@around
async def _response(
    original: Original,
    self: Any,
    request: Any,
    sampling_params: Any,
    result_generator: Any,
    context: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Keeps the report with a response, which may be retrieved later; the last event of a stream holds it as well."""
    try:
        response = await original(self, request, sampling_params, result_generator, context, *args, **kwargs)
    except SpecRefused as error:
        return self.create_error_response(error)  # a response that runs in the background shows it as well
    found = exchange()
    if found is not None and found.unsent and hasattr(response, "output"):
        response.saesteer = in_json(found.unsent[0].fields)
    return response
