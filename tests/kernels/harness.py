"""Runs drawn requests through kernel and reference, and holds both against truth.py. Knows how the op is called."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from saesteer.kernels import layout
from saesteer.kernels.bound import Bound
from saesteer.kernels.edit.configs import Configs
from saesteer.kernels.edit.launch import edit_triton
from saesteer.kernels.layout import BARE, NORMED, PAIR
from saesteer.kernels.reference import edit_ref_, rms_norm_ref
from tests.kernels.doses import judge_doses
from tests.kernels.requests import DENSE, Drawer, Request, Wish, World
from tests.kernels.tables import assert_as_accurate, make_positions, make_work, relative_error, write_row
from tests.kernels.truth import Array, Bools, Dictionary, Outcome, Reconstruct, When, dosed, outcome

GPU = torch.cuda.is_available()
NEAR = 1e-4  # nearer to a decision than this fp32 may fall on the other side than float64
EPS, OFFSET = 1e-6, 1.0
KEPT = ("kept", "before", "after")
WEIGHTS = ("w_enc", "w_dec", "b_enc", "threshold", "b_dec")


@dataclass(frozen=True, slots=True)
class Path:
    """A way through the kernels."""

    span: int = 1  # tokens of an item at most
    tiled: bool = False  # rows of a kind that a tile kernel takes go there
    tuned: Configs | None = None

    def __str__(self) -> str:
        return f"span{self.span}{'-tiled' * self.tiled}"


TOKEN, SPANS, TILED = Path(), Path(layout.TILE), Path(layout.TILE, True)


@dataclass
class State:
    """Everything that a call changes."""

    stream: Tensor
    second: Tensor | None
    cells: Tensor
    counts: Tensor
    registers: Tensor = field(default_factory=lambda: torch.zeros(0, 4))  # rows are made for the call
    kept: Tensor | None = None
    before: Tensor | None = None
    after: Tensor | None = None

    def clone(self) -> State:
        return deepcopy(self)


@dataclass
class Call:
    """Everything that a call reads."""

    norm_weight: Tensor | None
    table: Tensor
    site: Tensor
    work: Tensor
    positions: Tensor
    kinds: Tensor
    weights: tuple[Tensor, ...]
    form: int
    dense_size: int
    has_norms: bool

    def bound(self, place: str, state: State, scratch: Tensor) -> Bound:
        """What the call reads, bound to its site, over copies on another device."""
        if len(state.registers) < len(state.cells):
            state.registers = torch.zeros(len(state.cells), state.registers.shape[1])
        return Bound(
            index=self.site.to(place),
            table=self.table.to(place),
            work=self.work.to(place),
            positions=self.positions.to(place),
            kinds=self.kinds,
            **{name: weights.to(place) for name, weights in zip(WEIGHTS, self.weights, strict=True)},
            cells=state.cells.to(place),
            registers=state.registers.to(place),
            **{name: one.to(place) for name in KEPT if (one := getattr(state, name)) is not None},
            scratch=scratch,
            dense_size=self.dense_size,
            has_norms=self.has_norms,
        )

    def reference(self, state: State) -> None:
        bound = self.bound("cpu", state, torch.zeros(0))
        edit_ref_(state.stream, state.second, self.norm_weight, state.counts, bound, self.form, EPS, OFFSET)

    def kernel(self, state: State, path: Path) -> None:
        """On CPU tensors in the interpreter, or over a copy on the GPU."""
        place = "cuda" if GPU else "cpu"
        # Room for one round of dense tokens only. The kernels' first words are arrivals; the rest may hold anything.
        scratch = torch.full((layout.scratch_words(state.stream.shape[1], self.dense_size, layout.TILE),), torch.nan)
        scratch[: layout.PARTIALS] = 0
        stream, second, norm_weight = (
            None if one is None else one.to(place) for one in (state.stream, state.second, self.norm_weight)
        )
        assert stream is not None
        counts = state.counts.to(place)
        bound = self.bound(place, state, scratch.to(place))
        with np.errstate(all="ignore"):  # what a lane computes and nobody uses: a GPU says nothing of it
            given = stream, second, norm_weight, counts, bound, self.form, EPS, OFFSET
            edit_triton(*given, tuned=path.tuned, tiled=path.tiled)
        state.stream.copy_(stream)
        if state.second is not None and second is not None:
            state.second.copy_(second)
        for name in ("cells", "registers", *KEPT):
            if getattr(state, name) is not None:
                getattr(state, name).copy_(getattr(bound, name))
        state.counts.copy_(counts)
        assert not bound.scratch[: layout.PARTIALS].any(), "arrivals are left behind"


def cut(tokens: Sequence[tuple[int, int, int]], span: int) -> list[tuple[int, int, int, int]]:
    """Items of at most `span` neighbours from (token, row, position) of each listed token, request after request."""
    items: list[tuple[int, int, int, int]] = []
    for token, row, position in tokens:
        if items and items[-1][1] == row and items[-1][3] < span and items[-1][0] + items[-1][3] == token:
            items[-1] = (*items[-1][:3], items[-1][3] + 1)
        else:
            items.append((token, row, position, 1))
    return items


def work_of(tokens: Sequence[tuple[int, int, int]], table: Tensor, path: Path, room: int) -> Tensor:
    """The list as the map writes it."""
    items = cut(tokens, path.span)
    parts = max((int(table[row, 1]) for _, row, _ in tokens), default=1)
    return make_work(items, room, span=path.span, parts=parts)


def kinds_of(tokens: Sequence[tuple[int, int, int]], table: Tensor, sites: int = 2) -> Tensor:
    kinds = torch.zeros(1, dtype=torch.int32)
    for row in {row for _, row, _ in tokens}:
        for site in range(sites):
            kinds |= table[row, layout.HEAD + layout.SPAN * site + layout.KIND]
    return kinds


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int16) if x.dtype in (torch.float16, torch.bfloat16) else x.view(torch.int32)


def a_world(
    rng: np.random.Generator, width: int, dtype: torch.dtype, features: int, edits: int, sizes: Sequence[int]
) -> Drawer:
    """Weights with a dictionary of each kind, whose deltas stay small however many they are."""
    world = World(rng, width, dtype, strength=min(1.0, 4 / max(edits, 1) ** 0.5))
    sizes = [int(rng.choice([1, 3, 37, 64, 100])) for _ in range(5)]
    plain = [world.dictionary(features, "jumprelu"), world.dictionary(sizes[0], "relu")]
    if width > 1:
        plain.append(world.dictionary(sizes[1], "jumprelu", norm="layer_norm"))
    plain.append(world.dictionary(sizes[2], "relu", norm="l2"))
    norms = ["none", "none", "l2", *["layer_norm"] * (width > 1)]
    dense = [plain[int(rng.integers(len(plain)))]]
    for activation in ("topk", "abstopk"):
        size = int(rng.choice(sizes))
        k = int(rng.integers(1, min(size, 128) + 1))
        dense.append(world.dictionary(size, activation, k, str(rng.choice(norms))))
    k = int(rng.integers(1, 9))
    dense.append(world.dictionary(k * max(max(sizes) // 8, 1), "groupmax", k, str(rng.choice(norms))))
    return Drawer(world, plain, dense)


@dataclass
class Case:
    """One step of several requests, with tokens of nobody between them."""

    world: World
    requests: list[Request]
    dtype: torch.dtype
    form: int
    seed: int

    def __post_init__(self) -> None:
        rng = self.world.rng
        entries = [[request.entries(self.world, site) for site in (0, 1)] for request in self.requests]
        most = max((sum(len(g) for groups in row for g in groups) for row in entries), default=0)
        # Words behind a row's own are garbage, as in a server after many requests.
        self.table = torch.full((len(entries) + 1, layout.width(2, most)), -(2**30), dtype=torch.int32)
        self.dense_size = 0
        self.table[0] = 0
        for row, groups in enumerate(entries):
            needs = {one for one in map(dense_of, self.requests[row].sites[1]) if one is not None}
            needs |= {
                w.of for w in self.requests[row].bits if isinstance(w.of, Dictionary) and w.of.activation in DENSE
            }
            assert len(needs) <= 1
            dense = [(self.world.base[id(one)], len(one.b)) for one in needs]
            self.dense_size = max([self.dense_size, *[size for _, size in dense]])
            doses, limit = self.doses(row), self.requests[row].limit or 0.0
            write_row(self.table, row + 1, groups, dense[0] if dense else (0, 0), doses, limit)
        self.every = [entry for row in entries for groups in row for group in groups for entry in group]
        self.tokens: list[tuple[int, int, int]] = []  # token, row, position of all that are listed
        at = 1
        for row, request in enumerate(self.requests):
            if any(request.sites):
                self.tokens += [(at + t, row + 1, request.start + t) for t in range(request.tokens)]
            at += request.tokens + int(rng.integers(0, 2))
        self.room = at + 1
        draw = torch.Generator().manual_seed(self.seed)
        self.cells = torch.randint(-(2**31), 2**31, (self.room + 3,), generator=draw).int()
        # One counter of all rows behind the other, as an engine has them; test_exact.py has the rows so.
        self.counts = torch.randint(1000, (self.edits + 9, len(self.requests) + 1), generator=draw).int().t()
        self.counts[:, self.edits : self.edits + 8] = 0  # the doses of two sites begin there, where they are measured
        self.streams = [self._tensor(draw) for _ in (0, 1)]
        self.seconds = [self._tensor(draw) if self.form == PAIR else None for _ in (0, 1)]
        if self.form == NORMED:
            self.seconds = [torch.full_like(self.streams[0], torch.nan) for _ in (0, 1)]
        self.norm_weight = None
        if self.form == NORMED and self.seed % 3:
            self.norm_weight = torch.rand(self.world.width, generator=draw).to(self.dtype)
        self.weights = self.world.weights(self.every)

    @property
    def edits(self) -> int:
        """Columns of counts that edits may have."""
        return max([len(r.sites[0]) + len(r.sites[1]) for r in self.requests], default=0) + 2

    def doses(self, request: int) -> list[int]:
        """Columns of counts where those of each site begin; 0: not measured."""
        one = self.requests[request]
        columns = [self.edits, self.edits + layout.DOSE_WORDS]
        return [at * bool(one.limit is not None and edits) for at, edits in zip(columns, one.sites, strict=True)]

    def _tensor(self, draw: torch.Generator) -> Tensor:
        """Tokens of nobody are NaN."""
        out = torch.full((self.room, self.world.width), torch.nan)
        listed = [token for token, _, _ in self.tokens]
        out[listed] = 2 * torch.randn(len(listed), self.world.width, generator=draw)
        return out.to(self.dtype)

    def call(self, site: int, path: Path, tokens: Sequence[tuple[int, int, int]] | None = None) -> Call:
        tokens = self.tokens if tokens is None else tokens
        return Call(
            self.norm_weight,
            self.table,
            torch.tensor([site], dtype=torch.int32),
            work_of(tokens, self.table, path, self.room),
            make_positions(tokens, self.room),
            kinds_of(tokens, self.table),
            self.weights,
            self.form,
            self.dense_size if site else 0,
            any(entry.flags & (layout.LAYER_NORM | layout.L2_NORM) for entry in self.every),
        )

    def start(self, site: int) -> State:
        second = self.seconds[site]
        return State(
            self.streams[site].clone(),
            None if second is None else second.clone(),
            self.cells.clone(),
            self.counts.clone(),
        )

    def run(self, path: Path | None) -> list[State]:
        """What is left after each of the two sites, by the kernels' path or by the reference."""
        out: list[State] = []
        for site in (0, 1):
            state, call = self.start(site), self.call(site, path or TOKEN)
            if out:
                state.cells, state.counts = out[0].cells.clone(), out[0].counts.clone()
            if path is None:
                call.reference(state)
            else:
                call.kernel(state, path)
            out.append(state)
        return out

    def inputs(self, site: int, request: int) -> tuple[list[int], Array]:
        """A request's tokens, and x."""
        tokens = [token for token, row, _ in self.tokens if row == request + 1]
        x, second = self.streams[site][tokens], self.seconds[site]
        if self.form == PAIR and second is not None:
            x = x + second[tokens]
        return tokens, x.double().numpy()


def dense_of(edit: object) -> Dictionary | None:
    one = getattr(edit, "dictionary", None)
    if isinstance(one, Dictionary) and (one.activation in DENSE or isinstance(edit, Reconstruct)):
        return one
    return None


def normed(x: Array, weight: Tensor | None) -> Array:
    y = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + EPS)
    return y if weight is None else y * (weight.double().numpy() + OFFSET)


def judge(case: Case, ours: list[State], theirs: list[State]) -> int:
    """Hold what a path left against the truth, with the reference as yardstick; returns the tokens compared.

    Raises:
        AssertionError: less accurate, a wrong count or cell, or a bit changed that nobody asked for.
    """
    compared = 0
    conditions: list[dict[When, tuple[Bools, Array]]] = [{} for _ in case.requests]
    counts = case.counts.clone().long()
    unsure = torch.zeros_like(counts)
    for site in (0, 1):
        untouched = torch.ones(case.room, dtype=torch.bool)
        safe: list[int] = []
        want: list[Array] = []
        for number, request in enumerate(case.requests):
            tokens, x = case.inputs(site, number)
            if not tokens:
                continue
            held = conditions[number]
            for when in request.whens(site):
                held[when] = when.holds(x)
            positions = np.arange(request.start, request.start + len(tokens))
            done: Outcome = outcome(x, positions, request.sites[site], held)
            sure, touched = done.margin > NEAR, done.touched.any(1)
            for column, tells in zip(request.columns[site], done.touched.T, strict=True):
                counts[number + 1, column] += int((tells & sure).sum())
                unsure[number + 1, column] += int((~sure).sum())
            limit = request.limit or 0.0
            y, dose = dosed(x, done.x, limit)
            if column := case.doses(number)[site]:
                words = slice(column, column + layout.DOSE_WORDS)
                for state in (ours[site], theirs[site]):
                    judge_doses(state.counts[number + 1, words], dose[sure & touched], int((~sure).sum()), limit)
                counts[number + 1, words], unsure[number + 1, words] = -(2**31), 2**32  # judged
            untouched[tokens] = torch.from_numpy(sure & ~touched)
            safe += [token for token, is_safe in zip(tokens, sure & touched, strict=True) if is_safe]
            want += list(y[sure & touched])
        for state, was in ((ours[site], case.start(site)), (theirs[site], case.start(site))):
            assert torch.equal(bits(state.stream)[untouched], bits(was.stream)[untouched])
            if state.second is not None and was.second is not None:
                assert torch.equal(bits(state.second)[untouched], bits(was.second)[untouched])
        compared += len(safe)
        if want:
            _compare(case, ours[site], theirs[site], safe, torch.from_numpy(np.stack(want)))
        for state in (ours[site], theirs[site]):
            _cells(case, state.cells, conditions)
            assert ((counts <= state.counts) & (state.counts <= counts + unsure)).all()
    return compared


def _compare(case: Case, ours: State, theirs: State, safe: list[int], truth: Tensor) -> None:
    # A yardstick has to be one: fp32, rounded once.
    assert relative_error(theirs.stream[safe], truth) < torch.finfo(case.dtype).eps + 2e-5
    assert_as_accurate(ours.stream[safe], theirs.stream[safe], truth)
    if case.form == NORMED:
        assert ours.second is not None and theirs.second is not None
        weight = case.norm_weight
        assert_as_accurate(ours.second[safe], theirs.second[safe], torch.from_numpy(normed(truth.numpy(), weight)))
        # From the stream as it was rounded, not from what it was before.
        anew = torch.from_numpy(normed(ours.stream[safe].double().numpy(), weight))
        assert_as_accurate(ours.second[safe], rms_norm_ref(ours.stream[safe], weight, EPS, OFFSET), anew)
    if case.form == PAIR:
        assert ours.second is not None
        assert not ours.second[safe].any()


def _cells(case: Case, cells: Tensor, conditions: list[dict[When, tuple[Bools, Array]]]) -> None:
    """The bits of the conditions so far tell whether they hold; all others are as they were."""
    want, sure = case.cells.clone(), torch.full_like(case.cells, -1)
    for number, (request, held) in enumerate(zip(case.requests, conditions, strict=True)):
        tokens = torch.tensor([token for token, row, _ in case.tokens if row == number + 1])
        for when, (holds, near) in held.items():
            bit = request.bits[when] - (1 << 32 if request.bits[when] == 1 << 31 else 0)
            want[tokens] = (want[tokens] & ~bit) | torch.from_numpy(holds).int() * bit
            sure[tokens] &= torch.where(torch.from_numpy(near) > NEAR, -1, ~bit).int()
    assert torch.equal(cells & sure, want & sure)


def check(
    wishes: Sequence[Wish],
    path: Path,
    *,
    width: int,
    dtype: torch.dtype,
    form: int = BARE,
    seed: int = 0,
    features: int = 100,
    sizes: Sequence[int] = (1, 5, 64, 130),  # of dictionaries that are encoded whole
) -> int:
    """Draw a step with these requests and judge it; returns the tokens compared."""
    rng = np.random.default_rng(seed)
    most = max((wish.edits for wish in wishes), default=0)
    drawer = a_world(rng, width, dtype, max(features, most), most, sizes)
    case = Case(drawer.world, [drawer.request(wish) for wish in wishes], dtype, form, seed)
    theirs = case.run(None)
    return judge(case, case.run(path), theirs)
