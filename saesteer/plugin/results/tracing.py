"""What vLLM's trace span of a request says of steering: numbers and the operator's names. No prompt, no vector.

vLLM makes the span when an answer has ended, if the server was started with --otlp-traces-endpoint. It collects the
attributes in one function and hands them to another, so the first one's request is remembered until then.
"""

from contextvars import ContextVar
from typing import Any

from saesteer.language.fields import Fields, Json
from saesteer.plugin.wrap import Original, around

_NAMED = {"op": "ops", "site": "sites", "dictionary": "dictionaries", "vector": "vectors"}
_told: ContextVar[Fields] = ContextVar("told")  # of the request whose span is being made


def attributes(fields: Fields) -> Json:
    """Attributes of a span, each a number or a list of strings; none for an answer that nothing was applied to.

    Args:
        fields: of the answer's ``saesteer``, with counts and doses.
    """
    applied, fired, doses = (fields.get(name, ()) for name in ("applied", "flags", "dose"))
    found: Json = {}
    if applied:
        found = {"edits": len(applied), "tokens_edited": sum(one.get("tokens_edited", 0) for one in applied)}
        for field, name in _NAMED.items():
            # An inline vector has no name.
            if several := list(dict.fromkeys(one[field] for one in applied if field in one)):
                found[name] = several
    if measured := [one["max"] for one in doses if one["max"] is not None]:
        found["dose.max"] = max(measured)
    if fired:
        found["rules_fired"] = len(fired)
    return {f"saesteer.{name}": value for name, value in found.items()}


@around
def _of_request(
    original: Original, self: Any, engine_core_output: Any, req_state: Any, *args: Any, **kwargs: Any
) -> None:
    answer = getattr(req_state, "saesteer", None)
    token = _told.set({} if answer is None else attributes(answer.fields))
    try:
        original(self, engine_core_output, req_state, *args, **kwargs)
    finally:
        _told.reset(token)


@around
def _of_span(
    original: Original,
    span_name: str,
    start_time: int,
    end_time: int | None = None,
    attributes: Fields | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    told = _told.get({})
    if told:
        attributes = {**(attributes or {}), **told}
    return original(span_name, start_time, end_time, attributes, *args, **kwargs)
