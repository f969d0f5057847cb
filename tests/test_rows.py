"""Rows under random batches: none is given twice, none leaks, and a batch always gets all the rows that it needs."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from saesteer.plugin.worker.slots import Rows

CAPACITY = 4
IDS = st.sampled_from([f"r{n}" for n in range(9)])


class RowsMachine(RuleBasedStateMachine):
    """Batches of at most CAPACITY requests come and go; a model remembers what each row was filled with."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = Rows(CAPACITY)
        self.filled: dict[int, str] = {}  # row → whose words it holds

    @rule(batch=st.lists(IDS, unique=True, max_size=CAPACITY))
    def take(self, batch: list[str]) -> None:
        taken, fresh = self.rows.take(batch)
        for request, row in zip(batch, taken, strict=True):
            assert 1 <= row <= CAPACITY
            if request in fresh:
                self.filled[row] = request
            assert self.filled[row] == request, "a row that is not fresh holds this request's words"
        assert len(set(taken)) == len(batch)

    @rule(request=IDS)
    def release(self, request: str) -> None:
        self.rows.release(request)
        assert self.rows.release(request) is None

    @invariant()
    def never_more_than_there_are(self) -> None:
        assert len(self.rows) <= CAPACITY


TestRows = RowsMachine.TestCase


@given(st.integers(1, 300))
def test_thousands_of_requests_leave_nothing_behind(count: int) -> None:
    rows = Rows(CAPACITY)
    for n in range(count):
        rows.take([f"r{n}"])
        rows.release(f"r{n}")
    assert len(rows) == 0
    assert sorted(rows.take(["a", "b", "c", "d"])[0]) == [1, 2, 3, 4]
