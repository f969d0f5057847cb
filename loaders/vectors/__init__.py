"""Vector files -> VectorSet, by one rule for all containers. Knows no models, no requests and no dictionaries.

    one array [d]              the vector, for any site
    one array [layers, d]      row i belongs to layer i; the model must have as many layers as the array has rows
    several arrays [d]         each named by its layer or site: 12, layer_12, direction.12, blocks.12.hook_resid_post
    layer, site, hook_name     numbers and names beside one array that hold it to a place, as its own name does
    bias                       a number beside it, which makes it a probe: x . v + bias
    two rows and two biases    of two classes: their difference
    function                   of a probe: linear, sigmoid or tanh

Behind a place, #NAME or #ROW takes one array or row, and @SITE says where it belongs, whatever the file says. In front
of it, ``hidden_states:`` says that one array [layers + 1, d] has the rows of Transformers' hidden_states: row 0 is the
embedding, row i + 1 the output of layer i, and the last row is behind the final norm, which no site is.

Axes of length 1 do not count. Layers count from 0, as in ``resid_post.12``; so they do in GGUF's direction.N, which
llama.cpp adds after layer N. All values become float32.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, get_args

import numpy as np

from saesteer.dictionaries.vectors import HIDDEN_STATES, Function, VectorSet, vector_set
from saesteer.errors import LoadError
from saesteer.language.sites import canonical, split_site
from saesteer.loaders.files import fetch, there, wrong
from saesteer.loaders.hub import unpinned
from saesteer.loaders.vectors.contents import READERS, contents
from saesteer.loaders.vectors.meaning import Asked, meaning

MAX_WIDTH = 1 << 17


def asked(place: str | Path) -> Asked:
    """What ``[hidden_states:]FILE[#NAME or #ROW][@@REVISION][@SITE]`` asks for; a file of that whole name comes first.

    Raises:
        LoadError: there is no such file.
        ConfigError: what stands behind @ is not a site.
    """
    if there(Path(place).expanduser()):
        return Asked(fetch(place))
    text = str(place).removeprefix(HIDDEN_STATES)
    where, site = split_site(text)
    plain, pin = unpinned(where)
    file, _, array = plain.rpartition("#")
    if not file.endswith((*READERS,)):
        file, array = plain, ""
    site = site and canonical(site)
    return Asked(fetch(file + pin), array or None, site, text != str(place))


def read_vectors(place: str | Path, *, bias: float | None = None, function: Function | None = None) -> VectorSet:
    """The vectors of a file.

    Args:
        place: a file of one of READERS, or one on the hub as ``org/repo/file``, with what may stand around it.
        bias: a probe's bias, in place of the file's, which is 0 if it has none.
        function: a probe's function, in place of the file's, which is linear if it has none.

    Raises:
        LoadError: naming the file, the array, what is there and what was expected.
        ConfigError: what stands behind @ is not a site.
    """
    wanted = asked(place)
    path, held = wanted.file, contents(wanted.file)
    given: Any = held.words.pop("function", "linear")
    if given not in get_args(Function):
        raise wrong(path, "function", f"{given!r:.40}", f"one of {', '.join(get_args(Function))}")
    found = meaning(wanted, held)
    for layer, row in found.rows.items():
        at = "the vector" if layer is None else f"layer {layer}"
        if not 0 < row.size <= MAX_WIDTH:
            raise wrong(path, at, f"shape {list(row.shape)}", f"[d] with d up to {MAX_WIDTH}")
        if not np.isfinite(row).all():
            raise wrong(path, at, "holds NaN, infinity or a number beyond float32", "finite values")
        if not row.any():
            raise wrong(path, at, "all zeros", "a direction; leave out a layer without one")
    if bias is not None and not math.isfinite(bias):
        raise LoadError(f"{place}: bias {bias}; expected a finite number")
    own = found.bias if bias is None else bias
    return vector_set(found.rows, own, function or given, kind=found.kind, stack=found.stack, notes=found.notes)
