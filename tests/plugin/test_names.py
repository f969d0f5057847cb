"""The front end's names, with workers that may fail: what they stand for when, and a change is whole or none."""

import asyncio
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from saesteer.errors import RegistryError, SpecError
from saesteer.language.spec import from_json
from saesteer.planning.expand import MAX_DEPTH
from saesteer.plugin.names import versions
from saesteer.plugin.names.changes import Given, version_of
from saesteer.plugin.names.versions import Names
from saesteer.plugin.results import metrics
from tests.plugin.names import SPEC, Workers, start


def put(known: Names, engine: Any, name: str, *numbers: float) -> Any:
    return asyncio.run(known.put(engine, "vector", name, Given(numbers)))


def test_a_request_is_planned_with_what_its_names_stand_for() -> None:
    known, engine = start(), Workers()
    assert put(known, engine, "v", 1, 0, 0)[0] is False
    held = known.hold()
    known.count(held, SPEC)
    assert known.uses()["vector", "v"] == 1
    assert put(known, engine, "v", 0, 1, 0)[0] is True
    assert held.catalog.vectors["v"] is not known.catalog.vectors["v"]
    assert known.uses()["vector", "v"] == 0, "what it stands for now was used by nobody"
    known.count(held, SPEC)
    assert known.uses()["vector", "v"] == 0, "nor by whoever was admitted before"
    known.count(known.hold(), from_json({"return": {"probes": [{"probe": "v", "site": "resid_post.3"}]}}))
    assert known.uses()["vector", "v"] == 1, "a probe that is read is a use, too"
    put(known, engine, "v", 0, 0, 1)
    assert engine.pinned == [(1, 0), (1, 0), (1, 1)], "what nobody can name goes with the next change"
    first, second, third = (told["pin"][0][0] for told in engine.told)
    assert engine.told[2]["unpin"] == [["resid_post.3", first]] and len({first, second, third}) == 3


class _Clock:
    """In the place of time and sleep, which may take another time than it was told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: float) -> None:
        self.now, self.sleeps, self.error = 100.0, 0, error
        monkeypatch.setattr(versions, "time", self)
        monkeypatch.setattr(asyncio, "sleep", self.sleep)

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.sleeps += 1
        self.now += seconds + self.error


@pytest.mark.parametrize("error", [-0.0008, 0.0, 7.0], ids=["early, as uvloop", "right", "late, as a busy machine"])
@pytest.mark.parametrize("times", [0, 1, 3])
def test_a_full_pool_takes_the_new_when_the_old_has_gone(
    monkeypatch: pytest.MonkeyPatch, error: float, times: int
) -> None:
    """Running requests may hold slots on a worker: it is asked again for a while, however long a sleep takes."""
    known, engine = start(), Workers()
    put(known, engine, "v", 1, 0, 0)
    clock = _Clock(monkeypatch, error)
    engine.full = times
    if error > versions.PATIENCE and times > 1:
        with pytest.raises(RegistryError, match="--pool-rows 3"):
            put(known, engine, "v", 0, 1, 0)
        assert clock.sleeps == 1
        engine.full = 0
    put(known, engine, "v", 0, 1, 0)
    assert known.catalog.vectors["v"].rows[None].tolist() == [0, 1, 0]


@pytest.mark.parametrize("engines", [1, 2])
def test_a_change_that_fails_on_a_worker_is_no_change(engines: int) -> None:
    known, engine = start(3), Workers(engines)
    put(known, engine, "v", 1, 0, 0)
    engine.answers = ["", "MemoryError: no"]
    with pytest.raises(RuntimeError, match="no"):
        put(known, engine, "v", 0, 1, 0)
    assert known.catalog.vectors["v"].rows[None].tolist() == [1, 0, 0]
    assert known.usage() == {"resid_post.3": (1, 3)}
    in_vain = engine.told[-1]["pin"][0][0]
    engine.answers = ["", ""]
    put(known, engine, "w", 0, 0, 1)
    assert engine.told[-1]["unpin"] == [["resid_post.3", in_vain]], "some worker may have it"
    put(known, engine, "v", 0, 1, 0)
    assert engine.told[-1]["unpin"] == [] and engine.told[-1]["pin"][0][0] == in_vain


def test_a_module_is_set_as_the_default_for_what_is_admitted_later() -> None:
    known, engine = start(), Workers()
    put(known, engine, "v", 1, 0, 0)
    asyncio.run(known.put(engine, "module", "m", SPEC))
    before = known.hold()
    asyncio.run(known.set_default("m"))
    assert (before.catalog.default, known.catalog.default) == (None, "m")
    known.count(known.hold(), from_json({}))
    assert known.uses()["module", "m"] == 1, "without a spec"
    with pytest.raises(RegistryError, match="module 'm' steers every request of this server; replace it, or clear"):
        asyncio.run(known.delete(engine, "module", "m"))
    put(known, engine, "v", 0, 1, 0)
    assert known.catalog.default == "m", "other changes leave it"
    with pytest.raises(SpecError, match=r"got 'n', expected one of: m") as caught:
        asyncio.run(known.set_default("n"))
    assert (caught.value.field, caught.value.code) == ("module", "unknown_name")
    asyncio.run(known.set_default(None))
    asyncio.run(known.delete(engine, "module", "m"))
    assert not known.catalog.modules


def test_a_replacement_that_a_module_cannot_use_is_refused() -> None:
    known, engine = start(), Workers()
    put(known, engine, "v", 1, 0, 0)
    asyncio.run(
        known.put(engine, "module", "m", from_json({"edits": [{"op": "add", "vector": "v", "site": "resid_post.3"}]}))
    )
    other = Given.read({"dtype": "float32", "shape": [1, 3], "layers": [4], "data": "AACAPwAAgD8AAIA/"}, None)
    with pytest.raises(RegistryError, match=r"module 'm' uses vector 'v'.*layer 3"):
        asyncio.run(known.put(engine, "vector", "v", other))


def test_modules_are_registered_in_one_another_up_to_a_bound() -> None:
    known, engine = start(), Workers()
    put(known, engine, "v", 1, 0, 0)
    asyncio.run(known.put(engine, "module", "m0", SPEC))

    def chained() -> None:
        for n in range(1, 600):
            nested = from_json({"edits": [{"op": "use", "module": f"m{n - 1}"}]})
            asyncio.run(known.put(engine, "module", f"m{n}", nested))

    with pytest.raises(SpecError, match=f"{MAX_DEPTH + 1} modules deep, expected at most {MAX_DEPTH}") as error:
        chained()
    assert error.value.code == "too_many" and error.value.field.startswith("spec.edits[0].module.edits[0].module")
    asyncio.run(known.put(engine, "module", "apart", SPEC))
    with pytest.raises(RegistryError, match=r"module 'm\d+' uses module 'm0', and could not use this one"):
        asyncio.run(known.put(engine, "module", "m0", from_json({"edits": [{"op": "use", "module": "apart"}]})))


@pytest.mark.parametrize("name", [".", "..", "a/../b", "./a", "a/.", "../.."])
def test_names_that_clients_take_out_of_a_path_are_refused(name: str) -> None:
    """Such a vector could not be deleted: its address would be another one's."""
    known, engine = start(), Workers()
    for change in (known.put(engine, "vector", name, Given((1, 0, 0))), known.put(engine, "module", name, SPEC)):
        with pytest.raises(SpecError, match="without the parts") as refused:
            asyncio.run(change)
        assert (refused.value.field, refused.value.code) == ("name", "out_of_range")
    for fine in ("...", "a..b", ".a", "a/b.", "..a/b"):
        put(known, engine, fine, 1, 0, 0)


def test_each_change_is_logged_and_counted(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "vllm.saesteer")
    counted: list[str] = []
    monkeypatch.setattr(metrics, "changed", counted.append)
    known, engine = start(8), Workers()
    put(known, engine, "v", 1, 0, 0)
    first = version_of(("vector", "v"), known.catalog)
    put(known, engine, "v", 0, 1, 0)
    second = version_of(("vector", "v"), known.catalog)
    asyncio.run(known.put(engine, "module", "m\n", SPEC) if False else known.put(engine, "module", "m", SPEC))
    module = version_of(("module", "m"), known.catalog)
    with pytest.raises(RegistryError):
        asyncio.run(known.delete(engine, "vector", "v"))
    asyncio.run(known.delete(engine, "module", "m"))
    assert [record.message for record in caplog.records if record.message.startswith("admin: ")] == [
        f"admin: register vector 'v', version {first}, before it none",
        f"admin: replace vector 'v', version {second}, before it {first}",
        f"admin: register module 'm', version {module}, before it none",
        f"admin: delete module 'm', version none, before it {module}",
    ]
    assert counted == ["register", "replace", "register", "delete"] and len({first, second, module}) == 3
    assert {len(one) for one in (first, second, module)} == {16}, "as the lists of the admin routes have it"
