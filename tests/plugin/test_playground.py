"""The playground's files on vLLM's app without an engine: who gets which, and under what headers. Opens no browser."""

import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from fastapi.testclient import TestClient

from saesteer.commands.embedded import DEMO_SAE
from saesteer.config.assets import Assets
from saesteer.config.config import SaesteerConfig
from saesteer.plugin.http import features
from saesteer.plugin.http.playground import FILES, FOLDER, PREFIX
from tests.plugin.apps import app_of_vllm
from tests.plugin.conftest import random_coder

STORED = sorted(path for path in FOLDER.rglob("*") if path.is_file())
OURS = [path for path in STORED if "vendor" not in path.parts]
LISTED = "/v1/saesteer/dictionaries"
EMBEDDED = "SmolLM2-135M-Instruct-b179c9523d0e-1"  # the folder of the embedded model


def client_of(monkeypatch: pytest.MonkeyPatch, playground: bool | None = True) -> TestClient:
    """The app as a server with a key has it."""
    config = {"saesteer": {} if playground is None else {"playground": playground}}
    return TestClient(app_of_vllm(monkeypatch, "--api-key", "usual", additional=config), follow_redirects=False)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> TestClient:
    return client_of(monkeypatch)


def test_every_file_is_served_without_a_key_and_nothing_else(client: Any) -> None:
    for name, (file, kind) in FILES.items():
        found = client.get(PREFIX + name)
        assert (found.status_code, found.content) == (200, file.read_bytes()), name
        assert found.headers["Content-Type"] == kind
        assert client.head(PREFIX + name).status_code == 200
        assert client.post(PREFIX + name, json={}).status_code == 405
    assert {file for file, _ in FILES.values()} == {*STORED} - {FOLDER / "vendor/lit-html/LICENSE"}


def test_it_begins_with_the_cases_that_fit_the_server(monkeypatch: pytest.MonkeyPatch, client: TestClient) -> None:
    found = client.get(f"{PREFIX}start.json")
    assert found.json() == {"key": True, "gallery": []} and found.headers["X-Content-Type-Options"] == "nosniff"
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    wire = {"dictionaries": {"demo": str(DEMO_SAE)}, "playground": True}
    app = app_of_vllm(monkeypatch, "--model", f"/cache/{EMBEDDED}", additional={"saesteer": wire})
    first = TestClient(app).get(f"{PREFIX}start.json").json()
    assert first["key"] is False
    assert [case["name"] for case in first["gallery"]] == ["Cars", "Ocean", "Horse", "Forest", "Bridge"]


@pytest.mark.parametrize(
    "name",
    [
        "index.html",
        "none.js",
        "views",
        "views/",
        "vendor/lit-html/LICENSE",
        "../plugin/__init__.py",
        "%2e%2e/plugin/__init__.py",
        "..%2fplugin%2f__init__.py",
        "%2e%2e%2f%2e%2e%2fpyproject.toml",
        "//etc/passwd",
        "style.css%00",
        "style.css/",
        "STYLE.CSS",
        "views\\page.js",
        "x" * 10_000,
    ],
)
def test_other_names_are_not_there(client: Any, name: str) -> None:
    assert client.get(PREFIX + name).status_code in (307, 404)
    assert client.get(PREFIX + name, follow_redirects=True).status_code == 404 or name == "style.css/"


def test_headers_allow_nothing_from_elsewhere(client: Any) -> None:
    for name in FILES:
        headers = client.get(PREFIX + name).headers
        policy = dict(one.split(" ", 1) for one in headers["Content-Security-Policy"].split("; "))
        assert policy["default-src"] == "'none'"
        loaded = {policy[one] for one in ("script-src", "style-src", "connect-src", "img-src")}
        assert loaded == {"'self'"}
        assert {policy[one] for one in ("base-uri", "form-action", "frame-ancestors")} == {"'none'"}
        assert policy["require-trusted-types-for"] == "'script'" and policy["trusted-types"] == "lit-html"
        assert "unsafe" not in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "no-referrer"


@pytest.mark.parametrize("playground", [None, False])
def test_it_is_off_unless_the_operator_says_so(monkeypatch: pytest.MonkeyPatch, playground: bool | None) -> None:
    client = client_of(monkeypatch, playground)
    assert {client.get(PREFIX + name).status_code for name in FILES} == {404}


def test_a_server_that_cannot_steer_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert TestClient(app_of_vllm(monkeypatch, additional={})).get(PREFIX).status_code == 404
    monkeypatch.setenv("SAESTEER_DISABLE", "1")
    assert client_of(monkeypatch).get(PREFIX).status_code == 404


def test_no_text_becomes_html_or_code_and_nothing_is_stored() -> None:
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|unsafe|\beval\b|new Function"
    forbidden += r"|Storage\b|cookie|indexedDB|pushState|replaceState|location\.(?:hash|search)"
    for path in OURS:
        assert not re.search(forbidden, path.read_text()), path


def test_the_dictionaries_of_a_server_are_listed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from saesteer.loaders.formats import own

    (tmp_path / "more").mkdir()
    own.write(tmp_path / "more" / "a.safetensors", random_coder("relu", 1))
    (tmp_path / "deep").mkdir()
    for layer in (15, 20):
        own.write(tmp_path / "deep" / f"layer_{layer}.safetensors", random_coder("relu", layer))
    config = SaesteerConfig.from_json(
        {
            "dictionaries": {
                "demo": str(DEMO_SAE),
                "stored": {"path": str(DEMO_SAE), "rows": True},
                "deep": f"{tmp_path}/deep@resid_post",
            },
            "dictionary_folder": f"{tmp_path}/more",
            "sites": ["resid_post.3"],
        }
    )
    app: Any = app_of_vllm(monkeypatch)
    app.state.saesteer_admin = Namespace(names=Namespace(catalog=Assets.open(config).catalog(width=576, layers=30)))
    client = TestClient(app)
    found = client.get(LISTED)
    assert found.status_code == 200, found.text
    told = {one["dictionary"]: (one["layers"], one["site"], one["readable"]) for one in found.json()["dictionaries"]}
    more = {name for name in told if name.startswith("a")}
    assert len(more) == 1 and not found.json()["more"]
    assert {name: one for name, one in told.items() if name not in more} == {
        "demo": (None, "resid_post.15", True),
        "stored": (None, "resid_post.15", False),
        "deep": ([15, 20], "resid_post.15", True),
    }
    assert told[more.pop()] == (None, None, False), "it has no site, so no request can name it as it is"
    monkeypatch.setattr(features, "MOST_LISTED", 2)
    found = client.get(LISTED).json()
    assert len(found["dictionaries"]) == 2 and found["more"]
