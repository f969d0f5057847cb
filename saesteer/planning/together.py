"""Which read-outs travel as one: those whose rows, or whose products, are made together. Knows no weights."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from saesteer.planning.plan import CAPTURE, Catalog, Plan, Readout


def together(found: Sequence[Readout], catalog: Catalog) -> Iterator[tuple[Readout, ...]]:
    """The read-outs whose rows travel as one: neighbours in ``return`` that differ in nothing but their site, or probe.

    A request that reads all layers has one row for each position then, not one for each layer, and the products of all
    its probes are made together. The sites of one read stay together, and alone.

    Args:
        found: the read-outs of a request.
        catalog: the catalog that they were planned with: tensors of another width or pipeline stage travel alone.
    """

    def alike(one: Readout) -> object:
        if one.site is None or one.kind not in ("activation", "probe"):
            return one
        where = catalog.width_at(one.site), catalog.stage_of(one.site), one.whole and one.field
        if one.kind == "probe":
            same = replace(one, field="", site=None, op=None, probe=None)
            return where, catalog.function_of(one.probe and one.probe.vector), same
        return where, one.field == CAPTURE, replace(one, field="", site=None, op=None)

    for _, several in groupby(found, alike):
        yield tuple(several)


def watched_together(plan: Plan) -> Iterator[tuple[tuple[Readout, ...], tuple[int, ...]]]:
    """What the rules of a plan watch at the same positions of a tensor: features of a dictionary as one read-out that
    names them all, probes side by side; and for each name its number among ``plan.measures``."""
    found: dict[Readout, list[int]] = {}
    for number, one in enumerate(plan.measures):
        found.setdefault(replace(one, field="", features=(), probe=None), []).append(number)
    for numbers in found.values():
        first, *others = [plan.measures[number] for number in numbers]
        if first.kind == "features":
            named = (feature for one in (first, *others) for feature in one.features)
            yield (replace(first, features=tuple(named)),), tuple(numbers)
        else:
            yield (first, *others), tuple(numbers)
