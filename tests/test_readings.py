"""What is read of captured tensors, against plain indexing; and rows that capture, through a small engine on a CPU."""

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from saesteer.engine.brought import Brought
from saesteer.engine.captures import Captures
from saesteer.engine.engine import Engine, Row
from saesteer.engine.readouts import Reading, Segment, Source
from saesteer.kernels import ops
from saesteer.kernels.read.features import Encoder, read_features
from saesteer.kernels.read.rows import Probes
from saesteer.planning.plan import END
from tests.one_site import CODERS, TOKENS, WIDTH, make_engine
from tests.rows import row_of
from tests.spec.scopes import windows as spans

MAX_TOKENS = 24
WIDTHS = {"a": 4, "b": 4, "wide": 6, "c": 4}
_DRAW = torch.Generator().manual_seed(2)


def numbers(*shape: int) -> Tensor:
    return torch.randint(-50, 50, shape, generator=_DRAW).float()


def encoder(width: int, features: int = 7) -> Encoder:
    return Encoder(numbers(features, width), numbers(features), torch.zeros(features))


SOURCES = {  # two of each kind and width, so that some requests share one
    "features": {width: [Source(encoder(width)), Source(encoder(width))] for width in (4, 6)},
}
# Directions, biases and the site of each, by the number of sites.
_AT: dict[int, list[list[int]]] = {1: [[0], [0, 0]], 2: [[0, 1, 1, 0], [0, 1, 1]], 3: [[0, 1, 2], [2, 0, 0, 1, 0]]}
PROBES = {
    (width, sites): [(numbers(len(at), width), [float(n) for n in range(len(at))], at) for at in _AT[sites]]
    for width in (4, 6)
    for sites in _AT
}
SCORED = {id(one): one for several in PROBES.values() for one in several}
MADE = {number: Source(probes=Probes.of(*one, torch.device("cpu"), torch.float32)) for number, one in SCORED.items()}


@st.composite
def readings(draw: Any) -> Reading:
    kind = draw(st.sampled_from(["features", "probe", "activation", "activation", "hidden"]))
    op = None if kind == "hidden" else draw(st.sampled_from([*WIDTHS]))
    last = kind == "hidden" and draw(st.booleans())
    reduce: Any = draw(st.sampled_from(["none", "mean", "max", "last"])) if kind == "activation" else "none"
    source = draw(st.sampled_from(SOURCES[kind][WIDTHS[op]])) if kind in SOURCES and op else None
    asked = [(3, ()), (3, (2,)), (0, (5, 1)), (0, (1, 5)), (0, (1,)), (0, (0, 1, 2, 3, 4, 5, 6)), (8, (6,))]
    top_k, named = draw(st.sampled_from(asked)) if kind == "features" else (0, ())
    windows = [] if last else draw(spans(30))
    ops = () if op is None else (op,)
    if kind in ("activation", "probe") and op != "wide":
        ops = tuple(draw(st.permutations(["a", "b", "c"]))[: draw(st.integers(1, 3))])
    if kind == "probe" and op is not None:
        source = MADE[id(draw(st.sampled_from(PROBES[WIDTHS[op], len(ops)])))]
    return Reading(kind, ops, draw(st.booleans()), windows, last, reduce, source, top_k, named)


@st.composite
def steps(draw: Any) -> list[Segment]:
    """The requests of a step that read, among others."""
    found, first = [], 0
    for number in range(draw(st.integers(1, 5))):
        first += draw(st.integers(0, 2))  # tokens of others
        tokens = min(draw(st.just(1) | st.integers(1, 9)), MAX_TOKENS - first)
        if tokens <= 0:
            break
        asked = draw(st.lists(readings() | st.none(), min_size=1, max_size=4))  # None: another stage's
        found.append(Segment(f"request {number}", asked, first, draw(st.integers(0, 20)), tokens))
        first += tokens
    return found


def expected(reading: Reading, rows: Tensor) -> list[Tensor]:
    """The arrays of one readout, from its rows."""
    if reading.reduce != "none":
        return [{"mean": rows.sum(0), "max": rows.max(0).values, "last": rows[-1]}[reading.reduce]]
    if reading.source is None:
        return [rows]
    if reading.source.encoder is None:
        directions, bias, at = next(SCORED[number] for number, one in MADE.items() if one is reading.source)
        own = rows.reshape(len(rows), len(reading.ops), -1)
        return [torch.stack([own[:, site] @ v + b for v, b, site in zip(directions, bias, at, strict=True)], dim=1)]
    return [*read_features(rows, reading.source.encoder, reading.top_k, torch.tensor(reading.named).long())]


@given(
    segments=steps(),
    ending=st.sets(st.sampled_from([f"request {n}" for n in range(5)])),
    at_once=st.sampled_from([1, 4, 4096]),
)
def test_each_readout_gets_its_own_positions(segments: list[Segment], ending: set[str], at_once: int) -> None:
    """However many rows are taken at once, whoever else reads of the same dictionary, and whatever they name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("saesteer.engine.lanes.ROWS", at_once)
        judge(segments, ending, at_once)


def judge(segments: list[Segment], ending: set[str], at_once: int) -> None:
    """Compare what comes home with plain indexing."""
    captures = Captures(WIDTHS, MAX_TOKENS, torch.float32, torch.device("cpu"))
    planes = {}
    for site, width in WIDTHS.items():
        for moment, plane in captures.of(site).items():
            assert plane.shape == (MAX_TOKENS, width)
            plane[:] = numbers(MAX_TOKENS, width)
            planes[site, moment == "after"] = plane.clone()
    hidden = numbers(MAX_TOKENS, 5)
    wanted: dict[str, list[Any]] = {}
    some = False
    for segment in segments:
        for number, reading in enumerate(segment.readings):
            if reading is None:
                continue
            inside = [*range(segment.position, segment.position + segment.tokens)]
            at = inside[-1:] if reading.last else [p for p in inside if any(lo <= p < hi for lo, hi in reading.windows)]
            some = some or bool(at)
            if not at or (reading.last and segment.name not in ending):
                continue
            tensors = [planes[op, reading.after] for op in reading.ops] or [hidden]
            places = [segment.first + p - segment.position for p in at]
            rows = torch.cat([tensor[places] for tensor in tensors], dim=1)
            wanted.setdefault(segment.name, []).append((number, at, expected(reading, rows)))
    brought = captures.read(segments, hidden)
    assert (brought is not None) == some
    found = {} if brought is None else brought.blobs(ending)
    asked = {one.name: one.readings for one in segments}
    found = {name: joined(blobs, asked[name]) for name, blobs in found.items()}
    for one in () if brought is None else brought.made:
        taken = sum(one.rows) if one.order is None else int(one.order.max()) + 1
        assert taken <= max(3, 2 * at_once), "memory is bounded"
    assert found.keys() == wanted.keys()
    for name, blobs in found.items():
        assert [number for number, *_ in sorted(blobs, key=lambda one: one[0])] == [one[0] for one in wanted[name]]
        for (number, places, *data), (_, at, arrays) in zip(
            sorted(blobs, key=lambda one: one[0]), wanted[name], strict=True
        ):
            assert [p for lo, hi in places for p in range(lo, hi)] == at, (name, number)
            for got, array in zip(data, arrays, strict=True):
                there = torch.frombuffer(bytearray(got), dtype=array.dtype) if got else torch.empty(0)
                assert torch.equal(there, array.flatten())


def joined(blobs: list[Any], readings: Any) -> list[Any]:
    """The blobs of a request with the pieces of each readout joined."""
    found: dict[int, list[Any]] = {}
    for number, places, *data in blobs:
        if number not in found:
            found[number] = [number, [*places], *data]
            continue
        found[number][1] += places
        both, how = [*zip(found[number][2:], data, strict=True)], readings[number].reduce
        if how == "none":
            found[number][2:] = [a + b for a, b in both]
        elif how == "last":
            found[number][2:] = data
        else:
            (one, other), *_ = [[np.frombuffer(each, "<f4") for each in pair] for pair in both]
            found[number][2:] = [(one + other if how == "mean" else np.maximum(one, other)).tobytes()]
    return [*found.values()]


def test_sites_that_keep_nothing_have_no_tensors() -> None:
    captures = Captures({"a": 4}, MAX_TOKENS, torch.float16, torch.device("cpu"))
    assert captures.of("b") == {}
    before, after = captures.of("a").values()
    assert before.data_ptr() != after.data_ptr() and before.is_contiguous() and after.is_contiguous()
    reading = Reading("activation", ("a",), True, [(3, 5)], False, "none", None, 0, ())
    assert captures.read([Segment("a", [reading], 0, 5, 9)], None) is None, "nothing of this step"
    after[:] = torch.arange(MAX_TOKENS).half()[:, None]
    (blob,) = read(captures.read([Segment("a", [reading], 7, 1, 9)], None))["a"]
    assert blob[:2] == [0, [(3, 5)]] and len(blob[2]) == 2 * 4 * 2, "two positions in the model's dtype"
    assert torch.frombuffer(bytearray(blob[2]), dtype=torch.float16).tolist() == [9.0] * 4 + [10.0] * 4


def read(brought: Brought | None) -> dict[str, Any]:
    assert brought is not None
    return brought.blobs(())


def test_features_of_a_partial_dictionary_go_by_their_own_numbers() -> None:
    """Rows 0, 1 and 2 are the features 40, 7 and 900 of the whole; behind the last active one stands -1."""
    captures = Captures({"a": 3}, 4, torch.float32, torch.device("cpu"))
    captures.of("a")["before"][0] = torch.tensor([-1.0, 2.0, 5.0])
    source = Source(Encoder(torch.eye(3), torch.zeros(3), torch.zeros(3)), ids=np.array([40, 7, 900], dtype=np.int32))
    reading = Reading("features", ("a",), False, [(0, END)], False, "none", source, 3, (1,))
    (blob,) = read(captures.read([Segment("x", [reading], 0, 6, 1)], None))["x"]
    indices, values, named = (
        np.frombuffer(data, kind).tolist() for data, kind in zip(blob[2:], ("<i4", "<f4", "<f4"), strict=True)
    )
    assert (indices, values, named) == ([900, 7, -1], [5.0, 2.0, 0.0], [2.0])


def test_what_was_read_leaves_its_process_without_weights() -> None:
    captures = Captures({"a": 3000}, 4, torch.float32, torch.device("cpu"))
    captures.of("a")["before"][0] = numbers(3000)
    source = Source(encoder(3000), ids=np.arange(7, dtype=np.int32) + 40)
    reading = Reading("features", ("a",), False, [(0, END)], False, "none", source, 3, (1,))
    brought = captures.read([Segment("x", [reading], 0, 6, 1)], None)
    waited: list[int] = []
    assert brought is not None
    brought.event = SimpleNamespace(synchronize=lambda: waited.append(1))
    sent = pickle.dumps(brought)
    assert waited and len(sent) < 4 * 3000, "less than a row of the encoder"
    assert read(pickle.loads(sent)) == read(brought)


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return make_engine(tmp_path)


SITE = "resid_post.1"
READ: dict[str, Any] = {
    "features": [{"dictionary": "jump", "top_k": 3, "features": [2], "scope": {"positions": [[4, 9]]}}],
    "activations": [{"site": SITE}, {"site": SITE, "at": "after", "scope": {"positions": [[-1, None]]}}],
    "hidden": True,
}
CLAMP = {"op": "clamp", "dictionary": "rect", "feature": 1, "value": 50.0}


def start(engine: Engine, number: int, spec: Any) -> Row:
    found = row_of(engine, spec, TOKENS)
    assert found is not None
    engine.fill(number, found)
    return found


def step(engine: Engine, rows: list[int], kinds: Any, *, counting: bool = True) -> tuple[Tensor, Tensor]:
    """A step of TOKENS tokens for the request in each row: the tensor before it and after it."""
    tokens = TOKENS * len(rows)
    engine.positions[:tokens] = torch.arange(TOKENS).repeat(len(rows))
    starts = torch.arange(len(rows) + 1, dtype=torch.int32) * TOKENS
    engine.schedule(torch.tensor(rows), 0, starts, len(rows), tokens, kinds, counting=counting)
    (site,) = engine.sites.values()
    stream = torch.randn(tokens, WIDTH, generator=_DRAW)
    before = stream.clone()
    engine.edit(site, stream)
    ops.publish_(engine.counts, site.index, engine.steps, engine.published)
    return before, stream


def test_who_only_reads_changes_nothing_and_gets_its_tokens(engine: Engine) -> None:
    """Beside a request that edits and reads, and one that does neither."""
    reader, editor = start(engine, 1, {"return": READ}), start(engine, 2, {"edits": [CLAMP], "return": READ})
    before, after = step(engine, [1, 0, 2], reader.kinds | editor.kinds)
    assert torch.equal(before[: 2 * TOKENS], after[: 2 * TOKENS])
    changed = (before != after).any(1)[2 * TOKENS :]
    assert changed.tolist() == [False] + [True] * (TOKENS - 1)
    hidden = torch.randn(3 * TOKENS, WIDTH)
    segments = [Segment("reader", reader.readings, 0, 0, TOKENS)]
    segments.append(Segment("editor", editor.readings, 2 * TOKENS, 0, TOKENS))
    brought = engine.captures.read(segments, hidden)
    assert brought is not None
    found = brought.blobs(["reader", "editor"])
    for name, first in (("reader", 0), ("editor", 2 * TOKENS)):
        features, whole, one, last = sorted(found[name], key=lambda blob: blob[0])
        x = before[first : first + TOKENS]
        f = CODERS["jump"].encode(x[4:9])
        assert features[1] == [(4, 9)]
        assert np.allclose(np.frombuffer(features[4], "<f4"), f[:, 2].numpy(), atol=1e-5)
        strongest = np.frombuffer(features[3], "<f4").reshape(5, 3)
        assert np.allclose(strongest, f.clamp_min(0).topk(3).values.numpy(), atol=1e-5)
        assert (whole[1], whole[2]) == ([(0, TOKENS)], x.numpy().tobytes())
        there = after[first + TOKENS - 1]
        assert (one[1], one[2]) == ([(TOKENS - 1, TOKENS)], there.numpy().tobytes())
        assert (last[1], last[2]) == ([(TOKENS - 1, TOKENS)], hidden[first + TOKENS - 1].numpy().tobytes())


def test_steps_in_which_somebody_reads_are_numbered_as_the_host_numbers_them(engine: Engine) -> None:
    """Whoever only reads counts nothing, so neither side numbers those steps; a later step's counts are found."""
    quiet, reader = start(engine, 1, {"return": {"hidden": True}}), start(engine, 2, {"return": READ})
    assert not quiet.listed and reader.listed
    (site,) = engine.sites.values()
    for _ in range(3):
        engine.rest()
        ops.publish_(engine.counts, site.index, engine.steps, engine.published)
        step(engine, [1, 2], reader.kinds, counting=False)
    editor = start(engine, 3, {"edits": [CLAMP]})
    step(engine, [1, 3, 2], reader.kinds | editor.kinds)
    number, published = engine.last_published()
    assert published.read(number, [3], 1).tolist() == [[TOKENS - 1]]
