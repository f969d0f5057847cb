"""What an answer reports about its edits: the place and version of each, and how many tokens it changed.

Knows plans and fingerprints; the counts come from the device (``counts`` in kernels/layout.py) and are added later.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from saesteer.dictionaries.vectors import fingerprint_of
from saesteer.language.fields import Json
from saesteer.planning.plan import END, Catalog, Change, Clamps, Direction, Feature, Plan, behind
from saesteer.planning.windows import of_part

_LETTERS = 16  # an answer shows this many letters of a fingerprint


def applied(plan: Plan, catalog: Catalog) -> list[Json]:
    """One JSON object for each change at each site, in the order of the request; ``count`` adds the counts.

    Args:
        plan: the plan of the request.
        catalog: the catalog that it was planned with.
    """
    found = []
    for site, part in ((group.site, part) for group in plan.groups for part in group.parts):
        change = part.first if isinstance(part, Clamps) else part
        entry = {"edit": change.field, "op": change.op, "site": site, **_target(change, catalog)}
        entry["positions"] = [[start, None if end == END else end] for start, end in change.windows]
        if change.part is not None:
            entry["part"] = change.part
        if change.asked is None:
            found.append(entry)
        elif isinstance(part, Clamps):
            for n, (feature, value) in enumerate(zip(part.features, part.values, strict=True)):
                own = {"edit": behind(change.field, n), "feature": feature}
                found.append(entry | own | _asked(change, feature, value, catalog))
        else:
            found.append(entry | _asked(change, entry["feature"], change.asked[1], catalog))
    return found


def _asked(change: Any, feature: int, value: Any, catalog: Catalog) -> Json:
    """The value of a clamp as the request has it, and in multiples of the feature's largest activation."""
    info = catalog.dictionaries[change.target.dictionary]
    row = catalog.rows.get(change.target)
    known = catalog.largest(info, feature) if row is None else row.max_act
    found = {"mode": change.asked[0], "value": value, "unit": change.unit}
    if known is None or not info.knows_max_act(feature):
        return found
    if change.unit == "max_act":
        found["times_max_act"] = value
    elif known and change.asked[0] != "scale":
        found["times_max_act"] = np.divide(value, known).tolist()
    return found | {"max_act": known, "max_act_by": info.max_act_from}


def count(applied: Sequence[Json], counts: Sequence[int], cached: int, border: int = END, end: int = END) -> None:
    """Add the counts to the entries of one answer.

    Args:
        applied: the entries.
        counts: how many tokens each change has changed in forward passes of this request, in the same order.
        cached: how many tokens at the beginning the prefix cache had. The request that computed them edited them in
            the same way; the ones in an edit's windows are not counted again.
        border: between the parts of the answer (windows.inside).
        end: positions from here on were not computed; an edit without a token before gets a warning.
    """
    for entry, changed in zip(applied, counts, strict=False):  # the counts of a batch have the length of its longest
        entry["tokens_edited"] = changed
        first, last = of_part(entry.get("part"), border)
        spans = [(max(lo, first), min(last, END if hi is None else hi)) for lo, hi in entry["positions"]]
        entry["tokens_cached"] = sum(max(0, min(cached, hi) - lo) for lo, hi in spans)
        if all(min(end, hi) <= lo for lo, hi in spans):
            entry["warning"] = "its scope holds no token of this request"


def _target(change: Change, catalog: Catalog) -> Json:
    target = change.target
    if isinstance(target, Direction):
        if isinstance(target.vector, str):
            version = catalog.vectors[target.vector].fingerprint
            about: Json = {"vector": target.vector, "version": version[:_LETTERS]}
        else:
            about = {"version": fingerprint_of(target.vector)[:_LETTERS]}
        return about if target.layer is None else about | {"layer": target.layer}
    name, layer = catalog.named(target.dictionary)
    about = {"dictionary": name} if layer is None else {"dictionary": name, "layer": layer}
    version = catalog.dictionaries[target.dictionary].fingerprint
    if isinstance(target, Feature):
        about["feature"] = target.feature
        if target in catalog.rows:
            version = catalog.rows[target].digest
    about["version"] = version[:_LETTERS]
    origin = catalog.origin(target.dictionary)
    if origin is not None and origin.fit in ("base", "declared"):  # else the server's own name says the same
        about["trained_on"] = origin.model
    return about
