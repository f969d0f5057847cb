"""Which features a plan or a spec takes from dictionaries that are served by rows. Knows no file and no number."""

from collections.abc import Iterator
from itertools import chain

from saesteer.errors import SpecError
from saesteer.language.edits import Clamp
from saesteer.language.spec import Spec
from saesteer.planning.expand import steps_of
from saesteer.planning.plan import Catalog, Feature, Plan


def features_of(plan: Plan, catalog: Catalog) -> dict[Feature, str]:
    """The features whose rows a plan needs, each with the path of its first mention."""
    found: dict[Feature, str] = {}
    edited = ((one.target, one.field) for one in (*plan.parts, *plan.inputs) if isinstance(one.target, Feature))
    reads = (one for one in (*plan.readouts, *plan.measures) if one.dictionary is not None)
    read = ((Feature(str(one.dictionary), feature), one.field) for one in reads for feature in one.features)
    for target, field in chain(edited, read):
        if catalog.dictionaries[target.dictionary].by_rows:
            found.setdefault(target, field)
    return found


def mentioned(spec: Spec, catalog: Catalog) -> Iterator[Feature]:
    """The features that a spec and its modules name, before anything is checked; none where it is wrong."""
    try:
        edits = [edit for step in steps_of(spec, catalog) for edit in step.alike.each()]
    except SpecError:
        return
    for edit in edits:
        if isinstance(edit, Clamp):
            yield Feature(catalog.key(edit.dictionary, edit.layer), edit.feature)
        for _, one in edit.sources():
            if one.dictionary is not None and one.feature is not None:
                yield Feature(catalog.key(one.dictionary, one.layer), one.feature)
    for read in spec.returns.features:
        yield from (Feature(catalog.key(read.dictionary, read.layer), feature) for feature in read.features)
