"""Where the reasoning ends, found on the device: the kernel and its reference against the whole sequence of tokens.

Sequences come in steps of any length, are preempted and computed again, partly from a cache, and change their rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from saesteer.kernels import layout, ops
from saesteer.kernels.reference import border_ref_, close_ref_
from saesteer.kernels.step.border import border_triton

CLOSES = (7, 8)
WINDOWS = [(0, layout.NEVER, 0), (3, 9, layout.ANSWER), (0, layout.NEVER, layout.ANSWER), (2, 6, layout.REASONING)]
SITES, ROWS = 2, 4


@dataclass
class Sequence:
    """A request: its tokens, how many are prompt, and the windows and parts of its entries."""

    ids: list[int]
    prompt: int
    closing: tuple[int, int]
    entries: list[tuple[int, int, int]]
    first: int  # of the entries are at the first site, all others at the second
    computed: int = 0
    row: int = 0

    def border(self) -> int:
        """Of all its tokens, by looking at them."""
        found = (at for at in range(self.prompt, len(self.ids)) if self.ids[at] in self.closing)
        return next(found, layout.NEVER - 1)

    def holds(self, position: int) -> list[bool]:
        """Which entries edit a position."""
        inside = {0: True, layout.ANSWER: position > self.border(), layout.REASONING: position <= self.border()}
        return [lo <= position < hi and inside[part] for lo, hi, part in self.entries]

    def words(self) -> Tensor:
        """A new row, for what is not computed yet: the border of a cached token is known from its id."""
        words = torch.zeros(layout.width(SITES, len(WINDOWS) + 1), dtype=torch.int32)
        words[0], words[layout.FROM] = len(self.entries), self.prompt
        words[layout.CLOSING : layout.CLOSING + 2] = torch.tensor(self.closing)
        behind = layout.head(SITES)
        for site, share in enumerate((self.entries[: self.first], self.entries[self.first :])):
            begin = layout.one_at(site) if len(share) == 1 else behind
            end = begin + layout.ENTRY * len(share)
            words[span_of(site)] = torch.tensor([begin, end])
            behind += layout.ENTRY * len(share) * (len(share) > 1)
        for number, (entry, (lo, hi, part)) in enumerate(zip(lines_of(words), self.entries, strict=True)):
            entry[layout.LO], entry[layout.HI] = lo, ~hi if part == layout.ANSWER else hi
            entry[layout.FLAGS] = part | 3 | number << layout.COUNTER
        if self.border() < self.computed:
            close_ref_(words, SITES, self.border())
        return words


def span_of(site: int) -> slice:
    """The words BEGIN and END of a site."""
    return slice(layout.HEAD + layout.SPAN * site, layout.HEAD + layout.SPAN * site + 2)


def lines_of(words: Tensor) -> list[Tensor]:
    """The entries of a row, site by site."""
    spans = [words[span_of(site)].tolist() for site in range(SITES)]
    return [words[at : at + layout.ENTRY] for begin, end in spans for at in range(begin, end, layout.ENTRY)]


def run_steps(run: Callable[..., None], device: torch.device, data: st.DataObject) -> None:
    """Steps over random sequences; after each, every token of the step has the entries that it should have."""
    token = st.integers(0, 9)
    sequences = []
    for _ in range(data.draw(st.integers(1, ROWS - 1), label="sequences")):
        ids = data.draw(st.lists(token, min_size=2, max_size=10), label="ids")
        entries = data.draw(st.lists(st.sampled_from(WINDOWS), min_size=0, max_size=4), label="entries")
        closing = data.draw(st.sampled_from([CLOSES, (7, 7)]), label="closing")
        first = data.draw(st.integers(0, len(entries)), label="at the first site")
        prompt = data.draw(st.integers(1, len(ids) - 1), label="prompt")
        sequences.append(Sequence(ids, prompt, closing, entries, first))
    table = torch.zeros(ROWS + 1, layout.width(SITES, len(WINDOWS) + 1), dtype=torch.int32, device=device)
    while running := [one for one in sequences if one.computed < len(one.ids)]:
        for one in running:
            if not one.row or data.draw(st.integers(0, 9), label="preempted") == 9:
                held = {other.row for other in sequences}
                one.row = data.draw(
                    st.sampled_from([row for row in range(1, ROWS + 1) if row not in held]), label="row"
                )
                one.computed = data.draw(st.integers(0, one.computed), label="cached")
                table[one.row] = one.words().to(device)
        batch = data.draw(st.lists(st.sampled_from(running), min_size=1, unique_by=id), label="batch")
        counts = [data.draw(st.integers(1, len(one.ids) - one.computed), label="tokens") for one in batch]
        places = [(one, one.computed + n) for one, count in zip(batch, counts, strict=True) for n in range(count)]
        starts = torch.tensor([0, *counts]).cumsum(0)
        before = table.clone()
        run(
            table,
            torch.tensor([one.row - 1 for one in batch], dtype=torch.int32, device=device),
            1,
            starts.to(torch.int32).to(device),
            torch.tensor([one.ids[at] for one, at in places] + [7], dtype=torch.int32, device=device),
            torch.tensor([at for _, at in places] + [99], device=device),
            SITES,
            len(batch),
        )
        others = [row for row in range(ROWS + 1) if row not in {one.row for one in batch}]
        assert torch.equal(table[others], before[others]), "rows that are not in the batch keep their words"
        for one, at in places:
            lines = lines_of(table[one.row].cpu())
            found = [bool(entry[layout.LO] <= at < entry[layout.HI]) for entry in lines]
            assert found == one.holds(at), (at, one)
            assert [int(entry[layout.FLAGS]) >> layout.COUNTER for entry in lines] == [*range(len(lines))]
        for one, count in zip(batch, counts, strict=True):
            one.computed += count
            assert int(table[one.row, layout.FROM]) == (0 if one.border() < one.computed else one.prompt)


RUNS = [pytest.param(border_triton, id="kernel"), pytest.param(border_ref_, id="reference")]
EXAMPLES = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("run", RUNS)
@EXAMPLES
@given(data=st.data())
def test_each_token_has_the_edits_of_its_part(run: Any, device: torch.device, data: st.DataObject) -> None:
    run_steps(run, torch.device("cpu") if run is border_ref_ else device, data)


@pytest.mark.parametrize("run", RUNS)
def test_the_border_is_in_a_long_step(run: Any, device: torch.device) -> None:
    """Longer than a block of the kernel, in a row with more entries than a block, read from int64 tensors."""
    place = torch.device("cpu") if run is border_ref_ else device
    count, border, most = 2500, 2100, 1500
    words = torch.zeros(2, layout.width(1, most), dtype=torch.int32)
    words[1, span_of(0)] = torch.tensor([layout.head(1), layout.head(1) + layout.ENTRY * most])
    words[1, 0], words[1, layout.FROM], words[1, layout.CLOSING : layout.CLOSING + 2] = most, 100, 7
    entries = words[1, layout.head(1) :].view(most, layout.ENTRY)
    entries[:, layout.HI], entries[:, layout.FLAGS] = ~layout.NEVER, layout.ANSWER
    entries[::2, layout.HI], entries[::2, layout.FLAGS] = layout.NEVER, layout.REASONING
    tokens = torch.zeros(count, dtype=torch.int64)
    tokens[[50, border, border + 1, 2400]] = 7
    table = words.to(place)
    slots, starts = torch.tensor([1], device=place), torch.tensor([0, count], device=place)
    run(table, slots, 0, starts, tokens.to(place), torch.arange(count, device=place), 1, 1)
    found = table.cpu()[1, layout.head(1) :].view(most, layout.ENTRY)
    assert (found[1::2, layout.LO] == border + 1).all() and (found[1::2, layout.HI] == layout.NEVER).all()
    assert (found[::2, layout.LO] == 0).all() and (found[::2, layout.HI] == border + 1).all()


def test_wrong_arguments_are_named(device: torch.device) -> None:
    ints = torch.zeros(4, dtype=torch.int32, device=device)
    table = torch.zeros(2, 64, dtype=torch.int32, device=device)
    good: list[Any] = [table, ints, 0, ints, ints, ints, 2, 1]
    ops.border_(*good)
    for at, bad, words in (
        (0, table.long(), "table is torch.int64"),
        (1, ints.float(), "slots is torch.float32"),
        (3, ints[:1], "query_start_loc is torch.int32 \\(1,\\)"),
        (4, ints.float(), "tokens is torch.float32"),
        (5, ints[::2], "positions is"),
        (6, 3, "sites 3: expected at most those of a row of 64 words"),
    ):
        with pytest.raises(ValueError, match=words):
            ops.border_(*[*good[:at], bad, *good[at + 1 :]])
