"""Requests of Neuronpedia's inference server → specs. Knows no server and reads no vector file.

A request that a spec cannot express is refused. docs/coming-from.md cites the schema, and lists the forms that are not
converted. What is left unchecked here, the request language checks afterwards.
"""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from saesteer.errors import ConfigError, SaesteerError
from saesteer.language.spec import MAX_CHARACTERS, from_json

_EVERYWHERE = {"positions": [[0, None]]}  # their edits change position 0 like any other
_HOOKED = re.compile(r"blocks\.(\d+)\.hook_(resid_pre|resid_mid|resid_post)")


class Converted(NamedTuple):
    """A spec, and what a reader must know about it."""

    spec: dict[str, Any]
    notes: Sequence[str] = ()


def run(form: str, file: Path) -> Converted:
    """Convert the request in a JSON file to a spec.

    Args:
        form: one of ``FORMS``.
        file: the request's body, or the part of it that steers.

    Raises:
        ConfigError: the form or the file is wrong, or the request needs what a spec cannot express.
        SpecError: a value in it is wrong.
    """
    if form not in FORMS:
        raise ConfigError(f"--from {form}: expected {', '.join(FORMS)}")
    try:
        with file.expanduser().open(encoding="utf-8") as stream:
            held = json.loads(stream.read(MAX_CHARACTERS + 1))
    except (OSError, ValueError, RecursionError) as exc:
        raise ConfigError(f"{file}: cannot be read ({str(exc)[:80]}); expected the request as JSON") from exc
    try:
        found = FORMS[form](held)
    except SaesteerError:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as exc:
        what = f"{exc} is missing" if isinstance(exc, KeyError) else "a value there has another form"
        expected = "expected an object with steerMethod, normalizeSteering, strengthMultiplier, and features or vectors"
        raise ConfigError(f"{file}: is no request of {form}: {what}; {expected}, as in docs/coming-from.md") from exc
    return Converted(from_json(found.spec).to_json(), found.notes)


def neuronpedia(held: Any) -> Converted:
    """Convert a SteerCompletionRequest or SteerCompletionChatRequest."""
    if held["steerMethod"] != "SIMPLE_ADDITIVE":
        expected = "SIMPLE_ADDITIVE: the others replace parts of the stream by rules of their own"
        _refuse("steerMethod", held["steerMethod"], expected)
    if held["normalizeSteering"]:
        _refuse("normalizeSteering", True, "false: a decoder row's length is in the dictionary, which is not read here")
    edits: list[dict[str, Any]] = []
    for i, one in enumerate(held.get("features") or ()):
        if one.get("steeringVector") is not None:
            _refuse(f"features[{i}].steeringVector", "a vector", "none: put it into vectors, with its hook")
        feature, value = f"{one['model']}/{one['source']}/{one['index']}", held["strengthMultiplier"] * one["strength"]
        edits.append({"op": "clamp", "feature": feature, "value": value, "mode": "add", "scope": _EVERYWHERE})
    for i, one in enumerate(held.get("vectors") or ()):
        found = _HOOKED.fullmatch(one["hook"])
        if found is None:
            _refuse(f"vectors[{i}].hook", one["hook"], "blocks.N.hook_resid_pre, hook_resid_mid or hook_resid_post")
        place = {"op": "add", "vector": one["steeringVector"], "site": f"{found[2]}.{found[1]}"}
        edits.append(place | {"scale": held["strengthMultiplier"] * one["strength"], "scope": _EVERYWHERE})
    unit = "strengths are for decoder rows of length 1, except of top-k dictionaries"
    clamps = any(edit["op"] == "clamp" for edit in edits)
    notes = [f"{unit}; else divide a clamp's value by the length of its row"] * clamps
    if held.get("steerSpecialTokens") is False:
        notes.append("steerSpecialTokens is false there; a scope with messages leaves out what is no message")
    return Converted({"edits": edits}, notes)


FORMS: dict[str, Callable[[Any], Converted]] = {"neuronpedia": neuronpedia}


def _refuse(at: str, found: object, expected: str) -> NoReturn:
    raise ConfigError(f"{at}: got {found!r}; expected {expected}")
