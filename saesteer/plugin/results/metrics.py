"""What saesteer adds to vLLM's /metrics: numbers only. Knows no prompt, no vector and no name in a request.

If vLLM has set its directory, prometheus_client sums over the API server processes, as for vLLM's own metrics.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from saesteer.language.fields import CODES
from saesteer.language.rules import RULES

ACTIONS = ("register", "replace", "delete")
_families: dict[str, Any] = {}  # empty in processes that serve no metrics
# Of each: what prometheus_client makes of it, its name, its meaning, its labels.
_TABLE = (
    (
        "Counter",
        "edited_tokens",
        "Tokens that edits have changed, as counted on the device, summed over the edits and sites of ended answers.",
    ),
    ("Counter", "rules", "Rules that have fired, by op: stop or flag.", "op"),
    ("Counter", "refusals", "Requests that saesteer has refused or ended, or that had a wrong key, by code.", "code"),
    ("Counter", "admin_changes", "Changes of names by an admin: register, replace or delete.", "action"),
    ("Counter", "consumer_rows", "Rows that a consumer has taken.", "consumer"),
    (
        "Counter",
        "consumer_dropped",
        "Rows that a consumer did not get: its queue was full, or it had failed for their request.",
        "consumer",
    ),
    (
        "Counter",
        "consumer_failures",
        "Exceptions in a consumer, and answers whose ids found no room in its queue.",
        "consumer",
    ),
    # All API servers see the same memory, results and pools.
    ("Gauge", "memory_used", "Share of the machine's or container's memory in use, with --memory-guard."),
    ("Gauge", "results", "Results that are kept to be fetched by a handle, and rooms for more."),
    ("Gauge", "results_bytes", "Bytes that these count as, of --max-results-mib."),
    ("Gauge", "pool_rows", "Slots for named vectors at a site.", "site"),
    ("Gauge", "pool_rows_in_use", "Slots that named vectors hold, also older ones still in use.", "site"),
)


@cache
def install(codes: tuple[str, ...] = ()) -> None:
    """Starts counting in this process, which answers HTTP; safe to call again.

    Args:
        codes: of refusals, beside those of a wrong spec.
    """
    import prometheus_client

    for kind, name, what, *labels in _TABLE:
        more = {"multiprocess_mode": "mostrecent"} if kind == "Gauge" else {}
        _families[name] = getattr(prometheus_client, kind)(f"saesteer_{name}", what, labels, **more)
    # Known from the start, since a rate counts from a series' first value: it would miss what made the series.
    for family, known in (("refusals", (*CODES, *codes)), ("rules", RULES), ("admin_changes", ACTIONS)):
        for label in known:
            _families[family].labels(label)


def edited(applied: Sequence[Mapping[str, Any]]) -> None:
    """Counts the edited tokens of an answer that has ended.

    Args:
        applied: the answer's own.
    """
    if _families:
        _families["edited_tokens"].inc(sum(one.get("tokens_edited", 0) for one in applied))


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
        _families[f"consumer_{what}"].labels(consumer).inc(count)


def pools(usage: Mapping[str, Sequence[int]]) -> None:
    """Records how full the pools of named vectors are; called at start and after each change.

    Args:
        usage: site → slots in use, slots.
    """
    for site, (used, size) in usage.items() if _families else ():
        _families["pool_rows_in_use"].labels(site).set(used)
        _families["pool_rows"].labels(site).set(size)


def results(number: int, size: int) -> None:
    """Records the results that are kept, and the bytes that they count as."""
    if _families:
        _families["results"].set(number)
        _families["results_bytes"].set(size)


def changed(action: str) -> None:
    """Counts a change of names by an admin."""
    if _families:
        _families["admin_changes"].labels(action).inc()


def memory(share: float) -> None:
    """Records the share of memory that is in use."""
    if _families:
        _families["memory_used"].set(share)
