"""Counts from the scheduler into bodies and chunks, piece by piece, with stand-ins for vLLM. Starts nothing."""

import asyncio
import json
import math
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from saesteer.plugin.http import bodies
from saesteer.plugin.results.unsent import Unsent

SAID = {"applied": [{"op": "clamp", "tokens_edited": 3}]}
STEERED: Any = SimpleNamespace(model_extra={"saesteer": {}}, vllm_xargs=None, n=None)


def unsent(fields: Any, *, ended: bool = False) -> Unsent:
    """What a stream has to say after one output."""
    made = Unsent()
    made.add(fields, ended=ended)
    return made


def test_a_chunk_keeps_its_bytes_and_only_the_end_of_a_choice_is_longer() -> None:
    begin = 'data: {"id":"a","choices":[{"index":0,"text":"\\"finish_reason\\":\\"no\\"","finish_reason":null}]}\n\n'
    end = 'data: {"id":"a","choices":[{"index":1,"text":"é\\u2028","finish_reason":"stop","logprobs":1e-07}]}\n\n'
    said = {1: unsent(SAID, ended=True)}
    assert bodies._with_answer(begin, said) is begin
    assert bodies._with_answer("data: [DONE]\n\n", said) == "data: [DONE]\n\n"
    told = bodies._with_answer(end, said)
    assert told.startswith(end.rstrip()[:-1]) and told.endswith("}\n\n")
    assert json.loads(told.removeprefix("data: ")) == json.loads(end.removeprefix("data: ")) | {"saesteer": SAID}
    assert bodies._with_answer(end, {0: unsent(SAID, ended=True)}) is end, "of another choice"
    error = 'data: {"error":{"message":"\\"finish_reason\\":\\"error\\""}}\n\n'
    assert bodies._with_answer(error, said) is error


def test_a_chunk_brings_what_was_read_since_the_last_one() -> None:
    middle = 'data: {"id":"a","choices":[{"index":0,"text":"x","finish_reason":null}]}\n\n'
    end = middle.replace("null", '"length"')
    report: dict[str, Any] = {**SAID, "features": [1]}
    said = unsent(report)

    def read(chunk: str) -> Any:
        return json.loads(bodies._with_answer(chunk, {0: said}).removeprefix("data: ")).get("saesteer")

    assert read(middle) == {"features": [1]}
    assert bodies._with_answer(middle, {0: said}) is middle, "nothing is new"
    report["features"] += [2, 3]
    assert bodies._with_answer(middle, {0: said}) is middle, "no output has brought it yet"
    said.add(report, ended=False)
    assert read(middle) == {"features": [2, 3]}
    report["features"].append(4)
    said.add(report, ended=True)
    assert bodies._with_answer(middle, {0: said}) is middle, "the end brings it"
    assert read(end) == {**SAID, "features": [4]}
    assert read(end) == {**SAID, "features": []}


async def _outputs(*found: Any) -> AsyncIterator[Any]:
    for one in found:
        yield one


def test_what_is_not_finite_is_null_since_json_has_nothing_else() -> None:
    """A model in float16 overflows; HTTP would answer 400 without a name, and a stream would be no JSON."""
    nan, inf = float("nan"), float("inf")
    report = {
        **SAID,
        "features": [{"rows": [{"position": 1, "top": [[3, inf], [4, 1.5]], "features": {"9": -inf}}]}],
        "probes": [{"positions": [1], "scores": [nan]}],
        "dose": [{"site": "resid_post.3", "max": nan, "mean": 0.5, "tokens": 2}],
    }
    told = {
        **SAID,
        "features": [{"rows": [{"position": 1, "top": [[3, None], [4, 1.5]], "features": {"9": None}}]}],
        "probes": [{"positions": [1], "scores": [None]}],
        "dose": [{"site": "resid_post.3", "max": None, "mean": 0.5, "tokens": 2}],
    }

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is no JSON")

    event = bodies.with_report('data: {"choices":[]}\n\n', report)
    assert json.loads(event.removeprefix("data: "), parse_constant=refuse)["saesteer"] == told
    choices = [SimpleNamespace(index=0), SimpleNamespace(index=1)]
    body: Any = SimpleNamespace(choices=choices)
    bodies._add_reports(body, {0: report, 1: SAID})
    assert body.saesteer == choices[0].saesteer == told and choices[1].saesteer is SAID

    async def whole(*_: Any) -> Any:
        return SimpleNamespace(output=[])

    made = asyncio.run(bodies._response(whole)(None, STEERED, None, None, SimpleNamespace(saesteer=unsent(report))))
    assert made.saesteer == told
    assert math.isnan(report["probes"][0]["scores"][0]), "in Python it stays what it is"  # type: ignore[index]


def test_a_stream_that_is_given_up_closes_vllm_s_own() -> None:
    closed = []

    async def chunks(*_: Any) -> AsyncIterator[str]:
        try:
            while True:
                yield "data: {}\n\n"
        finally:
            closed.append(True)

    async def ask() -> None:
        stream = bodies._chat_stream(chunks)(None, STEERED, _outputs())
        await anext(stream)
        await stream.aclose()
        assert closed

    asyncio.run(ask())


def test_metrics_are_summed_over_processes(tmp_path: Path) -> None:
    code = (
        "from saesteer.plugin.results import metrics\n"
        "metrics.refused('before')\n"
        "metrics.install(('dose',)); metrics.install(('dose',))\n"
        "metrics.edited([{'tokens_edited': 3}, {'tokens_edited': 4}, {'op': 'given up'}])\n"
        "metrics.refused('unknown_name')\n"
        "metrics.pools({'resid_post.3': (2, 5)})\n"
        "from prometheus_client import generate_latest\n"
        "from vllm.v1.metrics.prometheus import get_prometheus_registry\n"
        "print(generate_latest(get_prometheus_registry()).decode())\n"
    )
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for times in (1, 2):
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith("saesteer")]
        zeros = {line.removesuffix(" 0.0") for line in lines if line.endswith(" 0.0")}
        assert {'saesteer_refusals_total{code="dose"}', 'saesteer_rules_total{op="stop"}'} < zeros, "from the start"
        assert sorted(line for line in lines if not line.endswith(" 0.0")) == [
            f"saesteer_edited_tokens_total {7.0 * times}",
            'saesteer_pool_rows_in_use{site="resid_post.3"} 2.0',
            'saesteer_pool_rows{site="resid_post.3"} 5.0',
            f'saesteer_refusals_total{{code="unknown_name"}} {1.0 * times}',
        ]
