"""Hypothesis strategies for the whole request language, and ways to break a spec's JSON. Knows no server."""

import struct
from typing import Any, Literal

from hypothesis import strategies as st

from saesteer.language.edits import ClampUnit, Mode
from saesteer.language.sites import KINDS, canonical
from saesteer.language.spec import (
    Ablate,
    ActivationRead,
    Add,
    Cap,
    Clamp,
    FeatureRead,
    Flag,
    Gate,
    HiddenRead,
    InlineVector,
    ProbeRead,
    Reconstruct,
    Return,
    Scope,
    Spec,
    Stop,
    Strength,
    Use,
)

FAR = 2**31 - 2  # the last position and the largest bound

names = st.one_of(
    st.sampled_from(["gs20", "happy", "golden-gate", "org/repo@v1"]),
    st.text(min_size=1, max_size=128).filter(str.isprintable),
)
numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)
features = st.one_of(st.integers(0, 64), st.integers(0, 2**31 - 1))
layers = st.sampled_from([None, None, None, 15, 0, 9999])  # of a set
positions = st.one_of(st.integers(-12, 40), st.integers(-FAR, FAR))


def _holds_something(span: tuple[int, int | None]) -> bool:
    start, end = span
    return end is None or (end != 0 and ((start < 0) != (end < 0) or start < end))


intervals = st.tuples(positions, st.none() | positions).filter(_holds_something)
named_messages = st.lists(st.sampled_from(["user", "system", "tool"]) | st.integers(-5, 9), min_size=1, max_size=4)
scopes = st.builds(
    Scope,
    prompt=st.none() | st.booleans(),
    generated=st.none() | st.just(True),
    positions=st.none() | st.lists(intervals, min_size=1, max_size=4).map(tuple),
    skip_first=st.none() | st.integers(0, 20) | st.integers(0, FAR),
)
chat_scopes = st.builds(
    Scope,
    prompt=st.none() | st.just(True),
    positions=st.none() | st.lists(intervals, min_size=1, max_size=4).map(tuple),
    skip_first=st.none() | st.integers(0, 20),
    messages=named_messages.map(tuple),
)
part_scopes = st.builds(
    Scope,
    generated=st.none() | st.just(True),
    positions=st.none() | st.lists(intervals, min_size=1, max_size=4).map(tuple),
    skip_first=st.none() | st.integers(0, 20),
    part=st.sampled_from(["reasoning", "answer"]),
)
all_scopes = scopes | chat_scopes | part_scopes


@st.composite
def gates(draw: st.DrawFn) -> Gate:
    """A condition on a feature or a probe, with one bound or two."""
    low, high = sorted((draw(numbers), draw(numbers)))
    which = draw(st.sampled_from(["above", "below", "both"])) if low < high else "above"
    above, below = None if which == "below" else low, None if which == "above" else high
    if draw(st.booleans()):
        return Gate(probe=draw(names), above=above, below=below)
    return Gate(dictionary=draw(names), layer=draw(layers), feature=draw(features), above=above, below=below)


@st.composite
def read_strengths(draw: st.DrawFn) -> Strength:
    """What is read to make a strength, bounded or not."""
    low, high = sorted((draw(numbers), draw(numbers)))
    law: dict[str, Any] = {"slope": draw(numbers), "bias": draw(numbers)}
    law |= draw(st.sampled_from([{}, {"min": low}, {"max": high}, {"min": low, "max": high}]))
    if draw(st.booleans()):
        return Strength(probe=draw(names), **law)
    return Strength(dictionary=draw(names), layer=draw(layers), feature=draw(features), **law)


strengths = numbers | numbers | read_strengths()
whens = st.lists(gates(), max_size=3).map(tuple)
sites = st.builds("{}.{}".format, st.sampled_from(KINDS), st.integers(0, 120))
placed = st.one_of(
    sites.map(lambda one: (one,)),
    st.sampled_from(KINDS).map(lambda one: (one,)),
    # distinct layers of one kind: resid_pre and resid_post could name one place twice
    st.tuples(st.sampled_from(KINDS), st.lists(st.integers(0, 40), min_size=1, max_size=4, unique=True)).map(
        lambda pair: tuple(f"{pair[0]}.{layer}" for layer in pair[1])
    ),
)


@st.composite
def inline_vectors(draw: st.DrawFn) -> InlineVector:
    """A small float32 or float16 vector in base64, or one row per layer."""
    width = draw(st.integers(1, 6))
    layers = draw(st.none() | st.lists(st.integers(0, 40), min_size=1, max_size=3, unique=True).map(tuple))
    rows = len(layers) if layers is not None else 1
    dtype: Literal["float32", "float16"] = draw(st.sampled_from(["float32", "float16"]))
    letter = {"float32": "f", "float16": "e"}[dtype]
    items = draw(st.lists(st.integers(-9, 9).filter(bool), min_size=rows * width, max_size=rows * width))
    data = struct.pack(f"<{len(items)}{letter}", *items)
    return InlineVector(dtype=dtype, shape=(width,) if layers is None else (rows, width), data=data, layers=layers)


vectors = st.one_of(names, inline_vectors(), st.lists(numbers, min_size=1, max_size=6).filter(any).map(tuple))
modes: st.SearchStrategy[Mode] = st.sampled_from(["set", "add", "scale", "min", "max"])
units: st.SearchStrategy[ClampUnit] = st.sampled_from(["raw", "max_act"])


@st.composite
def clamps(draw: st.DrawFn) -> Clamp:
    """A clamp of any mode, unit, gate and scope."""
    mode = draw(modes)
    unit: ClampUnit = "raw" if mode == "scale" else draw(units)
    token: dict[str, Any] = {"when": draw(whens), "scope": draw(all_scopes), "layer": draw(layers)}
    value = draw(strengths if mode == "add" else numbers)
    return Clamp(draw(names), draw(features), value, mode, unit, draw(st.booleans()), **token)


@st.composite
def caps(draw: st.DrawFn) -> Cap:
    """A cap with one bound or two."""
    low, high = sorted((draw(numbers), draw(numbers)))
    which = draw(st.sampled_from(["min", "max", "both"]))
    low_bound, high_bound = (None if which == "max" else low), (None if which == "min" else high)
    token: dict[str, Any] = {"when": draw(whens), "scope": draw(all_scopes)}
    return Cap(draw(vectors), draw(placed), low_bound, high_bound, draw(numbers), **token)


adds = st.builds(Add, vectors, placed, strengths, st.sampled_from(["none", "match"]), when=whens, scope=all_scopes)
adds |= st.builds(
    Add,
    vectors,
    st.sampled_from(KINDS).map(lambda one: (one,)),
    scales=st.lists(numbers, min_size=1, max_size=3).map(tuple),
    scope=all_scopes,
)
ablates = st.builds(Ablate, vectors, placed, numbers, when=whens, scope=all_scopes)
errors = st.sampled_from(["keep", "drop"])
reconstructs = st.builds(Reconstruct, names, errors, layer=layers, when=whens, scope=all_scopes)
uses = st.builds(Use, names, strengths)
rules = st.builds(
    lambda rule, **fields: rule(**fields),
    st.sampled_from([Stop, Flag]),
    run=st.integers(1, 2**31 - 1),
    when=st.lists(gates(), min_size=1, max_size=3).map(tuple),
    scope=all_scopes,
)
edits = st.one_of(clamps(), adds, caps(), ablates, reconstructs, uses, rules)

moments: dict[str, Any] = {"at": st.sampled_from(["before", "after"]), "cached": st.sampled_from(["recompute", "skip"])}
words_of_positions = st.sampled_from(["all", "prompt", "generated"])
feature_reads = st.builds(
    FeatureRead,
    names,
    st.none() | st.integers(1, 1024),
    st.lists(features, max_size=3, unique=True).map(tuple),
    layer=layers,
    scope=all_scopes,
    **moments,
) | st.builds(FeatureRead, names)
probe_reads = st.builds(ProbeRead, names, st.none() | sites, scope=all_scopes, **moments) | st.builds(ProbeRead, names)
activation_reads = st.builds(
    ActivationRead,
    placed,
    st.sampled_from(["none", "mean", "max", "last", "message"]),
    transport=st.sampled_from(["inline", "handle"]),
    scope=all_scopes,
    **moments,
) | st.builds(
    ActivationRead, placed, positions=words_of_positions | st.lists(intervals, min_size=1, max_size=2).map(tuple)
)


def place_of(name: str) -> str:
    """The one name of a site, or a kind."""
    return name if name in KINDS else canonical(name)


hidden_reads = st.booleans() | st.builds(HiddenRead, all_scopes, cached=moments["cached"])
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | numbers | st.text(max_size=5),
    lambda one: st.lists(one, max_size=3) | st.dictionaries(st.text(max_size=5), one, max_size=3),
    max_leaves=5,
)
returns = st.builds(
    Return,
    features=st.lists(feature_reads, max_size=2, unique_by=lambda one: (one.dictionary, one.layer, one.at)),
    probes=st.lists(
        probe_reads, max_size=2, unique_by=lambda one: (one.probe, one.site and canonical(one.site), one.at)
    ),
    activations=st.lists(activation_reads, max_size=2, unique_by=lambda one: (*map(place_of, one.site), one.at)),
    hidden=hidden_reads,
    consumers=st.dictionaries(names, st.dictionaries(st.text(max_size=5), json_values, max_size=2), max_size=2),
    dose=st.booleans(),
)
specs = st.builds(
    Spec,
    edits=st.lists(edits, max_size=4).map(tuple),
    returns=st.just(Return()) | returns,
    defaults=st.booleans(),
)

junk: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 40),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(["set", "resid_post.3", "", 34.0, 10**400, 1e39, -0.0, [], {}, [[0, 0]], [[-1, None]]]),
    st.lists(st.integers(-3, 3), max_size=3),
    st.dictionaries(st.sampled_from(["op", "scope", "x"]), st.integers(0, 3), max_size=2),
)


def places(document: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of everything in a JSON document, itself first."""
    items = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    return [path] + [place for key, value in items for place in places(value, (*path, key))]


def at(document: Any, path: tuple[Any, ...]) -> Any:
    """What stands at a path."""
    for key in path:
        document = document[key]
    return document


@st.composite
def mutations(draw: st.DrawFn, document: Any) -> tuple[str, tuple[Any, ...], Any]:
    """What was done, where, and the broken copy: a field dropped, renamed, inserted, doubled or given another value."""
    found = copied(document)
    path = draw(st.sampled_from(places(found)))
    kind = draw(st.sampled_from(["drop", "rename", "insert", "double", "change"]))
    here = at(found, path)
    above = at(found, path[:-1])
    if kind == "insert" and isinstance(here, dict):
        key = draw(st.sampled_from(["op", "scope", "value", "scale", "min", "when", "layers"]) | st.text(max_size=4))
        if key not in here:
            here[key] = draw(junk)
            return "insert", (*path, key), found
    if path and kind == "drop":
        del above[path[-1]]
    elif path and kind == "rename" and isinstance(above, dict):
        above[draw(st.sampled_from(["featur", "op", "scope", "max", "vector"]))] = above.pop(path[-1])
    elif path and kind == "double" and isinstance(above, list):
        above.append(copied(here))
    elif path:
        above[path[-1]] = draw(junk)
        return "change", path, found
    else:
        return "change", path, draw(junk)
    return kind, path, found


def copied(document: Any) -> Any:
    """A deep copy of a JSON document."""
    if isinstance(document, dict):
        return {key: copied(value) for key, value in document.items()}
    return [copied(item) for item in document] if isinstance(document, list) else document
