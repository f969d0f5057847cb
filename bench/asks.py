"""What the requests of each mode bring: prompts, and specs with their vectors. Knows no engine and no clock.

All is drawn from seeds, so that every process makes the same without being sent it.
"""

from __future__ import annotations

import random
from base64 import b64encode
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np

from bench.dummy import MODELS

FEATURES = 16384  # of the dictionary at the middle layer
DICTIONARY, VECTOR, MODULE = "random", "all", "all"  # names in the settings
PROBES, PROBED = 100, 10  # in all, at so many sites
TOP_K = 8
SCALE = 0.01  # small beside the stream: the text does not matter, but nothing may overflow
BEGIN = 2  # first token of every prompt
APART = 4  # tokens between two ends of the run-in, and so between all that begin and end behind it

Spec = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Shape:
    """What prompts and vectors must know of a model."""

    layers: int
    width: int
    vocabulary: int

    @classmethod
    def of(cls, model: str) -> Shape:
        """That of a model in ``bench.dummy.MODELS``."""
        layers, width, vocabulary = (
            int(str(MODELS[model][key])) for key in ("num_hidden_layers", "hidden_size", "vocab_size")
        )
        return cls(layers, width, vocabulary)


@dataclass(frozen=True, slots=True)
class Mode:
    """A row of the table: which engine is asked, and for what."""

    name: str
    engine: Literal["stock", "disabled", "saesteer"]
    asks: Literal["nothing", "module", "inline", "clamp", "vector", "features", "probes", "activations"] = "nothing"
    sets: int = 0  # inline: different sets among the requests; 0: each request brings its own, never seen before
    edits: int = 1  # clamp: features of each request at its one layer; vector: layers at which one is added
    layers: int = 0  # activations: how many are read; 0: all

    @property
    def reads(self) -> bool:
        """Whether its requests read something, each of the tokens that it generates."""
        return self.asks in ("features", "probes", "activations")


STOCK = Mode("stock", "stock")
MODES = {
    mode.name: mode
    for mode in (
        Mode("disabled", "disabled"),  # installed, and nothing configured
        Mode("idle", "saesteer"),  # a dictionary, ops at all layers, nobody steered
        Mode("named", "saesteer", "module"),  # everybody uses one module: a named vector for every layer
        Mode("shared", "saesteer", "inline", 1),  # everybody brings the same vectors for every layer
        Mode("inline-4", "saesteer", "inline", 4),
        Mode("inline-16", "saesteer", "inline", 16),
        Mode("clamp", "saesteer", "clamp"),  # one layer, another feature for each request
        Mode("fresh", "saesteer", "inline"),  # nothing is ever sent twice
        Mode("features", "saesteer", "features"),  # the strongest 8
        Mode("probes", "saesteer", "probes"),  # PROBES scores at PROBED sites
        Mode("capture", "saesteer", "activations", layers=1),  # the stream behind one layer
        Mode("captures", "saesteer", "activations"),  # and behind all
    )
}
USUAL = tuple(name for name, mode in MODES.items() if name != "fresh" and not mode.reads)
# One number varied, for curves: edits at one layer, and layers with one edit.
VARIED = {
    **{f"clamps-{edits}": Mode(f"clamps-{edits}", "saesteer", "clamp", edits=edits) for edits in (4, 16, 32, 64)},
    **{f"vectors-{layers}": Mode(f"vectors-{layers}", "saesteer", "vector", edits=layers) for layers in (1, 4, 16)},
}


@dataclass(frozen=True, slots=True)
class Load:
    """One run: this many requests, at most so many at a time, behind a run-in that takes no times.

    The run-in has a request for each place, and they end one after the other. Requests of one length that begin
    together would end together: each time to a first token would be that of a queue, and jump with the steps it takes.
    """

    mode: str
    seed: int  # of the prompts; no two runs of one engine may share it, or the second finds them in the prefix cache
    requests: int
    at_once: int
    prompt: int  # tokens
    tokens: int  # that come out
    whole: bool = False  # answers come whole, as from LLM.generate, not token by token
    burst: bool = False  # all requests begin together, without a run-in

    @property
    def run_in(self) -> int:
        """Requests of the run-in."""
        return 0 if self.burst else self.at_once


def answers(load: Load) -> list[int]:
    """Tokens of every answer, those of the run-in first."""
    return [min(2 + APART * n, load.tokens) for n in range(load.run_in)] + [load.tokens] * load.requests


def mode_of(load: Load) -> Mode:
    """Its row of the table."""
    return (MODES | VARIED).get(load.mode, STOCK)


def reads(names: Iterable[str]) -> bool:
    """Whether one of these modes reads."""
    return any((MODES | VARIED)[name].reads for name in names)


def layers_read(mode: Mode, shape: Shape) -> list[int]:
    """The layers behind which a mode reads the stream."""
    if mode.asks == "activations":
        return spread(shape.layers, mode.layers or shape.layers)
    if mode.asks == "probes":
        return spread(shape.layers, PROBED)
    return [shape.layers // 2] if mode.reads else []


def prompts(load: Load, shape: Shape) -> list[list[int]]:
    """Token ids of every request, those of the run-in first; they share no block of the prefix cache."""
    draw = random.Random(load.seed)
    return [
        [BEGIN, *(draw.randrange(BEGIN + 1, shape.vocabulary) for _ in range(load.prompt - 1))]
        for _ in range(load.run_in + load.requests)
    ]


def specs(load: Load, shape: Shape) -> list[Spec | None]:
    """What every request asks saesteer for, those of the run-in first; None is nothing."""
    total = load.run_in + load.requests
    return [_spec(mode_of(load), shape, load.seed * total + n, n) for n in range(total)]


def probe() -> Spec:
    """What tells the three engines apart: one edits, one refuses, one has never heard of it."""
    return _clamp(7)


def vectors(shape: Shape, seed: int) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """Random bfloat16 bits [layers, width]."""
    drawn = np.random.default_rng(seed).standard_normal((shape.layers, shape.width), dtype=np.float32)
    return (drawn.view(np.uint32) >> 16).astype("<u2")


def _spec(mode: Mode, shape: Shape, unique: int, number: int) -> Spec | None:
    if mode.asks == "module":
        return {"edits": [{"op": "use", "module": MODULE}]}
    if mode.asks == "clamp":
        return _clamp(*((37 * unique + 101 * edit) % FEATURES for edit in range(mode.edits)))
    if mode.asks == "vector":
        add = {"op": "add", "vector": VECTOR, "scale": SCALE}
        return {"edits": [{**add, "site": f"resid_post.{layer}"} for layer in spread(shape.layers, mode.edits)]}
    if mode.asks == "inline":
        # Modes share no set: the same prompt with the same edits would be found in the prefix cache.
        inline = _wire(shape, 100 * mode.sets + number % mode.sets) if mode.sets else _draw(shape, 10_000 + unique)
        return {"edits": [{"op": "add", "site": "resid_post", "scale": SCALE, "vector": inline}]}
    if mode.reads:
        return {"return": {mode.asks: _reads(mode, shape)}}
    return None


def spread(layers: int, count: int) -> list[int]:
    """So many layers, evenly over a model; a small one has fewer."""
    return sorted({(2 * n + 1) * layers // (2 * count) for n in range(count)})


def probes_of(shape: Shape) -> list[tuple[str, int]]:
    """Name and layer of each probe, those of a layer side by side."""
    layers = layers_read(MODES["probes"], shape)
    share = PROBES // len(layers)
    return [(f"probe-{layer}-{number}", layer) for layer in layers for number in range(share)]


def _reads(mode: Mode, shape: Shape) -> list[dict[str, Any]]:
    if mode.asks == "features":
        return [{"dictionary": DICTIONARY, "top_k": TOP_K}]
    if mode.asks == "probes":
        return [{"probe": name, "site": f"resid_post.{layer}"} for name, layer in probes_of(shape)]
    # By handle: as text in the answer, all layers of the 4B are 60 MB for 256 tokens.
    read = {"as": "handle", "scope": {"generated": True}}
    return [{"site": f"resid_post.{layer}", **read} for layer in layers_read(mode, shape)]


def _clamp(*features: int) -> Spec:
    clamp = {"op": "clamp", "dictionary": DICTIONARY, "value": 30.0}
    return {"edits": [{**clamp, "feature": feature} for feature in features]}


@cache
def _wire(shape: Shape, seed: int) -> dict[str, Any]:
    return _draw(shape, seed)


def _draw(shape: Shape, seed: int) -> dict[str, Any]:
    return {
        "dtype": "bfloat16",
        "shape": [shape.layers, shape.width],
        "layers": list(range(shape.layers)),
        "data": b64encode(vectors(shape, seed).tobytes()).decode(),
    }
