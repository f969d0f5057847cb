"""The field in vLLM's OpenAPI document, and that its schema is the request language's. Starts no engine."""

from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings

pytest.importorskip("vllm", reason="vLLM is not installed")

from saesteer.plugin.http import openapi
from saesteer.plugin.http.routes import SERVED
from tests.plugin.apps import app_of_vllm
from tests.plugin.conftest import BRIDGE
from tests.spec.strategies import specs
from tools import schemas


@pytest.fixture(scope="module")
def document() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        app = app_of_vllm(patch)
        assert app.openapi() == app.openapi()
        return app.openapi()


def schema_of(document: Any, body: Any) -> Any:
    """Of a body in JSON, behind its reference."""
    found = body["content"]["application/json"]["schema"]
    return document["components"]["schemas"][found["$ref"].rpartition("/")[2]] if "$ref" in found else found


def test_every_served_route_has_the_field_in_its_body_and_its_answer(document: Any) -> None:
    for path in SERVED:
        route = document["paths"][path]["post"]
        if path != "/invocations":  # vLLM says nothing of its body
            asked = schema_of(document, route["requestBody"])["properties"]
            assert asked["saesteer"] == {"$ref": "#/components/schemas/SaesteerSpec"} and "model" in asked
        told = schema_of(document, route["responses"]["200"])["properties"]
        assert told["saesteer"] == {"$ref": "#/components/schemas/SaesteerAnswer"}


def test_a_server_that_cannot_steer_does_not_document_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Saesteer" not in str(app_of_vllm(monkeypatch, additional={}).openapi())


def test_all_references_lead_somewhere(document: Any) -> None:
    schemas = document["components"]["schemas"]

    def follow(found: Any) -> None:
        if isinstance(found, dict):
            if "$ref" in found:
                assert found["$ref"].rpartition("/")[2] in schemas
            for one in found.values():
                follow(one)
        elif isinstance(found, list):
            for one in found:
                follow(one)

    follow(openapi.SCHEMAS)
    for body in ("VectorBody", "ModuleBody"):  # of the admin routes
        follow(schemas[body])
    clamp = schemas["SaesteerClamp"]
    assert clamp["required"] == ["op", "feature", "value"]
    by_name, by_address = clamp["anyOf"]
    assert by_name == {"required": ["dictionary"]} and by_address["properties"].keys() == {"feature"}
    assert clamp["properties"]["mode"] == {"enum": ["set", "add", "scale", "min", "max"], "default": "set"}
    assert set(schemas["SaesteerSpec"]["properties"]) == {"edits", "return", "defaults", "version"}


@pytest.fixture(scope="module")
def validator() -> Any:
    whole = {"$ref": "#/components/schemas/SaesteerSpec", "components": {"schemas": openapi.SCHEMAS}}
    jsonschema.Draft202012Validator.check_schema(whole)
    return jsonschema.Draft202012Validator(whole)


def test_the_stored_schemas_are_the_languages() -> None:
    assert schemas.FILE.read_text() == schemas.written(), "make tables"


@settings(deadline=None)
@given(spec=specs)
def test_every_spec_fits_the_schema(validator: Any, spec: Any) -> None:
    validator.validate(spec.to_json())


@pytest.mark.parametrize(
    "edit",
    [
        {**BRIDGE, "valeu": 1},
        {**BRIDGE, "feature": "x"},
        {**BRIDGE, "op": "clam"},
        {**BRIDGE, "mode": "blend"},
        {"op": "clamp", "dictionary": "demo"},
        {**BRIDGE, "scope": {"positions": [[3]]}},
        {**BRIDGE, "when": [{"probe": 3}]},
    ],
)
def test_what_is_wrong_does_not(validator: Any, edit: Any) -> None:
    validator.validate({"edits": [BRIDGE, {**BRIDGE, "scope": {"messages": "user"}}], "return": {"dose": True}})
    assert not validator.is_valid({"edits": [edit]})


@pytest.mark.parametrize(
    "wanted",
    [
        {"features": [{"top_k": 3}]},
        {"features": ["demo"]},
        {"probes": [3]},
        {"probes": [{"site": "resid_post.3"}]},
        {"activations": [{"site": "resid_post.3", "transport": "inline"}]},
        {"hidden": {}},
        {"consumers": {"logging": None}},
        {"consumers": ["logging"]},
    ],
)
def test_what_is_wrong_in_a_read_does_not(validator: Any, wanted: Any) -> None:
    read = {"site": "resid_post.3", "as": "handle", "positions": [[0, 3]]}
    validator.validate(
        {"return": {"probes": ["a", {"probe": "b"}], "activations": [read], "consumers": {"logging": {}}}}
    )
    assert not validator.is_valid({"return": wanted})
