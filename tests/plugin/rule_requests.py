"""Requests whose rules watch a probe of the embedded model, and which bounds the scores that they read exceed."""

from collections.abc import Sequence
from typing import Any

from tests.plugin.read_requests import EVERYWHERE

SCORES = {"probes": [{"probe": "probe", "scope": EVERYWHERE}]}
ALWAYS = -1e9  # every score is above


def rule(op: str, above: float, run: int = 1, **scope: Any) -> dict[str, Any]:
    """One that watches the probe."""
    found = {"op": op, "when": {"probe": "probe", "above": above}, "for": run}
    return found | ({"scope": scope} if scope else {})


def spec(*rules: Any, edits: Sequence[Any] = ()) -> dict[str, Any]:
    """Rules behind edits, with a read of what they watch."""
    return {"edits": [*edits, *rules], "return": SCORES}


def scores(choice: Any) -> dict[int, float]:
    """By position."""
    return {
        at: score
        for entry in choice.saesteer["probes"]
        for at, score in zip(entry["positions"], entry["scores"], strict=True)
    }


def threshold(found: dict[int, float], at: int, start: int) -> float:
    """A bound that is first exceeded at a position, if that is the highest score so far."""
    before = max((found[one] for one in found if start <= one < at), default=found[at] - 1)
    assert before < found[at] - 1e-3, "a record"
    return (before + found[at]) / 2


def records(found: dict[int, float], start: int) -> list[int]:
    """Positions whose score is clearly higher than all before, from a start on."""
    kept, highest = [], float("-inf")
    for at in sorted(one for one in found if one >= start):
        if found[at] > highest + 1e-2:
            kept.append(at)
        highest = max(highest, found[at])
    return kept


def flag(number: int, position: int | None) -> dict[str, Any]:
    """What an answer says of an edit that flags a position, or none."""
    return {"edit": f"saesteer.edits[{number}]", "position": position}
