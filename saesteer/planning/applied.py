"""What an answer reports about its edits: the place and version of each, and how many tokens it changed.

Knows plans and fingerprints; the counts come from the device (``counts`` in kernels/layout.py) and are added later.
"""

from collections.abc import Sequence
from typing import Any

from saesteer.dictionaries.vectors import fingerprint_of
from saesteer.planning.plan import END, Catalog, Change, Direction, Feature, Plan

_LETTERS = 16  # an answer shows this many letters of a fingerprint


def applied(plan: Plan, catalog: Catalog) -> list[dict[str, Any]]:
    """One JSON object for each change at each site, in the order of the request; ``count`` adds the counts.

    Args:
        plan: the plan of the request.
        catalog: the catalog that it was planned with.
    """
    found = []
    for site, change in ((group.site, change) for group in plan.groups for change in group.changes):
        entry = {"edit": change.field, "op": change.op, "site": site, **_target(change, catalog)}
        if change.unit == "max_act" and isinstance(change.target, Feature):
            entry["max_act"] = getattr(catalog.dictionaries[change.target.dictionary], "max_act_from", None)
        entry["positions"] = [[start, None if end == END else end] for start, end in change.windows]
        found.append(entry)
    return found


def count(applied: Sequence[dict[str, Any]], counts: Sequence[int], cached: int) -> None:
    """Add the counts to the entries of one answer.

    Args:
        applied: the entries.
        counts: how many tokens each change has changed in forward passes of this request, in the same order.
        cached: how many tokens at the beginning the prefix cache had. The request that computed them edited them in
            the same way; the ones in an edit's windows are not counted again.
    """
    for entry, changed in zip(applied, counts, strict=False):  # the counts of a batch have the length of its longest
        entry["tokens_edited"] = changed
        entry["tokens_cached"] = sum(
            max(0, min(cached, cached if end is None else end) - start) for start, end in entry["positions"]
        )


def _target(change: Change, catalog: Catalog) -> dict[str, Any]:
    target = change.target
    if isinstance(target, Direction):
        if isinstance(target.vector, str):
            about: dict[str, Any] = {"vector": target.vector, "version": _short(catalog.vectors[target.vector])}
        else:
            about = {"version": fingerprint_of(target.vector)[:_LETTERS]}
        return about if target.layer is None else about | {"layer": target.layer}
    name, layer = catalog.named(target.dictionary)
    about = {"dictionary": name} if layer is None else {"dictionary": name, "layer": layer}
    if isinstance(target, Feature):
        about["feature"] = target.feature
        if target in catalog.rows:
            return about | {"version": catalog.rows[target].digest[:_LETTERS]}
    return about | {"version": _short(catalog.dictionaries[target.dictionary])}


def _short(of: object) -> str:
    """The beginning of a content's fingerprint."""
    return str(getattr(of, "fingerprint", ""))[:_LETTERS]
