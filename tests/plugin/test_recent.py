"""What front end and worker remember of specs: equal plans mean equal rows, and nobody borrows from another."""

import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="vLLM is not installed")

from saesteer.config.config import KEY
from saesteer.engine.engine import Engine
from saesteer.engine.sinks import SPOOLS
from saesteer.errors import SpecError
from saesteer.language.inline import InlineVector
from saesteer.language.spec import from_json
from saesteer.planning.digests import module_digests
from saesteer.planning.planner import plan
from saesteer.plugin.door import admission
from saesteer.plugin.prefix_cache import FIRST, first_read
from saesteer.plugin.worker import steering as steered  # needs vLLM
from tests.plugin.admitted import ADD, admitted
from tests.small_engine import make_engine
from tests.small_world import TOKENS, WIDTH, edits


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
        assert known.meaning(spec, engine.catalog, prompt_len) == anew


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
    request.sampling_params = SimpleNamespace(extra_args={FIRST: known.meaning(asked, catalog, 9).first})
    assert first_read(request) == (5 if "return" in spec else 1)


def test_names_that_stand_for_something_else_are_looked_up_anew(engine: Engine) -> None:
    known, spec = admission.Door(), from_json({"edits": [{"op": "use", "module": "m"}]})
    catalogs = [replace(engine.catalog, modules={"m": from_json({"edits": [{**ADD, "scale": n}]})}) for n in (1, 2)]
    catalogs = [replace(one, digests=module_digests(one)) for one in catalogs]
    contents = [known.meaning(spec, catalogs[n % 2], 9).runs for n in range(4)]
    assert contents[0] == contents[2] != contents[1] == contents[3]


def test_nobody_waits_while_another_spec_is_planned(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    known, slow, begun, go_on = admission.Door(), from_json({"edits": [{**ADD, "scale": 7.0}]}), Event(), Event()

    def blocking(spec: Any, *rest: Any) -> Any:
        if spec == slow:
            begun.set()
            assert go_on.wait(60)
        return plan(spec, *rest)

    monkeypatch.setattr(admission, "plan", blocking)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(known.meaning, slow, engine.catalog, 9)
        assert begun.wait(60)
        others = [threads.submit(known.meaning, from_json({"edits": [ADD]}), engine.catalog, 9) for _ in range(2)]
        assert [one.result(60).edits for one in others] == [True, True]
        assert not first.done()
        go_on.set()
        assert first.result(60).edits


def test_few_specs_are_known(engine: Engine) -> None:
    known = admission.Door()
    specs = [from_json({"edits": [{**ADD, "scale": 1 + n}]}) for n in range(500)]
    meanings = [known.meaning(spec, engine.catalog, 9) for spec in specs]
    assert known.meaning(specs[-1], engine.catalog, 3) is meanings[-1], "no scope counts from the prompt"
    assert known.meaning(specs[0], engine.catalog, 9) is not meanings[0]
    assert len(known._kept) == admission._KNOWN


@pytest.mark.parametrize("form", ["bytes", "list"])
@pytest.mark.parametrize("over", [0, 1])
def test_specs_that_bring_much_are_not_known(
    engine: Engine, form: str, over: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 of them with 12 MiB of vectors each would be held for good."""
    several = {0: 8 * WIDTH, 1: 64 * WIDTH}[form == "list"]  # bytes of two vectors, and of a tuple's numbers
    monkeypatch.setattr(admission, "_LARGEST", several + (form == "list") * 8 * WIDTH - over)
    numbers = [[float(n)] * WIDTH for n in (1, 2)]
    brought = (
        numbers
        if form == "list"
        else [InlineVector("float32", (WIDTH,), struct.pack("f", n[0]) * WIDTH) for n in numbers]
    )
    edits = [{**ADD, "vector": vector, "site": f"resid_mid.{n}"} for n, vector in enumerate(brought, 1)]
    known, spec = admission.Door(), from_json({"edits": edits})
    assert known.meaning(spec, engine.catalog, 9).edits
    assert len(known._kept) == 1 - over


@settings(
    max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(edits(), min_size=1, max_size=3),
    st.lists(edits(), max_size=1),
    st.lists(st.integers(2, TOKENS), min_size=2),
)
def test_a_plan_that_travels_means_the_row_of_its_spec(
    engine: Engine, found: list[Any], more: list[Any], lengths: list[int]
) -> None:
    rows: dict[bytes, list[Any]] = {}
    for spec in ({"edits": found}, {"edits": found + more}):
        for prompt_len in lengths:
            try:
                request = admitted(engine, spec, prompt_len)
            except SpecError:
                assume(False)
            row = words(engine, request)
            assert rows.setdefault(request.sampling_params.extra_args[KEY]["plan"], row) == row


def test_a_prompt_of_another_length_shares_a_row_unless_its_windows_differ(engine: Engine) -> None:
    def same(edit: Any, prompt_len: int, **more: Any) -> bytes:
        made: bytes = admitted(engine, {"edits": [edit], **more}, prompt_len).sampling_params.extra_args[KEY]["plan"]
        return made

    assert same(ADD, 4) == same(ADD, 9)
    generated = {**ADD, "scope": {"generated": True}}
    assert len({same(ADD, 4), same(generated, 4), same(generated, 5), same(ADD, 4, **{"return": {"dose": True}})}) == 4


def test_a_row_is_made_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    steering = steered.Steering(engine)
    first = steering.add(admitted(engine, {"edits": [ADD]}, 4))
    monkeypatch.setattr(engine, "make_row", lambda *_: pytest.fail("the row was known"))
    assert first is not None
    assert steering.add(admitted(engine, {"edits": [ADD]}, 7)) is first


def test_what_is_remembered_has_an_end(engine: Engine) -> None:
    steering = steered.Steering(engine)
    for n in range(3 * steered._RECENT):
        steering.add(admitted(engine, {"edits": [{**ADD, "scale": 1.0 + n}]}, 4))
    assert len(steering._recent) == steered._RECENT


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


def test_what_travels_comes_through_the_engines_messages_as_it_is(engine: Engine) -> None:
    from vllm import SamplingParams
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    spec = {"edits": [ADD, {"op": "add", "vector": "any", "site": "resid_post.2", "scope": {"generated": True}}]}
    extra = admitted(engine, spec, 4).sampling_params.extra_args
    sent = MsgpackDecoder(SamplingParams).decode(MsgpackEncoder().encode(SamplingParams(extra_args=extra)))
    assert sent.extra_args == extra
    row, again = (engine.make_row(one[KEY]) for one in (extra, sent.extra_args))
    assert row is not None and again is not None and row.words.tolist() == again.words.tolist()


@pytest.mark.parametrize("answers", [True, False])
def test_a_rank_whose_output_nobody_reads_makes_nothing_of_what_is_read(
    answers: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a lack of room would unsteer the request on that rank alone, and nobody would hear of it."""

    def without_room(*_: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    read = {"probe": "any", "site": "resid_post.1", "scope": {"prompt": True}}
    steering = steered.Steering(make_engine(tmp_path))
    steering.engine.answers = answers
    request = admitted(steering.engine, {"edits": [ADD], "return": {"probes": [read]}}, 4)
    monkeypatch.setattr("saesteer.engine.engine.probes_of", without_room)
    assert (steering.add(request) is None) == answers
    assert list(steering.failed) == ["r"] * answers
    assert (not answers) == bool(steering.rows)


def test_whatever_is_wrong_with_a_request_ends_no_other_one(engine: Engine) -> None:
    """As when its spools cannot be read: what leaves ``add`` would end the engine."""
    steering = steered.Steering(engine)
    request = admitted(engine, {"edits": [ADD]}, 4, **{SPOOLS: 3})
    assert steering.add(request) is None
    assert "broken" in steering.failed["r"] and not steering.rows
