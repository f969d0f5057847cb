"""Some thousands of broken requests over HTTP: none is a 5xx, the engine lives, and a plain request keeps its bits.

Specs are valid ones in which Hypothesis changed types, values and keys; around them stand bodies that schemathesis
makes from the server's own OpenAPI document. A 5xx that the same body without `saesteer` gets as well is vLLM's own.
The admin routes get the same, with their key and without, while others steer by the names that come and go.
"""

import asyncio
import json
import os
import re
from typing import Any
from urllib.parse import quote, unquote
from uuid import uuid4

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.core import NotSet

pytest.importorskip("vllm", reason="vLLM is not installed")

from saesteer.language.fields import CODES
from tests.plugin.apps import admin_app, ask_admin
from tests.plugin.conftest import ADMIN, ADMIN_KEY, BRIDGE, MODULES, OCEAN, VECTORS, WIDTH
from tests.plugin.turns import TURNS
from tests.spec.strategies import mutations

# Hypothesis shows what failed however long it is.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:Generating overly large repr")]

# What a request costs is bounded here; vLLM obeys, say, a million answers.
LIMITED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Who are you?", "max_tokens": 1},
    "/v1/chat/completions": {"messages": TURNS, "max_tokens": 1},
    "/v1/responses": {"input": "Who are you?", "max_output_tokens": 1},
}
ALWAYS = {"model": "base", "n": 1, "stream": False, "background": False, "min_tokens": 0, "use_beam_search": False}
AT_ONCE = 16
EXAMPLES = int(os.environ.get("SAESTEER_TEST_FUZZ", "40"))  # of each test, of AT_ONCE requests or so
FUZZ = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck), derandomize=True)

RAW = {"dtype": "float16", "shape": [576], "data": "ADwAPAA8" * 192}  # ones
CLAMP = {"op": "clamp", "dictionary": "second", "feature": 1, "value": 2.0}
WHEN = [{"dictionary": "mid", "feature": 3, "above": 0.5}, {"probe": "probe", "below": 2.0}]
LISTS: list[list[dict[str, Any]]] = [
    [{**BRIDGE, "mode": "set", "only_if_active": True, "when": WHEN[0], "scope": {"prompt": True}}],
    [{**OCEAN, "mode": mode, "value": 7.0, "unit": "raw"} for mode in ("min", "max")],
    [{"op": "add", "vector": "each", "site": "resid_post", "scale": 4.0, "norm": "match"}],
    [{"op": "add", "vector": [0.5] * 576, "site": ["resid_post.20", "resid_mid.7"]}],
    [{"op": "add", "vector": RAW, "site": "resid_post.15"}],
    [{"op": "cap", "vector": "any", "site": "resid_post.20", "min": -1.0, "max": 3.0, "strength": 0.5}],
    [{"op": "ablate", "vector": "any", "site": "resid_mid.7", "when": WHEN[1:]}],
    [CLAMP, {"op": "reconstruct", "dictionary": "second", "error": "drop"}],
    [{"op": "clamp", "dictionary": "topk", "feature": 7, "value": 2.0, "mode": "scale"}],
    [{"op": "use", "module": "outer", "scale": -2.0}, {"op": "use", "module": "bridge"}],
    [{**OCEAN, "scope": {"positions": [[0, 2], [-3, None]], "skip_first": 1}}],
    [{**OCEAN, "scope": {"messages": ["user", 0]}}],
]
BASES: list[Any] = [
    *({"version": 1, "edits": edits} for edits in LISTS),
    {"edits": [CLAMP], "return": {"features": [{"dictionary": "demo", "top_k": 4}], "probes": ["probe"]}},
]


@st.composite
def broken(draw: st.DrawFn) -> Any:
    """A spec as it stands in a body: an object, or its text for vllm_xargs; right or broken in up to three places."""
    spec: Any = draw(st.sampled_from(BASES))
    for _ in range(draw(st.integers(0, 3))):
        _, _, spec = draw(mutations(spec))
    return spec


def body_of(path: str, spec: Any, by_string: bool) -> dict[str, Any]:
    """A cheap request with a spec."""
    held = {"vllm_xargs": {"saesteer": json.dumps(spec)}} if by_string else {"saesteer": spec}
    return {"model": "base", **LIMITED[path], **held}


def send(server: httpx.Client, bodies: list[tuple[str, dict[str, Any]]]) -> list[httpx.Response]:
    """All of them at once, so that the broken and the right are in one batch."""
    return call(server, [("POST", path, body, {}) for path, body in bodies])


Call = tuple[str, str, Any, dict[str, Any]]  # method, path, body (... is none, bytes are sent as they are), headers


def call(server: httpx.Client, calls: list[Call]) -> list[httpx.Response]:
    """The same with other methods."""

    async def all_of_them() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=server.base_url, timeout=120) as client:
            # Not json=: httpx refuses NaN, other clients send it.
            sent = [
                client.request(
                    method,
                    path,
                    content=None if body is ... else body if isinstance(body, bytes) else json.dumps(body),
                    headers={"content-type": "application/json", **headers},
                )
                for method, path, body, headers in calls
            ]
            return await asyncio.gather(*sent)

    return asyncio.run(all_of_them())


def plain(server: httpx.Client) -> Any:
    """Tokens and logprobs of a plain request on a cold cache."""
    body = {
        "model": "base",
        "prompt": "Who are you?",
        "max_tokens": 12,
        "temperature": 0,
        "logprobs": 3,
        "ignore_eos": True,
    }
    response = server.post("/v1/completions", json={**body, "cache_salt": uuid4().hex, "return_token_ids": True})
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    return choice["token_ids"], choice["logprobs"]


@pytest.fixture(autouse=True)
def _unchanged(any_server: httpx.Client) -> Any:
    """Around each test: the engine lives, and a plain request says the same to the bit."""
    before = plain(any_server)
    yield
    assert any_server.get("/health").status_code == 200
    assert plain(any_server) == before


def test_broken_specs(any_server: httpx.Client, capsys: pytest.CaptureFixture[str]) -> None:
    counts: dict[Any, int] = {}
    one = st.tuples(st.sampled_from(list(LIMITED)), broken(), st.booleans())

    @settings(FUZZ, max_examples=EXAMPLES)
    @given(st.lists(one, min_size=AT_ONCE, max_size=AT_ONCE))
    def run(drawn: list[Any]) -> None:
        for what, response in zip(drawn, send(any_server, [(p, body_of(p, s, t)) for p, s, t in drawn]), strict=True):
            assert response.status_code in (200, 400), (what, response.text)
            if response.status_code == 200:
                counts[200] = counts.get(200, 0) + 1
                continue
            error = response.json()["error"]
            code = re.search(r"\[([a-z_]+)\]$", error["message"])
            assert str(error["param"]).startswith("saesteer"), (what, error)
            assert code is not None and code[1] in CODES, (what, error)
            counts[code[1]] = counts.get(code[1], 0) + 1

    run()
    with capsys.disabled():
        print(f"\n{sum(counts.values())} specs: {counts}")
    assert counts[200] > AT_ONCE and len(counts) > 8, "right ones and many kinds of broken ones"


def body_with(path: str, draw: st.DrawFn, made: dict[str, Any]) -> dict[str, Any]:
    """A cheap request with a spec and a few fields of a body; with all of them nearly each is refused for one."""
    kept = draw(st.lists(st.sampled_from(sorted(made)), max_size=3, unique=True)) if made else []
    body = {**LIMITED[path], **{key: made[key] for key in kept}}
    bounds = ALWAYS | {key: value for key, value in LIMITED[path].items() if key.startswith("max")}
    return (
        body | {key: value for key, value in bounds.items() if key in {*body, "model"}} | {"saesteer": draw(broken())}
    )


@pytest.mark.parametrize("path", LIMITED)
def test_bodies_of_the_server_s_own_document(
    any_server: httpx.Client, capsys: pytest.CaptureFixture[str], path: str
) -> None:
    document = any_server.get("/openapi.json").json()
    cases = schemathesis.openapi.from_dict(document)[path]["POST"]
    modes = [cases.as_strategy(generation_mode=mode) for mode in schemathesis.GenerationMode]
    counts: dict[Any, int] = {}

    @st.composite
    def bodies(draw: st.DrawFn) -> list[dict[str, Any]]:
        made = draw(st.one_of(modes)).body  # costs more to draw than to serve, so it serves several times
        return [body_with(path, draw, made if isinstance(made, dict) else {}) for _ in range(AT_ONCE // 2)]

    @settings(FUZZ, max_examples=EXAMPLES // 2)
    @given(bodies())
    def run(drawn: list[dict[str, Any]]) -> None:
        for body, response in zip(drawn, send(any_server, [(path, body) for body in drawn]), strict=True):
            status: Any = response.status_code
            if status >= 500:
                without = {key: value for key, value in body.items() if key != "saesteer"}
                (stock,) = send(any_server, [(path, without)])
                assert stock.status_code >= 500, (body, response.text)
                status = f"{status}, vLLM's own"
            counts[status] = counts.get(status, 0) + 1

    run()
    with capsys.disabled():
        print(f"\n{path}, {sum(counts.values())} bodies: {counts}")
    assert counts[200] > AT_ONCE and counts[400] > AT_ONCE


@pytest.mark.parametrize("value", [-1e30, 10**30, -(2**63) - 1, 3.4e38])
def test_enormous_values_break_no_answer(any_server: httpx.Client, value: float) -> None:
    """They are finite, so they are served; what the model makes of them may be anything but a 5xx."""
    edits = [
        {**OCEAN, "value": value, "unit": "raw"},
        {"op": "add", "vector": "any", "site": "resid_mid.7", "scale": value},
    ]
    asked = {"logprobs": 3, "max_tokens": 3, "return_token_ids": True, "ignore_eos": True}
    bodies: list[dict[str, Any]] = [
        {"model": "base", "prompt": "Who are you?", **asked, "temperature": heat, "saesteer": {"edits": [edit]}}
        for edit in edits
        for heat in (0, 0.8)
    ]
    beside: dict[str, Any] = {"model": "base", "prompt": "Who are you?", "temperature": 0, **asked}
    *found, other = send(any_server, [("/v1/completions", body) for body in [*bodies, beside]])
    assert {one.status_code for one in found} <= {200, 400}, [one.text for one in found]
    assert other.json()["choices"][0]["token_ids"] == plain(any_server)[0][:3]


ROUTES = ("/v1/saesteer/vectors", "/v1/saesteer/modules")
OWN = {*VECTORS, *MODULES}  # of the server, which other tests need
NAMES = ["a", "org/b c", "ü", "d"]
ROW = [((5 * n) % 7 - 3) / 2 for n in range(WIDTH)]
GIVEN: list[Any] = [ROW, RAW, *({**RAW, "shape": [1, WIDTH], "layers": [layer]} for layer in (20, 3))]
BY_NAME = {"op": "add", "vector": "a", "site": "resid_post.20", "scale": 0.5}


@st.composite
def changes(draw: st.DrawFn) -> Call:
    """A right call of an admin route, or one that is broken in a few places."""
    route = draw(st.sampled_from(ROUTES))
    if draw(st.sampled_from([False] * 5 + [True])):
        return "DELETE", f"{route}/{quote(draw(st.sampled_from(NAMES)), safe='')}", ..., ADMIN
    body: Any = {"name": draw(st.sampled_from(NAMES))}
    if "vectors" in route:
        body |= {"vector": draw(st.sampled_from(GIVEN)), "bias": 0.5}
    else:
        spec = draw(st.sampled_from([*BASES, {"edits": [BY_NAME]}, {"edits": [{"op": "use", "module": "d"}]}]))
        body |= {"spec": spec}
    for _ in range(draw(st.sampled_from([0, 0, 1, 2, 3]))):
        _, _, body = draw(mutations(body))
    return "POST", route, body, ADMIN


def from_document(any_server: httpx.Client) -> st.SearchStrategy[Call]:
    """Calls that schemathesis makes from what the server says of its admin routes."""
    schema = schemathesis.openapi.from_dict(any_server.get("/openapi.json").json())
    found = [
        schema[path][method].as_strategy(generation_mode=mode)
        for path in schema
        if path.startswith(ROUTES)
        for method in schema[path]
        for mode in schemathesis.GenerationMode
        if method.lower() != "get" or mode.is_positive
    ]
    assert len(found) >= 2 + 2 * 4

    def written(case: Any) -> Call:
        path = case.path
        for key, value in (case.path_parameters or {}).items():
            path = path.replace(f"{{{key}}}", quote(str(value), safe=""))
        body = ... if isinstance(case.body, NotSet) else case.body
        return case.method.upper(), path, body, ADMIN

    return st.one_of(found).map(written)


def harmless(one: Call) -> bool:
    """It can be sent, and changes no name of the server's own."""
    _, path, body, _ = one
    name = body.get("name") if isinstance(body, dict) else None
    path = unquote(path)
    return not (isinstance(name, str) and name in OWN) and path.rpartition("/")[2] not in OWN | {".", ".."}


def registered(any_server: httpx.Client) -> dict[str, dict[str, str]]:
    """Versions by name."""
    lists = {route: any_server.get(route, headers=ADMIN).json()[route.rpartition("/")[2]] for route in ROUTES}
    return {route: {one["name"]: one["version"] for one in found} for route, found in lists.items()}


@pytest.fixture
def registry(any_server: httpx.Client) -> Any:
    """What is registered; what comes to it goes again."""
    before = registered(any_server)
    yield before
    for route in reversed(ROUTES):  # a vector goes after the modules that use it, and these after those that use them
        for _ in range(len(NAMES) + 1):
            for name in registered(any_server)[route].keys() - before[route].keys():
                any_server.delete(f"{route}/{quote(name, safe='')}", headers=ADMIN)
    assert registered(any_server) == before


def test_admin_routes(any_server: httpx.Client, registry: Any, capsys: pytest.CaptureFixture[str]) -> None:
    counts: dict[Any, int] = {}
    calls = st.one_of(changes(), changes(), from_document(any_server)).filter(harmless)

    @settings(FUZZ, max_examples=EXAMPLES)
    @given(st.lists(calls, min_size=AT_ONCE, max_size=AT_ONCE))
    def run(drawn: list[Call]) -> None:
        steered: Call = ("POST", "/v1/completions", body_of("/v1/completions", {"edits": [BY_NAME]}, False), {})
        # Those that Hypothesis draws mostly name what is gone already, so one goes that is there.
        there = sorted(registered(any_server)[ROUTES[0]].keys() - registry[ROUTES[0]].keys())
        drawn += [("DELETE", f"{ROUTES[0]}/{quote(name, safe='')}", ..., ADMIN) for name in there[:1]]
        *told, by_name = call(any_server, [*drawn, steered])
        assert by_name.status_code == 200 or "[unknown_name]" in by_name.text, by_name.text
        for what, response in zip(drawn, told, strict=True):
            assert response.status_code in (200, 400, 404, 409), (what, response.text)
            code = "done" if response.status_code == 200 else response.json()["error"]["code"]
            assert code in {"done", "no_room", "no_site", "in_use", *CODES}, (what, response.text)
            key = f"{what[0]} {code}"
            counts[key] = counts.get(key, 0) + 1

    run()
    with capsys.disabled():
        print(f"\n{sum(counts.values())} calls of the admin routes: {counts}")
    assert counts["POST done"] > AT_ONCE and counts["DELETE done"] > 2 and len(counts) > 9, "of all kinds"
    assert all(registered(any_server)[route].items() >= registry[route].items() for route in ROUTES)


WRONG_KEYS: list[Any] = [
    {},
    {"Authorization": ""},
    {"Authorization": "Bearer"},
    {"Authorization": f"Bearer {ADMIN_KEY}x"},
    {"Authorization": f"Basic {ADMIN_KEY}"},
    {"Authorization": b"Bearer \xff\xfe"},
]


def test_admin_routes_without_the_key(any_server: httpx.Client, registry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is sent: 401 with another key, and 403 where the server has none."""
    monkeypatch.delenv("SAESTEER_ADMIN_KEY", raising=False)
    off = admin_app()

    @settings(FUZZ, max_examples=EXAMPLES // 4)
    @given(
        st.lists(st.one_of(changes(), from_document(any_server)).filter(harmless), min_size=8, max_size=8), st.data()
    )
    def run(drawn: list[Call], data: st.DataObject) -> None:
        calls = [(*one[:3], data.draw(st.sampled_from(WRONG_KEYS))) for one in drawn]
        for what, response in zip(calls, call(any_server, calls), strict=True):
            assert (response.status_code, response.json()["error"]["code"]) == (401, "wrong_key"), what
        method, path, body, headers = calls[0]
        told = ask_admin(off, method, path.removeprefix("/v1/saesteer/"), headers=headers, content=str(body))
        assert (told.status_code, told.json()["error"]["code"]) == (403, "admin_off")

    run()
    assert registered(any_server) == registry
