"""What a plan may not hold though each edit is right: clamps that meet, tensors that nobody has, too many vectors.

Knows plans and catalogs, not how a plan is made.
"""

from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from typing import get_args

from saesteer.language.edits import Part
from saesteer.language.fields import fail
from saesteer.language.sites import is_pregain, order
from saesteer.planning.lookup import fit
from saesteer.planning.plan import Catalog, Change, Clamps, Condition, Direction, Feature, Group, Plan, Read, Whole

_PARTS: tuple[Part, ...] = get_args(Part)


def refuse(found: Plan, catalog: Catalog) -> None:
    """Refuse a plan that the ops cannot carry out as it is meant.

    Raises:
        SpecError: a feature is clamped twice at a position, a dictionary by rows is needed whole or has another width
            than the model, an edit needs a tensor where there is no op, or mlp_in_pregain behind edits of resid_mid, a
            site needs two dictionaries whole, or one after other edits, or the request brings too many vectors for a
            site.
    """
    for group in found.groups:
        _refuse_twice(group)
    targets = [one.target for one in (*found.parts, *found.inputs)]
    kinds = {one.__class__ for one in targets}
    named = {one.dictionary for one in targets if not isinstance(one, Direction)}
    by_rows = any(catalog.dictionaries[name].by_rows for name in named)
    if by_rows:
        _refuse_by_rows(found, catalog)
    _refuse_apart(found, catalog)
    _refuse_stale(found, catalog)
    if Whole in kinds or any(catalog.dictionaries[name].k is not None for name in named):
        _refuse_dense(found, catalog)
    if by_rows or Direction in kinds:
        _refuse_brought(found, catalog)


def refuse_stages(site: str, field: str, needed: Iterable[Condition | Read], catalog: Catalog) -> None:
    """Refuse an edit that needs what another stage of a pipeline has read: registers and bits stay on their stage.

    Args:
        site: that it edits.
        field: its path in the request.
        needed: what it waits for, or takes a number from.
        catalog: the catalog that it was planned with.

    Raises:
        SpecError: names both sites.
    """
    there = catalog.stage_of(site)
    for one in needed:
        here = catalog.stage_of(one.site)
        if here != there:
            message = f"edits {site}, on stage {there} of this server's pipeline, by what is read at {one.site}"
            fail(field, "not_served", f"{message}, on stage {here}; expected both on one stage")


def _refuse_twice(group: Group) -> None:
    """Refuse to clamp a feature twice at a position."""
    [first, *more] = group.parts
    if not more and (not isinstance(first, Clamps) or len({*first.features}) == len(first.features)):
        return
    changes = group.changes
    if len({change.target for change in changes}) == len(changes):
        return
    spans: defaultdict[tuple[Feature, Part], list[tuple[int, int, int]]] = defaultdict(list)
    for place, change in enumerate(changes):
        if isinstance(change.target, Feature):
            for part in _PARTS if change.part is None else (change.part,):  # one of both meets all others
                spans[change.target, part] += [(lo, hi, place) for lo, hi in change.windows]
    for (target, _), found in spans.items():
        found.sort()
        for (_, end, one), (start, _, two) in pairwise(found):
            if start < end:
                first, second = changes[min(one, two)], changes[max(one, two)]
                what = f"feature {target.feature} of {target.dictionary!r}"
                message = f"clamps {what} at position {start} as {first.field} does"
                alike = "a min and a max with the same windows, when, unit and only_if_active"
                expected = f"windows that do not meet, or {alike}"
                fail(f"{second.field}.feature", "duplicate", f"{message}, expected {expected}")


def _refuse_by_rows(found: Plan, catalog: Catalog) -> None:
    """Refuse what the rows of a few features cannot do."""
    for one in (*found.parts, *found.inputs):
        target, at = one.target, f"{one.field}.dictionary"
        if isinstance(target, Direction) or not (info := catalog.dictionaries[target.dictionary]).by_rows:
            continue
        name = target.dictionary
        if isinstance(target, Whole):
            message = f"needs all of {name!r}, of which this server reads only the rows of features"
            fail(at, "not_served", f"{message}; start it with --dictionary NAME=PLACE, without rows:, to reconstruct")
        fit(catalog, str(info.site_in), info.d_in, at, f"{name!r} is")


def _refuse_apart(found: Plan, catalog: Catalog) -> None:
    """Refuse what needs the tensor of a site without an op: the op of the sum can only add to it."""
    begun: set[str] = set()
    for group in found.groups:
        apart = catalog.op_site(group.site) != group.site
        for change in group.changes if apart else ():
            added = change.target.__class__ is Direction and change.op == "add" and change.unit == "vector"
            held = change.held and change.target.__class__ is Feature
            if group.site in begun or not (added or held):
                message = f"needs the tensor at {group.site}, where this server has no op; there it adds one group of"
                expected = f"clamps or vectors at most; start it with --sites {group.site} to have an op"
                fail(change.field, "not_served", f"{message} {expected}")
        begun.add(group.site)


def _refuse_stale(found: Plan, catalog: Catalog) -> None:
    """Refuse edits by what reads mlp_in_pregain where resid_mid is edited: its op reads that before its edits."""
    edited = {group.site: group for group in found.groups}
    for one in found.inputs:
        if one.site not in edited or isinstance(one.target, Direction):
            continue
        name = one.target.dictionary
        info = catalog.dictionaries[name]
        if is_pregain(site := str(info.site_in or info.site_out)):
            message = f"reads {site} with {name!r}, which this version does not serve behind the edit of {one.site}"
            expected = "expected one of the two, or a dictionary that reads mlp_in"
            fail(f"{one.field}.dictionary", "not_served", f"{message} in {edited[one.site].parts[0].field}, {expected}")


def _refuse_dense(found: Plan, catalog: Catalog) -> None:
    """Refuse a second whole encoding at a site: there is only one, of the stream as it arrives there."""
    dense: dict[str, str] = {}
    why = "which this version does not serve: such a dictionary is encoded whole, once and before any edit of its site"

    def check(one: Change | Condition | Read, site: str, edited: set[str]) -> None:
        """Check what is read, or changed, at a site, which may be among those that have been edited."""
        target = one.target
        if isinstance(target, Direction):
            return
        name, at = target.dictionary, f"{one.field}.dictionary"
        if isinstance(target, Feature) and catalog.dictionaries[name].k is None:
            return
        first = dense.setdefault(site, name)
        if first != name:
            fail(at, "not_served", f"needs {name!r} as well as {first!r} at {site}, {why}")
        if site in edited:
            fail(at, "not_served", f"needs {name!r} after other edits, {why}")

    apart = {op for group in found.groups if (op := catalog.op_site(group.site)) != group.site}
    for one in found.inputs:
        check(one, one.site, apart)
    begun: set[str] = set()
    for group in sorted(found.groups, key=lambda one: order(one.site)):
        site = catalog.op_site(group.site)
        for change in group.changes:
            if not change.held:
                check(change, site, begun)
        begun.add(site)


def _refuse_brought(found: Plan, catalog: Catalog) -> None:
    """Refuse a request that brings more vectors, or rows of features, for a site than it may."""
    if catalog.inline_rows is None:
        return
    brought: defaultdict[str, set[object]] = defaultdict(set)
    changes = ((group.site, part) for group in found.groups for part in group.parts)
    for site, one in (*((read.site, read) for read in found.inputs), *changes):
        target = one.target
        if isinstance(target, Feature) and catalog.dictionaries[target.dictionary].by_rows:
            key, what, kept = "feature", "feature {} that the request takes from files for {}", "dictionary in memory"
        elif isinstance(target, Direction) and not isinstance(target.vector, str):
            if catalog.pinned and (site, target) in catalog.pinned:
                continue
            key, what, kept = "vector", "vector {} that the request brings for {}", "vectors themselves"
        else:
            continue
        here = brought[catalog.op_site(site)]
        here.add(target)
        if len(here) > catalog.inline_rows:
            message = f"is {what.format(len(here), site)}, expected at most {catalog.inline_rows}"
            hint = "the server takes more when started with a higher --inline-rows"
            if not (isinstance(target, Feature) and catalog.dictionaries[target.dictionary].targets):
                hint += f", or with the {kept}"  # which then needs no slot for a request
            fail(f"{one.field}.{key}", "too_many", f"{message}; {hint}")
