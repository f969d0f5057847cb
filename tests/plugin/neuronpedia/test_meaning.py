"""What Neuronpedia's requests mean in the request language, by the formulas of its server. Knows no route."""

from base64 import b64decode
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from hypothesis import given
from hypothesis import strategies as st

from saesteer.commands.embedded import DEMO_SAE
from saesteer.config.assets import Assets
from saesteer.config.config import SaesteerConfig
from saesteer.errors import SpecError
from saesteer.language.spec import from_json
from saesteer.planning.plan import Catalog
from saesteer.planning.planner import plan
from saesteer.plugin.http.neuronpedia import meaning, shapes
from saesteer.plugin.http.neuronpedia.meaning import Steered
from tests.formulas import Token, World

WIDTH = 6
SITES = ["resid_mid.1", "resid_post.1"]
numbers = st.floats(-8, 8, width=32)
methods = st.sampled_from(get_args(shapes.Method))
vectors = st.lists(numbers, min_size=WIDTH, max_size=WIDTH).map(lambda one: np.array(one, np.float32))
lengths = vectors.filter(lambda one: float(np.linalg.norm(one)) > 0.1)
steered = st.lists(st.tuples(st.sampled_from(SITES), numbers, lengths), min_size=1, max_size=5)


def request(method: shapes.Method, multiplier: float = 1.0, *, normalize: bool = False, **more: Any) -> shapes.Steer:
    base = {"model": "m", "types": ["STEERED"], "n_completion_tokens": 8, "temperature": 0.5, "freq_penalty": 0.25}
    given = {"steer_method": method, "normalize_steering": normalize, "strength_multiplier": multiplier, "seed": 3.0}
    return shapes.Steer.model_validate({**base, **given, **more})


def by_neuronpedia(method: str, c: float, d: Any, x: Any) -> Any:
    """One edit, as its server makes it."""
    u = d / np.linalg.norm(d)
    along = (x @ u) * u
    if method == "SIMPLE_ADDITIVE":
        return x + c * d
    if method == "ORTHOGONAL_DECOMP":
        return (x - along) + c * along
    return x - max(x @ u - c, 0.0) * u


@given(methods, numbers, st.booleans(), steered, vectors)
def test_edits_do_what_neuronpedias_server_does(
    method: shapes.Method, multiplier: float, normalize: bool, given_: list[Any], start: Any
) -> None:
    given = [Steered(site, strength, vector, "vectors[0]") for site, strength, vector in given_]
    scope = meaning.EVERYWHERE
    edits = meaning.edits_of(given, request(method, multiplier, normalize=normalize), scope)
    spec = meaning.spec_of("STEERED", edits)
    plan(from_json(spec), Catalog({}, frozenset(SITES), 4096, width=WIDTH, inline_rows=64), 4)
    for edit in edits:
        edit["vector"] = np.frombuffer(b64decode(edit["vector"]["data"]), "<f4").tolist()
    token = Token(World(SITES, {}, {}, {}, {}), 0, 4)  # position 0, which our own edits leave alone
    for site in SITES:
        wanted = start.astype(np.float64)
        for one in given:
            if one.site == site:
                d = one.vector.astype(np.float64)
                d = d / np.linalg.norm(d) if normalize else d
                wanted = by_neuronpedia(method, one.strength * multiplier, d, wanted)
        found = token.visit(site, edits, start.astype(np.float64))
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-3)


@given(st.integers(1, 1 << 40), st.integers(1, 100), st.integers(0, 10))
def test_sampling(wanted: int, room: int, logprobs: int) -> None:
    asked = request("SIMPLE_ADDITIVE", n_completion_tokens=wanted, n_logprobs=logprobs)
    found = meaning.sampling(asked, room)
    assert 1 <= found["max_tokens"] == min(wanted, room)
    assert (found["seed"], found["temperature"], found["frequency_penalty"]) == (3, 0.5, 0.25)
    assert found["logprobs"] == (logprobs or None)
    with pytest.raises(SpecError, match="64 bits"):
        meaning.sampling(request("SIMPLE_ADDITIVE", seed=2.0**63), room)
    with pytest.raises(SpecError, match="leaves no room"):
        meaning.sampling(asked, 0)


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    held = Assets.open(SaesteerConfig.from_json({"dictionaries": {"demo": str(DEMO_SAE)}})).catalog(
        width=576, layers=30
    )
    info = held.dictionaries["demo"]
    names = dict.fromkeys(("demo", "two", "scope@9", "scope@17"), info)
    known = {"np:tiny/3-res": "demo", "np:other/3-res": "two", "np:tiny/12-res": "two", "np:tiny/2-att": "demo"}
    return replace(
        held,
        origin=lambda _: None,
        dictionaries=dict.fromkeys(sorted(names), info),
        sets={"scope": (9, 17)},
        addresses=known,
    )


@pytest.mark.parametrize(
    ("source", "model", "dictionary", "layer", "key"),
    [
        ("demo", "any", "demo", None, "demo"),
        ("scope@17", "any", "scope", 17, "scope@17"),
        ("3-res", "tiny", "np:tiny/3-res", None, "demo"),
        ("3-res", "org/other", "np:other/3-res", None, "two"),
        ("12-res", "whatever", "np:tiny/12-res", None, "two"),
    ],
)
def test_sources(catalog: Catalog, source: str, model: str, dictionary: str, layer: int | None, key: str) -> None:
    found = meaning.place_of(catalog, source, model)
    assert (found.source, found.dictionary, found.layer, found.key) == (source, dictionary, layer, key)
    assert catalog.key(found.dictionary, found.layer) == key


def test_sets(catalog: Catalog) -> None:
    assert meaning.sources_of(catalog, "res", []) == ["3-res", "12-res"], "by layer, not by letters"
    assert meaning.sources_of(catalog, "scope", []) == ["scope@9", "scope@17"]
    assert meaning.sources_of(catalog, "two", []) == ["two"]
    assert meaning.sources_of(catalog, "unknown", ["b", "a", "b"]) == ["b", "a"]
    assert {"res", "att", "scope", "demo", "two"} == set(meaning.sets_of(catalog))


def test_unknown_sources_are_refused(catalog: Catalog) -> None:
    with pytest.raises(SpecError, match=r"got '3-ras' \(did you mean '3-res'\?\), expected one of: .*12-res"):
        meaning.place_of(catalog, "3-ras", "tiny")
    with pytest.raises(SpecError, match="of several models"):
        meaning.place_of(catalog, "3-res", "unknown")
    with pytest.raises(SpecError, match=r"sourceSet: got 'neurons', expected one of: .*scope"):
        meaning.sources_of(catalog, "neurons", [])
