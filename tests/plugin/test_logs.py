"""No log holds a vector or a prompt: not of a server that logs every request, not of an engine that fails."""

import base64
import json
import logging
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm import SamplingParams
from vllm.logging_utils.dump_input import prepare_object_to_dump
from vllm.v1.core.sched.output import NewRequestData

from saesteer.consumers import Consumer, Request
from saesteer.consumers.lines import Logging
from saesteer.consumers.runner import Runner, Ticket
from saesteer.errors import SpecError
from saesteer.plugin.configured import configure
from saesteer.plugin.door import logs
from saesteer.plugin.results.errors import raise_there
from saesteer.plugin.worker.steering import Steering
from tests.plugin.conftest import BRIDGE, WIDTH

ROW = np.random.default_rng(5).normal(size=WIDTH).astype(np.float32)
TEXT = base64.b64encode(ROW.tobytes()).decode()
ADD = {"op": "add", "site": "resid_post.15"}
BYTES = {**ADD, "vector": {"dtype": "float32", "shape": [WIDTH], "data": TEXT}}
NUMBERS = {**ADD, "vector": [round(float(number), 6) for number in ROW]}
SPEC: dict[str, Any] = {"edits": [BYTES, NUMBERS, BRIDGE]}
PROMPT = "Sesquipedalian zyzzyvas"


def parts(text: str) -> list[str]:
    """What of the vectors and the prompt stands in a text."""
    pieces = [PROMPT, "zyzzyvas", *(TEXT[n : n + 24] for n in (0, 600, 1200)), *map(str, NUMBERS["vector"][:20])]
    return [piece for piece in pieces if piece in text]


def test_what_is_printed_is_short_and_what_travels_is_whole() -> None:
    configure()
    assert str(SamplingParams()) == SamplingParams.__repr__.__wrapped__(SamplingParams()), "as it was"
    params = SamplingParams(max_tokens=7, extra_args={"saesteer": SPEC, "other": 1})
    for text in (str(params), f"{params}", repr([params])):
        assert not parts(text)
        assert "extra_args={'saesteer': '2 add, 1 clamp', 'other': 1}" in text and "max_tokens=7" in text
    assert params.extra_args == {"saesteer": SPEC, "other": 1}
    # As an engine that fails prints its batch.
    fields = dict.fromkeys(NewRequestData.__dataclass_fields__)
    dumped = prepare_object_to_dump(NewRequestData(**{**fields, "sampling_params": params}))
    assert "2 add, 1 clamp" in dumped and not parts(dumped)


ROUTES: list[tuple[str, dict[str, Any], bool]] = [
    ("completions", {"prompt": PROMPT, "max_tokens": 2}, True),
    ("chat/completions", {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 2}, True),
    ("chat/completions/batch", {"messages": [[{"role": "user", "content": PROMPT}]] * 2, "max_tokens": 2}, False),
    ("responses", {"input": PROMPT, "max_output_tokens": 2}, True),
    ("messages", {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 2}, True),
]


@pytest.mark.slow
def test_a_server_says_nothing_of_what_clients_do_wrong(any_server: httpx.Client, server_log: Path) -> None:
    before, asked = len(server_log.read_text()), 0
    wrong = {"edits": [{**BRIDGE, "feature": 9216}]}
    both = {"saesteer": SPEC, "vllm_xargs": {"saesteer": json.dumps(SPEC)}}
    for path, body, streams in ROUTES:
        for more in ({"saesteer": wrong}, {"vllm_xargs": {"saesteer": json.dumps(wrong)}}, both):
            for stream in (False, True)[: 1 + streams]:
                sent = {"model": "base", **body, **more, **({"stream": True} if stream else {})}
                response = any_server.post(f"/v1/{path}", json=sent)
                assert response.status_code == 400 and "saesteer" in response.json()["error"]["message"], response.text
                asked += 1
    said = ""
    for _ in range(100):
        said = server_log.read_text()[before:]
        if said.count("400 Bad Request") >= asked:
            break
        time.sleep(0.1)
    assert said.count("400 Bad Request") == asked
    assert "Traceback" not in said and "ERROR" not in said


@pytest.mark.slow
def test_a_server_that_logs_every_request(any_server: httpx.Client, server_log: Path) -> None:
    before = len(server_log.read_text())
    broken = {"edits": [{**BYTES, "vector": {**BYTES["vector"], "shape": [WIDTH - 1]}}, NUMBERS]}  # type: ignore[dict-item]
    asked: list[tuple[str, dict[str, Any]]] = [
        ("completions", {"prompt": PROMPT, "max_tokens": 2}),
        ("chat/completions", {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 2}),
        ("responses", {"input": PROMPT, "max_output_tokens": 2}),
    ]
    for path, body in asked:
        held: list[dict[str, Any]] = [{"saesteer": SPEC}, {"vllm_xargs": {"saesteer": json.dumps(SPEC)}}]
        for more in held:
            response = any_server.post(f"/v1/{path}", json={"model": "base", **body, **more})
            assert response.status_code == 200, response.text
        assert any_server.post(f"/v1/{path}", json={"model": "base", **body, "saesteer": broken}).status_code == 400
    said = ""
    for _ in range(100):
        said = server_log.read_text()[before:]
        if said.count("Received request") >= 9:
            break
        time.sleep(0.1)
    assert said.count("Received request") == 9, "vLLM logs them"
    assert said.count("'saesteer': '2 add, 1 clamp'") == 3 and said.count("'saesteer': '2 add'") == 3
    assert not parts(said)


class Failing(Consumer):
    def end(self, request: Request) -> Any:
        raise ValueError("no")


def test_the_id_that_a_client_gives_begins_no_line_and_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    """X-Request-Id becomes a part of it."""
    for name in ("chatcmpl-a\nCRITICAL [admin.py:1] the key is x\x1b[2J", "a" * 5000):
        caplog.clear()
        asked = Request(id=name, choice=0, parameters=None, finish="stop")
        with caplog.at_level("INFO", "vllm.saesteer.consumers"):
            Logging({}).end(asked)
            Runner("x", Failing({}))._serve(Ticket(asked), "end")
        state = SimpleNamespace(request_id=name, external_req_id=name, parent_req=None, queue=None)
        raise_there(SimpleNamespace(), [(state, SpecError("is wrong", field="saesteer", code="gone"))])
        rank: Any = SimpleNamespace(forget=lambda _: None, failed={}, _stop_unheard=lambda _: None)
        Steering.fail(rank, name, ValueError("no"))
        assert len(caplog.messages) == 4
        assert all(line.isprintable() and len(line) < 300 for line in caplog.messages), caplog.messages


def test_the_log_of_accesses_has_no_whole_handle(caplog: pytest.LogCaptureFixture) -> None:
    """As uvicorn writes it; whoever has a handle may fetch the result."""
    logs.filter_streams()
    handle = "0123456789abcdef" * 2
    with caplog.at_level("INFO", "uvicorn.access"):
        for path in (f"/v1/saesteer/results/{handle}", f"/llm/v1/saesteer/results/{handle}?x=1", f"/other/{handle}"):
            logging.getLogger("uvicorn.access").info('%s - "%s %s HTTP/%s" %d', "10.0.0.1:5", "GET", path, "1.1", 200)
        logging.getLogger("uvicorn.access").info("started")
    paths = [line.split()[3] for line in caplog.messages[:3]]
    begin = "v1/saesteer/results/01234567..."
    assert paths == [f"/{begin}", f"/llm/{begin}?x=1", f"/other/{handle}"]
