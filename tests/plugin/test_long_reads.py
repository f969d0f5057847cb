"""Reads of long texts: reductions hold the memory of a few tokens, and features take time in proportion to tokens.

Starts no engine.
"""

import time
import tracemalloc
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from saesteer.planning.answers import Rows
from saesteer.planning.plan import END
from tests.plugin.test_read_rows import numbers, readout

PROMPT, WIDTH = 40, 1024
STARTS = (0, 10, 30)


def row(at: int) -> Any:
    return np.full(WIDTH, at % 101 - 50, "<f4")


def blobs(how: str, lo: int, hi: int) -> list[Any]:
    """What a step of these tokens sends; each message alone."""
    cuts = [lo, *(at for at in STARTS if lo < at < hi and how == "message"), hi]
    found = []
    for first, end in pairwise(cuts):
        rows = np.stack([row(at) for at in range(first, end)])
        made = {"max": rows.max(0), "last": rows[-1]}.get(how, rows.sum(0))
        found.append([0, [[first, end]], made.astype("<f4").tobytes()])
    return found


@pytest.mark.parametrize("how", ["mean", "max", "last", "message"])
def test_a_long_answer_takes_no_more_memory_than_a_short_one(how: Any) -> None:
    """Preempted in its midst, and with tokens behind its last one that were guessed."""
    more = {"starts": STARTS} if how == "message" else {}
    one = readout("activation", [(0, END)], reduce=how, **more)
    fields: dict[str, Any] = {}
    rows, end = Rows([one], fields), PROMPT + 3000
    steps = [(0, 25), (25, PROMPT), *((at, at + 1) for at in range(PROMPT, 1500)), (0, 512), (512, 1500)]
    steps += [(at, at + 1) for at in range(1500, end)]
    tracemalloc.start()
    for step in steps:
        rows.add(blobs(how, *step))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 100 * 4 * WIDTH
    rows.add([blob for at in range(end, end + 8) for blob in blobs(how, at, at + 1)])
    rows.tell(PROMPT, end - PROMPT + 1, final=True)
    [entry] = fields["activations"]
    spans = [(0, 10), (10, 30), (30, end)] if how == "message" else [(0, end)]
    assert entry["positions"] == ([*map(list, spans)] if how == "message" else [0, end])
    expected = []
    for lo, hi in spans:
        all_ = np.stack([row(at)[:1].astype(float) for at in range(lo, hi)])
        expected.append({"max": all_.max(0), "last": all_[-1]}.get(how, all_.mean(0)).astype(np.float32).item())
    assert [found[0] for found in numbers(entry)] == expected
    assert all(found == [found[0]] * WIDTH for found in numbers(entry))


def test_named_features_take_time_in_proportion_to_tokens() -> None:
    """All of it is the time of the one loop that answers everybody."""
    names = tuple(range(5, 37))

    def seconds(tokens: int) -> float:
        fields: dict[str, Any] = {}
        rows = Rows([readout("features", [(0, END)], features=names)], fields)
        rows.add([[0, [[0, tokens]], b"", b"", np.arange(tokens * len(names), dtype="<f4").tobytes()]])
        begun = time.thread_time()
        rows.tell(tokens, 1, final=True)
        took = time.thread_time() - begun
        [entry] = fields["features"]
        last = entry["rows"][-1]
        assert last["position"] == tokens - 1 and [*last["features"]] == [*map(str, names)]
        assert last["features"]["36"] == tokens * len(names) - 1
        return took

    seconds(10)
    assert seconds(8000) < 24 * seconds(1000), "eight times as much; its square would be 64"
