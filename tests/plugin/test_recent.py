"""What front end and worker remember of specs: equal plans mean equal rows, and nobody borrows from another."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="vLLM is not installed")

from saesteer.config.config import KEY
from saesteer.engine.engine import Engine
from saesteer.engine.sinks import SPOOLS
from saesteer.errors import SpecError
from saesteer.language.spec import from_json
from saesteer.planning.digests import module_digests
from saesteer.plugin.door import admission
from saesteer.plugin.prefix_cache import FIRST, first_read
from saesteer.plugin.worker import steering as steered  # needs vLLM
from tests.plugin.admitted import ADD, admitted
from tests.small_engine import make_engine
from tests.small_world import TOKENS, edits


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return make_engine(tmp_path_factory.mktemp("recent"))


def words(engine: Engine, request: Any) -> list[Any]:
    row = engine.make_row(request.sampling_params.extra_args[KEY])
    return [] if row is None else [*row.words.tolist(), *((site, arrow.digest) for site, arrow in row.uses)]


@settings(
    max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(edits(), min_size=1, max_size=3), st.lists(st.integers(2, TOKENS), min_size=2))
def test_a_known_spec_means_what_it_would_mean_anew(engine: Engine, found: list[Any], lengths: list[int]) -> None:
    known, spec = admission.Door(), from_json({"edits": found})
    for prompt_len in [*lengths, *lengths]:
        try:
            anew = admission.Door().meaning(spec, engine.catalog, prompt_len)
        except SpecError:
            with pytest.raises(SpecError):
                known.meaning(spec, engine.catalog, prompt_len)
            continue
        again = known.meaning(spec, engine.catalog, prompt_len)
        assert again.applied() == anew.applied()
        assert replace(again, applied=anew.applied) == anew


@pytest.mark.parametrize(
    "spec",
    [
        {"return": {"hidden": {"scope": {"positions": [[5, None]]}}}},
        {"edits": [{"op": "stop", "when": {"probe": "any", "site": "resid_mid.1", "above": 0}, "scope": {}}]},
    ],
    ids=["read", "rule"],
)
def test_what_is_computed_again_does_not_depend_on_who_asked_before(engine: Engine, spec: Any) -> None:
    """A prompt that ends before what is read or watched, and then a longer one, which the cache may have."""
    catalog, known, asked = replace(engine.catalog, reads=None), admission.Door(), from_json(spec)
    for prompt_len in (1, 9, 1):
        anew = admission.Door().meaning(asked, catalog, prompt_len)
        assert known.meaning(asked, catalog, prompt_len).first == anew.first
    request: Any = SimpleNamespace(num_preemptions=0, num_tokens=9)
    request.sampling_params = SimpleNamespace(extra_args={KEY: {FIRST: known.meaning(asked, catalog, 9).first}})
    assert first_read(request) == (5 if "return" in spec else 1)


def test_names_that_stand_for_something_else_are_looked_up_anew(engine: Engine) -> None:
    known, spec = admission.Door(), from_json({"edits": [{"op": "use", "module": "m"}]})
    catalogs = [replace(engine.catalog, modules={"m": from_json({"edits": [{**ADD, "scale": n}]})}) for n in (1, 2)]
    catalogs = [replace(one, digests=module_digests(one)) for one in catalogs]
    contents = [known.meaning(spec, catalogs[n % 2], 9).runs for n in range(4)]
    assert contents[0] == contents[2] != contents[1] == contents[3]


def test_what_a_client_puts_beside_its_spec_is_not_heard(engine: Engine) -> None:
    """A client may put words of its own beside the spec (vllm_xargs), and a plan in the place of one."""
    steering = steered.Steering(engine)
    request = admitted(engine, {"edits": [ADD]}, 4)
    first = steering.add(request)
    assert first is not None
    forged = {**request.sampling_params.extra_args[KEY]}
    for spec in (forged, {**forged, "edits": [ADD]}):
        with pytest.raises(SpecError, match=r"plan|vectors"):
            from_json(spec)
    assert steering.add(admitted(engine, {"edits": []}, 4, plan=forged["plan"])) is None
    other = steering.add(admitted(engine, {"edits": [{**ADD, "scale": 9.0}]}, 4, plan=forged["plan"]))
    assert other is not None and other.words.tolist() != first.words.tolist()


def test_whatever_is_wrong_with_a_request_ends_no_other_one(engine: Engine) -> None:
    """As when its spools cannot be read: what leaves ``add`` would end the engine."""
    steering = steered.Steering(engine)
    request = admitted(engine, {"edits": [ADD]}, 4)
    request.sampling_params.extra_args[KEY][SPOOLS] = 3
    assert steering.add(request) is None
    assert "broken" in steering.failed["r"] and not steering.rows
