"""Results of clients that go away: of a request with two choices nothing stays, whichever of them had ended."""

import json
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from saesteer.client import Client, numbers
from tests.plugin.asked_http import metric
from tests.plugin.conftest import CUDA, LONG_PROMPT
from tests.plugin.serving import Served
from tests.plugin.turns import TURNS

pytestmark = pytest.mark.slow

READS = [
    {"site": "resid_post.15", "as": "handle"},
    {"site": "resid_post.20", "as": "handle"},
    {"site": "resid_post.20", "at": "after", "reduce": "mean", "as": "handle"},
]
SPEC = {"return": {"activations": READS, "probes": ["probe"]}}
SAMPLED = {"model": "base", "n": 2, "seed": 5, "temperature": 1.2, "ignore_eos": True, "saesteer": SPEC}


def kept(server: Served) -> set[str]:
    """The results and rooms that a server has; other tests may run beside this one."""
    process = psutil.Process(server.pid)
    ours = [process.pid, *(one.pid for one in process.children(recursive=True))]
    files = chain.from_iterable(Path(tempfile.gettempdir()).glob(f"saesteer-{one}-*/**/*") for one in ours)
    return {one.name for one in files if re.match(r"[0-9a-f]{32}", one.name)}


@pytest.fixture
def before(any_server: Served) -> Iterator[set[str]]:
    """What is kept before a test; it leaves no more behind."""
    found = kept(any_server)
    yield found
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and (kept(any_server) - found or metric(any_server, "vllm:num_requests_running")):
        time.sleep(0.1)
    assert kept(any_server) <= found
    assert metric(any_server, "vllm:num_requests_running") == 0


def chunks(response: httpx.Response) -> Iterator[Any]:
    """The events of a stream, one by one."""
    for line in response.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "n": ("/v1/chat/completions", {"messages": TURNS}),
    "prompts": ("/v1/completions", {"prompt": [LONG_PROMPT[:120], LONG_PROMPT[30:200]], "n": 1}),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_client_that_leaves_when_one_choice_has_ended_leaves_no_result(
    any_server: Served, before: set[str], way: str
) -> None:
    """Its handles came with the chunk that ended it. A stop token ends one of the two long before the other.

    The other one has so many tokens to go that its client may stand still for half a minute.
    """
    path, more = WAYS[way]
    body = {**SAMPLED, "max_tokens": 60, "return_token_ids": True, **more}
    whole = any_server.post(path, json={**body, "saesteer": {"return": {"probes": ["probe"]}}})
    assert whole.status_code == 200, whole.text
    one, other = (choice["token_ids"] for choice in whole.json()["choices"])
    end = next(token for token in one[4:40] if token not in other)
    body |= {"stop_token_ids": [end], "max_tokens": 900, "stream": True}
    with Client(str(any_server.base_url)) as client, any_server.stream("POST", path, json=body) as response:
        assert response.status_code == 200
        events = chunks(response)  # what is no longer held is closed, and the connection with it
        for chunk in events:
            assert "error" not in chunk
            last = chunk["choices"][0]
            if last["finish_reason"]:
                break
        assert (last["index"], last["finish_reason"], last["stop_reason"]) == (0, "stop", end)
        entries = chunk["saesteer"]["activations"]
        handles = [entry["handle"] for entry in entries]
        found = client.fetch(handles)
        assert [tuple(rows.shape) for rows in found] == [tuple(entry["shape"]) for entry in entries]
        mean = found[1].astype(np.float64).mean(0)
        np.testing.assert_allclose(found[2][0], mean, rtol=0, atol=1e-3 * abs(mean).max())
        assert any("." in name for name in kept(any_server) - before), "the other choice has room, and no result yet"
    gone, deadline = set(handles), time.monotonic() + 30
    while gone & kept(any_server) and time.monotonic() < deadline:
        time.sleep(0.05)
    for handle in handles:
        assert any_server.get(f"/v1/saesteer/results/{handle}").status_code == 404


@pytest.mark.parametrize("stream", [False, True], ids=["body", "stream"])
@pytest.mark.parametrize("seconds", [0.01, 0.1, 0.25] if CUDA else [0.01, 0.3, 1.5])  # the answer takes far longer
def test_a_client_that_leaves_at_any_time_leaves_no_result(
    any_server: Served, before: set[str], stream: bool, seconds: float
) -> None:
    body = {**SAMPLED, "prompt": [LONG_PROMPT, LONG_PROMPT[:50]], "max_tokens": 600, "stream": stream}
    timeout = httpx.Timeout(seconds, connect=60)
    begun = time.monotonic()
    with suppress(httpx.TimeoutException):
        with any_server.stream("POST", "/v1/completions", json=body, timeout=timeout) as response:
            assert response.status_code == 200
            for _ in response.iter_bytes():
                if time.monotonic() > begun + seconds:
                    return
        raise AssertionError("the answer was there before its client left")


def test_those_who_stay_get_theirs(any_server: Served, before: set[str]) -> None:
    """Beside clients that leave."""
    body = {**SAMPLED, "prompt": LONG_PROMPT[:300], "max_tokens": 12}
    inline = {"return": {"activations": [{**one, "as": "inline"} for one in READS]}}
    expected = any_server.post("/v1/completions", json={**body, "saesteer": inline}).json()
    with any_server.stream("POST", "/v1/completions", json={**body, "max_tokens": 300, "stream": True}) as response:
        next(chunks(response))
        made = any_server.post("/v1/completions", json=body).json()
    with Client(str(any_server.base_url)) as client:
        for choice, other in zip(made["choices"], expected["choices"], strict=True):
            for entry, wanted in zip(choice["saesteer"]["activations"], other["saesteer"]["activations"], strict=True):
                [rows] = client.fetch([entry["handle"]])
                assert entry["positions"] == wanted["positions"]
                np.testing.assert_allclose(rows, numbers(wanted), rtol=0, atol=1e-3 * abs(rows).max())
                client.delete_result(entry["handle"])


@pytest.mark.parametrize("how", ["inline", "handle"])
def test_what_may_be_too_much_is_a_413_with_the_numbers(any_server: Served, before: set[str], how: str) -> None:
    """Answers of up to 900 tokens, two rows of 576 numbers for each token: 64 MiB are allowed, by handle 256."""
    reads = [{"site": site, "as": how} for site in ("resid_post.15", "resid_post.20")]
    choices, limit = (32, 64 << 20) if how == "inline" else (130, 256 << 20)
    body = {
        **SAMPLED,
        "n": choices,
        "max_tokens": 900,
        "prompt": "Once",
        "saesteer": {"return": {"activations": reads}},
    }
    refused = any_server.post("/v1/completions", json=body)
    assert refused.status_code == 413, refused.text
    error = refused.json()["error"]
    assert error["code"] == 413
    assert re.search(rf"may read \d{{8,9}} bytes.*, expected at most {limit}\b", error["message"]), error
