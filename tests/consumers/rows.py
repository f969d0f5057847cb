"""Rows of one number each, which tells what they are, as consumers get them. Knows no queue and no disk."""

from dataclasses import replace
from typing import Any

import numpy as np

from saesteer.consumers import Array, Request, Rows
from saesteer.planning.answers import Reported
from saesteer.planning.plan import END, Readout

SITE = {"site": "resid_post.3", "at": "before", "layers": [3]}


def value(request: int, position: int) -> float:
    """What a row holds."""
    return request * 1000.0 + position


def token(position: int) -> int:
    return 7 * position + 1


def rows(request: int, lo: int, hi: int, width: int = 3) -> Rows:
    """The rows of some positions, ``width`` equal numbers each."""
    numbers = np.repeat(np.array([value(request, at) for at in range(lo, hi)], "<f4"), width)
    array = Array("float32", (hi - lo, width), numbers.tobytes())
    ids = np.array([token(at) for at in range(lo, hi)])
    return Rows("activation", SITE, np.arange(lo, hi), ids, {"data": array})


def request(number: int = 0, *, captured: bool = False, parameters: Any = "tag") -> Request:
    return Request(f"request {number}", 0, parameters, captured)


def readout(**more: Any) -> Reported:
    """A readout of an activation, as answers name it."""
    one = Readout("activation", "saesteer.return.activations[0]", "resid_post.3", "resid_post.3", False, ((0, END),))
    reduced = {"reduce": more["reduce"]} if "reduce" in more else {}
    return Reported(replace(one, **more), (SITE | reduced,), "float32")
