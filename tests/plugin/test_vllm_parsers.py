"""The border between the parts of an answer with vLLM's own reasoning parsers, and what of a prompt they see."""

from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="vLLM is not installed")

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm.reasoning import ReasoningParserManager
from vllm.renderers.params import ChatParams

from saesteer.errors import SpecError
from saesteer.planning.plan import END
from saesteer.plugin import reasoning
from saesteer.plugin.door import borders
from saesteer.plugin.door.borders import Borders
from saesteer.plugin.door.conversation import Conversation
from saesteer.plugin.reasoning import NEAR, Border, border_of, closing
from tests.plugin.turns import renderer_of

PLAIN, LETTERS = 3, 24  # ids of letters
TEXT = (
    "<|plamo:begin_think:plamo|> <|plamo:end_think:plamo|> "
    "<think> </think> <tool_call> </tool_call> <|im_start|> <|im_end|> <assistant> <seed:think> </seed:think> "
    "<seed:tool_call> <mm:think> </mm:think> <minimax:tool_call> <|START_THINKING|> <|END_THINKING|> <|CHATBOT_TOKEN|> "
    "<|open|> <|close|> <|sep|> <|channel> <channel|> <|tool_call> <|turn> <turn|> <|tool_response> <|think|> "
    "<ifm|think> </ifm|think> <|tool_calls_section_begin|> <|content_text|> <|content_thinking|> <|message_model|> "
    "<|end_message|> <|content_model_end_sampling|> <|end|> <|channel|> <|message|>"
)
MARKS = TEXT.split()
SPLIT = ["Ġ</", "</", "think", ">", "final"]
IDS = {name: PLAIN + LETTERS + at for at, name in enumerate([*MARKS, *SPLIT])}
SEVERAL = [[IDS["</"], IDS["think"], IDS[">"]], [IDS["<|open|>"], IDS["think"], IDS["<|sep|>"]]]
SEVERAL += [[IDS["<|close|>"], IDS["think"], IDS["<|sep|>"]], [IDS["<|channel|>"], IDS["final"], IDS["<|message|>"]]]
THINKS = {"chat_template_kwargs": {"thinking": True, "enable_thinking": True, "reasoning_effort": "high"}}
THINKS_NOT = {"chat_template_kwargs": {"thinking": False, "enable_thinking": False}}
BLIND = reasoning._BLIND | {"openai_gptoss"}


def _tokenizer() -> Any:
    letters = {f"l{n}": PLAIN + n for n in range(LETTERS)}
    words = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2, **letters, **IDS}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    found = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    found.add_special_tokens({"additional_special_tokens": MARKS})
    return found


TOKENIZER = _tokenizer()


def made(name: str, given: Any) -> Any:
    return ReasoningParserManager.get_reasoning_parser(name)(TOKENIZER, **given)


def _parsers() -> list[str]:
    """The registered parsers that a tokenizer with these marks is enough for."""
    found = []
    for name in ReasoningParserManager.list_registered():
        try:
            made(name, {})
        except (ImportError, ValueError, RuntimeError, KeyError):  # Cohere needs a package of its own before 0.31
            continue
        found.append(name)
    return found


PARSERS = _parsers()


def by_whole(parser: Any, prompt: list[int], generated: list[int]) -> int:
    """The definition: the parser sees all tokens up to each one."""
    if parser.is_reasoning_end(prompt):
        return len(prompt) - 1
    for end, new in enumerate(generated, 1):
        if parser.is_reasoning_end_streaming(prompt + generated[:end], [new]):
            return len(prompt) + end - 1
    return END


runs = st.builds(
    lambda letter, count: [letter] * count,
    st.integers(PLAIN, PLAIN + LETTERS - 1),
    st.sampled_from([1, 2, NEAR - 1, NEAR, 5 * NEAR]),
)
ENDS = [[IDS[name]] for name in ("</think>", "<think>", "<|END_THINKING|>", "<|START_THINKING|>")]
pieces = st.one_of(runs, st.sampled_from([*([one] for one in IDS.values()), *SEVERAL]), st.sampled_from(ENDS))
texts = st.lists(pieces, max_size=6).map(lambda several: [*chain.from_iterable(several)])


@pytest.mark.parametrize("name", PARSERS)
def test_each_token_that_closes_is_one_behind_which_the_parser_waits_no_more(name: str) -> None:
    for token in closing(made(name, THINKS)):
        assert by_whole(made(name, THINKS), [PLAIN], [PLAIN, token]) == 2


@pytest.mark.parametrize("given_", [{}, THINKS, THINKS_NOT], ids=["", "thinks", "thinks not"])
@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=60, deadline=None)
@given(prompt=texts, generated=texts, step=st.integers(1, 9))
def test_few_tokens_tell_what_all_of_them_tell(
    name: str, given_: Any, prompt: list[int], generated: list[int], step: int
) -> None:
    parser = made(name, given_)
    if name == "minimax_m3":  # what has ended the reasoning of an earlier turn ends every later one at its first token
        prompt = [one for one in prompt if one != IDS["</mm:think>"]]
    if name.startswith("cohere"):  # a start far inside an answer is not looked for
        generated = [one for at, one in enumerate(generated) if at < NEAR or one != IDS["<|START_THINKING|>"]]
    if name == "step3p5":  # until 0.30, a start directly behind an end is forgotten
        generated = [one for one in generated if one != IDS["<think>"]]
    border = Border(parser, prompt)
    for end in range(0, len(generated) + step, step):
        found = border.find(generated[:end])
    assert found == by_whole(made(name, given_), prompt, generated)


def server(name: str) -> Any:
    return SimpleNamespace(
        structured_outputs_config=SimpleNamespace(reasoning_parser=name, reasoning_parser_plugin=""),
        model_config=None,
        speculative_config=None,
    )


@pytest.fixture
def tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reasoning, "cached_tokenizer_from_config", lambda _: TOKENIZER)


@pytest.mark.usefixtures("tokenizer")
@pytest.mark.parametrize("name", PARSERS)
def test_parsers_that_do_not_look_at_tokens_are_refused(name: str) -> None:
    """GPT-OSS: any token would end the reasoning; the others never find an end, or only that of a tool call."""
    if name in BLIND and not (name == "openai_gptoss" and not made(name, {}).is_reasoning_end([])):
        with pytest.raises(SpecError, match=rf"{name}' does not look for the end of the reasoning in tokens") as caught:
            Borders(server(name)).told([PLAIN], None, {})
        assert (caught.value.field, caught.value.code) == ("saesteer", "not_served")
    else:
        assert Borders(server(name)).told([PLAIN], None, {}) == ({}, 0)
        parser = made(name, THINKS)
        assert any(
            by_whole(parser, [PLAIN], ids) < END
            for ids in ([[IDS["<mm:think>"], one] for one in IDS.values()] + SEVERAL)
        )


def chat(turns: list[dict[str, Any]], **template: Any) -> tuple[Conversation, list[int]]:
    """A chat by a template that keeps the reasoning of earlier turns, as in a tool loop, and its prompt."""

    def rendered(several: Any, given: Any) -> list[int]:
        ids: list[int] = []
        for turn in several:
            ids += [IDS["<|im_start|>"], PLAIN, *turn["content"], IDS["<|im_end|>"]]
        if given.get("continue_final_message"):
            ids.pop()
        return ids + [IDS["<|im_start|>"], PLAIN] * given.get("add_generation_prompt", False)

    def render(several: Any, params: Any, _: Any) -> Any:
        return None, [{"prompt_token_ids": rendered(several[0], params.chat_template_kwargs)}]

    given = {"add_generation_prompt": True, **template}
    return Conversation(renderer_of(render), turns, ChatParams(chat_template_kwargs=given), None), rendered(
        turns, given
    )


THINK, ENDED = IDS["<think>"], IDS["</think>"]
USER: dict[str, Any] = {"role": "user", "content": [PLAIN] * 3}
CALL: dict[str, Any] = {"role": "assistant", "content": [THINK, PLAIN, ENDED, PLAIN]}
RESULT: dict[str, Any] = {"role": "tool", "content": [PLAIN]}


@pytest.mark.usefixtures("tokenizer")
@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1", "step3", "ernie45", "kimi_k2", "minimax_m2_append_think"])
def test_the_reasoning_of_an_earlier_turn_belongs_to_no_part(name: str) -> None:
    conversation, ids = chat([USER, CALL, RESULT])
    told = Borders(server(name)).told(ids, conversation, {})
    border = border_of(server(name), told, ids)
    assert (told[1], border.found) == (len(ids) - 2, END)
    assert border.find([THINK, PLAIN, ENDED, PLAIN]) == len(ids) + 2
    where = Borders(server(name)).edited("saesteer.edits[0]", told, END)
    assert ENDED in where[0] and where[1] == END, "the device looks for it, too"


@pytest.mark.usefixtures("tokenizer")
@pytest.mark.parametrize(
    ("said", "ended"), [([THINK, PLAIN], False), ([THINK, PLAIN, ENDED, PLAIN], True), ([PLAIN], False)]
)
def test_a_message_that_goes_on_is_a_part_of_the_answer_s_own_turn(said: list[int], ended: bool) -> None:
    turns = [USER, CALL, RESULT, {"role": "assistant", "content": said}]
    conversation, ids = chat(turns, continue_final_message=True, add_generation_prompt=False)
    told = Borders(server("deepseek_r1")).told(ids, conversation, {})
    assert told[1] == len(ids) - len(said) - 2
    assert border_of(server("deepseek_r1"), told, ids).found == (len(ids) - 1 if ended else END)


@pytest.mark.usefixtures("tokenizer")
def test_all_of_a_prompt_counts_where_its_last_message_is_not_known() -> None:
    """A prompt that is no chat, or a template that cannot tell."""
    conversation, ids = chat([USER, CALL, RESULT])
    blind = Conversation(renderer_of(lambda *_: 1 / 0), conversation.messages, conversation.chat_params, None)
    for one in (None, blind):
        told = Borders(server("deepseek_r1")).told(ids, one, {})
        assert border_of(server("deepseek_r1"), told, ids).found == len(ids) - 1


@pytest.mark.usefixtures("tokenizer")
def test_what_clients_invent_for_a_parser_is_neither_kept_nor_taken_without_limit() -> None:
    door = Borders(server("deepseek_r1"))
    for n in range(3 * borders._KNOWN):
        told = door.told([PLAIN], None, {"x": "é\ud800" * 1000 + str(n)})
        assert door.edited("saesteer.edits[0]", told, END) == ((ENDED,), END)
    assert len(door._closing) <= borders._KNOWN and all(len(key) == 32 for key in door._closing)
    for template, many, long in (
        ({"x": "a" * 2**16}, 1, 2**16 + 1),
        ({f"{n:02}": True for n in range(65)}, 65, 65 * 6),
    ):
        with pytest.raises(SpecError) as caught:
            door.told([PLAIN], None, template)
        assert (caught.value.field, caught.value.code) == ("saesteer", "too_many")
        assert f"{many} of them with {long} characters, expected at most 64 and 65536" in str(caught.value)
