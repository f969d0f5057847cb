"""Reads of long texts: reductions hold the memory of a few tokens, and features take time in proportion to tokens.

Starts no engine.
"""

import tracemalloc
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from saesteer.config.config import SaesteerConfig
from saesteer.dictionaries.vectors import from_inline
from saesteer.errors import SpecError
from saesteer.language.spec import from_json
from saesteer.planning.answers import Rows
from saesteer.planning.plan import END, Catalog, Direction
from saesteer.planning.readouts import in_answers
from saesteer.plugin.door.admission import Door
from tests.plugin.blobs import numbers, readout

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


@pytest.mark.parametrize("kind", ["read", "watched"])
def test_what_rules_watch_is_bounded_as_what_is_read(kind: str) -> None:
    """64 probes over a prompt of 10,000 tokens: 2.4 MiB on their way from the device."""
    model = SimpleNamespace(dtype=torch.float16, max_model_len=64)
    door = Door("", SaesteerConfig.from_json({"max_read_mib": 2}), None, SimpleNamespace(model_config=model))
    vectors = {f"p{n}": from_inline(tuple(float(n == at) for at in range(64))) for n in range(64)}
    catalog = Catalog({}, frozenset({"resid_post.3"}), 64, vectors=vectors, width=64)
    there: Any = {"site": "resid_post.3", "scope": {"positions": [[0, None]]}}
    flags = [
        {"op": "flag", "when": {"probe": name, "site": there["site"], "above": 1.0}, "scope": there["scope"]}
        for name in vectors
    ]
    reads = {"probes": [{"probe": name, **there} for name in vectors]}
    spec = from_json({"edits": flags} if kind == "watched" else {"return": reads})
    params = SimpleNamespace(extra_args=None, max_tokens=1, n=1)
    request = SimpleNamespace(prompt_token_ids=[1] * 10_000, sampling_params=params)
    with pytest.raises(SpecError, match=r"may read \d+ bytes, expected at most 2097152.*--max-read-mib") as caught:
        door.admit(spec, catalog, request)
    assert str(caught.value).startswith("saesteer.edits[0].when" if kind == "watched" else "saesteer.return:")


@pytest.mark.parametrize(
    ("kind", "more", "wire"),
    [
        ("features", {"top_k": 64}, [4 * 64, 4 * 64, 0]),
        ("features", {"features": tuple(range(64))}, [0, 0, 4 * 64]),
        ("probe", {"probe": Direction("p", 3)}, [4]),
    ],
    ids=["strongest", "named", "probe"],
)
def test_a_request_is_charged_what_its_answer_takes(kind: Any, more: dict[str, Any], wire: list[int]) -> None:
    """Numbers are objects there, many times as large as on their way."""
    fields: dict[str, Any] = {}
    one, tokens = readout(kind, [(0, END)], **more), 4000
    rows = Rows([one], fields)
    numbers = (
        np.arange(tokens * size // 4, dtype="<i4" if at == 0 < len(wire) - 1 else "<f4") for at, size in enumerate(wire)
    )
    rows.add([[0, [[0, tokens]], *(numbers.tobytes() for numbers in numbers)]])
    tracemalloc.start()
    rows.tell(tokens, 1, final=True)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert fields and 0.6 < taken / (tokens * sum(wire) * in_answers(one.readout)) < 1.4
