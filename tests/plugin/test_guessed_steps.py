"""Steps with guesses through worker and scheduler, without vLLM's engine: they count and read what single tokens do."""

import pickle
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

from saesteer.config.assets import Assets
from saesteer.config.config import KEY, SaesteerConfig
from saesteer.engine import doses
from saesteer.engine.engine import Engine
from saesteer.kernels import ops
from saesteer.plugin.results import counts
from saesteer.plugin.results.reads import READ
from saesteer.plugin.worker import worker
from saesteer.plugin.worker.steering import Steering
from tests.plugin.admitted import admitted

WIDTH, SITE, PROMPT, TOKENS = 6, "resid_post.1", 4, 12
SPEC = {
    "edits": [{"op": "add", "vector": [1.0] * WIDTH, "site": SITE, "scope": {"positions": [[2, PROMPT + 9]]}}],
    "return": {
        "dose": True,
        "hidden": True,
        "activations": [
            {"site": SITE, "scope": {"positions": [[0, None]]}},
            {"site": SITE, "at": "after", "reduce": "mean"},
        ],
    },
}
TRUTH = torch.from_numpy(np.random.default_rng(5).normal(size=(PROMPT + TOKENS + 9, WIDTH)).astype(np.float32))
WRONG = 1e6
# How many tokens each step guesses, and how many of these hold.
STEPS = {
    "all hold": [(3, 3)] * 3,
    "none holds": [(3, 0)] * TOKENS,
    "some hold": [(3, 1), (0, 0), (2, 2), (1, 0), (3, 2), (3, 3), (2, 1), (3, 3)],
    "more than the answer has": [(3, 3), (3, 2), (3, 3), (3, 3)],
}


def lived(folder: Path, steps: Any, *, sent: bool, preempted: int = -1, spec: Any = SPEC) -> tuple[Any, ...]:
    """The counters of a request and what it has read, by readout: parts by position, and the last row.

    Args:
        folder: for files.
        steps: as in STEPS.
        sent: whether what the worker found travels to another process.
        preempted: the step in front of which the request is preempted.
        spec: of the request.
    """
    assets = Assets.open(SaesteerConfig(sites=(SITE,), reads=(SITE,), inline_rows=1))
    size: dict[str, Any] = {"width": WIDTH, "layers": 2, "max_rows": 2, "max_tokens": 64, "drafts": 3}
    engine = Engine(assets, dtype=torch.float32, device=torch.device("cpu"), **size)
    runner: Any = SimpleNamespace(_update_states=lambda _: None, _prepare_inputs=lambda _: None, _dummy_run=None)
    runner.query_start_loc = SimpleNamespace(np=np.zeros(9, np.int32), gpu=torch.zeros(9, dtype=torch.int32))
    runner.input_batch = SimpleNamespace(req_ids=["plain", "a"], num_reqs=2, num_computed_tokens_cpu=np.zeros(2, int))
    runner.requests = defaultdict(SimpleNamespace)  # looked at by requests that edit a part of the answer alone
    steering = Steering(engine)
    worker._wrap_v1(runner, steering)
    made: Any = None
    place = SimpleNamespace(sample_tokens=lambda _: made, model_runner=runner, is_driver_worker=True)
    counts.attach(place, steering)
    request = admitted(engine, spec, PROMPT)
    request.req_id = "a"
    scheduler = SimpleNamespace(requests={"a": None}, finished_req_ids=set())
    found: dict[int, Any] = {}
    told, computed, steps, number = 0, 0, [(0, 0), *steps], -1
    while told < TOKENS:
        number += 1
        resumed = number == preempted
        guesses, held = (0, 0) if resumed else steps.pop(0)
        computed = 0 if resumed else computed
        sure = PROMPT + told - computed
        tokens = sure + guesses
        step = SimpleNamespace(finished_req_ids=(), scheduled_new_reqs=[] if number else [request])
        step.scheduled_cached_reqs = SimpleNamespace(
            req_ids=["a"], num_computed_tokens=[0], resumed_req_ids={"a"} if resumed else set()
        )
        step.total_num_scheduled_tokens = 3 + tokens  # two guesses of a request that is not steered
        step.scheduled_spec_decode_tokens = {"plain": [9, 9]} | ({"a": [9] * guesses} if guesses else {})
        runner._update_states(step)
        runner.query_start_loc.np[:3] = 0, 3, 3 + tokens
        runner.query_start_loc.gpu[:3] = torch.from_numpy(runner.query_start_loc.np[:3])
        runner.input_batch.num_computed_tokens_cpu[:] = 70, computed
        runner._prepare_inputs(step)
        engine.positions[: 3 + tokens] = torch.tensor([70, 71, 72, *range(computed, computed + tokens)])
        stream = torch.cat([torch.ones(3, WIDTH), TRUTH[computed : computed + tokens]])
        stream[3 + sure + held :] *= WRONG
        runner.execute_model_state = SimpleNamespace(hidden_states=stream.clone())
        site = engine.sites[SITE]
        engine.edit(site, stream)
        ops.publish_(engine.counts, site.index, engine.steps, engine.published)
        made = SimpleNamespace(req_ids=["plain", "a"], req_id_to_index={"plain": 0, "a": 1})
        made.sampled_token_ids = [[7], [7] * (held + 1)]
        output = place.sample_tokens(None)
        if sent:
            output = pickle.loads(pickle.dumps(output))
        given = min(held + 1, TOKENS - told)
        told, computed = told + given, computed + sure + held
        reason = FinishReason.LENGTH if told == TOKENS else None
        scheduler.finished_req_ids = {"a"} if reason else set()
        one = EngineCoreOutput("a", [7] * given, finish_reason=reason)
        counts._sending(lambda *_, one=one: {0: EngineCoreOutputs(outputs=[one])})(scheduler, step, output)
        for readout, spans, *data in (one.kv_transfer_params or {}).get(READ, ()):
            own = found.setdefault(readout, {})
            first = spans[0][0]
            assert resumed or first not in own, "each position comes once"
            assert spans[-1][1] <= PROMPT + told - 1, "what does not hold stays away"
            own |= {first: data} if spans[-1][1] == first + 1 else {first: (spans, data)}
    assert engine.counts[1 + engine.max_rows :].eq(0).all(), "what guesses have counted is kept elsewhere"
    assert one.kv_transfer_params is not None
    return np.frombuffer(one.kv_transfer_params[KEY], np.int32), found


@pytest.mark.parametrize("sent", [False, True], ids=["here", "sent"])
@pytest.mark.parametrize("preempted", [-1, 3], ids=["undisturbed", "preempted"])
@pytest.mark.parametrize("name", STEPS)
def test_guesses_count_and_read_what_single_tokens_do(tmp_path: Path, name: str, preempted: int, sent: bool) -> None:
    expected, single = lived(tmp_path, [(0, 0)] * TOKENS, sent=sent)
    counted, read = lived(tmp_path, STEPS[name], sent=sent, preempted=preempted)
    assert counted[:2].tolist() == expected[:2].tolist() == [0, 11], "positions 2 to 12 are edited"
    [dose], [same] = (doses.report(words[1:], 1, [SITE]) for words in (counted, expected))
    assert dose == same and dose["tokens"] == 11
    hidden = max(single, key=lambda readout: -len(single[readout]))
    assert max(read[hidden]) == max(single[hidden]) == PROMPT + TOKENS - 2, "the row that has sampled the last token"
    if preempted < 0:
        for readout in single.keys() - {hidden}:
            assert read[readout] == single[readout]


@pytest.mark.parametrize("sent", [False, True], ids=["here", "sent"])
@pytest.mark.parametrize("preempted", [-1, 3], ids=["undisturbed", "preempted"])
@pytest.mark.parametrize("name", STEPS)
def test_a_hidden_state_is_that_of_the_last_token_though_nobody_does_anything_at_a_site(
    tmp_path: Path, name: str, preempted: int, sent: bool
) -> None:
    """Such a step has no work list, and its guesses are guesses all the same."""
    only: Any = {"spec": {"return": {"hidden": True}}, "sent": sent}
    _, single = lived(tmp_path, [(0, 0)] * TOKENS, **only)
    _, read = lived(tmp_path, STEPS[name], preempted=preempted, **only)
    last = PROMPT + TOKENS - 2
    assert max(read[0]) == max(single[0]) == last and read[0][last] == single[0][last]
