"""Bodies of a client's requests, from what Python callers pass. Knows no connection and no answer."""

from collections.abc import Mapping, Sequence

from saesteer.language.fields import Fields, Json, fail, plain
from saesteer.language.inline import Array, flat
from saesteer.language.spec import InlineVector, Steer, as_spec

Messages = str | Sequence[Fields]
NewVector = Sequence[float] | Array | InlineVector | Fields

KEY = "saesteer"  # the field of bodies that holds the spec


def vector_body(name: str, vector: NewVector, bias: float, function: str) -> Json:
    """The body that registers a vector; older servers know no function but linear, which goes without saying.

    Raises:
        SpecError: the vector is not a flat list of finite numbers.
    """
    probe: Json = {"bias": bias} | ({} if function == "linear" else {"function": function})
    if isinstance(vector, InlineVector):
        return {"name": name, "vector": vector.to_json(), **probe}
    inline = dict(vector) if isinstance(vector, Mapping) else flat(vector, "vector")
    return {"name": name, "vector": inline, **probe}


def refuse_several(body: Fields) -> None:
    """Refuse a body whose response has several choices, of which an answer would show the first alone.

    Raises:
        SpecError: names the field: ``n``, or the one with several texts or lists of token ids.
    """
    for name in ("n", "prompt", "prompt_embeds"):
        value = body.get(name) or 1
        count = len(value) if isinstance(value, list) and not isinstance(value[0], int) else value
        if isinstance(count, int) and count != 1:
            fail(name, "too_many", f"got {count}, expected 1: call it for each, or stream, where pieces have an index")


def chat_body(messages: Messages, steer: Steer, fields: Fields) -> Json:
    """The body of a chat completion; errors as ``body_of``."""
    turns = [{"role": "user", "content": messages}] if isinstance(messages, str) else [*map(dict, messages)]
    return body_of({"messages": turns}, steer, fields)


def body_of(body: Json, steer: Steer, fields: Fields) -> Json:
    """The body of a request; made when a method is called, so a wrong spec is an error before a stream is read.

    Raises:
        SpecError: ``steer`` is wrong.
    """
    spec = as_spec(steer)
    made: Json = plain({**fields, **body})
    return made | ({} if spec is None else {KEY: spec.to_json()})
