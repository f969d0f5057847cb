"""Reads of a part of an answer that are reduced, or go to consumers: as the rows of the whole answer say.

The first tests make up steps, preemptions and borders; the slow ones ask a real engine.
"""

from base64 import b64decode
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="vLLM is not installed")

from saesteer.client import numbers
from saesteer.config.config import SaesteerConfig
from saesteer.consumers.feed import Feed
from saesteer.kernels.read.rows import reduce_rows
from saesteer.language.spec import from_json
from saesteer.planning.answers import Rows
from saesteer.planning.plan import END, Catalog
from saesteer.planning.readouts import declared
from saesteer.planning.reductions import REDUCTIONS
from saesteer.planning.windows import inside
from saesteer.plugin.door.admission import Door
from tests.consumers.runners import Direct, ticket, tokens
from tests.plugin.blobs import Shelf, readout
from tests.plugin.read_requests import ask
from tests.plugin.reasoner import border_in, options, text
from tests.plugin.results import results
from tests.plugin.rule_requests import scores

PROMPT, WIDTH, SITES = 5, 3, 2
SITE = "resid_post.20"
PARTS: Any = ["reasoning", "answer"]
HOWS: Any = ["mean", "max", "last", "message"]
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def reduced(rows: torch.Tensor, how: Any) -> torch.Tensor:
    """The reduction of rows [n, d], as the device makes it of those of one step."""
    found = reduce_rows(rows, REDUCTIONS[how].device)
    return found / len(rows) if how in ("mean", "message") else found


@st.composite
def steps(draw: Any) -> tuple[list[tuple[int, int]], int]:
    """Positions that are computed one step after the other, again behind preemptions, and the tokens that come of it.

    The last step may compute positions behind the answer's last token.
    """
    generated = draw(st.integers(1, 12))
    end, computed, known = PROMPT + generated - 1, 0, PROMPT
    found: list[tuple[int, int]] = []
    while computed < end or not found:
        if draw(st.integers(0, 5)) == 5:
            computed = 0
        last = min(known, computed + draw(st.integers(1, 6)))
        if last == known:
            known += 1
        found.append((computed, last))
        computed = last
    if draw(st.booleans()):
        found.append((computed, computed + 2))
    return found, generated


@settings(deadline=None)
@given(
    computed=steps(),
    part=st.sampled_from(PARTS),
    how=st.sampled_from(HOWS),
    dtype=st.sampled_from([*DTYPES]),
    ends=st.integers(PROMPT - 1, PROMPT + 12) | st.just(END),
    streams=st.booleans(),
    kept=st.booleans(),
)
def test_a_reduction_of_a_part_is_that_of_its_rows(
    computed: Any, part: Any, how: Any, dtype: str, ends: int, streams: bool, kept: bool
) -> None:
    """Of two sites, whose rows travel as one, next to a read of the rows. Whole numbers, whose sums are exact."""
    made = [readout("activation", [(PROMPT, END)], part=part)]
    made.append(readout("activation", [(PROMPT, END)], part=part, reduce=how, starts=(0, 3), inline=not kept))
    made = [one._replace(abouts=({"site": 0}, {"site": 1}), dtype=dtype) for one in made]
    files: list[Any] = []
    fields: dict[str, Any] = {}
    rows, (found, generated) = Rows(made, fields, [Shelf(files, SITES, 4 * WIDTH)]), computed
    x = torch.randint(-40, 40, (PROMPT + 16, SITES * WIDTH), generator=torch.Generator().manual_seed(generated))
    stored = x.to(DTYPES[dtype])
    known = PROMPT

    def tell(count: int, *, final: bool) -> None:
        border = ends if ends < PROMPT + count else END  # as the tokens say that have come
        rows.tell(PROMPT, count, final=final, border=border)

    for lo, hi in found:
        if hi > PROMPT:
            first = max(lo, PROMPT)
            data = stored[first:hi].contiguous().view(torch.uint8).numpy().tobytes()
            rows.add([[number, [(first, hi)], data] for number in range(2)])
        if hi == known and known - PROMPT < generated:
            known += 1
            if streams and known - PROMPT < generated:
                tell(known - PROMPT, final=False)
    tell(generated, final=True)

    mine = [at for at in range(PROMPT, PROMPT + generated - 1) if inside(part, at, ends)]
    plain = [one for one in fields["activations"] if "tokens" not in one]
    whole = [one for one in fields["activations"] if "tokens" in one]
    for site in range(SITES):
        own = [one for one in plain if one["site"] == site]
        assert [at for one in own for at in one["positions"]] == mine
        [entry] = [one for one in whole if one["site"] == site]
        data = b64decode(entry["data"]) if not kept else files[int(entry["handle"].split()[1])][1]
        if not mine:
            assert (entry["positions"], entry["shape"], data) == ([], [0, 0], b"")
            continue
        bits = b"".join(b64decode(one["data"]) for one in own)
        read = torch.frombuffer(bytearray(bits), dtype=DTYPES[dtype]).reshape(len(mine), WIDTH)
        assert torch.equal(torch.frombuffer(bytearray(data), dtype=torch.float32), reduced(read, how))
        span, by_message = [mine[0], mine[-1] + 1], how == "message"
        assert entry["positions"] == ([span] if by_message else span)
        assert entry["tokens"] == ([len(mine)] if by_message else len(mine))
        assert (entry["dtype"], entry["shape"]) == ("float32", [1, WIDTH])
        assert entry.get("messages") == ([1] if by_message else None), "the one that opens the answer"


@settings(deadline=None)
@given(
    computed=steps(),
    part=st.sampled_from(PARTS),
    ends=st.integers(PROMPT - 1, PROMPT + 12) | st.just(END),
    how=st.sampled_from(["none", *HOWS]),
)
def test_consumers_get_the_rows_of_a_part_alone(computed: Any, part: Any, ends: int, how: Any) -> None:
    """In order, each once, as soon as its side of the border is known; or what the rows of the part come to."""
    runner, (found, generated) = Direct(), computed
    one = readout("activation", [(0, END)], part=part, reduce=how)
    rows = Rows([one], {}, fed=True)
    feed = Feed(rows, [(runner, ticket())])
    known, sent = PROMPT, 0

    def row(at: int) -> list[float]:
        return [float(at), float(-at)]

    for lo, hi in found:
        if hi > PROMPT:
            first = max(lo, PROMPT)
            rows.add([[0, [(first, hi)], np.array([row(at) for at in range(first, hi)], "<f4").tobytes()]])
            sent = max(sent, hi)
        if hi == known and known - PROMPT < generated:
            known += 1
        end = max(PROMPT, known - 1)
        feed.give(tokens, end, border=ends if ends < known else END)
        if how == "none":
            assert runner.positions == [at for at in range(PROMPT, min(sent, end)) if inside(part, at, ends)]
    length = PROMPT + generated
    feed.finish(tokens, length - 1, length, "stop", border=ends if ends < length else END)
    mine = [at for at in range(PROMPT, length - 1) if inside(part, at, ends)]
    given_rows = [one for _, one in runner.said[:-1]]
    if how == "none":
        assert runner.positions == mine
        assert [id for one in given_rows for id in one.tokens] == [token for at in mine for token in tokens(at, at + 1)]
        assert [r for one in given_rows for r in one.arrays["data"].numpy().tolist()] == [row(at) for at in mine]
    elif not mine:
        assert not given_rows
    else:
        [whole] = given_rows
        assert whole.positions.ravel().tolist() == [mine[0], mine[-1] + 1]
        expected = reduced(torch.tensor([row(at) for at in mine]), how)
        assert torch.equal(torch.from_numpy(whole.arrays["data"].numpy()[0].copy()), expected)


def test_rows_of_a_part_count_as_they_travel_and_are_kept_as_one(tmp_path: Any) -> None:
    """The border is known in the front end alone, so the worker reduces nothing."""
    config = SaesteerConfig.from_json({"max_read_mib": 1})
    door = Door("", config, None, SimpleNamespace(model_config=SimpleNamespace(dtype=torch.float16, max_model_len=64)))
    door.results = results(tmp_path, number=9)
    catalog = Catalog({}, frozenset({"resid_post.3"}), 64, width=8, parts=True)
    read = {"site": "resid_post.3", "scope": {"part": "answer"}, "reduce": "mean", "as": "handle"}
    spec = from_json({"return": {"activations": [read, {**read, "at": "after"}]}})
    readouts = door.meaning(spec, catalog, PROMPT).readouts
    found = [one.readout for one in readouts]
    assert declared(found, catalog, PROMPT + 3, 2) == [(4 - 1) * 8 * 2] * 2
    rooms = door._bound(readouts, (), catalog, PROMPT + 3, SimpleNamespace(n=1))
    assert len(rooms) == len(door.results.sweep()) == 2


@pytest.fixture
def llm(make_engine: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_engine(**options(tmp_path_factory.getbasetemp()))


def parts_of(llm: Any, output: Any) -> dict[str, range]:
    """The positions of each part that were inputs."""
    start, end = len(output.prompt_token_ids), len(output.prompt_token_ids) + len(output.outputs[0].token_ids) - 1
    cut = min(border_in(llm, output) + 1, end)
    return {"reasoning": range(start, cut), "answer": range(cut, end)}


def reading(part: str, how: str, way: str = "inline") -> dict[str, Any]:
    """Next to the rows of all that is generated, which are the same behind no edits."""
    whole = {"site": SITE, "at": "after", "scope": {"generated": True}}
    own = {"site": SITE, "scope": {"part": part}, "reduce": how, "as": way}
    return {"activations": [whole, own], "probes": [{"probe": "probe", "scope": {"part": part}}]}


def check(choice: Any, positions: range, how: str) -> Any:
    """What was reduced, against the rows; returns its entry."""
    whole, own = choice.saesteer["activations"]
    assert [*scores(choice)] == [*positions]
    if not positions:
        assert own["positions"] == [] and own["shape"] == [0, 0]
        return own
    rows = numbers(whole)[[whole["positions"].index(at) for at in positions]]
    expected = reduced(torch.from_numpy(rows), how).numpy()
    np.testing.assert_allclose(numbers(own)[0], expected, atol=1e-4 * float(np.abs(rows).max()))
    return own


@pytest.mark.slow
def test_reductions_of_each_part_and_consumers_of_it(llm: Any) -> None:
    prompt = [text("reduced", 150)]
    for how, way in (("mean", "inline"), ("max", "handle"), ("last", "inline")):
        for part in PARTS:
            (output,) = ask(llm, prompt, {"return": reading(part, how, way) | {"consumers": {"judge": {}}}}, 60)
            [choice], parts = output.outputs, parts_of(llm, output)
            positions = parts[part]
            assert len(positions) > 1, "the border is inside"
            own, span = check(choice, positions, how), [positions[0], positions[-1] + 1]
            if way == "handle":
                own["handle"].delete()  # other tests' engines share the folder
            assert own["positions"] == span and own["tokens"] == len(positions)
            whole = [*parts["reasoning"], *parts["answer"]]
            assert choice.saesteer["consumers"]["judge"]["positions"] == sorted([*whole, *positions, *span])


@pytest.mark.slow
def test_a_part_belongs_to_the_message_that_opens_the_answer(llm: Any) -> None:
    from vllm import SamplingParams

    params, turns = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), [{"role": "user", "content": "Hi"}]
    steer = {"return": reading("answer", "message")}
    for ended in (False, True):
        (output,) = llm.chat(turns, params, steer=steer, chat_template_kwargs={"ended": ended}, use_tqdm=False)
        start = len(output.prompt_token_ids)
        own = check(output.outputs[0], range(start, start + 5) if ended else range(0), "message")
        assert own["messages"] == ([1] if ended else [])
