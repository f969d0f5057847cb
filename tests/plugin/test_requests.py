"""Requests that are chunked, join, finish, get preempted, share ids or parameters: each is steered as asked, no other.

In float32, so that batch sizes do not change tokens: a request in a crowd is compared with the same request alone.
"""

from typing import Any

import numpy as np
import pytest

from tests.plugin.conftest import BRIDGE, PROMPTS, answer, generate
from tests.plugin.parity import same

pytestmark = pytest.mark.slow

STEERED = {"edits": [BRIDGE]}


def test_ids_that_begin_alike_are_kept_apart(make_engine: Any) -> None:
    from vllm import SamplingParams

    llm = make_engine(dtype="float32")
    plain, steered = generate(llm, [PROMPTS[1]])[0], generate(llm, [PROMPTS[1]], STEERED)[0]
    engine = llm.llm_engine
    for name, spec in (("a", STEERED), ("a-1", None), ("b-1", STEERED), ("b", None)):
        extra = {"saesteer": spec} if spec else None
        params = SamplingParams(temperature=0, max_tokens=16, logprobs=0, ignore_eos=True, extra_args=extra)
        ids = llm.get_tokenizer()(PROMPTS[1]).input_ids
        engine.add_request(name, {"prompt_token_ids": ids}, params)
    done = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                done[output.request_id] = answer(output.outputs[0])
    assert len(done) == 4
    for name, made in done.items():
        assert same(made, steered if name.split("-")[0] + name[1:] in ("a", "b-1") else plain), name


def test_a_reused_params_object_steers_every_time(make_engine: Any) -> None:
    from vllm import SamplingParams

    llm = make_engine(dtype="float32")
    extra = {"saesteer": STEERED}
    params = SamplingParams(temperature=0, max_tokens=16, logprobs=0, ignore_eos=True, extra_args=extra)
    (expected,) = generate(llm, [PROMPTS[0]], STEERED)
    for _ in range(2):
        outputs = llm.generate([PROMPTS[0], PROMPTS[0]], params, use_tqdm=False)
        assert all(same(answer(output.outputs[0]), expected) for output in outputs)
    assert params.extra_args == {"saesteer": {"edits": [BRIDGE]}}


def test_records_and_numpys_numbers_reach_the_engine(make_engine: Any) -> None:
    """vLLM's messages carry neither; what the language takes is sent as JSON."""
    from vllm import SamplingParams

    import saesteer

    llm = make_engine(dtype="float32")
    (expected,) = generate(llm, [PROMPTS[0]], STEERED)
    for edit in (
        saesteer.clamp("demo", 3497, 2.0, unit="max_act"),
        {**BRIDGE, "feature": np.int64(3497), "value": np.float32(2.0)},
    ):
        extra = {"saesteer": {"edits": [edit]}}
        params = SamplingParams(temperature=0, max_tokens=16, logprobs=0, ignore_eos=True, extra_args=extra)
        (output,) = llm.generate([PROMPTS[0]], params, use_tqdm=False)
        assert same(answer(output.outputs[0]), expected)
    assert len(generate(llm, PROMPTS)) == len(PROMPTS), "and the engine goes on"


def test_a_bad_spec_is_refused_and_its_batchmates_do_not_notice(make_engine: Any) -> None:
    from saesteer import SpecError

    llm = make_engine(dtype="float32")
    before = generate(llm, PROMPTS)
    bad = {"edits": [{**BRIDGE, "feature": 9216}]}
    with pytest.raises(SpecError, match=r"saesteer\.edits\[0\]\.feature"):
        generate(llm, PROMPTS, [None, STEERED, bad, None])
    assert not llm.llm_engine.has_unfinished_requests()
    assert all(same(a, b) for a, b in zip(generate(llm, PROMPTS), before, strict=True))
