"""When the admin routes stand in an app, and whom they let in; what they do is in test_admin.py, on a real server."""

import asyncio
from argparse import Namespace
from typing import Any

import httpx
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from fastapi import FastAPI

from saesteer.errors import ConfigError
from saesteer.planning.planner import Catalog
from saesteer.plugin.door.admission import Door
from saesteer.plugin.http.admin import EndpointPlugin, admin_key
from saesteer.plugin.names.versions import Names
from tests.plugin.names import Workers


class Engine:
    """Of AsyncLLM what the plugin looks at."""

    def __init__(self) -> None:
        catalog = Catalog(dictionaries={}, sites=frozenset({"resid_post.3"}), max_entries=64, width=3)
        self.input_processor = Namespace(saesteer_names=Names(catalog, pool_rows=2, layers=6), saesteer_door=Door())
        self.engine_core = Workers()


def app(api_key: Any = None, additional: Any = None) -> Any:
    made = FastAPI()
    made.state.args = Namespace(
        api_key=api_key, additional_config={"saesteer": {}} if additional is None else additional
    )
    plugin = EndpointPlugin()
    plugin.attach_router(made)
    asyncio.run(plugin.init_state(Engine(), made.state, made.state.args))
    return made


def ask(made: Any, method: str, path: str, **words: Any) -> httpx.Response:
    async def wait() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(made), base_url="http://host") as client:
            return await client.request(method, f"/v1/saesteer/{path}", **words)

    return asyncio.run(wait())


def test_without_a_key_they_are_off_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SAESTEER_ADMIN_KEY", raising=False)
    made = app()
    for headers in ({}, {"Authorization": "Bearer "}, {"Authorization": "Bearer x"}):
        told = ask(made, "GET", "vectors", headers=headers)
        assert told.status_code == 403
        assert told.json()["error"]["code"] == "admin_off" and "--saesteer-admin-key" in told.text


def test_the_admins_key_passes_where_another_guards_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAESTEER_ADMIN_KEY", "admin")
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    assert app().state.args.api_key is None, "no gate where there was none"
    assert app(["usual"]).state.args.api_key == ["usual", "admin"]
    monkeypatch.setenv("VLLM_API_KEY", "by environment")
    assert app().state.args.api_key == ["by environment", "admin"]
    told = ask(app(["usual"]), "GET", "vectors", headers={"Authorization": "Bearer usual"})
    assert told.status_code == 401, "the routes take the admin's key alone"


def test_a_server_without_saesteer_has_no_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAESTEER_ADMIN_KEY", "admin")
    assert ask(app(additional={}), "GET", "vectors", headers={"Authorization": "Bearer admin"}).status_code == 404


@pytest.mark.parametrize("key", ["two words", "schlüssel"])
def test_a_key_that_no_header_carries(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAESTEER_ADMIN_KEY", key)
    with pytest.raises(ConfigError, match="SAESTEER_ADMIN_KEY"):
        admin_key()


def test_names_with_slashes_are_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAESTEER_ADMIN_KEY", "admin")
    made, headers = app(), {"Authorization": "bearer admin"}
    put = ask(made, "POST", "vectors", headers=headers, json={"name": "org/a b", "vector": [1, 0, 0]})
    assert put.json()["shape"] == [3] and put.json()["uses"] == 0
    assert ask(made, "DELETE", "vectors/org%2Fa%20b", headers=headers).json() == {"name": "org/a b", "deleted": True}
    assert ask(made, "DELETE", "vectors/org%2Fa%20b", headers=headers).status_code == 404
