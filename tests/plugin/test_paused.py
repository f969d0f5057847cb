"""Requests that run while vLLM pauses, sleeps or gets new weights, on the real engine over HTTP.

They go on as if nothing had happened, or end as vLLM ends them; what they read comes once, and nothing stays behind.
test_reload.py compares new weights with an engine that was started with them.
"""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from saesteer.client import Client
from saesteer.plugin.results.unsent import joined
from tests.plugin.asked import (
    CLAMP,
    EVERYWHERE,
    FEATURES,
    KINDS,
    NOISE,
    PROBE,
    PROMPTS,
    ROWS,
    RULE,
    WIDTH,
    add,
    other_llama,
    tiny_llama,
)
from tests.plugin.conftest import ADMIN_KEY, CUDA
from tests.plugin.said import same
from tests.plugin.serving import Served, served
from tests.plugin.weights import BACKEND, EXTENSION, parts_of

pytestmark = pytest.mark.slow

TOKENS, SECONDS = 100, 0.02  # of an answer, and that a step takes at least: more than pass before a pause
SPEC: dict[str, Any] = {
    "edits": [CLAMP, add("v"), {"op": "flag", **RULE, "for": 2}],
    "return": {
        "features": [{"dictionary": "random", "features": [3, 17, 40, 99], "scope": EVERYWHERE}],
        "probes": [{**PROBE, "scope": EVERYWHERE}],
        "activations": [
            {"site": "z.2", "as": "handle", "scope": EVERYWHERE},
            {"site": "mlp_out.1", "reduce": "mean", "as": "handle"},
        ],
        "dose": True,
    },
}
# A GPU computes with more noise, and tokens that nearly tie may change places: there all are the same, and raw logprobs
# say what the model makes of them.
FORCED = {"allowed_token_ids": [9]} if CUDA else {}
HOLDS = {
    "paused with its cache": "/pause?mode=keep&clear_cache=false",
    "paused": "/pause?mode=keep",
    "asleep at level 0": "/sleep?level=0&mode=keep",
    "asleep at level 1": "/sleep?level=1&mode=keep",
    "asleep at level 2": "/sleep?level=2&mode=keep",
}
ONE = pytest.param(1, id="one engine", marks=pytest.mark.long)  # two do the same in CI


class World(NamedTuple):
    """A server, the number of its engines, and its folder for temporary files."""

    server: Served
    engines: int
    place: Path

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        """What a route for operators says."""
        response = self.server.post(path, json=body, headers={"Authorization": f"Bearer {ADMIN_KEY}"})
        assert response.status_code == 200, response.text
        return dict(response.json()) if response.content else {}  # vLLM 0.26 says nothing about a sleep

    def put(self, row: list[float]) -> None:
        """Register or replace v."""
        self.post("/v1/saesteer/vectors", name="v", vector=row)

    def ask(self, row: list[float], prompt: list[int] = PROMPTS[0], tokens: int = TOKENS) -> "Answer":
        """Undisturbed, with a new v."""
        self.put(row)
        return Answer(prompt).ask(self, 0, tokens)

    def wake(self, way: str) -> None:
        """Undo a pause or a sleep."""
        if "/pause" in way:
            self.post("/resume")
        elif "level=0" in way:
            self.post("/wake_up?tags=scheduling")
        elif "level=2" in way and CUDA:  # the weights are gone
            self.post("/wake_up?tags=weights")
            self.post("/collective_rpc", method="reload_weights")
            self.post("/wake_up?tags=kv_cache")
        else:
            self.post("/wake_up")

    def load(self, model: str) -> None:
        """Another checkpoint, by vLLM's weight transfer."""
        self.post("/start_weight_update")
        for part in parts_of(f"{model}/model.safetensors", 2):
            self.post("/update_weights", update_info=part)
        self.post("/finish_weight_update")

    @contextmanager
    def running(self) -> "Iterator[list[Answer]]":
        """A request on each engine, of which some tokens have come; all end behind the block."""
        self.put(ROWS[0])
        found = [Answer(PROMPTS[0]) for _ in range(self.engines)]
        with ThreadPoolExecutor(self.engines) as pool:
            asked = [pool.submit(one.ask, self, engine) for engine, one in enumerate(found)]
            while not all(len(one.tokens) > 5 for one in found):
                assert not any(one.done() for one in asked), [one.result() for one in asked]
                time.sleep(0.002)
            yield found
            for one in asked:
                one.result(120)


class Answer:
    """A streamed answer as it comes, with what it has read put together."""

    def __init__(self, prompt: list[int]) -> None:
        self.prompt = prompt
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.reason: str | None = None
        self.said: dict[str, Any] = {}

    def ask(self, world: World, engine: int, tokens: int = TOKENS) -> "Answer":
        """Until it has ended; its results are fetched and deleted."""
        body = {"model": "base", "prompt": self.prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        body |= {"stream": True, "logprobs": 0, "return_token_ids": True, "saesteer": SPEC, **FORCED}
        headers = {"X-data-parallel-rank": str(engine)}
        with world.server.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    self._take(json.loads(line.removeprefix("data: ")))
        with Client(str(world.server.base_url)) as client:
            for entry in self.said["activations"]:
                [rows] = client.fetch([entry["handle"]])
                client.delete_result(entry.pop("handle"))
                entry["data"] = rows.ravel().tolist()
        for word in ("features", "probes"):  # pieces are of any size
            pieces = (one.get("rows") or zip(one["positions"], one["scores"], strict=True) for one in self.said[word])
            self.said[word] = [row if isinstance(row, dict) else [*row] for piece in pieces for row in piece]
        return self

    def _take(self, event: dict[str, Any]) -> None:
        assert "error" not in event, event
        self.said = joined(self.said, event.get("saesteer", {}))
        for choice in event["choices"]:
            self.tokens += choice["token_ids"] or []
            self.logprobs += (choice["logprobs"] or {}).get("token_logprobs", [])
            self.reason = choice["finish_reason"] or self.reason

    def equals(self, other: "Answer") -> None:
        """To another one, but for noise."""
        assert (self.tokens, self.reason) == (other.tokens, other.reason)
        assert self.logprobs == pytest.approx(other.logprobs, abs=NOISE)
        same(self.said, other.said, 10 * NOISE)

    def positions(self) -> list[list[int]]:
        """Of each read-out."""
        features, probes = ([one["position"] for one in self.said["features"]], [one[0] for one in self.said["probes"]])
        return [features, probes, *(one["positions"] for one in self.said["activations"] if "reduce" not in one)]


def counted(*answers: Answer) -> list[int]:
    """Tokens of each, once no more come."""
    found: list[int] = []
    while found != (found := [len(one.tokens) for one in answers]):
        time.sleep(20 * SECONDS)
    return found


@pytest.fixture(scope="module", params=[ONE, pytest.param(2, id="two API servers and engines")])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    from bench.dummy import dictionary_file, tokenizer_folder

    folder, servers = tmp_path_factory.mktemp("paused"), request.param
    (folder / "temporary").mkdir()
    np.save(folder / "probe.npy", np.array(ROWS[1], dtype=np.float32))
    narrow, wide = (f"{dictionary_file(width, FEATURES, folder)}@" for width in (WIDTH, 2 * WIDTH))
    words = ["--dictionary", f"random={narrow}resid_post.1", "--dictionary", f"heads={wide}z.1"]
    words += ["--vector", f"probe={folder / 'probe.npy'}", "--pool-rows", "4", "--saesteer-admin-key", ADMIN_KEY]
    words += ["--sites", ",".join(["resid_post.all", *KINDS]), "--reads", ",".join([*KINDS, "z.1"])]
    words += ["--tokenizer", str(tokenizer_folder(512, folder)), "--served-model-name", "base", "--dtype", "float32"]
    words += ["--max-model-len", "256", "--max-num-seqs", "8", "--kv-cache-memory-bytes", str(64 << 20)]
    words += ["--worker-extension-cls", EXTENSION, "--weight-transfer-config", json.dumps({"backend": BACKEND})]
    engines = 1 if torch.cuda.device_count() == 1 else servers
    if servers > 1:
        words += ["--api-server-count", str(servers), "--data-parallel-size", str(engines)]
    environment = {"VLLM_SERVER_DEV_MODE": "1", "TMPDIR": str(folder / "temporary")}
    if CUDA:
        words += ["--enable-sleep-mode"]
    else:  # two engines would be bound to the same cores
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    arguments = [tiny_llama(folder), *words]
    with served(arguments, folder / "log", keep=servers == 1, environment=environment) as server:
        found = World(server, engines, folder / "temporary")
        found.post("/init_weight_transfer_engine", init_info={})
        found.post("/collective_rpc", method="saesteer_slow", args=[SECONDS])
        yield found


@pytest.fixture(scope="module")
def undisturbed(world: World) -> list[Answer]:
    """With the one v, and with the other, once each engine has run a request: its first one takes seconds more."""
    for engine in range(world.engines):
        world.put(ROWS[0])
        Answer(PROMPTS[0]).ask(world, engine, 8)
    one, other = (world.ask(row) for row in ROWS)
    assert one.logprobs != pytest.approx(other.logprobs, abs=10 * NOISE), "they are steered"
    assert one.said["flags"] and one.reason == "length"
    assert one.positions() == [[*range(len(one.prompt) + TOKENS - 1)]] * 3
    return [one, other]


@pytest.fixture(autouse=True)
def nothing_left(world: World) -> Iterator[None]:
    """Of a test's requests: neither in the first engine's worker nor in the folder of results."""
    yield
    held, kept, deadline = {"requests": 1}, [""], time.monotonic() + 10
    while (any(held.values()) or kept) and time.monotonic() < deadline:
        [held] = world.post("/collective_rpc", method="saesteer_held")["results"]
        del held["rows"], held["slots of names"]  # the last ones stay until others need their places
        kept = [path.name for path in world.place.glob("saesteer-*/results/*") if path.name != "lock"]
    assert not any(held.values()) and not kept, (held, kept)


@pytest.mark.parametrize("way", HOLDS.values(), ids=HOLDS)
def test_a_request_that_is_held_goes_on(world: World, undisturbed: list[Answer], way: str) -> None:
    """One that comes meanwhile waits; names may change."""
    late = Answer(PROMPTS[0])
    with ThreadPoolExecutor(1) as pool, world.running() as found:
        world.post(way)
        world.put(ROWS[1])
        waiting = pool.submit(late.ask, world, world.engines - 1)
        before = counted(*found, late)
        time.sleep(20 * SECONDS)
        after = [len(one.tokens) for one in (*found, late)]
        world.wake(way)
    waiting.result()
    assert after == before and max(before) < TOKENS and not before[-1]
    for one in found:
        one.equals(undisturbed[0])
    late.equals(undisturbed[1])


def test_a_sleep_that_waits_lets_requests_end(world: World, undisturbed: list[Answer]) -> None:
    with world.running() as found:
        world.post("/sleep?level=1&mode=wait")
    world.wake("/sleep?level=1")
    for one in found:
        one.equals(undisturbed[0])
    world.ask(ROWS[1]).equals(undisturbed[1])


@pytest.mark.parametrize("way", ["/pause?mode=abort", "/sleep?level=1&mode=abort"], ids=["pause", "sleep"])
def test_what_was_read_of_an_aborted_request_is_right(world: World, undisturbed: list[Answer], way: str) -> None:
    """It has what came before its end: no counts, doses or results, which come with a last step."""
    with world.running() as found:
        world.post(way)
        world.wake(way)
    for one in found:
        count = len(one.tokens)
        assert one.reason == "abort" and 5 < count < TOKENS and one.tokens == undisturbed[0].tokens[:count]
        assert one.positions() == [[*range(len(one.prompt) + count - 1)]] * 2
        for word in ("features", "probes"):
            same(one.said[word], undisturbed[0].said[word][: len(one.said[word])], 10 * NOISE)
        assert [entry.get("tokens_edited") for entry in one.said["applied"]] == [None, None]
        assert one.said["activations"] == one.said["dose"] == []
    world.ask(ROWS[1]).equals(undisturbed[1])


def test_a_held_request_goes_on_with_new_weights(world: World, undisturbed: list[Answer]) -> None:
    """As one whose prompt has the tokens that the old weights have made."""
    folder = world.place.parent
    with world.running() as found:
        world.post("/pause?mode=keep")
        before = counted(*found)
        world.load(other_llama(folder))
        world.wake("/pause")
    try:
        for count, one in zip(before, found, strict=True):
            assert one.tokens[:count] == undisturbed[0].tokens[:count]
            assert one.logprobs[:count] == pytest.approx(undisturbed[0].logprobs[:count], abs=NOISE)
            assert one.logprobs != pytest.approx(undisturbed[0].logprobs, abs=10 * NOISE), "the weights differ"
            assert one.positions() == undisturbed[0].positions()
            longer = world.ask(ROWS[0], PROMPTS[0] + one.tokens[:count], TOKENS - count)
            assert one.tokens[count:] == longer.tokens
            assert one.logprobs[count:] == pytest.approx(longer.logprobs, abs=NOISE)
            assert one.said["applied"] == longer.said["applied"]
            same(one.said["activations"], longer.said["activations"], 10 * NOISE)
    finally:
        world.post("/pause")  # which forgets the cache
        world.load(tiny_llama(folder))
        world.wake("/pause")
    for row, expected in zip(ROWS, undisturbed, strict=True):
        world.ask(row).equals(expected)
