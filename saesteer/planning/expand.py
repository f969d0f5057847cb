"""A list of edits without `use`: every module's edits in its place, with the scale they got. Knows no site and no names
of dictionaries or vectors.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from saesteer.language.edits import Edit, Use
from saesteer.language.fields import FLOAT32_MAX, closest, fail, listing, show
from saesteer.language.spec import MAX_EDITS, Return, Spec

MAX_DEPTH = 32  # of modules in one another, the one that a request names among them


@dataclass(frozen=True, slots=True)
class Step:
    """One edit that is no `use`."""

    edit: Edit
    at: str  # its path in the request; inside a module, behind the path of the module's name
    scale: float  # of the modules that it stands in, multiplied
    run: int  # edits of different runs have a `use` between them


def steps(edits: Sequence[Edit], modules: Mapping[str, Spec], inside: tuple[str, ...] = ()) -> Iterator[Step]:
    """The edits in the order in which they apply, each found when it is asked for.

    Args:
        edits: of a request or a module.
        modules: by name.
        inside: the modules that the edits stand in, the outermost first.

    Raises:
        SpecError: an unknown module, one that uses itself, modules too deep in one another, too many edits, or scales
            that multiply to too much.
    """
    for count, step in enumerate(_Walk(modules).walk(edits, "saesteer", 1.0, inside)):
        if count == MAX_EDITS:
            fail(step.at, "too_many", f"is edit {MAX_EDITS + 1} with those of modules, expected at most {MAX_EDITS}")
        yield step


class _Walk:
    def __init__(self, modules: Mapping[str, Spec]) -> None:
        self.modules = modules
        self.run = 0
        self.used = 0  # modules, an empty one as well

    def walk(self, edits: Sequence[Edit], at: str, scale: float, inside: tuple[str, ...]) -> Iterator[Step]:
        for i, edit in enumerate(edits):
            here = f"{at}.edits[{i}]"
            if isinstance(edit, Use):
                self.run += 1
                yield from self._use(edit, f"{here}.module", here, scale, inside)
                self.run += 1
            else:
                yield Step(edit, here, scale, self.run)

    def _use(self, edit: Use, at: str, here: str, scale: float, inside: tuple[str, ...]) -> Iterator[Step]:
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
        if module.returns != Return():
            fail(at, "not_served", f"module {name!r} reads values out, which is not served by this version")
        self.used += 1
        if self.used > MAX_EDITS:
            fail(at, "too_many", f"is module {self.used} in a row, expected at most {MAX_EDITS}")
        product = scale * edit.scale
        if abs(product) > FLOAT32_MAX:
            fail(f"{here}.scale", "out_of_range", f"makes {product:g} with the scales around it, too much for float32")
        yield from self.walk(module.edits, at, product, (*inside, name))
