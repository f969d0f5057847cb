"""Chat messages are found in prompts: against the demo model's template written once more, and on a real engine."""

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from saesteer.client import Capture, numbers
from saesteer.errors import SpecError
from tests.plugin.conftest import BRIDGE, OCEAN, answer
from tests.plugin.parity import TOLERANCE, compare_ids
from tests.plugin.turns import TURNS, pieces

pytestmark = pytest.mark.slow

SITE = "resid_post.15"


@pytest.fixture(scope="module")
def renderer(model_dir: str) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.renderers import renderer_from_config

    from saesteer.plugin.configured import configure

    configure()
    options = EngineArgs(model=model_dir, dtype="float32", enforce_eager=True, max_model_len=2048)
    return renderer_from_config(options.create_engine_config())


def render(renderer: Any, turns: Any, **template: Any) -> Any:
    """The prompt's tokens and what it was made of."""
    from vllm.renderers.params import ChatParams

    from saesteer.plugin.door.conversation import conversation_of

    params = ChatParams(**template.pop("params", {}), chat_template_kwargs={"add_generation_prompt": True, **template})
    _, (prompt,) = renderer.render_chat([turns], params)
    return prompt["prompt_token_ids"], conversation_of(prompt)


words = st.text(max_size=40) | st.sampled_from(["Hi", " a", "\n", "<|im_end|>", "user\n", "naïve 🙂"])
turns = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": words}),
    min_size=1,
    max_size=6,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=turns)
def test_windows_are_those_of_the_template_written_once_more(renderer: Any, turns: list[dict[str, str]]) -> None:
    ids, conversation = render(renderer, turns)
    found = [(one["start"], one["end"]) for one in conversation.told(ids)][:-1]
    texts = [renderer.tokenizer.decode(ids[low:high]) for low, high in found]
    alone = [list(renderer.tokenizer(piece, add_special_tokens=False).input_ids) for piece in pieces(turns)]
    assert [list(ids[low:high]) for low, high in found] == alone, texts
    assert renderer.tokenizer.decode(ids[found[-1][1] :]) == "<|im_start|>assistant\n"
    assert conversation.roles == [turn["role"] for turn in turns]


def test_the_last_message_that_is_to_be_continued_ends_with_the_prompt(renderer: Any) -> None:
    turns = TURNS[:3]
    ids, conversation = render(renderer, turns, add_generation_prompt=False, continue_final_message=True)
    (window,) = conversation.spans(ids, [(2, 3)], "x")
    assert renderer.tokenizer.decode(ids[slice(*window)]) == "<|im_start|>assistant\nIn the harbour."


def test_the_request_s_own_template_and_tools_are_those_that_count(renderer: Any) -> None:
    template = (
        "{{ tools[0].function.name }}{{ tone }}"
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}[answer]{% endif %}"
    )
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    ids, conversation = render(renderer, TURNS, params={"chat_template": template}, tools=tools, tone="!")
    (first, last) = conversation.spans(ids, [(0, 1), (3, 4)], "x")
    decode = renderer.tokenizer.decode
    assert decode(ids[slice(*first)]) == "look![system]Be brief.<|im_end|>"
    assert decode(ids[slice(*last)]) == "[user]Who are you?<|im_end|>"


# Each renders the beginning of a conversation in another way than within the whole.
REWRITING = {
    "other at the end": "{% for m in messages %}[{{ m.role }}{{ '!' if loop.last }}]{{ m.content }}{% endfor %}",
    "raises": "{% for m in messages %}{{ m.content if loop.length > 2 else raise_exception('few') }}~{% endfor %}",
    "a token over the border": "{% for m in messages %}[{{ m.content }}]{% endfor %}",
    "says how many": "{{ messages|length }}{% for m in messages %}{{ m.content }}{% endfor %}",
}


@pytest.mark.parametrize("template", REWRITING.values(), ids=REWRITING)
def test_messages_are_found_where_a_template_rewrites_earlier_ones(renderer: Any, template: str) -> None:
    ids, conversation = render(renderer, TURNS, params={"chat_template": template})
    told = conversation.told(ids)
    texts = [renderer.tokenizer.decode(ids[one["start"] : one["end"]]) for one in told]
    for n, text in enumerate(texts[:-1]):
        # A token may hold the end of one text and the beginning of the next.
        assert [turn["content"][1:-1] in text for turn in TURNS] == [n == other for other in range(len(TURNS))], texts
    assert conversation.opening(ids) == told[-1]["start"]


@pytest.mark.parametrize(("tokens", "side"), [(20, "left"), (20, "right")])
def test_messages_are_found_in_a_prompt_that_is_cut(renderer: Any, tokens: int, side: str) -> None:
    whole, conversation = render(renderer, TURNS)
    cut = whole[-tokens:] if side == "left" else whole[:tokens]
    shift = len(whole) - tokens if side == "left" else 0
    expected = [[min(max(one[at] - shift, 0), tokens) for at in ("start", "end")] for one in conversation.told(whole)]
    other = type(conversation)(renderer, TURNS, conversation.chat_params, None)
    assert [[one["start"], one["end"]] for one in other.told(cut)] == expected


# Marks change more than the text there.
REFUSING = {
    "differs": (
        "{% for m in messages %}[{{ m.content|length }}{{ '!' if loop.last }}]{{ m.content }}{% endfor %}",
        r"rendered alone, the messages up to there differ from the prompt at token \d+",
    ),
    "raises": (
        "{% if messages|length < 3 %}{{ raise_exception('too few') }}{% endif %}{{ messages[2].content|length }}",
        r"it refuses the messages up to there \(.*too few.*\)",
    ),
}


@pytest.mark.parametrize(("template", "why"), REFUSING.values(), ids=REFUSING)
def test_a_template_that_looks_at_texts_and_does_not_grow_is_refused(renderer: Any, template: str, why: str) -> None:
    ids, conversation = render(renderer, TURNS, params={"chat_template": template})
    with pytest.raises(SpecError, match=why) as caught:
        conversation.spans(ids, [(1, 2)], "saesteer.edits[0].scope.messages")
    assert (caught.value.field, caught.value.code) == ("saesteer.edits[0].scope.messages", "not_served")
    assert conversation.told(ids) is None


SCOPES: dict[str, tuple[Any, list[tuple[int, int]]]] = {
    "by role": ({"messages": "user"}, [(1, 2), (3, 4)]),
    "by index": ({"messages": [0, -2]}, [(0, 1), (2, 3)]),
    "meeting positions": ({"messages": ["assistant", 3], "positions": [[0, -8]]}, [(2, 4)]),
}


@pytest.mark.parametrize(("scope", "runs"), SCOPES.values(), ids=SCOPES)
def test_chat_is_steered_at_the_messages_and_nowhere_else(
    make_engine: Any, oracle: Any, scope: Any, runs: list[tuple[int, int]]
) -> None:
    from vllm import SamplingParams

    llm = make_engine(dtype="float32")
    spec = {"edits": [{**BRIDGE, "scope": scope}, {**OCEAN, "scope": {"generated": True}}]}
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=0, ignore_eos=True)
    (output,) = llm.chat([TURNS], params, steer=spec, use_tqdm=False)
    ids = list(output.prompt_token_ids)
    ends = [0]
    for piece in pieces(TURNS):
        ends.append(ends[-1] + len(oracle.tokenizer(piece, add_special_tokens=False).input_ids))
    limit = len(ids) - 8 if "positions" in scope else len(ids)
    low = 0 if "positions" in scope else 1
    windows = [[max(ends[first], low), min(ends[end], limit)] for first, end in runs]
    by_position = {"edits": [{**BRIDGE, "scope": {"positions": windows}}, spec["edits"][1]]}
    difference, skipped = compare_ids(oracle, ids, answer(output.outputs[0]), by_position)
    assert difference < TOLERANCE and skipped < 6
    first, second = output.saesteer["applied"]
    assert first["positions"] == windows
    assert first["tokens_edited"] == sum(high - low for low, high in windows)
    assert second["tokens_edited"] == 11
    (plain,) = llm.chat([TURNS], params, use_tqdm=False)
    assert answer(plain.outputs[0]) != answer(output.outputs[0])


@pytest.mark.parametrize("generated", [False, True], ids=["prompt", "everything"])
def test_chat_is_read_by_message(make_engine: Any, generated: bool) -> None:
    from vllm import SamplingParams

    llm = make_engine(dtype="float32")
    scope = {} if generated else {"prompt": True}
    reads = [{"site": SITE, "scope": scope}, {"site": SITE, "at": "after", "reduce": "message", "scope": scope}]
    params = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True)
    (output,) = llm.chat([TURNS], params, steer={"return": {"activations": reads}}, use_tqdm=False)
    found, (_, means) = Capture.of(output.saesteer), output.saesteer["activations"]
    assert [one["role"] for one in found.messages] == ["system", "user", "assistant", "user", None]
    assert [one["index"] for one in found.messages] == means["messages"] == [*range(5)]
    decode = llm.get_tokenizer().decode
    texts = [decode(output.prompt_token_ids[one["start"] : one["end"]]) for one in found.messages]
    assert texts == [*pieces(TURNS), "<|im_start|>assistant\n"]
    slices = [found.message(i, SITE, include_generated=generated) for i in range(5)]
    positions, rows = found.at(SITE)
    assert positions.tolist() == [*range(len(output.prompt_token_ids) + 6 * generated)]
    assert np.concatenate(slices).tolist() == rows.tolist()
    assert means["tokens"] == [*map(len, slices)]
    expected = np.stack([one.astype(np.float64).mean(0) for one in slices])
    assert numbers(means) == pytest.approx(expected, abs=1e-4 * abs(expected).max())


def test_prompts_that_are_no_chat_are_refused_by_name(make_engine: Any) -> None:
    llm = make_engine(dtype="float32")
    spec = {"edits": [OCEAN, {**BRIDGE, "scope": {"messages": "user"}}]}
    for prompt in ("Who are you?", {"prompt_token_ids": [1, 2, 3]}):
        with pytest.raises(SpecError, match="names chat messages") as caught:
            llm.generate([prompt], steer=spec, use_tqdm=False)
        assert (caught.value.field, caught.value.code) == ("saesteer.edits[1].scope.messages", "not_served")
    reads = {"return": {"activations": [{"site": SITE, "reduce": "message"}]}}
    with pytest.raises(SpecError, match="only chat requests with nothing but text") as caught:
        llm.generate(["Who are you?"], steer=reads, use_tqdm=False)
    assert (caught.value.field, caught.value.code) == ("saesteer.return.activations[0].reduce", "not_served")
    wrong = {"edits": [{**BRIDGE, "scope": {"messages": "usr"}}]}
    with pytest.raises(SpecError, match="did you mean 'user'"):
        llm.chat([TURNS], steer=wrong, use_tqdm=False)
