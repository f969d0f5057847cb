"""Edits of a part of an answer, on an engine without vLLM: as edits of the positions that turn out to be the part.

Tokens come in steps of any length, and again after a preemption, in a row that another request may have had.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from saesteer.engine.engine import Engine
from saesteer.engine.parts import Border
from saesteer.errors import SpecError
from saesteer.kernels import layout
from saesteer.language.spec import from_json
from saesteer.planning.plan import END
from saesteer.planning.windows import inside, of_part
from tests.parts import CLOSES, EDITS, PROMPT, TOKENS, explicit
from tests.rows import row_of
from tests.small_engine import make_engine
from tests.small_world import NARROW, WIDTH

PARTS = ["reasoning", "answer"]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    made = make_engine(tmp_path_factory.mktemp("parts"))
    made.catalog = replace(made.catalog, parts=True)
    return made


def step(engine: Engine, row: int, content: Any, x: torch.Tensor, start: int, ids: list[int]) -> torch.Tensor:
    """The streams of some tokens behind all sites; `ids` are those of the step."""
    starts = torch.tensor([0, len(ids)], dtype=torch.int32)
    engine.positions[: len(ids)] = torch.arange(start, start + len(ids))
    engine.schedule([row], 0, starts, 1, len(ids), content.kinds)
    if content.parts:
        engine.find_borders([row], 0, starts, 1, torch.tensor(ids, dtype=torch.int32))
    stream = x[start : start + len(ids)].clone()
    for site in NARROW:
        engine.edit(engine.sites[site], stream)
    return stream


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_part_is_the_positions_that_it_turns_out_to_be(engine: Engine, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.sampled_from([1, 2, 3, 4, CLOSES]), min_size=TOKENS, max_size=TOKENS), label="ids")
    chosen = data.draw(st.lists(st.sampled_from(EDITS), min_size=1, max_size=4, unique_by=repr), label="edits")
    parts = [data.draw(st.sampled_from(PARTS), label="part") for _ in chosen]
    border = next((at for at in range(PROMPT, TOKENS) if ids[at] == CLOSES), END)
    x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(len(chosen)))

    spec = {"edits": [{**edit, "scope": {"part": part}} for edit, part in zip(chosen, parts, strict=True)]}
    try:
        content = row_of(engine, from_json(spec), PROMPT)
    except SpecError:  # some edits cannot follow others
        reject()
    assert content is not None and content.parts
    waiting, row, computed = Border((CLOSES,), PROMPT), 1, 0
    found = torch.zeros_like(x)
    engine.fill(row, content, waiting)
    while computed < TOKENS:
        if data.draw(st.integers(0, 9), label="preempted") == 9:
            engine.fill(row, None)
            row, computed = 1 + row % 4, data.draw(st.integers(0, computed), label="cached")
            engine.fill(row, content, waiting.after(ids[:computed], computed))
        count = data.draw(st.integers(1, TOKENS - computed), label="tokens")
        found[computed : computed + count] = step(engine, row, content, x, computed, ids[computed : computed + count])
        computed += count
    engine.fill(row, None)

    wanted = x.clone()
    edits = [explicit(edit, part, border) for edit, part in zip(chosen, parts, strict=True)]
    if said := [edit for edit in edits if edit is not None]:
        plain = row_of(engine, from_json({"edits": said}), PROMPT)
        assert plain is not None and not plain.parts
        engine.fill(1, plain)
        wanted = step(engine, 1, plain, x, 0, ids)
        engine.fill(1, None)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_what_the_prompt_has_ended_is_known_from_the_start(engine: Engine) -> None:
    """No token is looked for, though one comes that would end the reasoning."""
    ids = [1] * 6 + [CLOSES] + [1] * 5
    x = torch.randn(TOKENS, WIDTH)
    for part in PARTS:
        content = row_of(engine, from_json({"edits": [{**EDITS[0], "scope": {"part": part}}]}), PROMPT)
        engine.fill(2, content, Border((), PROMPT, PROMPT - 1))
        changed = (step(engine, 2, content, x, 0, ids) != x).any(1)
        assert changed.tolist() == [part == "answer" and at >= PROMPT for at in range(TOKENS)]
        assert engine.table[2, layout.FROM] == 0


def test_the_host_looks_at_tokens_that_no_step_computes() -> None:
    waiting = Border((5, 6), 3)
    ids = [5, 5, 5, 1, 6, 5]
    assert waiting.after(ids, 3).found == waiting.after(ids, 4).found == END, "tokens of the prompt do not count"
    assert waiting.after(ids, 5).found == waiting.after(ids, 6).found == 4
    assert waiting.after(ids, 6).after(ids, 4).found == END, "preempted again, and less of it is cached"
    ended = Border((), 3, 2)
    assert ended.after(ids, 6) is ended


@pytest.mark.parametrize("border", [2, 5, END])
def test_positions_of_a_part(border: int) -> None:
    for part in (None, "reasoning", "answer"):
        low, high = of_part(part, border)
        assert [low <= at < high for at in range(9)] == [inside(part, at, border) for at in range(9)]
