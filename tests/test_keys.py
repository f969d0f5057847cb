"""Digests of edited positions, which are the keys of the prefix cache: where two are equal, the output is.

Needs no second definition of what counts as an edit: two specs that differ in one field run through the small engine.
"""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st

from saesteer.engine.engine import Engine
from saesteer.errors import SpecError
from saesteer.language.spec import from_json
from saesteer.planning.planner import plan
from saesteer.planning.runs import contents, runs
from tests.small_engine import forward, make_engine
from tests.small_world import (
    INLINE,
    MODULES,
    NARROW,
    PROBES,
    TOKENS,
    VECTORS,
    WIDTH,
    edits,
    features,
    gates,
    names,
    strengths,
    values,
)

Place = tuple[Any, ...]  # keys and indices from a spec down to a field

# What a field may be changed to; what the rest of the spec does not allow there is refused.
NEW: dict[str, st.SearchStrategy[Any]] = {
    "value": values | strengths(),
    "scale": values | strengths(),
    "mode": st.sampled_from(["set", "add", "scale", "min", "max"]),
    "unit": st.sampled_from(["raw", "max_act"]),
    "only_if_active": st.booleans(),
    "feature": features,
    "dictionary": names,
    "vector": st.sampled_from([*VECTORS, *INLINE, VECTORS["any"][None].tolist()]),
    "probe": st.sampled_from(PROBES),
    "site": st.sampled_from(NARROW),
    "norm": st.sampled_from(["none", "match"]),
    "error": st.sampled_from(["keep", "drop"]),
    "strength": values,
    "slope": values,
    "bias": values,
    "min": values,
    "max": values,
    "above": values,
    "below": values,
    "module": st.sampled_from([*MODULES]),
    "scope": st.sampled_from([{"prompt": True}, {"generated": True}, {"positions": [[0, 3], [-2, None]]}])
    | st.integers(0, 6).map(lambda skipped: {"skip_first": skipped}),
    "when": gates(),
}
# Fields that an edit, a strength or a condition may have beside those that it has.
MORE = {"clamp": ("only_if_active", "when", "scope"), "use": (), "read": ("slope", "bias", "min", "max")}


def places(one: Any, at: Place = ()) -> list[Place]:
    """The fields of a spec that may be changed or added."""
    found = []
    if isinstance(one, dict):
        read = "op" not in one and ("probe" in one or "feature" in one)
        more = ("above", "below") if {"above", "below"} & one.keys() else MORE["read"] if read else ()
        more = MORE.get(one["op"], ("when", "scope")) if "op" in one else more
        found = [(*at, key) for key in {**one, **dict.fromkeys(more)} if key in NEW]
    if isinstance(one, dict | list):
        for key, value in one.items() if isinstance(one, dict) else enumerate(one):
            found += places(value, (*at, key))
    return found


def put(one: Any, at: Place, value: Any) -> Any:
    """The same with another value at a place; without it where the value is None."""
    if not at:
        return value
    key, *below = at
    if isinstance(one, list):
        return [put(old, tuple(below), value) if place == key else old for place, old in enumerate(one)]
    new = put(one.get(key), tuple(below), value)
    return {name: old for name, old in one.items() if name != key} | ({} if new is None else {key: new})


@st.composite
def pairs(draw: Any) -> Any:
    """The edits of a spec, and the same with one field changed, or with one edit moved, copied or left out."""
    one = draw(st.lists(edits(), min_size=1, max_size=4))
    kind = draw(st.sampled_from(["field"] * 8 + ["moved", "copied", "gone"]))
    place = draw(st.integers(0, len(one) - 1))
    rest = one[:place] + one[place + 1 :]
    if kind == "moved":
        to = draw(st.integers(0, len(rest)))
        return one, [*rest[:to], one[place], *rest[to:]], kind
    if kind == "copied":
        return one, [*one, one[place]], kind
    if kind == "gone":
        return one, rest, kind
    at = draw(st.sampled_from(places(one)))
    value = draw(NEW[at[-1]] | st.none() if at[-1] in ("when", "scope", "min", "max") else NEW[at[-1]])
    return one, put(one, at, value), str(at[-1])


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return make_engine(tmp_path_factory.mktemp("keys"), inline_rows=8, max_edits=512)


def digests(engine: Engine, spec: Any, prompt_len: int) -> list[str | None]:
    """The digest at each position; None where nothing is edited.

    Raises:
        SpecError: the spec is wrong.
    """
    planned = plan(from_json(spec), engine.catalog, prompt_len)
    found: list[str | None] = [None] * TOKENS
    for lo, hi, digest in runs(planned, contents(planned, engine.catalog)):
        for position in range(lo, min(hi, TOKENS)):
            found[position] = digest
    return found


@settings(max_examples=400, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(pairs(), st.integers(2, TOKENS), st.sampled_from([0, 0, 0, 0, 1]), st.integers(0, 99))
def test_equal_digests_mean_equal_outputs(engine: Engine, found: Any, prompt_len: int, longer: int, seed: int) -> None:
    *both, kind = found
    specs, lengths = [{"edits": one} for one in both], [prompt_len, min(TOKENS, prompt_len + longer)]
    try:
        keys = [digests(engine, *one) for one in zip(specs, lengths, strict=True)]
        x = 2 * torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed))
        outs = [forward(engine, [spec], n, x.clone()) for spec, n in zip(specs, lengths, strict=True)]
    except SpecError:
        assume(False)  # tested in tests/spec
    equal = [p for p in range(TOKENS) if keys[0][p] == keys[1][p]]
    event(f"{kind}: {'some' if len(equal) < TOKENS else 'no'} digests differ")
    for p in equal:
        one, other = outs[0][p], outs[1][p]
        assert (one - other).abs().max() <= 2e-3 * (1 + one.abs().max()), f"{kind}: position {p}"
