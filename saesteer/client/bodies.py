"""Bodies and queries of a client's requests, from what Python callers pass. Knows no connection and no answer."""

from collections.abc import Mapping, Sequence
from typing import Any

from saesteer.language.fields import fail, number
from saesteer.language.spec import Edit, InlineVector, Spec, as_spec

Steer = Spec | Edit | Mapping[str, Any] | Sequence[Edit | Mapping[str, Any]] | None
Messages = str | Sequence[Mapping[str, Any]]
NewVector = Sequence[float] | InlineVector | Mapping[str, Any]

KEY = "saesteer"  # the field of bodies that holds the spec


def vector_body(name: str, vector: NewVector, bias: float, function: str) -> dict[str, Any]:
    """The body that registers a vector; older servers know no function but linear, which goes without saying.

    Raises:
        SpecError: the vector is not a flat list of finite numbers.
    """
    probe: dict[str, Any] = {"bias": bias} | ({} if function == "linear" else {"function": function})
    if isinstance(vector, InlineVector):
        return {"name": name, "vector": vector.to_json(), **probe}
    inline = dict(vector) if isinstance(vector, Mapping) else _numbers(vector)
    return {"name": name, "vector": inline, **probe}


def _numbers(vector: Any) -> list[float]:
    """The numbers of a list, an array or a tensor."""
    if len(shape := getattr(vector, "shape", (0,))) != 1:
        fail("vector", "wrong_type", f"got the shape {list(shape)}, expected one dimension, or an InlineVector")
    return [number(one, f"vector[{i}]") for i, one in enumerate(_plain(vector))]


def _plain(value: Any) -> Any:
    """A value for JSON: numbers, arrays and tensors of other libraries as Python's own, in lists as well."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def features_query(
    dictionary: str, q: str | None, feature: int | None, layer: int | None, limit: int
) -> dict[str, Any]:
    """The query that finds features, without what is not given."""
    query = {"dictionary": dictionary, "q": q, "feature": feature, "layer": layer, "limit": limit}
    return {name: value for name, value in query.items() if value is not None}


def module_body(name: str, steer: Steer) -> dict[str, Any]:
    """The body that registers a module."""
    return {"name": name, "spec": (as_spec(steer) or Spec()).to_json()}


def chat_body(messages: Messages, steer: Steer, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a chat completion; errors as ``body_of``."""
    turns = [{"role": "user", "content": messages}] if isinstance(messages, str) else [*map(dict, messages)]
    return body_of({"messages": turns}, steer, fields)


def body_of(body: dict[str, Any], steer: Steer, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a request; made when a method is called, so a wrong spec is an error before a stream is read.

    Raises:
        SpecError: ``steer`` is wrong.
    """
    spec = as_spec(steer)
    made = {name: _plain(value) for name, value in {**fields, **body}.items()}
    return made | ({} if spec is None else {KEY: spec.to_json()})
