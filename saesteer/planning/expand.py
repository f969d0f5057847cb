"""A list of edits without `use`: the edits of each module stand in its place, with their scale. Knows no site and no
names of dictionaries or vectors.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from saesteer.errors import SpecError
from saesteer.language.alike import Alike, parts_of
from saesteer.language.edits import Clamp, Edit, Scope, Strength, Use
from saesteer.language.fields import FLOAT32_MAX, closest, fail, listing, show, varied
from saesteer.language.rules import Rule
from saesteer.language.spec import MAX_EDITS, Return, Spec
from saesteer.planning.plan import Catalog, Feature, behind

MAX_DEPTH = 32  # how deep modules may be nested, including the one that a request names
_NOTHING = Return()
_UNNAMED = Scope()

Found = tuple[str, Strength]


class Step(NamedTuple):
    """One edit that is not a `use`, or neighbouring clamps that differ in their features and values alone."""

    edit: Edit  # the first
    at: str  # its path in the request; inside a module, it follows the path of the module's name
    scale: float  # product of the scales of the modules that it stands in
    strength: Found | None  # its path and itself, where the edit's own strength or a scale is read
    run: int  # edits of different runs have a `use` between them
    alike: Alike  # all of them

    def part(self, start: int, end: int) -> "Step":
        """Some of the edits."""
        some = self.alike.part(start, end)
        return self._replace(edit=some.first, at=behind(self.at, start), alike=some)


def in_front(spec: Spec, catalog: Catalog) -> list[tuple[str, str]]:
    """The modules that are used in front of a request's own edits, each as its path and its name."""
    found = ("saesteer.defaults", catalog.default if spec.defaults else None), ("model", spec.model)
    return [(at, name) for at, name in found if name is not None]


def steps_of(spec: Spec, catalog: Catalog) -> Iterator[Step]:
    """The edits of a request in the order in which they apply, as ``steps``."""
    found = steps(spec.edits, catalog.modules, first=in_front(spec, catalog))
    return found if catalog.scope is None else (_scoped(step, catalog.scope) for step in found)


def _scoped(step: Step, scope: Scope) -> Step:
    if step.edit.scope != _UNNAMED or isinstance(step.edit, Rule):
        return step
    edit = varied(step.edit, scope=scope)
    return step._replace(edit=edit, alike=step.alike._replace(first=edit))


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


def steps(
    edits: Sequence[Edit],
    modules: Mapping[str, Spec],
    inside: tuple[str, ...] = (),
    first: Sequence[tuple[str, str]] = (),
) -> Iterator[Step]:
    """The edits in the order in which they apply, each found only when the caller asks for it.

    Args:
        edits: the edits of a request or a module.
        modules: all modules, by name.
        inside: the modules that the edits stand in, outermost first.
        first: modules that are used in front of them, each as its path and its name.

    Raises:
        SpecError: a module is unknown or uses itself, modules are nested too deep, there are too many edits, or the
            product of the scales is too large.
    """
    walk = _Walk(modules)
    used = (walk.use(Use(name), at, at, 1.0, None, inside) for at, name in first)
    room = MAX_EDITS
    for step in chain(*used, walk.walk(edits, "saesteer", 1.0, None, inside)):
        if step.alike.size > room:
            if room:
                yield step.part(0, room)
            at = behind(step.at, room)
            fail(at, "too_many", f"is edit {MAX_EDITS + 1}, modules included, expected at most {MAX_EDITS}")
        room -= step.alike.size
        yield step


class _Walk:
    def __init__(self, modules: Mapping[str, Spec]) -> None:
        self.modules = modules
        self.run = 0
        self.used = 0  # modules used so far, including empty ones

    def walk(
        self, edits: Sequence[Edit], at: str, scale: float, strength: Found | None, inside: tuple[str, ...]
    ) -> Iterator[Step]:
        i = 0
        for part in parts_of(edits):
            edit, here = part.first, f"{at}.edits[{i}]"
            if isinstance(edit, Use):
                self.run += 1
                yield from self.use(edit, f"{here}.module", here, scale, strength, inside)
            else:
                step = Step(edit, here, scale, _only(edit, here, strength), self.run, part)
                # A min and a max may make a band, so each is a step.
                bounds = part.size > 1 and isinstance(edit, Clamp) and edit.mode in ("min", "max")
                yield from (step.part(n, n + 1) for n in range(part.size)) if bounds else (step,)
            i += part.size

    def use(
        self, edit: Use, at: str, here: str, scale: float, strength: Found | None, inside: tuple[str, ...]
    ) -> Iterator[Step]:
        name = edit.module
        module = self.modules.get(name)
        if module is None:
            known = listing(self.modules)
            fail(at, "unknown_name", f"got {show(name)}{closest(name, self.modules)}, expected one of: {known}")
        if name in inside:
            path = " uses ".join(map(repr, [*inside[inside.index(name) :], name]))
            fail(at, "conflict", f"is a cycle, {path}, expected modules that do not use themselves")
        if len(inside) == MAX_DEPTH:
            message = f"uses {show(name)}, {MAX_DEPTH + 1} modules deep, expected at most {MAX_DEPTH}"
            fail(at, "too_many", message)
        if module.returns != _NOTHING:
            fail(at, "not_served", f"module {name!r} reads values out, which is not served by this version")
        if not module.defaults:
            fail(at, "conflict", f"module {name!r} has defaults false, which only a request may have")
        self.used += 1
        if self.used > MAX_EDITS:
            fail(at, "too_many", f"is module {self.used} in a row, expected at most {MAX_EDITS}")
        product = scale if isinstance(edit.scale, Strength) else scale * edit.scale
        strength = _only(edit, here, strength)
        if abs(product) > FLOAT32_MAX:
            fail(f"{here}.scale", "out_of_range", f"makes {product:g} with the outer scales, too large for float32")
        takes = False
        for step in self.walk(module.edits, at, product, strength, (*inside, name)):
            takes = takes or not isinstance(step.edit, Rule)
            yield step
        if isinstance(edit.scale, Strength) and not takes:  # else nobody would look at what it reads
            message = f"is read, and module {name!r} has no edit that it would scale"
            fail(f"{here}.scale", "conflict", f"{message}; expected a module with one, or no scale")
        self.run += 1


def _only(edit: Edit, at: str, outer: Found | None) -> Found | None:
    """The strength that is read for an edit: its own, or that of a `use` around it."""
    if edit.read_strength is None:
        return outer
    key, own = edit.read_strength
    if outer is not None:
        message = f"is read, inside a module whose scale is read at {outer[0]}"
        fail(f"{at}.{key}", "conflict", f"{message}; expected a number in one of the two")
    return f"{at}.{key}", own
