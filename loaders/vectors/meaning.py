"""What the arrays and words of a file of vectors mean: the rows, and where they belong. Knows no container.

The rule stands in ``saesteer.loaders.vectors``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from saesteer.dictionaries.vectors import HIDDEN_STATES, Vector
from saesteer.language.sites import parse
from saesteer.loaders.aliases import Place, place_in
from saesteer.loaders.files import wrong
from saesteer.loaders.vectors.contents import MATRIX, Contents, Numbers

Rows = dict[int | None, Vector]  # by layer; None: for any site

_BIAS = re.compile(r"(.*[/.])?(bias|b|intercept_?)")
_LAYER = re.compile(r"(.*/)?((best|optimal|target|steering)_)?layers?(_?(idx|index|indices|ids?))?", re.IGNORECASE)
_SITE = re.compile(r"(.*/)?(site|hook|hook_name|hook_point|module|submodule)", re.IGNORECASE)
_OWN, _KNOWN = "controlvector.", ("model_hint", "layer_count")  # llama.cpp's own keys
_ONE = "#{} behind the place, which takes one, as in FILE#{}@resid_post.20"


class Asked(NamedTuple):
    """What the operator wants of a file."""

    file: Path
    array: str | None = None  # the name of an array, or the number of a row
    site: str | None = None  # canonical
    hidden: bool = False  # the rows are those of hidden_states


class Found(NamedTuple):
    """The vectors of a file."""

    rows: Rows
    kind: str | None = None  # of the sites that they belong to
    stack: int | None = None  # how many layers their array has a row for, if nothing but that says that they are layers
    bias: float = 0.0
    notes: tuple[tuple[str, str], ...] = ()


def meaning(asked: Asked, held: Contents) -> Found:
    """The vectors that are asked for; raises LoadError for contents without one meaning."""
    path, arrays, words = asked.file, dict(held.arrays), dict(held.words)
    biases = _biases(path, arrays, words)
    said, layers = _said(path, arrays, words)
    notes = [("says", f"{name} = {word!r:.80}") for name, word in words.items()]
    if unknown := [name for name in words if name.startswith(_OWN) and name.removeprefix(_OWN) not in _KNOWN]:
        notes.append(("warning", f"unknown keys, which change nothing here: {', '.join(unknown):.200}"))
    row = None
    if asked.array is not None:
        arrays, row = _picked(path, arrays, asked.array)
    if len(arrays) != 1:
        found = _several(path, arrays, said)
    else:
        [(name, array)] = arrays.items()
        place = _joined(path, name, place_in(name), said)
        if len(biases) == 2 == len(array) == array.ndim and row is None:
            array, biases = array[1] - array[0], [biases[1] - biases[0]]
            notes.insert(0, ("note", "two classes: row 1 less row 0"))
        found = _one(asked, name, array, place, layers, row)
    if len(biases) > 1:
        raise wrong(path, "bias", f"{len(biases)} numbers", "one, or two beside a row for each of two classes")
    return _held(asked, found)._replace(bias=biases[0] if biases else 0.0, notes=(*found.notes, *notes))


def _one(asked: Asked, name: str, array: Numbers, place: Place, layers: list[int], row: int | None) -> Found:
    """One array, or one of its rows."""
    path, shape = asked.file, list(array.shape)
    if row is not None:
        if array.ndim != 2 or row >= len(array):
            raise wrong(path, f"#{row}", f"no row of {name} {shape}", "a row, counted from 0")
        array = array[row]
    if array.ndim == 1:
        return Found({place.layer: _floats(path, name, array)}, place.kind)
    if array.ndim != 2:
        raise wrong(path, name, f"shape {shape}", MATRIX)
    numbers = _floats(path, name, array)
    if layers:
        if len(layers) != len(array) or len({*layers}) < len(layers):
            raise wrong(path, name, f"{len(array)} rows for layers {layers[:8]}", "one row for each layer")
        return Found(dict(sorted(zip(layers, numbers, strict=True))), place.kind)
    if place.layer is not None:
        expected = f"[d] for layer {place.layer}, or {_ONE.format('ROW', 3)}"
        raise wrong(path, name, f"shape {shape}", expected)
    if asked.hidden:
        between = range(len(array) - 2)
        note = f"row i + 1 is resid_post.i; rows 0 (embedding) and {len(array) - 1} (final norm) are left out"
        rows: Rows = {layer: numbers[layer + 1] for layer in between}
        return Found(rows, "resid_post", len(array) - 1, notes=(("note", note),))
    return Found(dict(enumerate(numbers)), place.kind, len(array))


def _several(path: Path, arrays: dict[str, Numbers], said: Place) -> Found:
    """Arrays that are named by their places."""
    places = {name: _joined(path, name, place_in(name), said) for name in arrays}
    if unplaced := [name for name, place in places.items() if place.layer is None]:
        expected = f"one array, names such as layer_12, or {_ONE.format('NAME', unplaced[0])}"
        raise wrong(path, ", ".join(unplaced[:8]), "no name of a layer", expected)
    if not arrays:
        raise wrong(path, "the file", "no array", "an array of floats, [d] or [layers, d]")
    if len(kinds := {place.kind for place in places.values()}) > 1:
        raise wrong(path, "the arrays", f"of {', '.join(sorted(map(str, kinds)))}", "one kind of site")
    rows: Rows = {}
    for name, (_, layer) in sorted(places.items(), key=lambda pair: pair[1].layer or 0):
        if layer in rows:
            raise wrong(path, name, f"the second array of layer {layer}", "one for each layer")
        if arrays[name].ndim != 1:
            raise wrong(path, name, f"shape {list(arrays[name].shape)}", "[d]")
        rows[layer] = _floats(path, name, arrays[name])
    if len(widths := {row.size for row in rows.values()}) > 1:
        raise wrong(path, "the arrays", f"{' and '.join(map(str, sorted(widths)[:2]))} wide", "one width")
    return Found(rows, kinds.pop())


def _held(asked: Asked, found: Found) -> Found:
    """What belongs to the site that the operator names, if there is one."""
    if asked.hidden and found.stack is None:
        raise wrong(asked.file, HIDDEN_STATES, "no array of rows without layers", "one array [layers + 1, d]")
    if asked.site is None:
        return found
    kind, layer = parse(asked.site)
    if len(found.rows) > 1 and (layer not in found.rows or found.kind not in (None, kind)):
        raise wrong(asked.file, f"@{asked.site}", f"{len(found.rows)} rows, none for it", _ONE.format("ROW", 3))
    row = found.rows[layer] if len(found.rows) > 1 else next(iter(found.rows.values()))
    return found._replace(rows={layer: row}, kind=kind)


def _picked(path: Path, arrays: dict[str, Numbers], name: str) -> tuple[dict[str, Numbers], int | None]:
    """The array with a name; or the only one, and the number of a row."""
    if name in arrays:
        return {name: arrays[name]}, None
    if len(arrays) != 1 or not name.isdecimal():
        raise wrong(path, f"#{name}", "no array of this name", f"one of {', '.join(arrays)}, or a row of a single one")
    return arrays, int(name)


def _biases(path: Path, arrays: dict[str, Numbers], words: dict[str, object]) -> list[float]:
    """The numbers of the bias, which is taken away from the rest."""
    names = [name for name in (*arrays, *words) if _BIAS.fullmatch(name)]
    if len(names) > 1:
        raise wrong(path, ", ".join(names[:8]), "several biases", "one: a file holds one probe")
    found = [np.asarray(arrays.pop(name, None) if name in arrays else words.pop(name)) for name in names]
    for value in found:
        if value.dtype.kind not in "fi" or value.size > 2 or not np.isfinite(value).all():
            expected = "one finite number, or two of two classes"
            raise wrong(path, names[0], f"shape {list(value.shape)}, or not finite", expected)
    return [float(one) for value in found for one in value.reshape(-1)]


def _said(path: Path, arrays: dict[str, Numbers], words: dict[str, object]) -> tuple[Place, list[int]]:
    """The place that words beside the arrays name, and the layers if they are several; both are taken away."""
    place, layers = Place(), list[int]()
    for name in [name for name in (*words, *arrays) if _LAYER.fullmatch(name)]:
        value = words[name] if name in words else arrays[name]
        numbers = np.asarray(int(value) if isinstance(value, str) and value.isdecimal() else value)
        if numbers.dtype.kind in "fi" and numbers.ndim < 2 and not (numbers % 1).any() and (numbers >= 0).all():
            layers = [int(one) for one in numbers.reshape(-1)]
            words.pop(name, None), arrays.pop(name, None)
    if len(layers) == 1:
        place, layers = Place(None, layers[0]), []
    for name in [name for name in words if _SITE.fullmatch(name)]:
        if (found := place_in(str(words[name]))) != Place():
            place = _joined(path, name, found, place)
            del words[name]
    return place, layers


def _joined(path: Path, name: str, one: Place, other: Place) -> Place:
    """The place of both; raises LoadError where they contradict each other."""
    both = Place(one.kind or other.kind, other.layer if one.layer is None else one.layer)
    for place in (one, other):
        if place.kind not in (None, both.kind) or place.layer not in (None, both.layer):
            raise wrong(path, name, "at two places", "one place by its name and by what stands beside it")
    return both


def _floats(path: Path, name: str, array: Numbers) -> Vector:
    if array.dtype.kind != "f":
        raise wrong(path, name, f"{array.dtype} {list(array.shape)}", "floats of 16, 32 or 64 bits")
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinity, which is refused
        return np.ascontiguousarray(array, np.float32)
