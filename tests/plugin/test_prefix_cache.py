"""Requests share KV blocks exactly where their tokens and their edits agree: on the real engine, warm against cold."""

from typing import Any

import pytest

from tests.plugin.conftest import BRIDGE, CUDA, LONG_PROMPT, OCEAN, generate

pytestmark = pytest.mark.slow

BLOCK = 32  # tokens: the smallest that a CPU takes
# Of logprobs: what is cached was computed in a pass of another length. A GPU multiplies float32 in tf32, of ten bits.
CLOSE = 1e-2 if CUDA else 2e-3
STEERED = {"edits": [BRIDGE]}
GENERATED = {"edits": [{**BRIDGE, "scope": {"generated": True}}]}


@pytest.fixture
def llm(make_engine: Any) -> Any:
    return make_engine(dtype="float32", block_size=BLOCK)


def fresh(tag: str) -> str:
    """A prompt of several blocks that no other test has used."""
    return f"Notes number {tag}. {LONG_PROMPT}"


def ask(llm: Any, prompt: Any, spec: Any, tokens: int = 16) -> Any:
    """One answer, greedy, of that many tokens."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=tokens, logprobs=0, ignore_eos=True)
    call = llm.chat if isinstance(prompt, list) and isinstance(prompt[0], dict) else llm.generate
    given = {"prompt_token_ids": prompt} if isinstance(prompt, list) and isinstance(prompt[0], int) else prompt
    (output,) = call(given, params, steer=spec, use_tqdm=False)
    return output


def cold(llm: Any, prompt: Any, spec: Any, tokens: int = 16) -> Any:
    """The same with an empty cache, which it leaves empty."""
    assert llm.reset_prefix_cache()
    output = ask(llm, prompt, spec, tokens)
    assert output.num_cached_tokens == 0
    assert llm.reset_prefix_cache()
    return output


def check_alike(warm: Any, cold: Any) -> None:
    """Same tokens, and logprobs as close as passes of other lengths are."""
    one, two = warm.outputs[0], cold.outputs[0]
    assert one.token_ids == two.token_ids
    for token, first, second in zip(one.token_ids, one.logprobs, two.logprobs, strict=True):
        assert first[token].logprob == pytest.approx(second[token].logprob, abs=CLOSE)


def computed(output: Any) -> list[int]:
    """The tokens that were inputs: the last one sampled never was."""
    return [*output.prompt_token_ids, *output.outputs[0].token_ids[:-1]]


def edited(output: Any) -> list[Any]:
    """For each position which edits it has, as the answer says."""
    said = getattr(output, "saesteer", {"applied": []})["applied"]
    length = len(output.prompt_token_ids) + len(output.outputs[0].token_ids)
    spans = [[(lo, length if hi is None else hi) for lo, hi in one["positions"]] for one in said]
    return [[n for n, windows in enumerate(spans) if any(lo <= p < hi for lo, hi in windows)] for p in range(length)]


def expected_hit(first: Any, second: Any) -> int:
    """Whole blocks up to the first position where tokens or edits differ, without the second prompt's last token."""
    pairs = zip(computed(first), second.prompt_token_ids, edited(first), edited(second), strict=False)
    same = 0
    for one, two, here, there in pairs:
        if (one, here) != (two, there):
            break
        same += 1
    return min(same, len(second.prompt_token_ids) - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("first", [None, STEERED], ids=["plain first", "steered first"])
def test_both_orders_equal_cold_runs(llm: Any, first: Any) -> None:
    prompt = fresh("order")
    second = STEERED if first is None else None
    expected = [cold(llm, prompt, first), cold(llm, prompt, second)]
    assert expected[0].outputs[0].token_ids != expected[1].outputs[0].token_ids
    for spec, alone in zip((first, second), expected, strict=True):
        output = ask(llm, prompt, spec)
        assert output.num_cached_tokens == 0
        check_alike(output, alone)


def test_equal_specs_share_the_cache_and_others_do_not(llm: Any) -> None:
    prompt = fresh("sharing")
    whole = (len(ask(llm, prompt, None).prompt_token_ids) - 1) // BLOCK * BLOCK
    for spec, hit in (
        (None, whole),
        ({"edits": []}, whole),
        (STEERED, 0),
        (STEERED, whole),
        ({"edits": [OCEAN]}, 0),
        ({"edits": [{**BRIDGE, "scope": {"positions": [[BLOCK, None]]}}]}, BLOCK),
        ({"edits": [{**BRIDGE, "scope": {"positions": [[BLOCK + 1, None]]}}]}, BLOCK),
        ({"edits": [{**BRIDGE, "scope": {"positions": [[BLOCK, 99999]]}}]}, whole),  # alike as far as the prompt goes
    ):
        assert ask(llm, prompt, spec, 2).num_cached_tokens == hit, spec


SCOPES = {
    "generated": {"generated": True},
    "prompt": {"prompt": True},
    "negative positions": {"positions": [[-16, None]]},
    "fixed positions": {"positions": [[3, 70]]},
    "none": None,
}


@pytest.mark.parametrize("scope", SCOPES)
def test_a_steered_second_turn_is_what_it_is_cold(llm: Any, scope: str) -> None:
    spec = {"edits": [{**OCEAN, **({"scope": SCOPES[scope]} if SCOPES[scope] else {})}]}
    ids = llm.get_tokenizer().encode(fresh(f"turn {scope}"))[:121]
    first = ask(llm, ids, spec, 44)
    second = [*computed(first), *ids[5:15]]
    warm = ask(llm, second, spec)
    hit = expected_hit(first, warm)
    assert hit == {"generated": 96, "prompt": 96, "negative positions": 96}.get(scope, 160)
    assert warm.num_cached_tokens == hit
    (said,) = warm.saesteer["applied"]
    inside = sum(max(0, min(hit, len(second) if end is None else end) - start) for start, end in said["positions"])
    assert said["tokens_cached"] == inside
    check_alike(warm, cold(llm, second, spec))


@pytest.mark.parametrize("wanted", ["user", "assistant", -1, 0])
def test_a_steered_second_turn_of_a_chat(llm: Any, wanted: Any) -> None:
    """Messages are positions; a scope that begins at a message leaves all before it to everybody."""
    spec = {"edits": [{**OCEAN, "scope": {"messages": wanted}}]}
    turns = [{"role": "user", "content": fresh(f"chat {wanted}")[:300]}]
    first = ask(llm, turns, spec if wanted != "assistant" else None, 48)
    turns += [{"role": "assistant", "content": first.outputs[0].text}, {"role": "user", "content": "And then? " * 9}]
    warm = ask(llm, turns, spec)
    assert warm.num_cached_tokens == expected_hit(first, warm)
    assert warm.num_cached_tokens >= (BLOCK if wanted in ("user", "assistant", 0) else 0)
    check_alike(warm, cold(llm, turns, spec))


def test_a_prompt_that_only_what_is_generated_edits_is_shared_with_everybody(llm: Any) -> None:
    prompt = fresh("shared prompt")
    plain, steered = cold(llm, prompt, None), cold(llm, prompt, GENERATED)
    whole = (len(plain.prompt_token_ids) - 1) // BLOCK * BLOCK
    assert plain.outputs[0].token_ids != steered.outputs[0].token_ids
    for order in ((GENERATED, None), (None, GENERATED)):
        assert llm.reset_prefix_cache()
        for number, spec in enumerate(order):
            output = ask(llm, prompt, spec)
            assert output.num_cached_tokens == number * whole
            check_alike(output, plain if spec is None else steered)


def test_the_second_turn_after_a_steered_answer_is_cold(llm: Any) -> None:
    """Generated blocks are cached too: an unsteered second turn must not find those of a steered first."""
    first = ask(llm, fresh("turns"), GENERATED, 40)
    second = [*computed(first), 28, 1670, 588]
    warm = ask(llm, second, None)
    assert warm.num_cached_tokens == len(first.prompt_token_ids) // BLOCK * BLOCK
    check_alike(warm, cold(llm, second, None))


def test_many_at_once_share_and_are_as_alone(llm: Any) -> None:
    """In one batch, where blocks are found that the same step computes."""
    prompt = fresh("at once")
    specs = [None, GENERATED, STEERED, None, GENERATED, {"edits": [{**OCEAN, "scope": {"positions": [[70, None]]}}]}]
    alone = [cold(llm, prompt, spec) for spec in specs]
    together = generate(llm, [prompt] * len(specs), specs)
    for made, output in zip(together, alone, strict=True):
        one = output.outputs[0]
        assert [token for token, _ in made] == list(one.token_ids)
        for (token, logprob), step in zip(made, one.logprobs, strict=True):
            assert logprob == pytest.approx(step[token].logprob, abs=CLOSE)
