"""Parts of an answer: the border that vLLM's reasoning parser tells, found token by token. Slow: on a real engine."""

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from types import SimpleNamespace
from typing import Any

import pytest

from saesteer import hf
from saesteer.config.config import KEY
from saesteer.errors import SpecError
from saesteer.language.spec import from_json
from saesteer.planning.plan import END
from saesteer.plugin import reasoning
from saesteer.plugin.door import admission, borders, conversation, frontend
from saesteer.plugin.reasoning import BORDER, Border, closing
from tests.plugin.conftest import BRIDGE, CUDA, OCEAN, answer, preemptions
from tests.plugin.read_requests import ask
from tests.plugin.reasoner import border_in, options, text
from tests.plugin.rule_requests import ALWAYS, flag, rule, scores
from tests.spec.reads import CATALOG

OPENS, CLOSES = 1, 2
CLOSE = 5e-2 if CUDA else 2e-3  # of logprobs
SCORES = 5.0 if CUDA else 1e-2  # of scores, whose rows and probe are 200 and 24 long: a product of tf32 errs by 1e-3


class Parser:
    """As vLLM's: what opened last says for a prompt, the closing token for what is generated."""

    def __init__(self, *closing: int) -> None:
        self.closing = closing or (CLOSES,)
        self.vocab = {str(token): token for token in range(12)}

    def is_reasoning_end(self, ids: list[int]) -> bool:
        last = [one for one in ids if one in (OPENS, CLOSES)][-1:]
        return last == [CLOSES]

    def is_reasoning_end_streaming(self, ids: list[int], new: list[int]) -> bool:
        assert ids[-len(new) :] == new, "all tokens up to here"
        return any(token in new for token in self.closing)


@pytest.mark.parametrize(
    ("prompt", "generated", "found"),
    [
        ([7, 8], [5, 6, CLOSES, 5, CLOSES, 6], 4),
        ([7, 8], [5, 6], END),
        ([7, 8], [], END),
        ([7, CLOSES, 8], [5, CLOSES], 2),
        ([7, CLOSES, OPENS], [5, CLOSES], 4),
        ([], [CLOSES], 0),
    ],
)
def test_where_the_border_is(prompt: list[int], generated: list[int], found: int) -> None:
    whole = Border(Parser(), prompt)
    assert whole.find(generated) == whole.find(generated) == found
    growing = Border(Parser(), prompt)
    for count in range(len(generated) + 1):
        border = growing.find(generated[:count])
        assert border == (found if found < len(prompt) + count else END)


class Listing(Parser):
    """Those of newer versions list what they look for; a part of it may end nothing here."""

    reasoning_end_token_ids = frozenset({3, 2})


class Several(Parser):
    """The reasoning ends with two tokens in a row."""

    def is_reasoning_end_streaming(self, ids: list[int], new: list[int]) -> bool:
        return ids[-2:] == [CLOSES, CLOSES]


@pytest.mark.parametrize(
    ("parser", "found"),
    [
        (Parser(), (CLOSES,)),
        (Parser(7, 3), (3, 7)),
        (Parser(1, 2, 3), ()),
        (Parser(*range(12)), ()),
        (Listing(2, 3), (2, 3)),
        (Listing(3, 5), (3,)),
        (Several(), ()),
    ],
)
def test_which_tokens_end_the_reasoning_by_themselves(parser: Any, found: tuple[int, ...]) -> None:
    assert closing(parser) == found


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Admits a spec with a parser: what goes to the scheduler and the worker."""

    def admit(parser: Any, prompt: list[int], edits: list[Any], *, parts: bool = True, guesses: Any = None) -> Any:
        for place in (borders, reasoning):
            monkeypatch.setattr(place, "parser_of", lambda *_: parser)
        asked = SimpleNamespace(
            prompt_token_ids=prompt, sampling_params=SimpleNamespace(extra_args=None, max_tokens=None)
        )
        config: Any = SimpleNamespace(speculative_config=guesses, model_config=None)
        admission.Door(vllm_config=config).admit(from_json({"edits": edits}), replace(CATALOG, parts=parts), asked)
        return asked.sampling_params.extra_args[KEY]

    return admit


CLAMP = {"op": "clamp", "dictionary": "gs15", "feature": 1, "value": 2.0}


def test_what_the_device_is_to_look_for(door: Any) -> None:
    edits = [{**CLAMP, "scope": {"part": "answer"}}]
    assert door(Parser(), [5, CLOSES, OPENS, 5], edits)[BORDER] == ((CLOSES,), END), "an older turn does not count"
    assert door(Parser(3, 7), [5], edits)[BORDER] == ((3, 7), END)
    assert door(Several(), [5, OPENS, CLOSES], edits)[BORDER] == ((), 2), "whatever would end it later"
    assert BORDER not in door(Parser(), [5], [CLAMP])


@pytest.mark.parametrize(
    ("parser", "parts", "words"),
    [
        (Parser(), False, "no reasoning parser is there to tell it; start the server with --reasoning-parser"),
        (Several(), True, "no single token ends the reasoning (or more than 2); expected it in reads and rules only"),
        (Parser(1, 2, 3), True, "no single token ends the reasoning (or more than 2)"),
    ],
)
def test_edits_of_a_part_that_are_refused(door: Any, parser: Any, parts: bool, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        door(parser, [5, 6], [CLAMP, {**CLAMP, "feature": 2, "scope": {"part": "answer"}}], parts=parts)
    assert (caught.value.field, caught.value.code) == ("saesteer.edits[1].scope.part", "not_served")
    assert words in str(caught.value)


def test_edits_of_a_part_are_refused_where_tokens_are_guessed(door: Any) -> None:
    """A wrong guess would end the reasoning for good."""
    edits = [{**CLAMP, "scope": {"part": "answer"}}]
    with pytest.raises(SpecError, match=r"scope.part: .*this server guesses tokens \(speculative decoding\)"):
        door(Parser(), [5, 6], edits, guesses=object())


@pytest.mark.parametrize("kind", ["token", "multimodal"])
def test_what_a_chat_says_to_its_template_is_said_to_the_parser_also_next_to_an_image(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.renderers.params import ChatParams

    said, prompt = {"add_generation_prompt": True, "thinking": False}, {"type": kind, "prompt_token_ids": [5]}

    def render_chat(renderer: Any) -> None:
        raise AssertionError

    renderer = type("Renderer", (), {"render_chat": wraps(render_chat)(lambda _: None)})()
    conversation._remember(renderer, [prompt], [[{"role": "user"}]], ChatParams(chat_template_kwargs=said))
    heard: list[Any] = []

    def parser_of(_: Any, given: Any) -> Any:
        heard.append(given)
        return Parser()

    monkeypatch.setattr(borders, "parser_of", parser_of)
    monkeypatch.setattr(reasoning, "parser_of", lambda *_: Parser())
    config: Any = SimpleNamespace(speculative_config=None, model_config=None)
    catalog = replace(CATALOG, parts=True)
    names: Any = SimpleNamespace(hold=lambda: SimpleNamespace(catalog=catalog), count=lambda *_: None)
    processor = SimpleNamespace(saesteer_names=names, saesteer_door=admission.Door(vllm_config=config))
    spec = {"edits": [{**CLAMP, "scope": {"part": "answer"}}]}
    taken = SimpleNamespace(extra_args={"saesteer": spec}, n=1, max_tokens=None)
    check = frontend._checking(lambda *_: SimpleNamespace(prompt_token_ids=[5], sampling_params=taken))
    check(processor, "r", prompt, taken)
    assert heard[0] == {"chat_template_kwargs": said}


@pytest.fixture
def llm(make_engine: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_engine(**options(tmp_path_factory.getbasetemp()))


@pytest.mark.slow
def test_reads_and_rules_of_each_part(llm: Any) -> None:
    prompt = [text("parts", 150)]
    (plain,) = ask(llm, prompt, {"return": {"probes": ["probe"]}}, 60)
    (whole,), start = plain.outputs, len(plain.prompt_token_ids)
    end = llm.get_tokenizer().encode(" the")[-1]
    border = start + list(whole.token_ids).index(end)
    assert start < border < start + 50
    found = scores(whole)
    for part, inside in (("reasoning", range(start, border + 1)), ("answer", range(border + 1, start + 59))):
        reads = {"probes": [{"probe": "probe", "scope": {"part": part}}], "hidden": {"scope": {"part": part}}}
        flagged = rule("flag", ALWAYS, 3, part=part)
        (output,) = ask(llm, prompt, {"edits": [flagged], "return": reads}, 60)
        (choice,) = output.outputs
        assert choice.token_ids == whole.token_ids
        assert scores(choice) == pytest.approx({at: found[at] for at in inside}, rel=1e-3, abs=SCORES)
        assert choice.saesteer["hidden"][0]["positions"] == [*inside]
        assert choice.saesteer["flags"] == ([flag(0, inside[2])] if len(inside) > 2 else [])
        (output,) = ask(llm, prompt, {"edits": [rule("stop", ALWAYS, part=part)]}, 60)
        assert len(output.outputs[0].token_ids) == inside[0] + 2 - start
    (output,) = ask(llm, prompt, {"edits": [rule("flag", ALWAYS, part="answer")]}, border - start)
    assert output.outputs[0].saesteer["flags"] == [], "the border was not reached"


@pytest.mark.slow
def test_what_the_chat_template_is_given_reaches_the_parser(llm: Any) -> None:
    from vllm import SamplingParams

    params, turns = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), [{"role": "user", "content": "Hi"}]
    steer = {
        "edits": [rule("flag", ALWAYS, part="answer")],
        "return": {"probes": [{"probe": "probe", "scope": {"part": "answer"}}]},
    }
    for ended in (False, True):
        (output,) = llm.chat(turns, params, steer=steer, chat_template_kwargs={"ended": ended}, use_tqdm=False)
        said, start = output.outputs[0].saesteer, len(output.prompt_token_ids)
        assert said["flags"] == ([flag(0, start)] if ended else [])
        assert [*scores(output.outputs[0])] == ([*range(start, start + 3)] if ended else [])


REASONING, ANSWER = {"part": "reasoning"}, {"part": "answer"}
PULL = {"op": "add", "vector": "any", "site": "resid_post.15", "scale": 0.6}
EDITS: dict[str, list[Any]] = {
    "reasoning": [{**OCEAN, "value": 0.4, "scope": REASONING}],
    "answer": [{**PULL, "scope": ANSWER}],
    "both": [{**PULL, "scope": REASONING}, {**OCEAN, "value": 0.4, "scope": ANSWER}],
    "next to others": [
        {**PULL, "scope": ANSWER},
        {**OCEAN, "value": 0.2, "scope": {"generated": True}},
        {**BRIDGE, "value": 0.2, "scope": {"prompt": True}},
    ],
}


def spelled_out(edits: list[Any], border: int, start: int, end: int) -> list[Any]:
    """The same edits by their positions, as far as these have tokens: what a reader of the answer would write."""
    found = []
    for edit in edits:
        spans = {"reasoning": (start, border + 1), "answer": (border + 1, END)}.get(edit["scope"].get("part"))
        if spans is None:
            found.append(edit)
        elif spans[0] < min(spans[1], end):
            found.append({**edit, "scope": {"positions": [[spans[0], min(spans[1], end)]]}})
    return found


def check_edited(llm: Any, oracle: hf.Model, output: Any, edits: list[Any]) -> int:
    """An answer against Transformers with the edits spelled out, teacher-forced; returns the border."""
    (choice,), prompt = output.outputs, output.prompt_token_ids
    start, border = len(prompt), border_in(llm, output)
    ids = [*prompt, *choice.token_ids]
    said = spelled_out(edits, border, start, len(ids))
    wanted = oracle.logits(ids, steer={"edits": said}, prompt_len=start).log_softmax(-1)
    for at, (token, logprob) in enumerate(answer(choice), start):
        assert logprob == pytest.approx(float(wanted[at - 1, token]), abs=CLOSE), (at, border, start)
    inputs = len(ids) - 1
    for one, edit in zip(choice.saesteer["applied"], edits, strict=True):
        assert one.get("part") == edit["scope"].get("part")
        if edit["op"] == "add":  # a clamp may find its value
            low, high = (start, border + 1) if edit["scope"] == REASONING else (border + 1, inputs)
            assert one["tokens_edited"] + one["tokens_cached"] == max(0, min(high, inputs) - low)
    return border


@pytest.mark.slow
@pytest.mark.parametrize("kind", EDITS)
def test_edits_of_each_part(llm: Any, oracle: hf.Model, kind: str) -> None:
    """Of a prompt in chunks, next to neighbours that are not edited. On a GPU each step is prepared
    before the last one's tokens are known; on a CPU vLLM does not.
    """
    assert llm.llm_engine.vllm_config.scheduler_config.async_scheduling == CUDA
    edits, prompts = EDITS[kind], [text(f"{kind} {n}", 300) for n in range(3)]
    alone = ask(llm, prompts[2:], None, 60)
    plain, edited, neighbour = ask(llm, [prompts[1], prompts[0], prompts[2]], [None, {"edits": edits}, None], 60)
    assert len(edited.prompt_token_ids) > 64, "in chunks"
    border = check_edited(llm, oracle, edited, edits)
    start = len(edited.prompt_token_ids)
    assert start <= border < start + 50, "the border is inside"
    assert not hasattr(plain, "saesteer")
    for one, two in zip(answer(neighbour.outputs[0]), answer(alone[0].outputs[0]), strict=True):
        assert one == pytest.approx(two, abs=CLOSE)


@pytest.mark.slow
def test_the_border_is_exact_to_the_token(llm: Any, oracle: hf.Model) -> None:
    """Edits that begin one position earlier or later give other numbers, so the other tests would see it."""
    edits = [{**one, "scale": 2} for one in EDITS["answer"]]
    (output,) = ask(llm, [text("exact", 200)], {"edits": edits}, 60)
    border, start = check_edited(llm, oracle, output, edits), len(output.prompt_token_ids)
    if CUDA:
        return  # one position changes logprobs by 0.03, which is less than CLOSE
    ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    found = dict(enumerate((logprob for _, logprob in answer(output.outputs[0])), start))
    for shift in (-1, 1):
        said = spelled_out(edits, border + shift, start, len(ids))
        wanted = oracle.logits(ids, steer={"edits": said}, prompt_len=start).log_softmax(-1)
        away = [abs(found[at] - float(wanted[at - 1, ids[at]])) for at in range(border + 1, len(ids))]
        assert max(away) > 3 * CLOSE, shift


@pytest.mark.slow
def test_parts_of_a_crowd_that_preempts(llm: Any, oracle: hf.Model) -> None:
    """Requests join, end and are preempted in mid-answer; rows go to others, and what returns may be in the cache."""
    assert llm.reset_prefix_cache()
    kinds = [*EDITS, None]
    wanted = [EDITS.get(str(kinds[n % len(kinds)])) for n in range(12)]
    specs = [None if one is None else {"edits": one} for one in wanted]
    prompts = [text(f"crowd {n}", 100 + 70 * (n % 5)) for n in range(12)]
    before = preemptions(llm)
    outputs = ask(llm, prompts, specs, [60 + 9 * (n % 7) for n in range(12)])
    assert preemptions(llm) > before, "the cache was small enough to preempt"
    borders = [check_edited(llm, oracle, one, own) for one, own in zip(outputs, wanted, strict=True) if own is not None]
    assert sum(border < END for border in borders) > len(borders) // 2
