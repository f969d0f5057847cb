"""Doses in answers over HTTP, and requests that end as a limit is passed: one server without it, and one that refuses.

The last test takes vectors of names from the second one's worker.
"""

import hashlib
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest

from tests.plugin.asked_http import metric
from tests.plugin.conftest import ADMIN_KEY, BRIDGE, PROMPTS, WIDTH
from tests.plugin.doses import LATE, LIMIT, STRONG
from tests.plugin.serving import events_of, served
from tests.plugin.turns import QUESTION

pytestmark = pytest.mark.slow

ASKED = {"edits": [BRIDGE], "return": {"dose": True}}
FIELDS = {"site", "max", "mean", "tokens"}
ROUTES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": QUESTION, "max_tokens": 9},
    "completions": {"prompt": PROMPTS[0], "max_tokens": 9},
    "responses": {"input": "Who are you?", "max_output_tokens": 9},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    log = tmp_path_factory.mktemp("refusing") / "log"
    words = ["--max-dose", str(LIMIT), "--max-dose-action", "refuse", "--dtype", "float32"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")  # for the last test
        with served(["demo", "--saesteer-admin-key", ADMIN_KEY, *words], log) as client:
            yield client


def ask(server: httpx.Client, path: str, model: str = "demo", **body: Any) -> httpx.Response:
    whole = {"model": model, "temperature": 0, **({} if path == "responses" else {"ignore_eos": True}), **body}
    return server.post(f"/v1/{path}", json=whole)


def post(server: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    response = ask(server, path, **body)
    assert response.status_code == 200, response.text
    return dict(response.json())


def events(server: httpx.Client, path: str, model: str = "demo", **body: Any) -> list[dict[str, Any]]:
    whole = {"model": model, "temperature": 0, "stream": True, **body}
    with server.stream("POST", f"/v1/{path}", json=whole) as response:
        assert response.status_code == 200
        return events_of(response)


def told(said: Any) -> dict[str, Any]:
    (one,) = said["dose"]
    assert one["site"] == "resid_post.15" and 0 < one["mean"] <= one["max"] < LIMIT
    return dict(one)


@pytest.mark.parametrize("path", ROUTES)
def test_doses_stand_beside_what_was_applied(any_server: httpx.Client, path: str) -> None:
    body: dict[str, Any] = {"model": "base", **ROUTES[path]}
    said = post(any_server, path, **body, saesteer=ASKED)["saesteer"]
    assert list(said) == ["applied", "dose"] and set(told(said)) == FIELDS
    edited = said["applied"][0]
    assert told(said)["tokens"] == edited["tokens_edited"] > 0
    found = events(any_server, path, **body, saesteer=ASKED)
    ends = [one["response"]["saesteer"] if path == "responses" else one["saesteer"] for one in found[-1:]]
    assert set(told(ends[0])) == FIELDS
    assert sum("dose" in json.dumps(one) for one in found) == 1
    assert "dose" not in post(any_server, path, **body, saesteer={"edits": [BRIDGE]})["saesteer"]


def test_a_server_with_a_limit_says_them_unasked(server: httpx.Client) -> None:
    for path, body in ROUTES.items():
        one = told(post(server, path, **body, saesteer={"edits": [BRIDGE]})["saesteer"])
        assert set(one) == {*FIELDS, "tokens_limited"} and one["tokens_limited"] == 0
        assert "saesteer" not in post(server, path, **body)


def refusal(error: Any) -> None:
    assert error["param"] == "saesteer.edits"
    assert error["message"].endswith("(--max-dose) [dose]") and "resid_post.15" in error["message"]


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("edit", [STRONG, LATE], ids=["prompt", "answer"])
def test_too_high_a_dose_is_a_400(server: httpx.Client, path: str, edit: Any) -> None:
    edit = {**edit, "scope": {"generated": True}} if edit is LATE else edit
    plain = exactly(server, path)
    response = ask(server, path, **ROUTES[path], saesteer={"edits": [edit]})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["code"] == 400
    refusal(response.json()["error"])
    if edit is STRONG:  # nothing of a stream has been sent
        streamed = ask(server, path, **ROUTES[path], stream=True, saesteer={"edits": [edit]})
        assert streamed.status_code == 400, streamed.text
        refusal(streamed.json()["error"])
    assert exactly(server, path) == plain


def exactly(server: httpx.Client, path: str) -> Any:
    """What a plain request is answered, to the bit; items of responses have ids of their own."""
    if path == "responses":
        return [item["content"] for item in post(server, path, **ROUTES[path])["output"]]
    return post(server, path, **ROUTES[path], logprobs=True if path.startswith("chat") else 1)["choices"]


def test_a_stream_that_has_begun_ends_with_the_error(server: httpx.Client) -> None:
    generated = {"edits": [{**STRONG, "scope": {"positions": [[40, None]]}}]}
    for path, body in ROUTES.items():
        length = {"max_output_tokens": 60} if path == "responses" else {"max_tokens": 60, "ignore_eos": True}
        *before, last = events(server, path, **{**body, **length}, saesteer=generated)
        if path == "responses":
            assert (last["type"], last["code"], last["sequence_number"]) == ("error", "dose", len(before))
            refusal(last)
            assert any(one["type"] == "response.output_text.delta" for one in before)
        else:
            assert last["error"]["code"] == 400
            refusal(last["error"])
            assert any(one["choices"][0].get("text") or one["choices"][0].get("delta") for one in before)
        assert not any("finish_reason" in json.dumps(one) and "length" in json.dumps(one) for one in before)


def check_idle(server: httpx.Client) -> None:
    """Nobody runs or waits, and no block is held; the figures come with the next step of the engine."""
    post(server, "completions", prompt="x", max_tokens=1)
    deadline = time.monotonic() + 20
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting{", "vllm:kv_cache_usage_perc")
    while time.monotonic() < deadline and any(metric(server, name) for name in names):
        time.sleep(0.2)
    assert [metric(server, name) for name in names] == [0.0] * 3


def test_all_choices_and_prompts_of_a_request_end_together(server: httpx.Client) -> None:
    name = 'saesteer_refusals_total{code="dose"}'
    before = metric(server, name)
    asked: dict[str, Any] = {"n": 4, "temperature": 1.0, "max_tokens": 400}
    for path, prompt in (("completions", {"prompt": PROMPTS[0]}), ("chat/completions", {"messages": QUESTION})):
        response = ask(server, path, **prompt, **asked, saesteer={"edits": [{**STRONG, "scope": {"generated": True}}]})
        assert response.status_code == 400, response.text
    assert metric(server, name) == before + 2, "once for a request"
    prompts = [PROMPTS[0], "a b c d e f g h i j k l m n o p q r s t"]  # the edit is behind the end of the first
    begun = time.monotonic()
    late = {"edits": [{**STRONG, "scope": {"positions": [[15, 17]]}}]}
    response = ask(server, "completions", prompt=prompts, max_tokens=900, saesteer=late)
    assert response.status_code == 400, response.text
    check_idle(server)
    assert time.monotonic() - begun < 60


def test_others_read_on_while_requests_are_refused(server: httpx.Client) -> None:
    """Plain and steered streams beside a crowd of requests that fail at different times say what they say alone."""
    bodies: list[dict[str, Any]] = [
        {"prompt": prompt, "max_tokens": 48, "ignore_eos": True, **more}
        for prompt, more in zip(PROMPTS, [{}, {"saesteer": {"edits": [BRIDGE]}}, {}, {}], strict=True)
    ]
    alone = [post(server, "completions", **body)["choices"][0]["text"] for body in bodies]

    def crowd(number: int) -> None:
        with httpx.Client(base_url=server.base_url, timeout=120) as own:
            for turn in range(3):
                scope = {"positions": [[6 + (7 * number + turn) % 23, None]]}
                spec = {"edits": [{**STRONG, "scope": scope}]}
                response = ask(own, "completions", prompt=PROMPTS[turn % 4], max_tokens=64, saesteer=spec)
                assert response.status_code == 400, response.text

    with ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(crowd, number) for number in range(4)]
        while not all(job.done() for job in jobs):  # so that somebody reads whenever somebody is refused
            streams = [pool.submit(events, server, "completions", **body) for body in bodies]
            said = ["".join(one["choices"][0]["text"] for one in stream.result()) for stream in streams]
            assert said == alone
        for job in jobs:
            job.result()
    check_idle(server)


def test_names_that_are_gone_are_a_400(server: httpx.Client) -> None:
    plain = post(server, "completions", **ROUTES["completions"])["choices"][0]["text"]
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    rows = {name: [sign, *[0.5] * (WIDTH - 1)] for name, sign in (("v", 1.0), ("w", -1.0))}
    for name, row in rows.items():
        made = server.post("/v1/saesteer/vectors", headers=headers, json={"name": name, "vector": row})
        assert made.status_code == 200, made.text
    # A row of the table has room for one of them beside what is pinned.
    digests = [hashlib.sha256(np.array(row, "<f4").tobytes()).hexdigest()[:32] for row in rows.values()]
    change = {"pin": [], "unpin": [["resid_post.15", one] for one in digests]}
    call = {"method": "saesteer_names", "args": [json.dumps(change)]}
    (answer,) = server.post("/collective_rpc", json=call, headers=headers).json()["results"]
    assert (answer["error"], answer["full"], answer["usage"]["resid_post.15"][0]) == ("", False, 0)
    spec = {"edits": [{"op": "add", "vector": name, "site": "resid_post.15", "scale": 0.01} for name in rows]}
    assert ask(server, "completions", **ROUTES["completions"], saesteer={"edits": spec["edits"][:1]}).status_code == 200
    for path, body in ROUTES.items():
        response = ask(server, path, **body, saesteer=spec)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["param"] == "saesteer" and error["message"].endswith("[gone]")
        assert ask(server, path, **body, stream=True, saesteer=spec).json() == response.json()
    assert post(server, "completions", **ROUTES["completions"])["choices"][0]["text"] == plain
    check_idle(server)
