"""Encodes a plan as what travels with a request (wire.py has its form). Knows plans, but neither weights nor slots."""

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain, repeat
from struct import Struct
from typing import Any, NamedTuple

import numpy as np

from saesteer.dictionaries.vectors import FeatureRow, row_digests
from saesteer.engine.wire import FEATURE, LINE, norm_of
from saesteer.kernels import layout
from saesteer.language.fields import FLOAT32_MAX
from saesteer.language.inline import InlineVector
from saesteer.language.sites import order
from saesteer.planning.digests import DIGEST, digest_of
from saesteer.planning.plan import (
    END,
    Catalog,
    Change,
    Clamps,
    Condition,
    Direction,
    Feature,
    Plan,
    Read,
    Readout,
    Whole,
)
from saesteer.planning.together import together, watched_together

_FLOAT = Struct("<f").pack
_LINE = Struct("<9i7f2i").pack  # makes one line; many times as fast as numpy for a few lines
_BYTES = 4 * LINE
_VARIED = Struct("<i12si16s2f28s")  # a line as what clamps that are alike differ in, and the bytes in between


def encode(plan: Plan, catalog: Catalog, *, dose: bool = False) -> dict[str, Any]:
    """What travels with a request: ``plan``, empty where nothing is edited or read, and the ``vectors`` that it brings.

    Args:
        plan: the plan of its spec.
        catalog: the catalog that it was planned with.
        dose: whether to measure doses.
    """
    if not (plan or plan.readouts or plan.measures):
        return {"plan": b"", "vectors": []}
    targets = _Targets(catalog)
    here: defaultdict[str, list[list[bytes]]] = defaultdict(list)  # by site the lines of its groups
    for one in plan.inputs:
        if not here[one.site]:
            here[one.site].append([])
        here[one.site][0].append(targets.gate(one) if isinstance(one, Condition) else targets.read(one))
    edits = 0
    for group in plan.groups:
        members: list[bytes] = []
        for part in group.parts:
            if isinstance(part, Clamps):
                members.append(targets.clamps(part, group.site, edits))
                edits += len(part.features)
            else:
                members += targets.change(part, group.site, edits)
                edits += 1
        here[group.site].append(members)
    changed = {group.site for group in plan.groups}
    edited = {catalog.op_site(site) for site in changed}
    captured: defaultdict[str, int] = defaultdict(int)
    readouts: list[list[Any]] = []
    for several, watched in (*((several, ()) for several in together(plan.readouts, catalog)), *watched_together(plan)):
        # Where the request edits nothing, both are the same, and what comes in is copied faster.
        after = several[0].captured_after and any(one.op in edited for one in several)
        for readout in several:
            if readout.op is not None:
                captured[readout.op] |= layout.AFTER if after else layout.BEFORE
                here[readout.op]  # it may have no lines
        readouts.append(targets.readout(several, after, watched))
    sites: dict[str, list[Any]] = {}
    lines: list[bytes] = []
    for site in sorted(here, key=order):  # of two sites with the same op, the first is a part of the second
        op = catalog.op_site(site)
        about = sites.setdefault(op, [op, [], False, captured[op]])
        about[2] |= site in changed
        for members in here[site]:
            lines.append(b"".join(members))
            about[1].append(len(lines[-1]) // _BYTES)
    named = tuple((op, tuple(many), changes, captures) for op, many, changes, captures in sites.values())
    known = _told(named, (*targets.dictionaries,), len(targets.vectors), edits, dose)
    head = f"[{known}, {json.dumps(readouts) if readouts else '[]'}]".encode()
    return {
        "plan": b"".join([len(head).to_bytes(4, "little"), head, *targets.vectors, *lines]),
        "vectors": [*map(_brought, targets.brought.values()), *map(_rows, targets.rows.values())],
    }


@lru_cache(64)
def _told(*facts: Any) -> str:
    """As JSON, what most requests have in common with others."""
    return json.dumps(facts)


class _Targets:
    """Entries, with dictionaries and vectors in the order of their first mention."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.dictionaries: dict[str, int] = {}
        self.vectors: dict[bytes, int] = {}  # by digest
        self.brought: dict[int, InlineVector | tuple[float, ...]] = {}  # by id: equal ones are the same object, or few
        self.rows: dict[str, FeatureRow] = {}  # by digest

    def gate(self, one: Condition) -> bytes:
        """The entry that writes a condition's bit."""
        source = self._source(one.target, one.site)
        power = -isinstance(one.target, Direction)  # bounds on x · v; the table has bounds on x · v / |v|
        bias = self._bias(one.target)
        low, high = _finite(one.above - bias), _finite(one.below - bias)
        law = -1.0, 0.0, low, high, source.bias, source.threshold, 1.0
        flags = layout.GATE | source.flags
        return _LINE(source.slot, 0, 0, END, flags, one.bit, 0, 0, 0, *law, source.target, power)

    def read(self, one: Read) -> bytes:
        """The entry that fills a register, or keeps a reconstruction."""
        source = self._source(one.target, one.site)
        # Of a vector, the entry's f is x · v / |v|: the worker multiplies MUL by |v|.
        shift = one.scale * self._bias(one.target) + one.shift
        law = one.scale, shift, one.low, one.high, source.bias, source.threshold, 1.0
        flags = source.flags | layout.READ | layout.RECONSTRUCT * isinstance(one.target, Whole)
        return _LINE(source.slot, 0, 0, END, flags, one.register, 0, 0, 0, *law, source.target, 0)

    def clamps(self, part: Clamps, site: str, column: int) -> bytes:
        """The entries of several changes: those of the first, with other features, values and columns."""
        one, several = part.first, part.values
        muls: Iterable[float] = repeat(one.scale - 1.0)
        adds: Iterable[float] = several
        if part.scales:
            muls, adds = [value - 1.0 for value in several], repeat(one.shift)
        windows = []
        for line in self.change(one, site, column):  # one for each window
            _, first, flags, second, _, _, rest = _VARIED.unpack(line)
            columns = range(flags, flags + (len(several) << layout.COUNTER), 1 << layout.COUNTER)
            numbers = (part.features, repeat(first), columns, repeat(second), muls, adds, repeat(rest))
            windows.append(map(_VARIED.pack, *numbers))
        return b"".join(chain.from_iterable(zip(*windows, strict=True)))

    def change(self, one: Change, site: str, column: int) -> list[bytes]:
        """The entries of a change, one for each window, or an idle one; ``column`` is its place among the counts."""
        source = self._source(one.target, site, held=one.held is not None)
        flags = source.flags | layout.ONLY_IF_ACTIVE * one.only_if_active + layout.MATCH * (one.unit == "stream")
        low, high = one.low, one.high
        if not isinstance(one.target, Feature | Direction):
            flags, low, high = layout.RECONSTRUCT, 0.0, 0.0
        flags |= column << layout.COUNTER
        flags |= layout.ANSWER * (one.part == "answer") | layout.REASONING * (one.part == "reasoning")
        held, factor = 0, 0
        if one.held:
            flags, held = flags | layout.HELD, one.held.register
        if one.strength:
            flags, factor = flags | layout.SCALED, one.strength.register
        # The table holds f' − f, so that a large f loses no digits: mul · f + add.
        law = one.scale - 1.0, one.shift, low, high, source.bias, source.threshold, one.gain
        behind = flags, one.gates, factor, held, 0, *law, source.target, int(one.unit in ("max_act", "vector"))
        return [
            _LINE(source.slot, 0, lo, ~hi if one.part == "answer" else hi, *behind)
            for lo, hi in one.windows or ((0, 0),)
        ]

    def readout(self, several: Sequence[Readout], after: bool, watched: Sequence[int]) -> list[Any]:
        """What the worker must know of readouts whose rows travel as one; ``Engine`` takes it apart.

        Args:
            several: of the same tensors but for their sites.
            after: whether the tensors are captured as the ops leave them.
            watched: for each name its number among what rules watch, which no answer has.
        """
        one = several[0]
        source: int | list[int] = 0
        bias: list[Any] = []
        if one.dictionary is not None and self.catalog.dictionaries[one.dictionary].by_rows:
            rows = [self._source(Feature(one.dictionary, feature), str(one.site)) for feature in one.features]
            source, bias = [row.target for row in rows], [(row.bias, row.threshold, row.flags) for row in rows]
        elif one.dictionary is not None:
            source = self.dictionaries.setdefault(one.dictionary, len(self.dictionaries))
        elif one.probe is not None:
            source = [self._source(same.probe, str(same.site)).target for same in several]
            bias = [self._bias(same.probe) for same in several]
        ops = [same.op for same in several if same.op is not None]
        about = [one.kind, ops, after, one.windows, one.last, one.reduced_there]
        return [*about, source, bias, one.top_k, one.features, one.starts, watched]

    def _bias(self, target: object) -> float:
        named = isinstance(target, Direction) and isinstance(target.vector, str)
        return self.catalog.vectors[target.vector].bias if named else 0.0  # type: ignore[attr-defined]

    def _source(self, target: object, site: str, *, held: bool = False) -> "_Source":
        """The words of what is read or written; ``held``: another entry reads it."""
        if isinstance(target, Feature) and (row := self.catalog.rows.get(target)) is not None:
            self.rows[row.digest] = row
            at = ~self.vectors.setdefault(bytes.fromhex(row.digest[: 2 * DIGEST]), len(self.vectors))
            norm = norm_of(self.catalog.dictionaries[target.dictionary])
            return _Source(0, 0.0, 0.0, 0, at) if held else _Source(0, row.bias, row.threshold, norm, at)
        if not isinstance(target, Direction):
            name: str = target.dictionary  # type: ignore[attr-defined]  # a feature or a whole dictionary
            of = self.dictionaries.setdefault(name, len(self.dictionaries))
            return _Source(target.feature if isinstance(target, Feature) else 0, 0.0, 0.0, 0, of)
        vector, pinned = target.vector, self.catalog.pinned
        if not (isinstance(vector, str) or id(vector) in self.brought or (pinned and (site, target) in pinned)):
            self.brought[id(vector)] = vector
        at = ~self.vectors.setdefault(digest_of(target, self.catalog), len(self.vectors))
        return _Source(0, 0.0, -math.inf, 0, at)


class _Source(NamedTuple):
    """The words of an entry that say what is read or written. A dictionary in memory adds its own on the worker."""

    slot: int
    bias: float
    threshold: float
    flags: int
    target: int


def _finite(value: float) -> float:
    """A bound that float32 can hold, or an infinite one."""
    return value if math.isinf(value) else min(max(value, -FLOAT32_MAX), FLOAT32_MAX)


def _rows(row: FeatureRow) -> list[Any]:
    """The feature's max_act and rows, as a vector travels."""
    head = _FLOAT(1.0 if row.max_act is None else row.max_act)
    return [FEATURE + row.dtype, bytes.fromhex(row.digest[: 2 * DIGEST]), head + row.data]


def _brought(vector: InlineVector | tuple[float, ...]) -> list[Any]:
    """The vector's dtype, the digests of its rows, and the rows as little-endian bytes."""
    digests = b"".join(bytes.fromhex(one[: 2 * DIGEST]) for one in row_digests(vector).values())
    if isinstance(vector, InlineVector):
        return [vector.dtype, digests, vector.data]
    return ["float32", digests, np.array(vector, "<f4").tobytes()]
