"""Each position goes out once, when its token is an input; what is computed again counts once."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from saesteer.consumers import Rows
from saesteer.consumers.feed import Feed
from saesteer.planning.answers import Reported
from saesteer.planning.answers import Rows as Answer
from saesteer.planning.plan import CAPTURE
from tests.consumers.rows import SITE, readout, token, value
from tests.consumers.runners import Direct, ticket, tokens


def blob(number: int, *spans: tuple[int, int]) -> list[Any]:
    """As the worker sends it."""
    numbers = [[value(0, at), value(0, at)] for lo, hi in spans for at in range(lo, hi)]
    return [number, [list(span) for span in spans], np.array(numbers, dtype="<f4").tobytes()]


def check(one: Rows) -> None:
    numbers = one.arrays["data"].numpy()
    assert numbers.shape == (len(one.positions), 2) == (len(one), 2)
    for row, at, id in zip(numbers, one.positions, one.tokens, strict=True):
        assert (row == value(0, int(at))).all() and id == token(int(at))


def fed(*readouts: Reported, own: Any = (), capturing: Any = ()) -> tuple[Answer, Feed]:
    """What an answer reads, and its feed."""
    rows = Answer(readouts, {}, fed=True)
    return rows, Feed(rows, own, capturing)


class Play:
    """A sequence that is computed in chunks, preempted, and computed again."""

    def __init__(self, prompt: int) -> None:
        self.prompt, self.runner = prompt, Direct()
        self.ticket = ticket()
        self.rows, self.feed = fed(readout(), own=[(self.runner, self.ticket)])


@given(
    st.integers(1, 12),
    st.lists(st.tuples(st.integers(1, 9), st.none() | st.integers(0, 8)), max_size=12),
    st.integers(0, 6),
)
def test_each_position_comes_once(prompt: int, chunks: list[tuple[int, int | None]], generated: int) -> None:
    """Also one that is first computed behind a second preemption: the first time, others' cached blocks had it."""
    play = Play(prompt)
    known, at, computed = 0, 0, set[int]()
    for size, resumed in chunks:
        at = at if resumed is None else min(resumed, prompt - 1)
        end = min(at + size, prompt + known)
        if end > at:
            play.rows.add([blob(0, (at, end))])
        computed |= {*range(at, end)}
        at = end
        if at == prompt + known and known < generated:
            known += 1
        play.feed.give(tokens, below := prompt + max(0, known - 1))
        assert sorted(play.runner.positions) == [one for one in sorted(computed) if one < below]
    length = prompt + known
    play.feed.finish(tokens, max(prompt, length - 1), length, "stop")
    assert sorted(play.runner.positions) == [one for one in sorted(computed) if one < max(prompt, length - 1)]
    for _, one in play.runner.said[:-1]:
        check(one)
        assert [*one.positions] == sorted(one.positions)
    assert play.runner.said[-1] == (play.ticket, "end")
    assert [*play.ticket.request.tokens] == tokens(0, length) and play.ticket.request.finish == "stop"


def test_rows_behind_the_last_token_never_come() -> None:
    play = Play(4)
    play.rows.add([blob(0, (0, 4), (4, 7))])
    play.feed.give(tokens, 4)
    play.feed.finish(tokens, 5, 6, "stop")
    assert play.runner.positions == [0, 1, 2, 3, 4]


def test_several_consumers_share_rows() -> None:
    """What a request reads for its own consumers and for the operator's is one object."""
    own, other, operator = Direct("own"), Direct("other"), Direct("operator")
    rows, feed = fed(
        readout(captured=True),
        readout(site="resid_post.9", field=CAPTURE, captured=True),
        own=[(own, ticket()), (other, ticket())],
        capturing=[(operator, ticket())],
    )
    rows.add([blob(0, (0, 3)), blob(1, (0, 3))])
    feed.give(tokens, 3)
    assert len(own.said) == len(other.said) == 1 and len(operator.said) == 2
    assert own.said[0][1] is other.said[0][1] is operator.said[0][1]
    assert feed.results.keys() == {"own", "other"}
    feed.abandon()
    feed.abandon()
    feed.finish(tokens, 3, 4, "stop")
    assert [runner.said[-1][1] for runner in (own, other, operator)] == ["drop"] * 3


def test_sites_that_travel_as_one_come_apart() -> None:
    runner = Direct()
    both = readout()._replace(abouts=(SITE, SITE | {"site": "resid_post.9"}))
    answer, feed = fed(both, own=[(runner, ticket())])
    answer.add([[0, [[0, 2]], np.arange(8, dtype="<f4").tobytes()]])
    feed.give(tokens, 2)
    rows = [one for _, one in runner.said if isinstance(one, Rows)]
    assert [one.about for one in rows] == [*both.abouts]
    assert [one.arrays["data"].numpy().tolist() for one in rows] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert [one.positions.tolist() for one in rows] == [[0, 1]] * 2


@pytest.mark.parametrize(("how", "expected"), [("mean", 2.0), ("max", 4.0), ("last", 4.0)])
def test_reductions_come_as_the_answer_has_them(how: Any, expected: float) -> None:
    runner = Direct()
    rows, feed = fed(readout(), readout(reduce=how), own=[(runner, ticket())])
    numbers = {"mean": 10.0, "max": 4.0, "last": 4.0}[how]  # of a sum over the tokens
    rows.add([blob(0, (0, 5)), [1, [[0, 5]], np.array([numbers, numbers], "<f4").tobytes()]])
    feed.finish(tokens, 5, 6, "stop")
    first, last = (one for _, one in runner.said if isinstance(one, Rows))
    assert first.about == SITE and last.about == SITE | {"reduce": how}
    assert last.positions.tolist() == [0, 5] and not len(last.tokens)
    assert last.arrays["data"].numpy().tolist() == [[expected, expected]]


def test_features_and_probes_have_their_arrays() -> None:
    runner = Direct()
    listed = readout(kind="features", dictionary="d", top_k=2, features=(7,))
    rows, feed = fed(listed, readout(kind="probe"), own=[(runner, ticket())])
    indices, strengths = np.array([[4, -1], [9, 3]], "<i4"), np.array([[2.5, 0.0], [3.0, 1.0]], "<f4")
    named, scores = np.array([[0.0], [1.5]], "<f4"), np.array([0.5, -0.5], "<f4")
    rows.add([[0, [[2, 4]], *(one.tobytes() for one in (indices, strengths, named))], [1, [[2, 4]], scores.tobytes()]])
    feed.give(tokens, 9)
    first, second = (one for _, one in runner.said)
    assert {name: one.numpy().tolist() for name, one in first.arrays.items()} == {
        "indices": indices.tolist(),
        "strengths": strengths.tolist(),
        "named": named.tolist(),
    }
    assert second.arrays["scores"].numpy().tolist() == [[0.5], [-0.5]]
    part = first.part(1, 2)
    assert part.positions.tolist() == [3] and part.arrays["indices"].numpy().tolist() == [[9, 3]]
