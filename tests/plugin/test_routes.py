"""When the admin routes stand in an app, whom they let in, and which bodies they refuse; test_admin.py has the rest."""

import json
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")


from fastapi.testclient import TestClient
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from saesteer.config.config import SaesteerConfig
from saesteer.config.settings import admin_key
from saesteer.errors import ConfigError
from saesteer.plugin.http.entries import VectorBody
from tests.plugin.apps import admin_app, app_of_vllm, ask_admin


def test_without_a_key_they_are_off_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SAESTEER_ADMIN_KEY", raising=False)
    made = admin_app()
    for headers in ({}, {"Authorization": "Bearer "}, {"Authorization": "Bearer x"}):
        told = ask_admin(made, "GET", "vectors", headers=headers)
        assert told.status_code == 403
        assert told.json()["error"]["code"] == "admin_off" and "--saesteer-admin-key" in told.text


def test_a_server_without_saesteer_has_no_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAESTEER_ADMIN_KEY", "admin")
    assert (
        ask_admin(admin_app(additional={}), "GET", "vectors", headers={"Authorization": "Bearer admin"}).status_code
        == 404
    )


@pytest.mark.parametrize("key", ["two words", "schlüssel"])
def test_a_key_that_no_header_carries(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAESTEER_ADMIN_KEY", key)
    with pytest.raises(ConfigError, match="SAESTEER_ADMIN_KEY"):
        admin_key()


def test_a_default_module_that_is_required_is_replaced_and_not_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAESTEER_ADMIN_KEY", "admin")
    made, headers = admin_app(), {"Authorization": "bearer admin"}
    spec = {"edits": [{"op": "ablate", "vector": [1, 0, 0], "site": "resid_post.3"}]}
    for name in ("a", "b"):
        assert ask_admin(made, "POST", "modules", headers=headers, json={"name": name, "spec": spec}).status_code == 200
    made.state.saesteer_admin.engine.input_processor.saesteer_door.config = SaesteerConfig(require=("default",))
    for name in ("a", "b"):
        told = ask_admin(made, "PUT", "default", headers=headers, json={"module": name})
        assert told.json() == {"module": name}
    refused = ask_admin(made, "DELETE", "default", headers=headers)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "in_use")
    assert "--require default" in refused.text
    assert ask_admin(made, "GET", "default", headers=headers).json()["module"] == "b"
    wrong = [{"module": 5}, {"module": "c"}, {"module": ["a"]}, {}, {"module": "a", "name": "a"}]
    found = [ask_admin(made, "PUT", "default", headers=headers, json=body) for body in wrong]
    assert [(one.status_code, one.json()["error"]["code"], one.json()["error"]["param"]) for one in found] == [
        (400, "wrong_type", "module"),
        (400, "unknown_name", "module"),
        (400, "wrong_type", "module"),
        (400, "missing_field", "module"),
        (400, "unknown_field", "name"),
    ]


def test_a_key_in_a_file_opens_the_admin_routes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("admin\n")
    monkeypatch.delenv("SAESTEER_ADMIN_KEY", raising=False)
    monkeypatch.setenv("SAESTEER_ADMIN_KEY_FILE", str(tmp_path / "key"))
    made = admin_app()
    for key, status in (("admin", 200), ("other", 401)):
        assert ask_admin(made, "GET", "vectors", headers={"Authorization": f"Bearer {key}"}).status_code == status
    monkeypatch.setenv("SAESTEER_ADMIN_KEY", "admin")
    with pytest.raises(ConfigError, match="SAESTEER_ADMIN_KEY and SAESTEER_ADMIN_KEY_FILE are both set"):
        admin_app()


def test_names_with_slashes_are_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAESTEER_ADMIN_KEY", "admin")
    made, headers = admin_app(), {"Authorization": "bearer admin"}
    put = ask_admin(made, "POST", "vectors", headers=headers, json={"name": "org/a b", "vector": [1, 0, 0]})
    assert put.json()["shape"] == [3] and put.json()["uses"] == 0
    assert ask_admin(made, "DELETE", "vectors/org%2Fa%20b", headers=headers).json() == {
        "name": "org/a b",
        "deleted": True,
    }
    assert ask_admin(made, "DELETE", "vectors/org%2Fa%20b", headers=headers).status_code == 404


HEADERS = {"Authorization": "Bearer other", "Content-Type": "application/json"}


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with pytest.MonkeyPatch.context() as patch:
        app: Any = app_of_vllm(patch, key="other")
        app.state.saesteer_admin = Namespace(names=None, engine=None, key="other")
        yield TestClient(app, headers=HEADERS)


@settings(deadline=None, max_examples=100, suppress_health_check=list(HealthCheck))
@given(
    st.text(st.characters(exclude_categories=()), max_size=300).filter(lambda name: name not in VectorBody.model_fields)
)
@example("k" * 3_000_000)
@example("\ud800")
@example("body")
@example("path")
def test_a_field_that_does_not_exist_is_named_in_short(client: TestClient, name: str) -> None:
    content = json.dumps({"name": "a", "vector": [1], name: 1})
    answer = client.post("/v1/saesteer/vectors", content=content)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "unknown_field")
    assert error["param"].isprintable() and len(answer.content) < 5000 and error["param"] in error["message"]
    if name in ("body", "path"):
        assert error["param"] == name
