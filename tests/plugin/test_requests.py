"""Requests that are chunked, join, finish, get preempted, share ids or parameters: each is steered as asked, no other.

In float32, so that batch sizes do not change tokens: a request in a crowd is compared with the same request alone.
"""

from typing import Any

import numpy as np
import pytest

from tests.plugin.conftest import BRIDGE, LONG_PROMPT, OCEAN, PROMPTS, TIGHT, Answer, answer, generate, preemptions
from tests.plugin.parity import NOISE, same

pytestmark = pytest.mark.slow

STEERED = {"edits": [BRIDGE]}


def crowd() -> tuple[list[str], list[Any]]:
    """Twelve requests of different lengths, a third of them plain, the others steered in two ways."""
    prompts = [f"{n}. {LONG_PROMPT[: 90 * (n % 5)]}{PROMPTS[n % 4]}" for n in range(12)]
    specs = [[None, STEERED, {"edits": [{**OCEAN, "scope": {"generated": True}}]}][n % 3] for n in range(12)]
    return prompts, specs


def alone(llm: Any, prompts: list[str], specs: list[Any], tokens: list[int]) -> list[Answer]:
    return [generate(llm, [prompt], spec, tokens=n)[0] for prompt, spec, n in zip(prompts, specs, tokens, strict=True)]


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 64, "max_num_seqs": 4, "max_model_len": 512, "enable_prefix_caching": False},
        TIGHT,
    ],
    ids=["chunked prefill, joining and finishing", "preemption"],
)
def test_a_crowd_is_steered_as_each_alone(make_engine: Any, options: dict[str, Any]) -> None:
    from vllm import SamplingParams

    prompts, specs = crowd()
    tokens = [8 + 5 * (n % 4) for n in range(12)]
    if options is TIGHT:
        tokens = [40] * 12  # 8 requests fill it nearly twice
    llm = make_engine(dtype="float32", **options)
    expected = alone(llm, prompts, specs, tokens)
    params = [SamplingParams(temperature=0, max_tokens=n, logprobs=0, ignore_eos=True) for n in tokens]
    before = preemptions(llm) if options is TIGHT else 0
    outputs = llm.generate(prompts, params, steer=specs, use_tqdm=False)
    made = [answer(output.outputs[0]) for output in outputs]
    wrong = [n for n in range(12) if not same(made[n], expected[n])]
    assert not wrong
    assert options is not TIGHT or preemptions(llm) > before, "the cache was small enough to preempt"


def test_n_of_two_steers_both(make_engine: Any) -> None:
    from vllm import SamplingParams

    llm = make_engine(dtype="float32")

    def first_step(n: int, steer: Any) -> list[dict[int, float]]:
        # Sampled, since greedy with n = 2 is refused by some versions; logprobs are those before the temperature.
        params = SamplingParams(temperature=0.5, n=n, max_tokens=4, logprobs=8, ignore_eos=True)
        (output,) = llm.generate([PROMPTS[0]], params, steer=steer, use_tqdm=False)
        return [{token: one.logprob for token, one in made.logprobs[0].items()} for made in output.outputs]

    both, (alone_,), (plain,) = first_step(2, STEERED), first_step(1, STEERED), first_step(1, None)
    assert len(both) == 2
    for one in both:
        shared = one.keys() & alone_.keys()
        assert len(shared) >= 8 and all(abs(one[token] - alone_[token]) < NOISE for token in shared)
    assert any(abs(alone_[token] - plain.get(token, -99.0)) > 0.1 for token in alone_)


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


@pytest.mark.parametrize(
    ("spec", "field", "code"),
    [
        ({"edits": [{**BRIDGE, "dictionary": "demon"}]}, "saesteer.edits[0].dictionary", "unknown_name"),
        ({"edits": [{**BRIDGE, "value": float("nan")}]}, "saesteer.edits[0].value", "not_finite"),
        ({"edits": [BRIDGE, {**BRIDGE, "colour": 1}]}, "saesteer.edits[1].colour", "unknown_field"),
        (
            {"edits": [{"op": "add", "vector": "happy", "site": "resid_post.12", "scale": 4.0}]},
            "saesteer.edits[0].vector",
            "unknown_name",
        ),
        ({"edits": [{**BRIDGE, "feature": n} for n in range(65)]}, "saesteer.edits", "too_many"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_is_named(make_engine: Any, spec: Any, field: str, code: str) -> None:
    from saesteer import SpecError

    with pytest.raises(SpecError) as caught:
        generate(make_engine(), [PROMPTS[0]], spec)
    assert caught.value.code == code
    assert caught.value.field.startswith(field)
