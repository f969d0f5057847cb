"""What `make soak` asks for and when it fails, with stand-ins; the tool itself runs for an hour, by hand."""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from saesteer.errors import SpecError
from saesteer.planning.plan import Catalog
from tests.plugin import soaking as storm
from tests.plugin.conftest import BRIDGE
from tools import soak

HELD = {"requests": 0}


def right(**body: Any) -> storm.Asked:
    return storm.Asked("completions", json.dumps(body).encode(), False, "right", "")


def test_a_third_of_the_right_requests_read(monkeypatch: pytest.MonkeyPatch) -> None:
    draw, catalog = random.Random(3), Catalog({}, frozenset(), 4)
    monkeypatch.setattr(soak, "plan", lambda *_: None)
    asked = right(prompt="x", saesteer={"edits": [BRIDGE], "return": {"dose": True}})
    found = [json.loads(soak.with_reads(draw, asked, catalog).body)["saesteer"] for _ in range(300)]
    reading = [one["return"] for one in found if one["return"] != {"dose": True}]
    assert 70 < len(reading) < 130 and all(one["dose"] and len(one) > 1 for one in reading)
    assert all(one["edits"] == [BRIDGE] for one in found)
    others = [right(prompt="x"), storm.Asked("completions", b"{", False, "wrong", "")]
    assert all(soak.with_reads(draw, one, catalog) == one for one in others for _ in range(20))

    def refuse(*_: Any) -> None:
        raise SpecError("has no op there", field="saesteer.return", code="not_served")

    monkeypatch.setattr(soak, "plan", refuse)
    assert all(soak.with_reads(draw, asked, catalog) == asked for _ in range(20)), "this server could not read that"


def test_growth_is_of_the_last_third() -> None:
    settled = [{"0 server": size, "1 engine": 5} for size in (1, 40, 90, 100, 100, 180, 100, 100, 101)]
    assert soak.growth(settled) == 0, "neither the beginning nor one round counts"
    assert soak.growth([{"0 server": 7 * n} for n in range(9)]) == 21


@pytest.fixture
def lasting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """A server of which everything lasts for as long as the clock runs; a test changes what does not."""
    state: dict[str, Any] = {"held": HELD, "answer": 1, "bytes": 0, "log": tmp_path / "log", "rounds": 0}
    state["log"].write_text("")
    counts = Counter({"right": 1, "plain": 1, "cut off": 1, "refused": 1, "changes of names": 1})

    def one_round(*_: Any) -> Counter[str]:
        state["rounds"] += 1
        state.get("then", lambda: None)()
        return counts

    monkeypatch.setattr(storm, "fill_cache", lambda server: None)
    monkeypatch.setattr(storm, "answer", lambda server, edits: state["answer"])
    monkeypatch.setattr(storm, "settled", lambda server: state["held"])
    monkeypatch.setattr(storm, "memory", lambda server: {"0 server": state["bytes"]})
    monkeypatch.setattr(storm, "requests", lambda draw, catalog, count: [])
    monkeypatch.setattr(storm, "storm", one_round)
    monkeypatch.setattr(soak, "fetch", lambda server: None)
    monkeypatch.setattr("tools.soak.time.monotonic", lambda: float(state["rounds"]))  # a round takes a second
    return state


def run(state: dict[str, Any]) -> None:
    server: Any = None
    catalog: Any = None
    soak.soak(server, state["log"], catalog, minutes=1, seed=0)


def test_what_lasts_passes(lasting: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    run(lasting)
    assert lasting["rounds"] == 60 and "+0.0 MiB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("what", "change", "said"),
    [
        ("held", lambda state: {"requests": 1}, "the worker holds"),
        ("answer", lambda state: 2, "a plain and a steered answer"),
        ("bytes", lambda state: state["bytes"] + storm.MIB, "memory has grown by 20.0 MiB"),
    ],
)
def test_what_does_not_last_is_named(lasting: dict[str, Any], what: str, change: Any, said: str) -> None:
    lasting["then"] = lambda: lasting.update({what: change(lasting)})
    with pytest.raises(AssertionError, match=said):
        run(lasting)


def test_an_error_in_the_log_is_one(lasting: dict[str, Any]) -> None:
    lasting["then"] = lambda: lasting["log"].write_text('"POST /v1/completions HTTP/1.1" 500 Internal Server Error\n')
    with pytest.raises(AssertionError, match="log has 1 failures"):
        run(lasting)
