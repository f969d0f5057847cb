"""What an answer says of the edits behind it: each with its place, its version and how many tokens it changed.

Knows plans and fingerprints; the counts come from the device (``counts`` in kernels/layout.py).
"""

from collections.abc import Sequence
from typing import Any

from saesteer.planned import END, Catalog, Change, Direction, Feature, Plan
from saesteer.vectors import from_inline


def applied(plan: Plan, catalog: Catalog, counts: Sequence[int] | None) -> list[dict[str, Any]]:
    """One JSON object for each change at each site, in the order of the request.

    Args:
        plan: of the request.
        catalog: that it was planned with.
        counts: tokens that each change has changed, in the order of the plan; None: not known.
    """
    changes = [(group.site, change) for group in plan.groups for change in group.changes]
    found = []
    for number, (site, change) in enumerate(changes):
        entry = {"edit": change.field, "op": change.op, "site": site, **_target(change, catalog)}
        entry["positions"] = [[start, None if end == END else end] for start, end in change.windows]
        if counts is not None:
            entry["tokens_edited"] = counts[number]
        found.append(entry)
    return found


def _target(change: Change, catalog: Catalog) -> dict[str, Any]:
    target = change.target
    if isinstance(target, Direction):
        named = isinstance(target.vector, str)
        of: Any = catalog.vectors[target.vector] if isinstance(target.vector, str) else from_inline(target.vector)
        about = {"vector": target.vector if named else None, "layer": target.layer}
        return {key: value for key, value in about.items() if value is not None} | {"version": _short(of)}
    about = {"dictionary": target.dictionary}
    if isinstance(target, Feature):
        about["feature"] = target.feature
    return about | {"version": _short(catalog.dictionaries[target.dictionary])}


def _short(of: object) -> str:
    """The beginning of a content's fingerprint."""
    return str(getattr(of, "fingerprint", ""))[:16]
