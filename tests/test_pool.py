"""Slots of a pool: never one for two contents, none lost, and nothing written that stands there already."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from saesteer.engine.pool import Pool

FIRST, SIZE = 7, 4


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=60))
def test_a_slot_holds_what_its_holders_wrote(steps: list[tuple[bool, int]]) -> None:
    pool = Pool(FIRST, SIZE)
    held: Counter[bytes] = Counter()
    memory: dict[int, bytes] = {}
    slots: dict[bytes, int] = {}
    for take, number in steps:
        content = bytes([number])
        if take and (content in held or len(held) < SIZE):
            slot, fresh = pool.take(content)
            assert FIRST <= slot < FIRST + SIZE
            if fresh:
                assert memory.get(slot) not in held, "nobody's content is overwritten"
                memory[slot] = content
            assert memory[slot] == content, "what need not be written stands there"
            assert held[content] == 0 or slots[content] == slot
            slots[content] = slot
            held[content] += 1
        elif not take and held[content]:
            pool.release(content)
            held[content] -= 1
        held += Counter()  # drops zeros
        assert len(pool) == len(held)
        assert len({slots[one] for one in held}) == len(held)


def test_a_vector_that_comes_again_is_still_there() -> None:
    pool = Pool(0, 2)
    assert pool.take(b"a") == (0, True)
    pool.release(b"a")
    assert pool.take(b"a") == (0, False)
    assert pool.take(b"b") == (1, True)
    pool.release(b"a")
    assert pool.take(b"c") == (0, True)
