"""Requests of Neuronpedia become the specs that docs/coming-from.md puts next to them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from saesteer.commands import foreign
from saesteer.commands.cli import app
from saesteer.errors import ConfigError, SaesteerError
from saesteer.language.spec import from_json
from tests.markdown import blocks

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


def test_every_spec_on_the_page_is_one() -> None:
    specs = [from_json(json.loads(block)) for block in blocks(PAGE, "json")]
    assert len(specs) == 3 and all(spec.edits for spec in specs)


def test_every_form_is_on_the_page() -> None:
    assert {form for form, _, _ in pairs()} == foreign.FORMS.keys()


@pytest.mark.parametrize(("form", "theirs", "ours"), pairs())
def test_the_page_shows_what_convert_makes(form: str, theirs: Any, ours: Any, tmp_path: Path) -> None:
    found = converted(form, theirs, tmp_path)
    assert from_json(found.spec) == from_json(ours)


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
        ("neuronpedia", 3, "is no request of neuronpedia: a value there has another form"),
        ("hotwire", {}, "--from hotwire: expected neuronpedia"),
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
            foreign.run("neuronpedia", tmp_path / name)


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
