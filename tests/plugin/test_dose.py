"""Doses of offline answers, and requests that end on a real engine as the limit is passed or their names are gone."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from saesteer import PromptsFailed, SpecError
from saesteer.dictionaries.vectors import from_inline
from tests.plugin.admin import Puts
from tests.plugin.conftest import BRIDGE, LONG_PROMPT, PROMPTS, WIDTH, generate
from tests.plugin.doses import LATE, LIMIT, STRONG
from tests.plugin.serving import CUDA

pytestmark = pytest.mark.slow

CLOSE = 2e-2 if CUDA else 1e-3  # logprobs in batches of other sizes; a GPU rounds products of float32 to tf32
EARLY = {**STRONG, "scope": {"positions": [[1, 3]]}}  # in the first block of a prompt


@pytest.fixture
def refusing(make_engine: Any) -> Any:
    """Long prompts come in three parts, which the prefix cache keeps."""
    size = {"max_num_batched_tokens": 128, "block_size": 32, "max_num_seqs": 16}
    return make_engine(dtype="float32", max_dose=LIMIT, max_dose_action="refuse", **size)


def test_a_limit_is_told_whether_asked_for_or_not(refusing: Any) -> None:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    answers = [refusing.generate([LONG_PROMPT], params, steer=BRIDGE, use_tqdm=False)[0] for _ in range(2)]
    for output in answers:
        (told,) = output.saesteer["dose"]
        assert told["tokens"] == len(output.prompt_token_ids) - 1 + 3 and told["tokens_limited"] == 0
        assert 0.1 < told["mean"] < told["max"] < LIMIT
        assert output.saesteer["applied"][0]["tokens_cached"] == 0, "what is not computed is not measured"


def exactly(llm: Any, prompts: list[str]) -> list[Any]:
    """Answers to the bit, with logprobs; one after the other, as the engine may begin with some of a batch."""
    assert llm.reset_prefix_cache(), "no block is held"
    return [generate(llm, [prompt], spec, tokens=4)[0] for prompt in prompts for spec in (None, BRIDGE)]


@pytest.mark.parametrize("edit", [STRONG, LATE, EARLY], ids=["prompt", "answer", "first part of a prompt"])
def test_a_call_raises_with_the_other_answers_and_leaves_nothing_behind(refusing: Any, edit: Any) -> None:
    from vllm import SamplingParams

    prompts = [*PROMPTS, LONG_PROMPT]
    before = exactly(refusing, prompts)
    for n in (1, 2):  # the prefix cache hides nothing
        params = SamplingParams(temperature=0.5 * (n > 1), n=n, max_tokens=16, ignore_eos=True)
        with pytest.raises(PromptsFailed, match=r"^1 of 5 prompts failed, .*prompts\[4\]: ") as told:
            refusing.generate(prompts, params, steer=[None, BRIDGE, None, None, edit], use_tqdm=False)
        assert (told.value.code, told.value.field) == ("dose", "saesteer.edits")
        assert "resid_post.15" in str(told.value) and "1 at most" in str(told.value)
        *others, failed = told.value.outputs
        assert failed is None and [output.prompt for output in others] == prompts[:-1]
        assert all(len(choice.token_ids) == 16 for output in others for choice in output.outputs)
        assert others[1].saesteer["applied"] and [len(output.outputs) for output in others] == [n] * 4
        processor = refusing.llm_engine.output_processor
        assert not (processor.request_states or processor.parent_requests or processor.external_req_ids)
    assert exactly(refusing, prompts) == before


def test_every_row_is_free_again(refusing: Any) -> None:
    """More refused ones than the table has rows; then as many others at once as it has."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    for _ in range(5):
        with pytest.raises(SpecError):
            refusing.generate([PROMPTS[0]] * 16, params, steer=LATE, use_tqdm=False)
    specs = [{"edits": [{**BRIDGE, "value": 0.1 * n}]} for n in range(1, 17)]
    (alone,) = generate(refusing, [PROMPTS[0]], specs[7], tokens=8)
    crowd = generate(refusing, [PROMPTS[0]] * 16, specs, tokens=8)
    assert [token for token, _ in crowd[7]] == [token for token, _ in alone]


def step(llm: Any, asked: list[tuple[Any, Any]], **more: Any) -> tuple[dict[int, Any], dict[int, int]]:
    """Requests of one engine that begin at once, stepped by hand: what each made, and in which step it ended."""
    from vllm import SamplingParams

    engine, made, ends = llm.llm_engine, {}, {}
    engine.engine_core.call_utility("pause_scheduler", "keep", False)
    for number, (prompt, spec) in enumerate(asked):
        extra = {"saesteer": spec} if spec else None
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0, extra_args=extra, **more)
        engine.add_request(f"{number}", {"prompt_token_ids": llm.get_tokenizer().encode(prompt)}, params)
    engine.engine_core.call_utility("resume_scheduler")
    steps = 0
    while engine.has_unfinished_requests():
        steps += 1
        for output in engine.step():
            if output.finished:
                one = output.outputs[0]
                logprobs = [at[token].logprob for token, at in zip(one.token_ids, one.logprobs, strict=True)]
                made[int(output.request_id)] = one.finish_reason, list(one.token_ids), logprobs
                ends[int(output.request_id)] = steps
    return made, ends


def test_batchmates_go_on_as_if_it_had_not_been_there(refusing: Any) -> None:
    others: list[tuple[Any, Any]] = [(PROMPTS[1], None), (PROMPTS[2], {"edits": [BRIDGE]}), (LONG_PROMPT, None)]
    alone, _ = step(refusing, others)
    beside, ends = step(refusing, [*others, (PROMPTS[0], {"edits": [LATE]}), (PROMPTS[3], {"edits": [STRONG]})])
    assert [beside[number][0] for number in range(5)] == ["length"] * 3 + ["error"] * 2
    for number in range(3):
        assert beside[number][:2] == alone[number][:2]
        assert beside[number][2] == pytest.approx(alone[number][2], abs=CLOSE)
    assert ends[4] < ends[3] < min(ends[number] for number in range(3))
    assert beside[4][1] == [] and 5 < len(beside[3][1]) < 12, "a token that was computed beside the news stays unsaid"


def test_it_fails_before_a_prompt_is_through(refusing: Any) -> None:
    """The first part of the prompt makes no output. Two at once share no block that only one of them has computed."""
    spec = {"edits": [EARLY]}
    made, ends = step(refusing, [(LONG_PROMPT, None), (LONG_PROMPT, spec), (LONG_PROMPT, spec)], min_tokens=24)
    assert [made[number][0] for number in range(3)] == ["length", "error", "error"]
    assert all(made[number][1] == [] and ends[number] < ends[0] - 20 for number in (1, 2))


ROW = [(-1.0) ** n for n in range(WIDTH)]
ADD: dict[str, Any] = {"op": "add", "vector": "lost", "site": "resid_post.15", "scale": 0.01}


@contextmanager
def lost(llm: Any) -> Iterator[None]:
    """While the front end has a name of which no worker has the vector."""
    known = llm.llm_engine.input_processor.saesteer_names
    with pytest.MonkeyPatch.context() as patch:
        vectors = {**known.catalog.vectors, "lost": from_inline(tuple(ROW))}
        patch.setattr(known, "_now", known._now._replace(catalog=replace(known.catalog, vectors=vectors), puts=Puts()))
        yield


def test_names_that_are_gone_fail_their_request_alone(refusing: Any) -> None:
    before = exactly(refusing, PROMPTS)
    with lost(refusing):
        with pytest.raises(SpecError, match=r"send it again \[gone\]"):
            refusing.generate(PROMPTS[:2], steer=[None, ADD], use_tqdm=False)
        made, _ = step(refusing, [(PROMPTS[0], None), (LONG_PROMPT, {"edits": [ADD]})])
        assert [made[number][0] for number in range(2)] == ["length", "error"] and made[1][1] == []
    assert exactly(refusing, PROMPTS) == before


def test_what_a_request_of_gone_names_computed_is_found_by_nobody(make_engine: Any) -> None:
    llm = make_engine(dtype="float32")
    with lost(llm):
        assert step(llm, [(LONG_PROMPT, {"edits": [ADD]})])[0][0][0] == "error"
    spec = {"edits": [{**ADD, "vector": ROW}]}  # the same numbers, hence the same keys
    cached = [llm.generate([LONG_PROMPT], steer=spec, use_tqdm=False)[0].num_cached_tokens for _ in range(2)]
    assert cached[0] == 0 < cached[1]
