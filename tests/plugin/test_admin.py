"""Names while serving, on the real engine over a socket: registered, replaced and deleted while others generate."""

import base64
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from saesteer.client import Client, numbers
from saesteer.errors import RequestRefused
from tests.plugin import asked_http
from tests.plugin.asked_http import forget_names, text
from tests.plugin.conftest import ADMIN, ADMIN_KEY, BRIDGE, CUDA, OCEAN, PROMPTS, WIDTH
from tests.plugin.serving import served

pytestmark = pytest.mark.slow

_DRAW = np.random.default_rng(11)
ROWS = [(3 * _DRAW.normal(size=WIDTH)).astype(np.float32) for _ in range(6)]
# Longer than a block of the prefix cache (128 on a CPU), so that a version could find what another one has left.
LONG = "The old town lies between the hills and the sea, and every road in it leads down to the harbour. " * 8


def inline(rows: Any, layers: list[int] | None = None) -> dict[str, Any]:
    """A vector as bytes in base64."""
    found = {"dtype": "float32", "shape": list(rows.shape), "data": base64.b64encode(rows.tobytes()).decode()}
    return found if layers is None else {**found, "layers": layers}


def add(vector: Any, site: str = "resid_post.15", scale: float = 2.0) -> dict[str, Any]:
    return {"op": "add", "vector": vector, "site": site, "scale": scale}


def use(module: str) -> dict[str, Any]:
    return {"op": "use", "module": module}


ONE = pytest.param(1, id="one API server", marks=pytest.mark.long)  # two of each do the same in CI


@pytest.fixture(scope="module", params=[ONE, pytest.param(2, id="two and two engines")])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder, servers = tmp_path_factory.mktemp("admin"), request.param
    words = ["--sites", "resid_post.7,resid_post.15,resid_post.20", "--pool-rows", "8"]
    engines = 1 if torch.cuda.device_count() == 1 else servers
    if servers > 1:
        words += ["--api-server-count", str(servers), "--data-parallel-size", str(engines)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        if not CUDA:  # two engines would be bound to the same cores
            patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
            patch.setenv("OMP_NUM_THREADS", "1")
        arguments = ["demo", "--saesteer-admin-key", ADMIN_KEY, *words]
        with served(arguments, folder / "log", keep=servers == 1) as client:
            yield client
            answered = sorted(path.name for path in folder.glob("saesteer-*/uses-*"))
            made = re.findall(r'vllm:generation_tokens_total\{engine="(\d)".*\} (.*)', client.get("/metrics").text)
    assert answered == ([] if servers == 1 else [f"uses-{rank}" for rank in range(servers)]), "all have taken part"
    assert {engine for engine, tokens in made if float(tokens)} == {str(one) for one in range(engines)}
    assert not [*folder.glob("saesteer-*")], "nothing is left behind"


@pytest.fixture(autouse=True)
def nothing_left(server: httpx.Client) -> Iterator[None]:
    """Each test leaves the server as it found it."""
    yield
    forget_names(server)


def register(server: httpx.Client, kind: str, **body: Any) -> httpx.Response:
    return server.post(f"/v1/saesteer/{kind}", headers=ADMIN, json=body)


def complete(server: httpx.Client, edits: list[Any], prompt: str = PROMPTS[0], **body: Any) -> httpx.Response:
    return asked_http.complete(server, "demo", prompt, **body, saesteer={"edits": edits})


def error(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    return dict(response.json()["error"])


def test_by_name_is_inline_and_replacing_changes_what_follows(server: httpx.Client) -> None:
    plain, *expected = [text(complete(server, edits)) for edits in ([], *([add(inline(row))] for row in ROWS[:2]))]
    assert len({plain, *expected}) == 3
    versions = []
    for row, answer in zip(ROWS, expected, strict=False):
        made = register(server, "vectors", name="v", vector=inline(row)).json()
        versions.append(made["version"])
        response = complete(server, [add("v")])
        assert text(response) == answer
        [told] = response.json()["saesteer"]["applied"]
        assert told["version"] == made["version"] and told["tokens_edited"] > 0
    assert len(set(versions)) == 2
    assert text(complete(server, [])) == plain


def test_a_module_with_vectors_of_its_own_needs_no_slots_of_its_requests(server: httpx.Client) -> None:
    """Two inline vectors at one site are more than a request may bring here, and each has its slot at registration."""
    edits = [BRIDGE, add(inline(ROWS[0]), scale=0.5), add(ROWS[1].tolist(), scale=0.5), add("v", "resid_post.7", 0.5)]
    register(server, "vectors", name="v", vector=ROWS[2].tolist())
    register(server, "vectors", name="w", vector=inline(ROWS[0]))
    register(server, "vectors", name="x", vector=inline(ROWS[1]))
    assert error(complete(server, edits), 400)["param"] == "saesteer.edits[2].vector"
    made = register(server, "modules", name="m", spec={"edits": edits})
    assert made.json() == {"name": "m", "edits": 4, "version": made.json()["version"], "uses": 0, "replaced": False}
    named = [BRIDGE, add("w", scale=0.5), add("x", scale=0.5), add("v", "resid_post.7", 0.5)]
    assert text(complete(server, [use("m")])) == text(complete(server, named)) != text(complete(server, []))
    [listed] = server.get("/v1/saesteer/modules", headers=ADMIN).json()["modules"]
    assert listed["uses"] == 1 and listed["version"] == made.json()["version"]
    uses = {one["name"]: one["uses"] for one in server.get("/v1/saesteer/vectors", headers=ADMIN).json()["vectors"]}
    assert uses == {"v": 2, "w": 1, "x": 1}
    register(server, "vectors", name="v", vector=ROWS[3].tolist())
    [listed] = server.get("/v1/saesteer/modules", headers=ADMIN).json()["modules"]
    assert listed["version"] != made.json()["version"], "it does something else now"


def test_what_runs_keeps_what_it_started_with(server: httpx.Client) -> None:
    tokens = 1900 if CUDA else 160  # for the changes to come while it runs
    old, new = (text(complete(server, [add(inline(row))], max_tokens=tokens)) for row in ROWS[:2])
    register(server, "vectors", name="v", vector=inline(ROWS[0]))
    body = {"model": "demo", "prompt": PROMPTS[0], "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    pieces: list[str] = []
    with server.stream(
        "POST", "/v1/completions", json={**body, "stream": True, "saesteer": {"edits": [add("v")]}}
    ) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            pieces += [choice["text"] for choice in httpx.Response(200, text=line[6:]).json()["choices"]]
            if len(pieces) == 3:
                register(server, "vectors", name="v", vector=inline(ROWS[1]))
                for row in ROWS[2:6]:  # what nobody reads goes with the next change, and its slot is taken
                    register(server, "vectors", name="other", vector=inline(row))
                assert server.delete("/v1/saesteer/vectors/v", headers=ADMIN).status_code == 200
                # The other one, what v was when the last change came, and what the request has.
                listed = server.get("/v1/saesteer/vectors", headers=ADMIN).json()
                assert listed["pool_rows_in_use"] == 3, "the changes came while it ran"
    assert "".join(pieces) == old != new


def test_deleted_and_unknown_names(server: httpx.Client) -> None:
    register(server, "vectors", name="v", vector=inline(ROWS[0]))
    register(server, "modules", name="m", spec={"edits": [add("v")]})
    register(server, "modules", name="outer", spec={"edits": [use("m"), OCEAN]})
    assert "module m" in error(server.delete("/v1/saesteer/vectors/v", headers=ADMIN), 409)["message"]
    assert error(server.delete("/v1/saesteer/modules/m", headers=ADMIN), 409)["code"] == "in_use"
    for kind, name in (("modules", "outer"), ("modules", "m"), ("vectors", "v")):
        assert server.delete(f"/v1/saesteer/{kind}/{name}", headers=ADMIN).json() == {"name": name, "deleted": True}
        assert error(server.delete(f"/v1/saesteer/{kind}/{name}", headers=ADMIN), 404)["code"] == "unknown_name"
    told = error(complete(server, [add("v")]), 400)
    assert told["param"] == "saesteer.edits[0].vector" and "[unknown_name]" in told["message"]
    assert error(complete(server, [use("m")]), 400)["param"] == "saesteer.edits[0].module"


def test_the_key_is_asked_for_first(server: httpx.Client) -> None:
    routes = [("GET", "vectors"), ("POST", "vectors"), ("DELETE", "vectors/v"), ("GET", "modules"), ("POST", "modules")]
    for method, path in routes:
        for headers in (
            {},
            {"Authorization": f"Bearer {ADMIN_KEY}x"},
            {"Authorization": ADMIN_KEY},
            {"Authorization": f"Basic {ADMIN_KEY}"},
        ):
            response = server.request(method, f"/v1/saesteer/{path}", headers=headers, content=b"{")
            assert error(response, 401)["code"] == "wrong_key"


def test_a_full_pool_is_a_409_that_says_what_helps(server: httpx.Client) -> None:
    for n in range(8):
        made = register(server, "vectors", name=f"v{n}", vector=inline(ROWS[0] + n))
        assert made.status_code == 200, made.text
    told = error(register(server, "vectors", name="more", vector=inline(ROWS[1])), 409)
    assert told["code"] == "no_room" and "--pool-rows 9" in told["message"]
    again = register(server, "vectors", name="alias", vector=inline(ROWS[0]))
    assert again.status_code == 200, "equal vectors share a slot"
    listed = server.get("/v1/saesteer/vectors", headers=ADMIN).json()
    assert (listed["pool_rows"], listed["pool_rows_in_use"]) == (8, 8)
    # The old and the new stand side by side for a moment, so a full pool takes the new when the old is gone.
    assert error(register(server, "vectors", name="v7", vector=inline(ROWS[1])), 409)["code"] == "no_room"
    assert text(complete(server, [add("v7")])) == text(complete(server, [add(inline(ROWS[0] + 7))]))
    server.delete("/v1/saesteer/vectors/v7", headers=ADMIN)
    made = register(server, "vectors", name="v7", vector=inline(ROWS[1]))
    assert made.status_code == 200, made.text
    assert text(complete(server, [add("v7")])) == text(complete(server, [add(inline(ROWS[1]))]))


def test_a_default_module_is_set_and_cleared_on_every_server(server: httpx.Client) -> None:
    """Each request may reach another API server."""
    register(server, "modules", name="calm", spec={"edits": [add(inline(ROWS[0]))]})
    body = {"model": "demo", "prompt": PROMPTS[0], "max_tokens": 4, "temperature": 0}

    def default(method: str, **more: Any) -> tuple[Any, list[int]]:
        told = server.request(method, "/v1/saesteer/default", headers=ADMIN, **more)
        found = [server.post("/v1/completions", json=body).json() for _ in range(6)]
        return told.json(), [len(one.get("saesteer", {}).get("applied", ())) for one in found]

    assert default("GET") == default("DELETE") == ({"module": None}, [0] * 6)
    assert default("PUT", json={"module": "calm"}) == default("GET") == ({"module": "calm"}, [1] * 6)
    refused = error(server.delete("/v1/saesteer/modules/calm", headers=ADMIN), 409)
    assert refused["code"] == "in_use" and "steers every request" in refused["message"]
    beams = {**body, "use_beam_search": True, "n": 2}
    assert error(server.post("/v1/completions", json=beams), 400)["param"] == "saesteer"
    assert default("DELETE") == default("GET") == ({"module": None}, [0] * 6)
    assert server.post("/v1/completions", json=beams).status_code == 200


def test_the_document_has_every_route_with_examples(server: httpx.Client) -> None:
    document = server.get("/openapi.json").json()
    routes = {(m, p) for p, found in document["paths"].items() for m in found if p.startswith("/v1/saesteer")}
    names = {("get", "s"), ("post", "s"), ("delete", "s/{name}")}
    admin = {(m, f"/v1/saesteer/{kind}{end}") for kind in ("vector", "module") for m, end in names}
    results = "/v1/saesteer/results/{handle}"
    schemas = document["components"]["schemas"]
    others = [
        ("get", results),
        ("delete", results),
        ("get", "/v1/saesteer"),
        *(("get", f"/v1/saesteer/{n}") for n in ("features", "dictionaries")),
    ]
    default = {(method, "/v1/saesteer/default") for method in ("get", "put", "delete")}
    assert routes == admin | default | {*others}
    assert schemas["DefaultBody"]["examples"] == [{"module": "calm"}]
    assert not any("security" in document["paths"][path][method] for method, path in others)
    for body, kind in (("VectorBody", "vectors"), ("ModuleBody", "modules")):
        assert schemas[body]["examples"]
        refused = document["paths"][f"/v1/saesteer/{kind}"]["post"]["responses"]
        assert {"200", "400", "401", "403", "409", "413"} <= set(refused)
    assert "saesteer_admin_key" in document["components"]["securitySchemes"]


def test_whichever_server_is_asked_has_a_result(server: httpx.Client) -> None:
    read = {"site": "resid_post.15", "as": "handle"}
    body: dict[str, Any] = {"model": "demo", "prompt": PROMPTS[0], "max_tokens": 3, "temperature": 0}
    whole = server.post("/v1/completions", json={**body, "saesteer": {"return": {"activations": [read]}}}).json()
    [entry] = whole["saesteer"]["activations"]
    assert "data" not in entry and entry["positions"] == [*range(whole["usage"]["total_tokens"] - 1)]
    read["as"] = "inline"
    again = server.post("/v1/completions", json={**body, "saesteer": {"return": {"activations": [read]}}}).json()
    [inline] = again["saesteer"]["activations"]
    each = httpx.HTTPTransport(limits=httpx.Limits(max_keepalive_connections=0))  # a connection for each request
    with Client(str(server.base_url), transport=each) as client:
        for _ in range(6):
            [found] = client.fetch([entry["handle"]])
            assert found.shape == tuple(entry["shape"])
            # In bfloat16, and in another batch.
            np.testing.assert_allclose(found, numbers(inline), rtol=0, atol=0.1 * abs(found).max())
        client.delete_result(entry["handle"])
        for _ in range(6):
            with pytest.raises(RequestRefused, match="was deleted"):
                client.fetch([entry["handle"]])


def test_each_engine_counts_reads_and_stops(server: httpx.Client) -> None:
    """Whichever of the data parallel engines has the request, its answer says the same."""
    engines = sorted(set(re.findall(r'engine="(\d)"', server.get("/metrics").text)))
    stop = {
        "op": "stop",
        "when": {"dictionary": BRIDGE["dictionary"], "feature": BRIDGE["feature"], "above": -1},
        "for": 5,
    }
    returns = {"dose": True, "hidden": True, "features": [{"dictionary": BRIDGE["dictionary"], "top_k": 2}]}
    said = []
    for engine in engines:
        body = {"model": "demo", "prompt": f"{LONG} So what?", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        spec = {"edits": [BRIDGE, stop], "return": returns}
        headers = {"X-data-parallel-rank": engine}
        response = server.post("/v1/completions", headers=headers, json={**body, "saesteer": spec})
        assert text(response)
        found = response.json()["saesteer"]
        assert found["flags"] and found["hidden"] and found["features"] and found["dose"]
        for one in found["applied"]:
            one["tokens_edited"] += one.pop("tokens_cached")
        del found["dose"], found["hidden"]  # their last digits depend on what is in the batch and in the cache
        said.append((text(response), found["applied"], found["flags"], len(found["features"])))
    assert said == [said[0]] * len(engines)


def test_each_engine_keeps_blocks_of_other_edits_apart(server: httpx.Client) -> None:
    """One prompt, plain and with two edits in turn: answers stay as they were, edits find their own blocks alone."""
    specs = {"plain": [], "clamp": [BRIDGE], "vector": [add(inline(ROWS[0]))]}
    for engine in sorted(set(re.findall(r'engine="(\d)"', server.get("/metrics").text))):
        body = {"model": "demo", "prompt": f"{engine}. {LONG}", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        first: dict[str, str] = {}
        for turn, (name, edits) in ((turn, one) for turn in range(3) for one in specs.items()):
            headers = {"X-data-parallel-rank": engine}
            response = server.post("/v1/completions", headers=headers, json={**body, "saesteer": {"edits": edits}})
            assert text(response) == first.setdefault(name, text(response))
            cached = [one["tokens_cached"] > 0 for one in response.json().get("saesteer", {}).get("applied", [])]
            assert cached == [turn > 0] * len(edits)
        assert len({*first.values()}) == len(specs)


def test_no_request_sees_a_mixture(server: httpx.Client) -> None:
    """Register, replace and delete in a loop while eight clients generate by name, with the prefix cache on."""
    layered = [np.stack([row, row[::-1]]).copy() for row in ROWS[:3]]  # layers 7 and 15: half of each would be neither
    sets = [inline(rows, [7, 15]) for rows in layered]
    prompts = [LONG + prompt for prompt in PROMPTS]
    known = {prompt: {text(complete(server, [add(one, "resid_post")], prompt)) for one in sets} for prompt in prompts}
    assert all(len(answers) == 3 for answers in known.values())
    register(server, "vectors", name="v", vector=sets[0])
    register(server, "modules", name="m", spec={"edits": [add("v", "resid_post")]})
    over = threading.Event()
    wrong: list[str] = []
    seen: list[int] = []
    gone: list[int] = []

    def generate(client: int) -> None:
        with httpx.Client(base_url=server.base_url, timeout=120) as own:
            turn = 0
            while not over.is_set():
                turn += 1
                prompt = prompts[(client + turn) % len(prompts)]
                fleeting = client % 4 == 3
                edits = (
                    [add("fleeting", "resid_post")] if fleeting else [[add("v", "resid_post")], [use("m")]][turn % 2]
                )
                response = complete(own, edits, prompt)
                if response.status_code == 200 and text(response) in known[prompt]:
                    seen.append(client)
                elif fleeting and response.status_code == 400 and "[unknown_name]" in response.text:
                    gone.append(client)
                else:
                    wrong.append(response.text)

    changes, took, start = 0, 0.0, time.monotonic()

    def enough() -> bool:
        return changes > 20 and len(set(seen)) == 8 and bool(gone)

    with ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(generate, client) for client in range(8)]
        try:
            # A busy machine gets more time for what has to have happened.
            while not wrong and (took < 15 or (not enough() and took < 600)) and not any(job.done() for job in jobs):
                for name in ("v", "fleeting"):
                    made = register(server, "vectors", name=name, vector=sets[changes % 3])
                    assert made.status_code == 200, made.text
                changes, took = changes + 1, time.monotonic() - start
                time.sleep(0.05)
                assert server.delete("/v1/saesteer/vectors/fleeting", headers=ADMIN).status_code == 200
        finally:
            over.set()
        for job in jobs:
            job.result()
    assert not wrong, wrong[:3]
    print(f"{changes} rounds of changes, {len(seen)} answers, {len(gone)} refusals of what was gone")
    assert enough()
    # Nothing of the versions is left behind: the next changes find room, and the cache answers as a cold one.
    for number, one in enumerate(sets):
        register(server, "vectors", name="v", vector=one)
        for prompt in prompts:
            assert text(complete(server, [use("m")], prompt)) == text(
                complete(server, [add(one, "resid_post")], prompt)
            )
        assert number < 3
