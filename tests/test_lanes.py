"""What each readout gets of a step: rows of the right tokens, for files with their positions. Starts no engine."""

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from saesteer.engine.lanes import Lanes
from saesteer.engine.readouts import Reading
from saesteer.engine.shares import File
from saesteer.engine.sinks import Sink
from saesteer.planning.plan import END, Window

PLANES = {"a": [0], "b": [100], "c": [200, 0, 100]}  # where each kind of readout is captured, in the same bank
NAMES = "xyz"


class Room(Sink):
    """A sink without a file."""

    def __init__(self) -> None:
        pass


class Request:
    """One request, its readouts, and the position that it computes next."""

    def __init__(self, readouts: list[tuple[str, list[Window]]]) -> None:
        self.readouts = [
            (kind, Reading("activation", (kind,), False, windows, False, "none", None, 0, ()), Room())
            for kind, windows in readouts
        ]
        self.position = 0

    def expected(self, first: int, tokens: int) -> dict[tuple[int, int], list[int]]:
        """By id of the file and position, rows of the bank."""
        found = {}
        for kind, reading, sink in self.readouts:
            for at in range(self.position, self.position + tokens):
                if any(lo <= at < hi for lo, hi in reading.windows):
                    found[id(sink), at] = [plane + first + at - self.position for plane in PLANES[kind]]
        return found


def where(ops: tuple[str, ...], _: bool) -> tuple[int, Any]:
    return 7, np.array(PLANES[ops[0]])


def rows_of(step: File) -> dict[tuple[int, int], list[int]]:
    """The same of a step."""
    found, chosen = {}, step.chosen.tolist()
    filing = step.filing
    each = len(chosen) // int(filing.lengths.sum())
    for sink, first, length in zip(filing.sinks, filing.positions, filing.lengths, strict=True):
        for ahead in range(length):
            found[id(sink), int(first) + ahead] = chosen[:each]
            del chosen[:each]
    assert not chosen
    return found


def windows() -> st.SearchStrategy[list[Window]]:
    borders = st.lists(st.integers(0, 30), min_size=2, max_size=8, unique=True).map(sorted)
    closed = borders.map(lambda many: [*zip(many[::2], many[1::2], strict=False)])
    return closed | borders.map(lambda many: [*zip(many[1::2], [*many[2::2], END], strict=False)])


@settings(max_examples=300)
@given(st.data())
def test_each_token_is_read_once_and_where_it_belongs(data: st.DataObject) -> None:
    """Prompts in chunks, guesses that do not hold, and batches that change."""
    lanes, readouts = Lanes(), st.tuples(st.sampled_from("abc"), windows())
    requests = {name: Request(data.draw(st.lists(readouts, min_size=1, max_size=2))) for name in NAMES}
    for name, one in requests.items():
        sinks = {number: sink for number, (*_, sink) in enumerate(one.readouts)}
        lanes.add(name, [reading for _, reading, _ in one.readouts], sinks, where)
    for _ in range(data.draw(st.integers(1, 10))):
        batch = data.draw(st.lists(st.sampled_from(NAMES), min_size=1, unique=True))
        places = data.draw(st.integers(0, 1))  # in front of them is somebody who reads nothing
        lanes.look([*["nobody"] * places, *batch], {})
        for _ in range(data.draw(st.integers(1, 8))):
            tokens = [1] * (places + len(batch))
            if data.draw(st.integers(0, 3)) == 0:
                tokens = [data.draw(st.just(1) | st.integers(1, 9)) for _ in tokens]
            starts = np.cumsum([0, *tokens])
            at = np.array([0] * places + [requests[name].position for name in batch])
            single = tokens == [1] * len(tokens)
            reads, steps = lanes.step(starts[:-1], starts[1:], at, single=single)
            assert not reads
            expected: dict[tuple[int, int], list[int]] = {}
            for place, name in enumerate(batch, places):
                expected |= requests[name].expected(int(starts[place]), tokens[place])
                requests[name].position += tokens[place] - data.draw(st.integers(0, tokens[place] - 1))
            found: dict[tuple[int, int], list[int]] = {}
            for step in steps:
                assert step.bank == 7
                found |= rows_of(step)
            assert found == expected and sum(int(step.filing.lengths.sum()) for step in steps) == len(expected)
        if data.draw(st.booleans()):  # another one has its name
            name = data.draw(st.sampled_from(NAMES))
            lanes.forget(name)
            again = requests[name] = Request(data.draw(st.lists(readouts, min_size=1, max_size=2)))
            sinks = {number: sink for number, (*_, sink) in enumerate(again.readouts)}
            lanes.add(name, [reading for _, reading, _ in again.readouts], sinks, where)
    for name in NAMES:
        lanes.forget(name)
    assert not lanes.known and lanes.step(np.array([0]), np.array([1]), np.array([9])) == ([], [])


def test_what_a_step_had_is_no_longer_taken_for_the_next_once_a_window_has_ended() -> None:
    """Several tokens at once lead one request out of its window, while the other one goes on as before."""
    lanes = Lanes()
    for name, window in (("x", (0, END)), ("y", (0, 4))):
        reading = Reading("activation", ("a",), False, [window], False, "none", None, 0, ())
        lanes.add(name, [reading], {0: Room()}, where)
    lanes.look(["x", "y"], {})
    for positions, tokens, read in (([0, 0], [1, 1], 2), ([1, 1], [1, 5], 4), ([2, 6], [1, 1], 1), ([3, 7], [1, 1], 1)):
        starts = np.cumsum([0, *tokens])
        _, steps = lanes.step(starts[:-1], starts[1:], np.array(positions), single=tokens == [1, 1])
        assert sum(int(step.filing.lengths.sum()) for step in steps) == read
