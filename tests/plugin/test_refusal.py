"""A request that is refused, at the door or by the worker, changes no bit of those that came with it."""

import json
import os
from typing import Any

import pytest

from tests.apart import hear
from tests.plugin.conftest import BRIDGE, Dictionaries, engine_options

pytestmark = pytest.mark.slow

# Requests are added by hand, a bad one among them; the scheduler is in this process, so none starts before all are in.
# The worker is in it as well, and made to fail for one feature.
JOB = """
import json, sys
from vllm import SamplingParams
import saesteer
from saesteer.engine.engine import Engine
from saesteer.engine.wire import decode
from saesteer.kernels import layout
from tests.apart import tell

BROKEN = 4242
make_row = Engine.make_row

def make_row_or_fail(self, admitted):
    if BROKEN in decode(admitted["plan"]).lines[:, layout.SLOT]:
        raise RuntimeError("made to fail")
    return make_row(self, admitted)

Engine.make_row = make_row_or_fail

if __name__ == "__main__":
    job = json.load(sys.stdin)
    llm = saesteer.LLM(job["model"], dictionaries=job["dictionaries"], **job["options"])
    engine, runs = llm.llm_engine, []
    for run, specs in enumerate(job["runs"]):
        llm.reset_prefix_cache()
        refused = []
        for n, (prompt, spec) in enumerate(specs):
            extra = {"saesteer": spec} if spec else None
            params = SamplingParams(temperature=0, max_tokens=16, logprobs=0, ignore_eos=True, extra_args=extra)
            try:
                engine.add_request(f"{run}-{n}", {"prompt_token_ids": prompt}, params)
            except saesteer.SpecError as error:
                refused.append(error.field)
        made = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    one = output.outputs[0]
                    if one.finish_reason == "error":
                        refused.append(output.request_id.split("-")[1])
                        continue
                    made[str(output.prompt_token_ids)] = [
                        [t, step[t].logprob] for t, step in zip(one.token_ids, one.logprobs)
                    ]
        runs.append([refused, made])
    tell(runs)
"""


def test_batchmates_of_a_refused_request_keep_their_bits(model_dir: str, dictionaries: Dictionaries) -> None:
    bad = {"edits": [{**BRIDGE, "feature": 9216}]}
    good: list[Any] = [[[40 + n, 50, 60, 70 + n], spec] for n, spec in enumerate([None, {"edits": [BRIDGE]}, None])]
    job = {
        "model": model_dir,
        "dictionaries": {"demo": dictionaries.arguments["demo"]},
        "options": engine_options(),
        "runs": [
            good,
            [good[0], [[1, 2, 3, 4], bad], *good[1:]],
            [good[0], [[1, 2, 3, 4], {"edits": [{**BRIDGE, "feature": 4242}]}], *good[1:]],
        ],
    }
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    without, beside, broken = hear("-c", JOB, environment=environment, given=json.dumps(job), timeout=600)
    assert without[0] == [] and beside[0] == ["saesteer.edits[0].feature"]
    assert len(beside[1]) == 3
    assert beside[1] == without[1]
    assert broken == [["1"], without[1]], "it ended alone"
