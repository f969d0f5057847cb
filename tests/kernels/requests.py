"""Random requests in the words of truth.py, the weights that they read, and the table entries that they become."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from saesteer.kernels import layout
from tests.kernels.tables import Entry
from tests.kernels.truth import (
    ALWAYS,
    Ablate,
    Add,
    Array,
    Cap,
    Clamp,
    Dictionary,
    Edit,
    Probe,
    Reconstruct,
    When,
    groups,
)

NORMS = {"none": 0, "layer_norm": layout.LAYER_NORM, "l2": layout.L2_NORM}
DENSE = ("topk", "abstopk", "groupmax")
DIRECTIONS = 6  # vectors of a world


class World:
    """The weights of a site: dictionaries behind one another, then vectors. Rows that nobody may read are NaN."""

    def __init__(self, rng: np.random.Generator, width: int, dtype: torch.dtype, strength: float = 1.0) -> None:
        self.rng, self.width, self.dtype = rng, width, dtype
        self.strength = strength / width**0.5  # of a decoder's element
        self._enc: list[Tensor] = []
        self._dec: list[Tensor] = []
        self.biases: list[Array] = []
        self.thresholds: list[Array] = []
        self.outputs: list[Array] = []  # b_dec of each dictionary
        self.base: dict[int, int] = {}  # of dictionaries, vectors and probes by identity
        self.slots = 0
        self._rows(3)  # slot 0 is nobody's
        self.vectors = [self._vector() for _ in range(DIRECTIONS)]
        self.dictionaries: list[Dictionary] = []

    def _rows(self, count: int, centred: bool = False) -> tuple[Tensor, Tensor]:
        enc = torch.from_numpy(self.rng.normal(size=(count, self.width)) / self.width**0.5)
        if centred:
            # On a grid that bf16 holds too, so that rows sum to 0 exactly.
            grid = (enc * 64).round().clamp(-200, 200)
            rest = grid.sum(1, keepdim=True)
            share = (rest / self.width).trunc()
            grid -= share
            rest = rest - share * self.width
            grid -= rest.sign() * (torch.arange(self.width) < rest.abs())
            enc = grid / 64
            assert (enc.sum(1) == 0).all() and (enc.to(self.dtype).double() == enc).all()
        dec = torch.from_numpy(self.rng.normal(size=(count, self.width)) * self.strength)
        self._enc.append(enc.to(self.dtype))
        self._dec.append(dec.to(self.dtype))
        self.slots += count
        return self._enc[-1], self._dec[-1]

    def _vector(self) -> Array:
        self._rows(1)
        row = self._enc[-1].double()
        row = (row / row.norm()).to(self.dtype)
        self._enc[-1] = self._dec[-1] = row
        vector: Array = row[0].double().numpy()
        self.base[id(vector)] = self.slots - 1
        return vector

    def dictionary(self, features: int, activation: str, k: int = 0, norm: str = "none") -> Dictionary:
        """A new one, behind the others."""
        rng, base = self.rng, self.slots
        enc, dec = self._rows(features, centred=norm == "layer_norm")
        self._rows(1)  # and a row that is nobody's
        e: Array = enc.double().numpy()
        threshold = np.where(rng.random(features) < 0.3, 0.0, np.abs(rng.normal(size=features)))
        one = Dictionary(
            # What a norm takes away from x may as well be in the encoder: the tables hold it without.
            e=e + 0.05 if norm == "layer_norm" else e,
            d=dec.double().numpy(),
            b=single(rng.normal(size=features) / 4),
            b_dec=single(rng.normal(size=self.width)),
            threshold=single(threshold),
            activation=activation,
            k=k,
            norm=norm,
        )
        self.base[id(one)] = base
        self.dictionaries.append(one)
        return one

    def weights(self, entries: Sequence[Entry]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """w_enc, w_dec, b_enc, threshold and b_dec, NaN where these entries must not look."""
        enc, dec = torch.cat(self._enc), torch.cat(self._dec)
        reads, writes = torch.zeros(self.slots, dtype=torch.bool), torch.zeros(self.slots, dtype=torch.bool)
        whole, outputs = reads.clone(), torch.zeros(len(self.dictionaries), dtype=torch.bool)
        for entry in entries:
            if entry.flags & (layout.RANKED | layout.RECONSTRUCT):
                one = self.dictionaries[entry.slot] if entry.flags & layout.RECONSTRUCT else self.at(entry.slot)
                rows = slice(self.base[id(one)], self.base[id(one)] + len(one.b))
                whole[rows] = True
            if entry.flags & layout.RECONSTRUCT:
                writes[rows] = True
                outputs[entry.slot] = True
            else:
                reads[entry.slot] = True
                writes[entry.slot] |= not entry.flags & layout.GATE
        reads |= whole
        bias, threshold = (torch.full((self.slots,), torch.nan) for _ in range(2))
        b_dec = torch.full((max(len(self.dictionaries), 1), self.width), torch.nan)
        for number, one in enumerate(self.dictionaries):
            rows = slice(self.base[id(one)], self.base[id(one)] + len(one.b))
            bias[rows] = torch.from_numpy(one.b).float()
            threshold[rows] = torch.from_numpy(bounds(one)).float()
            b_dec[number] = torch.from_numpy(one.b_dec).float()
        enc[~reads], dec[~writes], bias[~whole], threshold[~whole] = (torch.nan,) * 4
        b_dec[: len(outputs)][~outputs] = torch.nan
        return enc, dec, bias, threshold, b_dec

    def at(self, slot: int) -> Dictionary:
        """The dictionary that holds a slot."""
        for one in self.dictionaries:
            if self.base[id(one)] <= slot < self.base[id(one)] + len(one.b):
                return one
        raise AssertionError(f"slot {slot} is in no dictionary")


def single(x: Array) -> Array:
    """The nearest numbers that fp32 holds."""
    return x.astype(np.float32).astype(np.float64)


def bounds(one: Dictionary) -> Array:
    """What a pre-activation has to exceed."""
    if one.activation == "jumprelu":
        return one.threshold
    return np.full_like(one.threshold, -np.inf if one.activation == "abstopk" else 0.0)


@dataclass(frozen=True, eq=False)
class Request:
    """Edits at each of two sites, and the tokens of this step."""

    sites: tuple[list[Edit], list[Edit]]
    tokens: int
    start: int  # position of the first one
    columns: tuple[list[int], list[int]] = field(default=([], []))  # of counts, for each edit
    bits: dict[When, int] = field(default_factory=dict)
    limit: float | None = None  # of a dose, 0.0 for any; None: doses are not measured

    def whens(self, site: int) -> list[When]:
        """The conditions that are decided at a site."""
        return [when for when in self.bits if when.site == site]

    def entries(self, world: World, site: int) -> list[list[Entry]]:
        """Groups of table entries."""
        out = [[gate(world, when, self.bits[when]) for when in self.whens(site)]]
        for numbers in groups(self.sites[site]):
            out.append([])
            for number in numbers:
                edit = self.sites[site][number]
                lock = 0
                for when in edit.when:
                    lock |= self.bits[when]
                for lo, hi in edit.windows:
                    common = {"lo": lo, "hi": hi, "gates": lock, "counter": self.columns[site][number]}
                    out[-1] += [Entry(**one, **common) for one in laws(world, edit)]  # type: ignore[arg-type]
        return [group for group in out if group]


def gate(world: World, when: When, bit: int) -> Entry:
    if isinstance(when.of, Probe):
        slot = world.base[id(when.of.v)]
        return Entry(
            slot,
            low=when.above,
            high=when.below,
            bias=when.of.bias,
            threshold=-np.inf,
            gates=bit,
            flags=layout.GATE,
        )
    reads = reading(world, when.of, when.feature)
    flags = reads.pop("flags")
    assert isinstance(flags, int)
    return Entry(low=when.above, high=when.below, gates=bit, flags=flags | layout.GATE, **reads)  # type: ignore[arg-type]


def reading(world: World, one: Dictionary, feature: int) -> dict[str, object]:
    """How an entry reads a feature."""
    base, size, k = world.base[id(one)], len(one.b), one.k
    fields: dict[str, object] = {
        "slot": base + feature,
        "bias": float(one.b[feature]),
        "threshold": float(bounds(one)[feature]),
    }
    if one.activation == "groupmax":
        part = size // k
        size, k = part, 1
    if one.activation in DENSE:
        fields |= {"size": size, "k": k}
    return fields | {"flags": ranking(one) | NORMS[one.norm]}


def ranking(one: Dictionary) -> int:
    if one.activation not in DENSE:
        return 0
    return layout.RANKED | layout.MAGNITUDE * (one.activation == "abstopk")


def laws(world: World, edit: Edit) -> list[dict[str, object]]:
    """The fields of the entry that an edit becomes, one a window; none for a reconstruction that keeps the error."""
    if isinstance(edit, Clamp):
        v = edit.value
        law: dict[str, object] = {
            "set": {"scale": 0.0, "shift": v},
            "add": {"shift": v},
            "scale": {"scale": v},
            "min": {"low": v},
            "max": {"high": v},
            "band": {"low": v, "high": edit.upper},
        }[edit.mode]  # type: ignore[assignment]
        reads = reading(world, edit.dictionary, edit.feature)
        return [{**reads, **law, "only_if_active": edit.only_if_active, "gain": edit.use}]
    if isinstance(edit, Reconstruct):
        one = edit.dictionary
        flags = layout.RECONSTRUCT | ranking(one) | NORMS[one.norm]
        whole = {"size": len(one.b), "k": one.k, "flags": flags, "gain": edit.use}
        return [{"slot": world.dictionaries.index(one), **whole}] * (edit.error == "drop")
    assert isinstance(edit, Add | Cap | Ablate)
    along: dict[str, object] = {"slot": world.base[id(edit.v)], "threshold": -np.inf}
    if isinstance(edit, Add):
        return [along | {"shift": edit.scale, "gain": edit.use, "flags": layout.MATCH * edit.match}]
    if isinstance(edit, Cap):
        return [along | {"low": edit.low, "high": edit.high, "gain": edit.use * edit.strength}]
    return [along | {"scale": 0.0, "gain": edit.use * edit.strength}]


@dataclass(frozen=True, slots=True)
class Wish:
    """What a drawn request is to look like."""

    kind: str  # clamps: one group; list: everything in turn; dense: first a whole dictionary; elsewhere; none
    edits: int
    tokens: int
    gated: bool = False
    limit: float | None = None  # as of the request


class Drawer:
    """Draws the details of requests."""

    def __init__(self, world: World, plain: Sequence[Dictionary], dense: Sequence[Dictionary]) -> None:
        self.world, self.rng = world, world.rng
        self.plain, self.dense = list(plain), list(dense)  # dense: reconstructed, or ranked

    def number(self, low: float, high: float) -> float:
        return float(np.float32(self.rng.uniform(low, high)))

    def one(self, *values: float) -> float:
        return float(self.rng.choice(values))

    def request(self, wish: Wish) -> Request:
        start = int(self.rng.integers(0, 8))
        if wish.kind == "none":
            return Request(([], []), wish.tokens, start, limit=wish.limit)
        dense = self.dense[int(self.rng.integers(len(self.dense)))] if wish.kind == "dense" else None
        whens = self.whens(dense) if wish.gated else []
        first = self.clamps(1, self.plain[0], start, wish.tokens, [w for w in whens if w.site == 0])
        last: list[Edit] = []
        if wish.kind == "clamps" and wish.edits:
            last = self.clamps(wish.edits, self.plain[0], start, wish.tokens, whens)
        elif wish.kind != "elsewhere" and wish.edits:
            last = self.list(wish.edits, dense, start, wish.tokens, whens)
        sites = (first if wish.kind == "elsewhere" or wish.gated else [], last)
        total = len(sites[0]) + len(last)
        columns = self.rng.permutation(total + 2)[:total].tolist()
        used = {when for edits in sites for edit in edits for when in edit.when}
        places = self.rng.permutation(32)  # bits of a word
        bits = {when: 1 << int(places[at]) for at, when in enumerate(w for w in whens if w in used)}
        split = (columns[: len(sites[0])], columns[len(sites[0]) :])
        return Request(sites, wish.tokens, start, split, bits, wish.limit)

    def whens(self, dense: Dictionary | None) -> list[When]:
        out = []
        for _ in range(int(self.rng.integers(1, 5))):
            above = self.one(-np.inf, 0.0, 0.25, -0.5)
            below = np.inf if self.rng.random() < 0.6 and above > -np.inf else self.number(0.5, 3)
            site, pick = int(self.rng.integers(2)), self.rng.random()
            if pick < 0.3:
                probe = Probe(self.vector(), self.number(-0.5, 0.5))
                out.append(When(site, probe, above=above, below=below))
                continue
            # A dictionary of which every feature is needed lies at the second site.
            one = dense if dense is not None and dense.activation in DENSE and site == 1 and pick < 0.7 else self.any()
            out.append(When(site, one, int(self.rng.integers(len(one.b))), above, below))
        return out

    def any(self) -> Dictionary:
        return self.plain[int(self.rng.integers(len(self.plain)))]

    def vector(self) -> Array:
        return self.world.vectors[int(self.rng.integers(DIRECTIONS))]

    def scope(self, start: int, tokens: int, whens: Sequence[When]) -> dict[str, object]:
        """Windows, conditions and the scale of a use."""
        windows: tuple[tuple[int, int], ...] = ALWAYS
        if self.rng.random() < 0.5:
            inside = np.arange(max(start - 1, 0), start + tokens + 2)
            count = 2 * min(int(self.rng.integers(1, 4)), len(inside) // 2)
            cuts = sorted(self.rng.permutation(inside)[:count].tolist())
            windows = tuple(zip(cuts[::2], cuts[1::2], strict=True))
        picked = tuple(when for when in whens if self.rng.random() < 0.4)
        return {"windows": windows, "when": picked, "use": self.one(1.0, 1.0, 0.5, -1.0), "module": self.module()}

    def module(self) -> int:
        return int(self.rng.random() < 0.2) * int(self.rng.integers(1, 1 << 30))

    def clamps(
        self, count: int, one: Dictionary, start: int, tokens: int, whens: Sequence[When], **shared: object
    ) -> list[Edit]:
        """Neighbours of one dictionary: a single group."""
        out: list[Edit] = []
        shared = {"module": self.module()} | shared
        for feature in self.rng.permutation(len(one.b))[:count].tolist():
            mode = str(self.rng.choice(["set", "add", "scale", "min", "max", "band"]))
            value = self.number(-1, 2) if mode == "scale" else self.number(-2, 4)
            if mode == "max":
                value = self.number(0, 2)
            fields = self.scope(start, tokens, whens) | shared
            only = bool(self.rng.random() < 0.3)
            upper = self.number(4, 6)
            out.append(
                Clamp(
                    dictionary=one,
                    feature=feature,
                    mode=mode,
                    value=value,
                    upper=upper,
                    only_if_active=only,
                    **fields,  # type: ignore[arg-type]
                )
            )
        return out

    def list(self, count: int, dense: Dictionary | None, start: int, tokens: int, whens: Sequence[When]) -> list[Edit]:
        """Everything in turn; what needs a whole dictionary stands first, as it must at a site."""
        out: list[Edit] = []
        if dense is not None:
            shared = self.scope(start, tokens, whens)
            if dense.activation == "groupmax" or (dense.activation in DENSE and self.rng.random() < 0.4):
                out += self.clamps(max(count // 2, 1), dense, start, tokens, whens)
            else:
                out += self.clamps(
                    int(self.rng.integers(0, max(count // 2, 1) + 1)), dense, start, tokens, (), **shared
                )
                error = "keep" if out and self.rng.random() < 0.2 else "drop"
                out.append(Reconstruct(dictionary=dense, error=error, **shared))  # type: ignore[arg-type]
        while len(out) < count:
            scope = self.scope(start, tokens, whens)
            kind = self.rng.choice(["clamps", "clamps", "add", "cap", "ablate"])
            if kind == "clamps":
                # Ranks and reconstructions stay in the first group of their site.
                some = int(self.rng.integers(1, 2 + count - len(out)))
                out += self.clamps(some, self.any(), start, tokens, whens)
            elif kind == "add":
                match = bool(self.rng.random() < 0.3)
                scale = self.number(-0.5, 0.5) if match else self.number(-2, 2)
                out.append(Add(v=self.vector(), scale=scale, match=match, **scope))  # type: ignore[arg-type]
            elif kind == "cap":
                low, high = sorted((self.number(-2, 2), self.number(-2, 2)))
                ends = [(low, high), (-np.inf, high), (low, np.inf)][int(self.rng.integers(3))]
                strength = self.one(1.0, 0.5)
                out.append(Cap(v=self.vector(), low=ends[0], high=ends[1], strength=strength, **scope))  # type: ignore[arg-type]
            else:
                out.append(Ablate(v=self.vector(), strength=self.one(1.0, 2.0, -1.0, 0.5), **scope))  # type: ignore[arg-type]
        return out
