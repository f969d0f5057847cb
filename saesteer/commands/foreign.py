"""Steering requests of other systems → specs, where their schema is public. Knows no server and reads no vector file.

Each form is one function, which refuses what a spec cannot say. docs/coming-from.md cites the schemas, and lists the
forms that are not converted. What a function leaves unchecked, the request language checks afterwards.
"""

import base64
import json
import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from saesteer.errors import ConfigError, SaesteerError
from saesteer.language.spec import MAX_CHARACTERS, from_json

Edits = list[dict[str, Any]]

# The phases of a request, as scopes. These systems edit position 0 like any other.
_PHASES: dict[str, dict[str, Any]] = {
    "both": {"positions": [[0, None]]},
    "prefill": {"positions": [[0, None]], "prompt": True},
    "decode": {"generated": True},
}
# Where the stream is edited → our kind. An addition in front of the MLP's own is in the sum behind it.
_HOOKS = {"pre_attn": "resid_pre", "post_attn": "resid_mid", "post_block": "resid_post", "post_mlp": "resid_post"}
_MODES = {"absolute": "set", "additive": "add"}
_TIERS = {"": "both", "prefill_": "prefill", "decode_": "decode"}
_HOOKED = re.compile(r"blocks\.(\d+)\.hook_(resid_pre|resid_mid|resid_post)")


class Converted(NamedTuple):
    """A spec, and what a reader must know about it."""

    spec: dict[str, Any]
    notes: Sequence[str] = ()


def run(form: str, file: Path) -> Converted:
    """The spec of a request in a JSON file.

    Args:
        form: one of ``FORMS``.
        file: the request's body, or the part of it that steers.

    Raises:
        ConfigError: the form or the file is wrong, or the request asks for what a spec cannot say.
        SpecError: a value in it is wrong.
    """
    if form not in FORMS:
        raise ConfigError(f"--from {form}: expected one of {', '.join(FORMS)}")
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
        expected = f"expected {_REQUESTS[form]}, as in docs/coming-from.md"
        raise ConfigError(f"{file}: is no request of {form}: {what}; {expected}") from exc
    return Converted(from_json(found.spec).to_json(), found.notes)


def hotwire(held: Any) -> Converted:
    """``{"id", "layer", "scale", "decode_only"}`` or a list of them; of two for one layer, the last counts."""
    by_layer: dict[int, dict[str, Any]] = {}
    for one in held if isinstance(held, list) else [held]:
        scope = _PHASES["decode" if one.get("decode_only") else "both"]
        place = {"op": "add", "vector": one["id"], "site": f"resid_post.{one['layer']}"}
        by_layer[one["layer"]] = place | {"scale": one["scale"], "scope": scope}
    names, sites = ({edit[key] for edit in by_layer.values()} for key in ("vector", "site"))
    flags = [f"--vector {name}={name}.pt" for name in sorted(names)] + [f"--sites {site}" for site in sorted(sites)]
    return Converted({"edits": list(by_layer.values())}, [f"start the server with {' '.join(flags)}"])


def neuronpedia(held: Any) -> Converted:
    """SteerCompletionRequest or SteerCompletionChatRequest of Neuronpedia's inference server."""
    if held["steerMethod"] != "SIMPLE_ADDITIVE":
        expected = "SIMPLE_ADDITIVE: the others replace parts of the stream by rules of their own"
        _refuse("steerMethod", held["steerMethod"], expected)
    if held["normalizeSteering"]:
        _refuse("normalizeSteering", True, "false: a decoder row's length is in the dictionary, which is not read here")
    edits: Edits = []
    for i, one in enumerate(held.get("features") or ()):
        if one.get("steeringVector") is not None:
            _refuse(f"features[{i}].steeringVector", "a vector", "none: put it into vectors, with its hook")
        feature, value = f"{one['model']}/{one['source']}/{one['index']}", held["strengthMultiplier"] * one["strength"]
        edits.append({"op": "clamp", "feature": feature, "value": value, "mode": "add", "scope": _PHASES["both"]})
    for i, one in enumerate(held.get("vectors") or ()):
        found = _HOOKED.fullmatch(one["hook"])
        if found is None:
            _refuse(f"vectors[{i}].hook", one["hook"], "blocks.N.hook_resid_pre, hook_resid_mid or hook_resid_post")
        place = {"op": "add", "vector": one["steeringVector"], "site": f"{found[2]}.{found[1]}"}
        edits.append(place | {"scale": held["strengthMultiplier"] * one["strength"], "scope": _PHASES["both"]})
    unit = "strengths are for decoder rows of length 1, except of top-k dictionaries"
    clamps = any(edit["op"] == "clamp" for edit in edits)
    notes = [f"{unit}; else divide a clamp's value by the length of its row"] * clamps
    if held.get("steerSpecialTokens") is False:
        notes.append("steerSpecialTokens is false there; a scope with messages leaves out what is no message")
    return Converted({"edits": edits}, notes)


def packed(held: Any) -> Converted:
    """A request, or a module's file, of the vLLM fork with vectors packed by layer and declared clamps."""
    edits: Edits = []
    notes = []
    if name := held.get("steering_name"):
        edits.append({"op": "use", "module": name})
        notes.append(f"convert the module's file as well; start the server with --module {name}=FILE.json")
    for tier, phase in _TIERS.items():
        for key in (f"{tier}steering_vectors", f"{tier}vectors"):
            for hook, rows in (held.get(key) or {}).items():
                edits += _rows(rows, _kind(hook, key), _PHASES[phase])
    for key in ("sae_clamp_specs", "sae_full_reconstruction_specs"):
        for one in held.get(key) or ():
            edits += _clamps(one, key)
            notes.append(f"start the server with --dictionary {one['module_name']}=PLACE")
    return Converted({"edits": edits}, notes)


def _rows(held: Any, kind: str, scope: dict[str, Any]) -> Edits:
    """The edits of one hook: one for a packed array, or one for each layer that has a list of numbers."""
    if "data" not in held:
        rows = ((layer, one if isinstance(one, Mapping) else {"vector": one}) for layer, one in held.items())
        return [
            {"op": "add", "vector": row["vector"], "site": f"{kind}.{layer}", "scale": row.get("scale", 1.0)}
            | {"scope": scope}
            for layer, row in rows
        ]
    vector = {"dtype": held["dtype"], "shape": held["shape"], "layers": held["layer_indices"], "data": held["data"]}
    if held["dtype"] == "float64":
        numbers = array("f", array("d", base64.b64decode(held["data"], validate=True)))
        vector |= {"dtype": "float32", "data": base64.b64encode(numbers.tobytes()).decode()}
    edit = {"op": "add", "vector": vector, "site": kind, "scope": scope}
    if scales := held.get("scales"):  # ours are in the order of the layers
        edit["scales"] = [scale for _, scale in sorted(zip(held["layer_indices"], scales, strict=True))]
    return [edit]


def _clamps(held: Any, key: str) -> Edits:
    """The edits of one SAEClampSpec or SAEFullReconstructionSpec, site by site."""
    whole, scope = key == "sae_full_reconstruction_specs", _PHASES[held.get("phase", "both")]
    edits: Edits = []
    for hook, layers in (held.get("clamps") or {}).items():
        _kind(hook, f"{key}.clamps")
        for layer, entries in layers.items():
            place = {"dictionary": held["module_name"], "layer": int(layer), "scope": scope}
            for one in entries:
                law = {"feature": one["feature_idx"], "value": one["value"], "mode": _MODES[one["kind"]]}
                edits.append({"op": "clamp", **place, **law, "only_if_active": one.get("only_if_active", False)})
            if whole:
                edits.append({"op": "reconstruct", **place})
    if not edits:
        _refuse(f"{key}.clamps", "none", "a layer: a spec names each site")
    return edits


FORMS: dict[str, Callable[[Any], Converted]] = {"hotwire": hotwire, "neuronpedia": neuronpedia, "packed": packed}


_REQUESTS = {
    "hotwire": "an object with id, layer and scale, or a list of such objects",
    "neuronpedia": "an object with steerMethod, normalizeSteering, strengthMultiplier, and features or vectors",
    "packed": "an object with steering_vectors, sae_clamp_specs or other fields of that fork",
}


def _kind(hook: str, at: str) -> str:
    return _HOOKS[hook] if hook in _HOOKS else _refuse(at, hook, f"one of {', '.join(_HOOKS)}")


def _refuse(at: str, found: object, expected: str) -> NoReturn:
    raise ConfigError(f"{at}: got {found!r}; expected {expected}")
