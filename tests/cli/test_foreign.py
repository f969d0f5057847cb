"""Requests of other systems become the specs that docs/coming-from.md puts next to them."""

import base64
import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from saesteer.commands import foreign
from saesteer.commands.cli import app
from saesteer.errors import ConfigError, SaesteerError
from saesteer.language.spec import from_json

PAGE = (Path(__file__).parents[2] / "docs/coming-from.md").read_text()
EVERYWHERE = {"positions": [[0, None]]}


def converted(form: str, held: Any, folder: Path) -> foreign.Converted:
    file = folder / "request.json"
    file.write_text(json.dumps(held))
    return foreign.run(form, file)


def pairs() -> list[tuple[str, Any, Any]]:
    """The page's blocks that are marked with a form, each with the spec behind it."""
    found = re.findall(r"^```json from ([a-z-]+)\n(.*?)^```\n.*?^```json\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    return [(form, json.loads(theirs), json.loads(ours)) for form, theirs, ours in found]


def test_every_form_is_on_the_page() -> None:
    assert {form for form, _, _ in pairs()} == foreign.FORMS.keys()


@pytest.mark.parametrize(("form", "theirs", "ours"), pairs())
def test_the_page_shows_what_convert_makes(form: str, theirs: Any, ours: Any, tmp_path: Path) -> None:
    found = converted(form, theirs, tmp_path)
    assert from_json(found.spec) == from_json(ours)


def test_hotwire_keeps_the_last_of_a_layer(tmp_path: Path) -> None:
    held = [
        {"id": "a", "layer": 3, "scale": 1},
        {"id": "b", "layer": 3, "scale": 2},
        {"id": "c", "layer": 4, "scale": 1},
    ]
    found = converted("hotwire", held, tmp_path)
    assert [edit["vector"] for edit in found.spec["edits"]] == ["b", "c"]
    assert found.notes == [
        "start the server with --vector b=b.pt --vector c=c.pt --sites resid_post.3 --sites resid_post.4"
    ]


def test_packed_arrays_keep_their_numbers(tmp_path: Path) -> None:
    """Scales go with their layers; float64 becomes float32."""
    numbers = [1.0, 2.0, 3.0, 4.0]
    for dtype, letter in (("float32", "f"), ("float64", "d")):
        data = base64.b64encode(struct.pack(f"<4{letter}", *numbers)).decode()
        rows = {"dtype": dtype, "shape": [2, 2], "layer_indices": [9, 4], "data": data, "scales": [9.0, 4.0]}
        [edit] = from_json(converted("packed", {"steering_vectors": {"post_block": rows}}, tmp_path).spec).edits
        wire: Any = edit
        assert struct.unpack("<4f", wire.vector.data) == tuple(numbers)
        assert (wire.vector.layers, wire.scales, wire.site) == ((9, 4), (4.0, 9.0), ("resid_post",))
        assert wire.scope.positions == ((0, None),)


def test_a_module_of_the_fork_becomes_a_module(tmp_path: Path) -> None:
    held = {
        "vectors": {"post_block": {"15": [0.1, 0.2], "20": {"vector": [0.4, 0.5], "scale": 2.0}}},
        "prefill_vectors": {"pre_attn": {"15": [0.3, 0.4]}},
        "decode_vectors": None,
    }
    edits = converted("packed", held, tmp_path).spec["edits"]
    assert [(edit["site"], edit.get("scale", 1.0)) for edit in edits] == [
        ("resid_post.15", 1.0),
        ("resid_post.20", 2.0),
        ("resid_pre.15", 1.0),
    ]
    assert [edit["scope"] for edit in edits] == [EVERYWHERE, EVERYWHERE, {**EVERYWHERE, "prompt": True}]


STEER = {"steerMethod": "SIMPLE_ADDITIVE", "normalizeSteering": False, "strengthMultiplier": 2.0}
FEATURE = {"model": "gemma-2-2b", "source": "20-gemmascope-res-16k", "index": 3124, "strength": 5.0}


@pytest.mark.parametrize(
    ("form", "held", "words"),
    [
        (
            "neuronpedia",
            STEER | {"steerMethod": "PROJECTION_CAP"},
            "steerMethod: got 'PROJECTION_CAP'; expected SIMPLE",
        ),
        ("neuronpedia", STEER | {"normalizeSteering": True}, "normalizeSteering: got True; expected false"),
        ("neuronpedia", STEER | {"features": [FEATURE | {"steeringVector": [1.0]}]}, "features[0].steeringVector"),
        ("neuronpedia", STEER | {"vectors": [{"hook": "blocks.3.hook_z", "strength": 1}]}, "vectors[0].hook"),
        ("neuronpedia", STEER | {"features": [FEATURE | {"index": "x"}]}, "expected the address of a feature"),
        (
            "neuronpedia",
            {},
            "is no request of neuronpedia: 'steerMethod' is missing; expected an object with steerMethod",
        ),
        (
            "packed",
            {"steering_vectors": {"attn": {"3": [1.0]}}},
            "steering_vectors: got 'attn'; expected one of pre_attn",
        ),
        (
            "packed",
            {"sae_full_reconstruction_specs": [{"module_name": "m"}]},
            "expected a layer: a spec names each site",
        ),
        (
            "packed",
            {"sae_clamp_specs": [{"module_name": "m", "clamps": {"post_block": {"3": [{}]}}}]},
            "'feature_idx' is missing",
        ),
        ("packed", {"steering_vectors": {"post_block": {"data": "=", "dtype": "float64"}}}, "is no request of packed"),
        (
            "packed",
            [],
            "is no request of packed: a value there has another form; expected an object with steering_vectors",
        ),
        (
            "hotwire",
            {"id": "a", "layer": 3},
            "is no request of hotwire: 'scale' is missing; expected an object with id, layer and scale",
        ),
        ("hotwire", {"id": "a", "layer": -3, "scale": 1}, "saesteer.edits[0].site"),
        ("hotwire", 3, "is no request of hotwire"),
        ("other", {}, "--from other: expected one of hotwire, neuronpedia, packed"),
    ],
)
def test_what_is_not_converted(form: str, held: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(SaesteerError) as caught:
        converted(form, held, tmp_path)
    assert words in str(caught.value)


def test_a_file_that_is_no_json(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("{")
    for name in ("x", "none"):
        with pytest.raises(ConfigError, match="expected the request as JSON"):
            foreign.run("hotwire", tmp_path / name)


def test_the_command_prints_the_spec_alone(tmp_path: Path) -> None:
    file = tmp_path / "request.json"
    file.write_text(json.dumps(STEER | {"features": [FEATURE], "steerSpecialTokens": False}))
    done = CliRunner().invoke(app, ["convert", "--from", "neuronpedia", str(file)], catch_exceptions=False)
    [edit] = json.loads(done.stdout)["edits"]
    assert (edit["dictionary"], edit["feature"]) == ("np:gemma-2-2b/20-gemmascope-res-16k", 3124)
    assert (edit["value"], edit["mode"], edit["scope"]) == (10.0, "add", EVERYWHERE)
    assert "except of top-k dictionaries; else divide a clamp's value by the length of its row" in done.stderr
    assert "messages" in done.stderr
    for more in (["copy.safetensors"], ["--dtype", "float16"]):
        with pytest.raises(ConfigError, match="takes neither FILE nor --dtype"):
            CliRunner().invoke(app, ["convert", "--from", "neuronpedia", str(file), *more], catch_exceptions=False)
    with pytest.raises(ConfigError, match="convert needs FILE"):
        CliRunner().invoke(app, ["convert", str(file)], catch_exceptions=False)
