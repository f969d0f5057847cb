"""What saesteer adds to vLLM's /metrics: numbers only. Knows no prompt, no vector and no name in a request.

If vLLM has set its directory, prometheus_client sums over the API server processes, as for vLLM's own metrics.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from saesteer.language.fields import CODES
from saesteer.language.rules import RULES

_families: dict[str, Any] = {}  # empty in processes that serve no metrics


@cache
def install(codes: tuple[str, ...] = ()) -> None:
    """Starts counting in this process, which answers HTTP; safe to call again.

    Args:
        codes: of refusals, beside those of a wrong spec.
    """
    from prometheus_client import Counter, Gauge

    _families["edited"] = Counter(
        "saesteer_edited_tokens",
        "Tokens that edits have changed, as counted on the device, summed over the edits and sites of ended answers.",
    )
    _families["rules"] = Counter("saesteer_rules", "Rules that have fired, by op: stop or flag.", ["op"])
    _families["refusals"] = Counter(
        "saesteer_refusals", "Requests that saesteer has refused or ended, by code.", ["code"]
    )
    for name, what in (
        ("rows", "Rows that a consumer has taken."),
        ("dropped", "Rows that a consumer did not get: its queue was full, or it had failed for their request."),
        ("failures", "Exceptions in a consumer, and answers whose ids found no room in its queue."),
    ):
        _families[name] = Counter(f"saesteer_consumer_{name}", what, ["consumer"])
    # All API servers see the same memory.
    _families["memory"] = Gauge(
        "saesteer_memory_used",
        "Share of the machine's or container's memory in use, with --memory-guard.",
        multiprocess_mode="mostrecent",
    )
    for name, what in (
        ("results", "Results that are kept to be fetched by a handle, and rooms for more."),
        ("results_bytes", "Bytes that these count as, of --max-results-mib."),
    ):
        _families[name] = Gauge(f"saesteer_{name}", what, multiprocess_mode="mostrecent")
    _families["changes"] = Counter(
        "saesteer_admin_changes", "Changes of names by an admin: register, replace or delete.", ["action"]
    )
    # Known from the start, since a rate counts from a series' first value: it would miss what made the series.
    for family, known in (("refusals", (*CODES, *codes)), ("rules", RULES)):
        for label in known:
            _families[family].labels(label)
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


def fired(ops: Iterable[str]) -> None:
    """Counts the rules that have fired for an answer that has ended.

    Args:
        ops: of each rule.
    """
    for op in ops if _families else ():
        _families["rules"].labels(op).inc()


def refused(code: str) -> None:
    """Counts a request that was refused or ended."""
    if _families:
        _families["refusals"].labels(code).inc()


def consumed(what: str, consumer: str, count: int) -> None:
    """Counts what a consumer did.

    Args:
        what: rows, dropped or failures.
        consumer: its name.
        count: how many.
    """
    if _families:
        _families[what].labels(consumer).inc(count)


def pools(usage: Mapping[str, Sequence[int]]) -> None:
    """Records how full the pools of named vectors are; called at start and after each change.

    Args:
        usage: site → slots in use, slots.
    """
    for site, (used, size) in usage.items() if _families else ():
        _families["slots_in_use"].labels(site).set(used)
        _families["slots"].labels(site).set(size)


def results(number: int, size: int) -> None:
    """Records the results that are kept, and the bytes that they count as."""
    if _families:
        _families["results"].set(number)
        _families["results_bytes"].set(size)


def changed(action: str) -> None:
    """Counts a change of names by an admin."""
    if _families:
        _families["changes"].labels(action).inc()


def memory(share: float) -> None:
    """Records the share of memory that is in use."""
    if _families:
        _families["memory"].set(share)
