"""The route that serves labels: on vLLM's app without an engine, and slow on the real server."""

import shutil
import sqlite3
from argparse import Namespace
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from saesteer import __version__
from saesteer.client import Client
from saesteer.commands.embedded import BRIDGE, DEMO_SAE, OCEAN
from saesteer.config.assets import Assets
from saesteer.config.config import SaesteerConfig
from saesteer.language.fields import CODES
from tests.plugin.apps import app_of_vllm

ROUTE = "/v1/saesteer/features"
KEY = {"Authorization": "Bearer usual"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's dictionary with its labels, with those of another, with something else, and without any; and one
    whose effects have not been measured."""
    found = tmp_path_factory.mktemp("labels")
    for name in ("own", "other", "broken", "none"):
        (found / name).mkdir()
        shutil.copy(DEMO_SAE, found / name / "d.safetensors")
    labels = DEMO_SAE.with_name(f"{DEMO_SAE.name}.labels")
    shutil.copy(labels, found / "own" / "d.safetensors.labels")
    shutil.copy(next(DEMO_SAE.parent.glob("*l12*.labels")), found / "other" / "d.safetensors.labels")
    (found / "broken" / "d.safetensors.labels").write_text("no labels")
    (found / "mlp").mkdir()
    shutil.copy(_transcoder(), found / "mlp" / "d.safetensors")
    shutil.copy(f"{_transcoder()}.labels", found / "mlp" / "d.safetensors.labels")
    with closing(sqlite3.connect(found / "mlp" / "d.safetensors.labels")) as base:
        base.executescript("DROP TABLE clamps; DROP TABLE writes; DROP TABLE written; DROP TABLE alike;")
    return found


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[TestClient]:
    with pytest.MonkeyPatch.context() as patch:
        app: Any = app_of_vllm(patch, "--api-key", "usual")
        places = {path.name: str(path / "d.safetensors") for path in folder.iterdir()}
        assets = Assets.open(SaesteerConfig.from_json({"dictionaries": places}))
        catalog = assets.catalog(width=576, layers=30)
        app.state.saesteer_admin = Namespace(names=Namespace(catalog=catalog))
        yield TestClient(app, headers=KEY)


def _transcoder() -> str:
    return str(next(DEMO_SAE.parent.glob("*l12*.safetensors")))


def numbers(response: httpx.Response) -> list[int]:
    assert response.status_code == 200, response.text
    return [one["feature"] for one in response.json()["features"]]


@pytest.mark.parametrize(("word", "feature"), [("bridge", BRIDGE), ("ocean", OCEAN)])
def test_features_by_words(client: Any, word: str, feature: int) -> None:
    found = client.get(ROUTE, params={"dictionary": "own", "q": word, "limit": 3})
    assert feature in numbers(found)
    body = found.json()
    assert body["dictionary"] == "own" and body["layer"] is None and "tokens of" in body["source"]
    scores = [one["score"] for one in body["features"]]
    assert len(scores) == 3 and scores == sorted(scores, reverse=True)
    assert numbers(client.get(ROUTE, params={"dictionary": "own", "q": f'{word}" OR *', "limit": 3})) != []
    assert numbers(client.get(ROUTE, params={"dictionary": "own", "q": "zzzzzz"})) == []
    assert len(numbers(client.get(ROUTE, params={"dictionary": "mlp", "q": word, "layer": 12}))) == 10


def test_the_server_describes_itself(client: Any) -> None:
    """Behind the usual key; what it says of dictionaries is what their own route says."""
    client.app.state.saesteer_admin.engine = Namespace(
        input_processor=Namespace(saesteer_door=Namespace(config=SaesteerConfig(max_edits=7)))
    )
    found = client.get("/v1/saesteer").json()
    assert client.get("/v1/saesteer", headers={"Authorization": "Bearer no"}).status_code == 401
    listed = client.get("/v1/saesteer/dictionaries").json()
    assert {name: found[name] for name in listed} == listed and len(listed["dictionaries"]) == 5
    assert (found["version"], found["layers"]) == (__version__, 30) and len(found["models"]) == 1
    assert found["sites"] == ["mlp_in.12", "resid_post.12", "resid_post.15"]
    assert "resid_post.15" in found["reads"]
    assert found["limits"]["max_edits"] == 7 and found["limits"]["max_dose"] is None
    assert {"/v1/saesteer", ROUTE, "/v1/chat/completions"} <= set(found["routes"])
    assert "/health" not in found["routes"] and "/saesteer/style.css" not in found["routes"]


def test_one_feature(client: Any) -> None:
    [found] = client.get(ROUTE, params={"dictionary": "own", "feature": BRIDGE}).json()["features"]
    assert found["feature"] == BRIDGE and found["label_by"] == "rule" and "bridge" in found["label"]
    assert found["examples"][0].keys() == {"value", "before", "token", "after"}
    assert found["score"] is None and found["density"] > 0
    assert "bridge" in found["writes"] and found["best"]["unit"] == "max_act" and found["only_reads"] is False
    [typo] = client.get(ROUTE, params={"dictionary": "own", "q": "ocaen", "limit": 1}).json()["features"]
    assert typo["instead"] == "ocean" and "ocean" in typo["writes"]
    [old] = client.get(ROUTE, params={"dictionary": "mlp", "feature": 3}).json()["features"]
    assert old["only_reads"] is None and old["best"] is None  # its effects have not been measured


REFUSED: list[tuple[dict[str, Any], int, str, str, str]] = [
    ({"q": "x", "layer": 15}, 400, "dictionary", "missing_field", "unless q searches all dictionaries, 64 at most"),
    ({"feature": 1}, 400, "dictionary", "missing_field", "unless q searches all"),
    ({"q": "?!"}, 400, "q", "out_of_range", "got '?!', expected words"),
    ({"dictionary": "own"}, 400, "q", "missing_field", "expected q or feature"),
    ({"dictionary": "own", "q": "x", "feature": 1}, 400, "q", "conflict", "expected one of them"),
    ({"dictionary": "own", "q": "?!"}, 400, "q", "out_of_range", "got '?!', expected words"),
    ({"dictionary": "own", "q": "x" * 201}, 400, "q", "out_of_range", "200"),
    ({"dictionary": "own", "q": "x", "limit": 101}, 400, "limit", "out_of_range", "100"),
    ({"dictionary": "own", "q": "x", "limit": 0}, 400, "limit", "out_of_range", "1"),
    ({"dictionary": "own", "q": "x", "layer": 3}, 400, "layer", "out_of_range", "of layer 15"),
    ({"dictionary": "own", "feature": "x"}, 400, "feature", "wrong_type", "integer"),
    ({"dictionary": "own", "feature": -1}, 400, "feature", "out_of_range", "0"),
    ({"dictionary": "own", "feature": 9216}, 400, "feature", "out_of_range", "0 to 9215"),
    ({"dictionary": "own", "feature": 10**30}, 400, "feature", "out_of_range", "0 to 9215"),
    ({"dictionary": "owm", "q": "x"}, 400, "dictionary", "unknown_name", "did you mean 'own'"),
    ({"dictionary": "../own", "q": "x"}, 400, "dictionary", "unknown_name", "expected one of"),
    ({"dictionary": "none", "q": "x"}, 404, "dictionary", "not_served", "has no labels"),
    ({"dictionary": "broken", "q": "x"}, 400, "dictionary", "unreadable", "is no SQLite database"),
    ({"dictionary": "other", "q": "x"}, 400, "dictionary", "unreadable", "belongs to other weights"),
]


@pytest.mark.parametrize(("query", "status", "param", "code", "told"), REFUSED, ids=range(len(REFUSED)))
def test_refusals(client: Any, query: dict[str, Any], status: int, param: str, code: str, told: str) -> None:
    found = client.get(ROUTE, params=query)
    assert found.status_code == status
    error = found.json()["error"]
    assert (error["param"], error["code"]) == (f"query.{param}", code) and told in error["message"]
    assert "/" not in error["message"].replace(str(query.get("dictionary")), "")


NAMES = st.sampled_from(["dictionary", "q", "feature", "layer", "limit", "other"])
VALUES = st.one_of(st.text(max_size=250), st.integers().map(str), st.sampled_from(["own", "none", "mlp", "12", ""]))


@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(NAMES, VALUES), max_size=6), st.booleans())
def test_no_query_is_an_error_of_the_server(client: Any, query: list[tuple[str, str]], right: bool) -> None:
    found = client.get(ROUTE, params=[("dictionary", "own"), *query] if right else query)
    assert found.status_code in (200, 400, 404)
    if found.status_code != 200:
        error = found.json()["error"]
        assert error["code"] in CODES and error["param"].startswith("query.")


def test_the_usual_key_guards_it(client: Any) -> None:
    assert (
        client.get(ROUTE, params={"dictionary": "own", "q": "x"}, headers={"Authorization": "Bearer no"}).status_code
        == 401
    )
    assert client.post(ROUTE, json={}).status_code == 405


@pytest.mark.slow
def test_the_real_server(demo_server: Any) -> None:
    with Client(str(demo_server.base_url)) as client:
        assert BRIDGE in [one["feature"] for one in client.features("demo", "bridge", limit=3)]
        assert client.features("demo-mlp", "magic", layer=12)
        assert {one["dictionary"] for one in client.features(q="bridge", limit=50)} == {"demo", "demo-mlp"}
        about = client.describe()
        assert about["sites"] == ["mlp_in.12", "resid_post.12", "resid_post.15"] and about["models"] == client.models()
        [one] = client.features("demo", feature=OCEAN)
        assert "ocean" in one["label"]
        clamp = {"op": "clamp", "dictionary": "demo", "feature": one["feature"]}
        ways = {**clamp, "value": 2 * one["max_act"]}, {**clamp, "value": 2, "unit": "max_act"}
        raw, unit = (client.chat("Who are you?", steer=way, temperature=0, max_tokens=48) for way in ways)
        assert "ocean" in raw.text.lower() and raw.text == unit.text
        assert raw.applied and unit.applied
        known = {"max_act": one["max_act"], "max_act_by": "file", "times_max_act": 2}
        for answer, value, name in ((raw, 2 * one["max_act"], "raw"), (unit, 2, "max_act")):
            assert known | {"value": value, "unit": name, "mode": "set"} == {
                word: (answer.applied or ())[0][word] for word in (*known, "value", "unit", "mode")
            }
