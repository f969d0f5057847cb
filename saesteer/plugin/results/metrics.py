"""What saesteer adds to vLLM's /metrics: numbers only. Knows no prompt, no vector and no name in a request.

If vLLM has set its directory, prometheus_client sums over the API server processes, as for vLLM's own metrics.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

_families: dict[str, Any] = {}  # empty in processes that serve no metrics


@cache
def install() -> None:
    """Starts counting in this process, which answers HTTP; safe to call again."""
    from prometheus_client import Counter, Gauge

    _families["edited"] = Counter(
        "saesteer_edited_tokens",
        "Tokens that edits have changed, as counted on the device, summed over the edits and sites of ended answers.",
    )
    _families["refusals"] = Counter("saesteer_refusals", "Requests whose spec was refused, by code.", ["code"])
    for name, of, what in (
        ("slots", "saesteer_pool_rows", "Slots for named vectors at a site."),
        ("slots_in_use", "saesteer_pool_rows_in_use", "Slots that named vectors hold, also older ones still in use."),
    ):
        _families[name] = Gauge(of, what, ["site"], multiprocess_mode="mostrecent")


def edited(applied: Sequence[Mapping[str, Any]]) -> None:
    """Counts the edited tokens of an answer that has ended.

    Args:
        applied: the answer's own.
    """
    if _families:
        _families["edited"].inc(sum(one.get("tokens_edited", 0) for one in applied))


def refused(code: str) -> None:
    """Counts a refused spec."""
    if _families:
        _families["refusals"].labels(code).inc()


def pools(usage: Mapping[str, Sequence[int]]) -> None:
    """Records how full the pools of named vectors are; called at start and after each change.

    Args:
        usage: site → slots in use, slots.
    """
    for site, (used, size) in usage.items() if _families else ():
        _families["slots_in_use"].labels(site).set(used)
        _families["slots"].labels(site).set(size)
