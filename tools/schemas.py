"""Writes the JSON schemas of a spec, for vLLM's OpenAPI document, from the records of the request language.

``make tables`` writes ``saesteer/data/spec.json`` anew, and a test compares it with what this file would write. The
server also checks what a schema cannot express.
"""

import json
from collections.abc import Sequence
from dataclasses import MISSING
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from saesteer.language import address
from saesteer.language.edits import OPS, Clamp, Edit, Gate, Scope, Strength
from saesteer.language.fields import Record, table
from saesteer.language.inline import InlineVector
from saesteer.language.returns import ActivationRead, Consumer, FeatureRead, HiddenRead, ProbeRead, Return
from saesteer.language.rules import RULES, Watched
from saesteer.language.spec import Spec

FILE = Path(__file__).parents[1] / "saesteer/data/spec.json"
_LISTS = (tuple, Sequence)
_PLAIN: dict[Any, dict[str, str]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    bytes: {"type": "string", "format": "byte"},
    NoneType: {"type": "null"},
}
_READS = (FeatureRead, ProbeRead, ActivationRead, HiddenRead)
_EDITS = (*OPS.values(), *RULES.values())
_RECORDS = (Spec, Return, *_READS, Scope, Gate, Watched, Strength, InlineVector, *_EDITS)
_ADDRESSED = (Clamp, Gate, Watched, Strength, FeatureRead)  # may name features by their addresses at Neuronpedia
_ADDRESS = {"type": "string", "pattern": f"^({address.PREFIX})?{address.FORM}$"}
_ADDRESSES: dict[str, dict[str, Any]] = {
    "feature": _ADDRESS,
    "features": {"type": "array", "items": _ADDRESS, "minItems": 1},
}


def written() -> str:
    """The text of the file: the schemas by name."""
    found = {_name(record): _schema_of_record(record) for record in _RECORDS}
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


def _name(record: type[Record]) -> str:
    return f"Saesteer{record.__name__}"


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


def _schema_of_record(record: type[Record]) -> dict[str, Any]:
    hints = get_type_hints(record)
    about: dict[str, Any] = {"title": _name(record), "description": (record.__doc__ or "").partition("\n")[0]}
    properties: dict[str, Any] = {}
    if issubclass(record, Edit):
        properties["op"] = {"type": "string", "const": record.op}
    required = list(properties)
    for key, one in table(record).items():
        schema = _schema_of(hints[one.name])
        if one.metadata["single"] or one.name == "messages":  # one item stands for a list of one
            schema = _any_of(_item(hints[one.name]), hints[one.name])
        if (named := _ADDRESSES.get(key)) and record in _ADDRESSED:
            schema = {"anyOf": [schema, named]}
            if MISSING is table(record)["dictionary"].default:  # it is, unless an address says it
                required.remove("dictionary")
                about["anyOf"] = [{"required": ["dictionary"]}, {"properties": {key: named}, "required": [key]}]
        if one.default is MISSING:
            required.append(key)
        elif isinstance(one.default, str | int | float):
            schema |= {"default": one.default}
        properties[key] = schema
    needs = {"required": required} if required else {}
    return about | {"type": "object", "properties": properties, "additionalProperties": False} | needs


def _schema_of(hint: Any) -> dict[str, Any]:
    """The schema of a type in the language's records; a record is a reference."""
    if hint in _PLAIN:
        return dict(_PLAIN[hint])
    if hint is Edit:
        return {"oneOf": [_ref(_name(one)) for one in _EDITS], "discriminator": {"propertyName": "op"}}
    if hint is ProbeRead:
        return {"anyOf": [_ref(_name(hint)), {"type": "string"}]}
    if hint == tuple[Consumer, ...]:
        return {"type": "object", "additionalProperties": {"type": "object"}}
    if isinstance(hint, type) and issubclass(hint, Record):
        return _ref(_name(hint))
    held = get_args(hint)
    if get_origin(hint) is Literal:
        return {"enum": list(held)}
    if get_origin(hint) not in _LISTS:
        return _any_of(*held)
    if held[-1] is ... or get_origin(hint) is Sequence:
        return {"type": "array", "items": _schema_of(held[0])}
    return {"type": "array", "items": _any_of(*held), "minItems": len(held), "maxItems": len(held)}


def _item(hint: Any) -> Any:
    """The items of a list, or of the first list among several types."""
    first = get_args(hint)[0]
    return first if get_origin(hint) in _LISTS else _item(first)


def _any_of(*hints: Any) -> dict[str, Any]:
    """The schema of one of several types; a union among them is flattened."""
    flat: list[Any] = []
    for hint in hints:
        inner = get_args(hint) if get_origin(hint) not in (*_LISTS, Literal, None) else (hint,)
        flat += [one for one in inner if one not in flat]
    return {"anyOf": [_schema_of(one) for one in flat]}
