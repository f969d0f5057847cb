"""What Neuronpedia's requests mean in the request language. Functions of their arguments alone: no engine, no file.

With c = strength * strengthMultiplier and d a decoder row, or a vector as it was sent:

    SIMPLE_ADDITIVE    x' = x + c * d                          add
    ORTHOGONAL_DECOMP  x' = x + (c - 1) * (x . u) * u          ablate with strength 1 - c
    PROJECTION_CAP     x' = x + (min(x . u, c) - x . u) * u    cap with max c

u is d at length 1, and ``normalizeSteering`` puts u in the place of d. Unlike our edits, these change position 0, too.
"""

import math
from base64 import b64encode
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from saesteer.dictionaries.coder import CoderInfo
from saesteer.language.address import PREFIX
from saesteer.language.fields import closest, fail, listing, show
from saesteer.planning.lookup import dictionary_of
from saesteer.planning.plan import Catalog, member
from saesteer.plugin.http.neuronpedia.shapes import Steer, Type

Vector = NDArray[np.float32]
Json = dict[str, Any]
INT64 = 2.0**63
EVERYWHERE: Json = {"positions": [[0, None]]}  # all tokens, the first as well


class Prompt(NamedTuple):
    """A prompt as the model reads it, token by token."""

    text: str
    ids: tuple[int, ...]
    tokens: tuple[str, ...]
    special: tuple[bool, ...]  # whether the tokenizer has the token for itself: BOS, a marker of a chat
    bos: int | None  # the tokenizer's BOS, if it has one

    @property
    def begins(self) -> bool:
        """Whether its first token is BOS."""
        return self.bos is not None and self.ids[:1] == (self.bos,)


class Place(NamedTuple):
    """A source of Neuronpedia, as our requests name a dictionary."""

    source: str  # as the client calls it
    dictionary: str
    layer: int | None
    key: str  # in the catalog
    info: CoderInfo

    @property
    def fields(self) -> Json:
        """The fields of an edit or of a read."""
        return {"dictionary": self.dictionary} | ({} if self.layer is None else {"layer": self.layer})


def place_of(catalog: Catalog, source: str, model: str, at: str = "source") -> Place:
    """The dictionary of a source: one with this name here, or with the address MODEL/SOURCE.

    Neuronpedia's server holds one model, so a source that only one loaded dictionary has needs no right model. A layer
    of a set is ``NAME@LAYER`` where it has no address.

    Raises:
        SpecError: there is none, several models have this source, or it is of a model that may not be the served one.
    """
    name, layer = catalog.named(source)
    if layer is not None or (source in catalog.dictionaries and source not in catalog.sets):
        return Place(source, name, layer, *dictionary_of(catalog, name, layer, at))
    found = {one: key for one, key in catalog.addresses.items() if one.rpartition("/")[2] == source}
    exact = f"{PREFIX}{model.rpartition('/')[2]}/{source}"
    if exact in found or len(set(found.values())) == 1:
        name = exact if exact in found else next(iter(found))
        return Place(source, name, None, *dictionary_of(catalog, name, None, at))
    if found:
        fail(at, "conflict", f"got {show(source)} of several models, expected the model of one: {listing(found)}")
    by_name = (one for one in catalog.dictionaries if not one.startswith(PREFIX))
    known = [*dict.fromkeys([*(one.rpartition("/")[2] for one in catalog.addresses), *by_name])]
    return fail(at, "unknown_name", f"got {show(source)}{closest(source, known)}, expected one of: {listing(known)}")


def sources_of(catalog: Catalog, source_set: str, selected: Sequence[str]) -> list[str]:
    """The sources that are asked for: those that are selected, else all of the set, in the order of their layers.

    A set is what stands behind the layer in sources, a name for dictionaries of several layers, or one dictionary.

    Raises:
        SpecError: there is no such set.
    """
    if selected:
        return [*dict.fromkeys(selected)]
    named = [one.rpartition("/")[2] for one in catalog.addresses]
    found = [one for one in dict.fromkeys(named) if _split(one)[1] == source_set]
    if found:
        return sorted(found, key=lambda one: _split(one)[0])
    if source_set in catalog.sets:
        return [member(source_set, layer) for layer in catalog.sets[source_set]]
    if source_set in catalog.dictionaries:
        return [source_set]
    known = sets_of(catalog)
    message = f"got {show(source_set)}{closest(source_set, known)}, expected one of: {listing(known)}"
    return fail("sourceSet", "unknown_name", message)


def sets_of(catalog: Catalog) -> list[str]:
    """All that a request may name as a set."""
    at_neuronpedia = [_split(one.rpartition("/")[2])[1] for one in catalog.addresses]
    names = [catalog.named(one)[0] for one in catalog.dictionaries]
    return [*dict.fromkeys([*at_neuronpedia, *names, *catalog.sets])]


def _split(source: str) -> tuple[int, str]:
    """``20-gemmascope-res-16k`` → its layer and its set; a source of another form is a set of its own."""
    layer, _, rest = source.partition("-")
    return (int(layer), rest) if layer.isdecimal() and rest else (0, source)


class Steered(NamedTuple):
    """What to steer with: a feature's decoder row, or a vector."""

    site: str
    strength: float
    vector: Vector  # [d]
    at: str  # where the request has it


def edits_of(given: Sequence[Steered], asked: Steer, scope: Json) -> list[Json]:
    """The edits of a request. What is added at one site is one vector, as a request may bring few of them.

    A dictionary's row is added as a vector, not by a clamp: where the dictionary scales its input, a clamp scales the
    row as well.

    Raises:
        SpecError: there is nothing to steer with, two vectors of a site differ in width, or one that has to have the
            length 1 is zero.
    """
    if not given:
        fail("features", "missing_field", "is empty, expected something to steer with, or DEFAULT as the only type")
    if asked.steer_method != "SIMPLE_ADDITIVE":  # along the vector
        found = []
        for one in given:
            c = one.strength * asked.strength_multiplier
            op: Json = (
                {"op": "cap", "max": c}
                if asked.steer_method == "PROJECTION_CAP"
                else {"op": "ablate", "strength": 1 - c}
            )
            found.append({**op, "vector": inline(one.vector), "site": one.site, "scope": scope})
        return found
    sums: dict[str, NDArray[np.float64]] = {}
    for one in given:
        length = _length(one.vector, one.at) if asked.normalize_steering else 1.0
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused as that
            added = one.strength * asked.strength_multiplier / length * one.vector.astype(np.float64)
        before = sums.setdefault(one.site, np.zeros_like(added))
        if len(before) != len(added):
            message = f"is {len(added)} wide, expected {len(before)}, like another vector for {one.site}"
            fail(one.at, "conflict", message)
        with np.errstate(invalid="ignore"):
            sums[one.site] = before + added
    # A sum of 0 changes nothing, and has no direction.
    held = {site: one for site, one in sums.items() if one.any()}
    return [{"op": "add", "vector": inline(one), "site": site, "scope": scope} for site, one in held.items()]


def _length(vector: Vector, at: str) -> float:
    found = math.sqrt(float(np.square(vector, dtype=np.float64).sum()))
    if found == 0:
        fail(at, "zero_vector", "is a vector of zeros, which has no direction, expected another")
    return found


def check_finite(numbers: Iterable[float], what: str) -> None:
    """Refuse an answer with numbers that JSON has not: the model's weights or a kernel may make them.

    Raises:
        SpecError: there is NaN or infinity among them.
    """
    if not all(map(math.isfinite, numbers)):
        fail("prompt", "not_finite", f"gives NaN or infinity in {what}, expected finite numbers, as JSON has no others")


def inline(vector: NDArray[Any]) -> Json:
    """A vector [d] as a request brings it. What float32 does not hold becomes infinite, and is refused as that."""
    with np.errstate(over="ignore"):
        data = vector.astype("<f4").tobytes()
    return {"dtype": "float32", "shape": [len(vector)], "data": b64encode(data).decode()}


def but_special(prompt: Prompt) -> Json:
    """All tokens of a prompt but its special ones, and all that are generated."""
    edges = [0, *(end for at, special in enumerate(prompt.special) if special for end in (at, at + 1)), None]
    spans = [[start, end] for start, end in zip(edges[::2], edges[1::2], strict=True) if start != end]
    return {"positions": spans}


def spec_of(kind: Type, edits: Sequence[Json]) -> Json:
    """The spec of an output. DEFAULT is without the server's default module, too."""
    return {"defaults": False} if kind == "DEFAULT" else {"edits": [*edits]}


def sampling(request: Steer, room: int) -> Json:
    """vLLM's sampling parameters.

    Args:
        request: says how many tokens it wants at most.
        room: for how many there is room behind the prompt.

    Raises:
        SpecError: for none, or the seed is no integer of 64 bits.
    """
    if not -INT64 <= request.seed < INT64:
        fail("seed", "out_of_range", f"got {request.seed}, expected a number of 64 bits")
    if room <= 0:
        fail("prompt", "too_many", "leaves no room for an answer, expected a shorter one")
    return {
        "temperature": request.temperature,
        "max_tokens": min(request.n_completion_tokens, room),
        "seed": int(request.seed),
        "frequency_penalty": request.freq_penalty,
        "logprobs": request.n_logprobs or None,
    }
