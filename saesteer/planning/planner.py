"""What a spec means for one prompt on one server: which changes apply, where, in which order, at which positions.

Knows no weights, no tensors and no engine. Anything that is not served is refused here by name, never ignored.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import singledispatchmethod
from typing import TYPE_CHECKING, Any, NamedTuple

from saesteer.language.edits import Ablate, Add, Cap, Clamp, Edit, Reconstruct, Scope, Strength
from saesteer.language.fields import FLOAT32_MAX, fail
from saesteer.language.rules import Rule
from saesteer.language.spec import Return, Spec
from saesteer.planning.expand import Step, steps_of
from saesteer.planning.lookup import check_feature, dictionary_of, places_of, reading_site, writing_sites
from saesteer.planning.plan import (
    Catalog,
    Change,
    Clamps,
    Condition,
    Feature,
    Group,
    Plan,
    Read,
    Whole,
    Window,
)
from saesteer.planning.readouts import behind_sums, check_scope, readouts
from saesteer.planning.reads import Key, Reads, bounds
from saesteer.planning.refusals import refuse, refuse_stages
from saesteer.planning.rules import Rules
from saesteer.planning.windows import is_own, is_relative, windows

if TYPE_CHECKING:
    from saesteer.dictionaries.coder import CoderInfo

_NOTHING = Return()


class _Member(NamedTuple):
    """Changes before it is known where what they read is kept."""

    part: Change | Clamps
    keys: tuple[Key, ...]  # of its conditions
    held: Key | None = None
    strength: Key | None = None


class _Clamped(NamedTuple):
    """A dictionary that is clamped, looked up once for all of its features."""

    key: str
    info: "CoderInfo"
    reads: str
    sites: tuple[str, ...]  # that it writes
    of: str  # whose clamps form a group with these


@dataclass(slots=True)
class _Growing:
    site: str
    of: object  # who may join: a dictionary's clamps, plain adds, or nobody (None)
    run: int
    members: list[_Member] = field(default_factory=list)
    halves: dict[object, int] = field(default_factory=dict)  # a min or max without its other half → its place


def plan(spec: Spec, catalog: Catalog, prompt_len: int, starts: Sequence[int] | None = None) -> Plan:
    """The groups, conditions, read-outs and rules of a spec.

    Entries are counted as they are made, and planning ends at the first entry above the limit: a request that the
    server refuses costs no more than one that it serves.

    Args:
        spec: the spec of the request.
        catalog: what the server has.
        prompt_len: the length of the prompt, in tokens.
        starts: where the chat messages begin, and behind them the generation prompt; None: it is no chat.

    Raises:
        SpecError: a name is unknown, a feature is out of range or clamped twice at a position, a scope is empty, there
            are too many entries, or this version does not serve the request.
    """
    assert prompt_len >= 0
    planner = _Planner(catalog, prompt_len)
    for step in steps_of(spec, catalog):
        planner.take(step.edit, step)
    found = planner.finish()
    if spec.returns != _NOTHING:
        relative = found.relative or any(is_relative(scope) for _, scope in spec.returns.scopes())
        found = replace(found, readouts=readouts(spec.returns, catalog, prompt_len, starts), relative=relative)
    return behind_sums(planner.rules.add_to(found), catalog)


class _Planner:
    """Groups as they grow, edit by edit."""

    def __init__(self, catalog: Catalog, prompt_len: int) -> None:
        self.catalog = catalog
        self.prompt_len = prompt_len
        self.reads = Reads(catalog)
        self.rules = Rules(catalog)
        self.groups: list[_Growing] = []
        self.last: dict[str, _Growing] = {}  # by site; an edit at another site in between does not end a group
        self.entries = 0  # changes times windows, without conditions
        self.relative = False
        self._known: dict[tuple[int, int], tuple[Window, ...]] = {}  # windows by the scope's id and skip_first
        self._clamped: dict[tuple[str, int | None], _Clamped] = {}  # by name and layer

    @singledispatchmethod
    def take(self, edit: Edit, step: Step) -> None:
        """Plan an edit, by its class; it is the first of the step's."""
        raise AssertionError(edit)

    @take.register
    def clamp(self, edit: Clamp, step: Step) -> None:
        at = step.at
        known = self._clamped.get((edit.dictionary, edit.layer))
        name, info = known[:2] if known else dictionary_of(self.catalog, edit.dictionary, edit.layer, at)
        check_feature(name, info, edit.feature, f"{at}.feature")
        target = Feature(name, edit.feature)
        if edit.unit == "max_act" and not info.knows_max_act(edit.feature):
            some, hint = info.has_max_act, ", `saesteer calibrate` finds them"
            what = f"activation of feature {edit.feature} of {name!r} is" if some else f"activations of {name!r} are"
            expected = f"raw: the max {what} not known{hint}"
            fail(f"{at}.unit", "unknown_max_act", f"got max_act, expected {expected}")
        if known is None:
            reads, sites = reading_site(self.catalog, name, info, at), writing_sites(self.catalog, name, info, at)
            of = name if info.targets is None else self.catalog.named(name)[0]  # clamps of all its layers form a group
            known = self._clamped[edit.dictionary, edit.layer] = _Clamped(name, info, reads, sites, of)
        count = step.alike.size
        if count > 1 and not self._are_plain(edit, step, known):
            for n in range(count):
                one = step.part(n, n + 1)
                self.take(one.edit, one)
            return
        value = 1.0 if isinstance(edit.value, Strength) else edit.value
        change = Change(
            target,
            self._windows(edit.scope, at, info.skip_first),
            at,
            part=edit.scope.part,
            scale={"set": 0.0, "scale": value}.get(edit.mode, 1.0),
            shift=value if edit.mode in ("set", "add") else 0.0,
            low=value if edit.mode == "min" else float("-inf"),
            high=value if edit.mode == "max" else float("inf"),
            unit=edit.unit,
            only_if_active=edit.only_if_active,
            gain=step.scale,
            op=edit.op,
            asked=None if isinstance(edit.value, Strength) else (edit.mode, edit.value),
        )
        if count > 1:
            part = Clamps(change, step.alike.features, step.alike.values, edit.mode == "scale")
            self._join(known.reads, known.of, step, part, str(info.site_out))
            return
        for number, site in enumerate(known.sites):
            held = self.reads.held(target, known.reads, site, at)
            there = replace(change, target=replace(target, target=number)) if number else change
            self._join(site, known.of, step, there, str(info.site_out), held)

    def _are_plain(self, edit: Clamp, step: Step, known: _Clamped) -> bool:
        """Whether clamps may be planned as one part; otherwise each is planned by itself, and may be refused."""
        info = known.info
        if known.sites != (known.reads,) or info.by_rows or getattr(info, "feature_ids", None):
            return False
        most = step.alike.size * len(self._windows(edit.scope, step.at, info.skip_first))
        most += self.entries + len(self.reads) + len(edit.when) + (step.strength is not None)
        features = step.alike.features
        if edit.unit == "max_act" and not all(map(info.knows_max_act, features)):
            return False
        return most <= self.catalog.max_entries and max(features) < info.features

    @take.register
    def add(self, edit: Add, step: Step) -> None:
        plain = edit.norm == "none"
        spans = self._windows(edit.scope, step.at)
        places = [*places_of(self.catalog, edit.vector, edit.site, step.at)]
        if edit.scales and len(edit.scales) != len(places):
            found = f"got {len(edit.scales)} numbers for the {len(places)} layers of the vector, expected one for each"
            fail(f"{step.at}.scales", "conflict", found)
        layers = sorted(target.layer or 0 for _, target, _ in places)  # a request's own vector has them in any order
        scale = 1.0 if isinstance(edit.scale, Strength) else edit.scale
        for site, target, written in places:
            number = layers.index(target.layer or 0)
            factor = edit.scales[number] if edit.scales else 1.0
            if abs(scale * factor) > FLOAT32_MAX:
                message = f"got {factor:g}, which makes {scale * factor:g} with scale, too large for float32"
                fail(f"{step.at}.scales[{number}]", "out_of_range", message)
            change = Change(
                target,
                spans,
                step.at,
                part=edit.scope.part,
                shift=scale * factor,
                unit="vector" if plain else "stream",
                gain=step.scale,
                op=edit.op,
            )
            self._join(site, Add if plain else None, step, change, written)

    @take.register
    def project(self, edit: Cap | Ablate, step: Step) -> None:
        """Plan a cap, or an ablation, whose projection becomes 0."""
        scale, low, high = (1.0, *bounds(edit.min, edit.max)) if isinstance(edit, Cap) else (0.0, *bounds(None, None))
        spans, gain = self._windows(edit.scope, step.at), step.scale * edit.strength
        if abs(gain) > FLOAT32_MAX:
            message = f"makes {gain:g} with the modules' scales, too large for float32"
            fail(f"{step.at}.strength", "out_of_range", message)
        law: dict[str, Any] = {"scale": scale, "low": low, "high": high, "gain": gain}
        for site, target, written in places_of(self.catalog, edit.vector, edit.site, step.at):
            change = Change(target, spans, step.at, part=edit.scope.part, op=edit.op, **law)
            self._join(site, None, step, change, written)

    @take.register
    def reconstruct(self, edit: Reconstruct, step: Step) -> None:
        at = step.at
        name, info = dictionary_of(self.catalog, edit.dictionary, edit.layer, at, address="dictionary")
        if info.targets is not None:
            message = f"{name!r} is a cross-layer transcoder, which makes no layer's output alone"
            fail(f"{at}.dictionary", "not_served", f"{message}; expected clamps of its features")
        [site] = writing_sites(self.catalog, name, info, at)
        spans = self._windows(edit.scope, at, info.skip_first)
        keys = self.reads.gates(edit.when, str(info.site_out), at, site)
        clamps = self.last.get(site)
        if clamps is None or clamps.of != name or clamps.run != step.run:
            clamps = None
        if edit.error == "keep" and clamps is None:
            message = f"is keep, but no clamp of {name!r} stands directly before it, so it does nothing"
            fail(f"{at}.error", "conflict", f"{message}; expected drop, or a clamp before it")
        for one in clamps.members if clamps else ():
            if (one.part.windows, one.part.part) != (spans, edit.scope.part):
                fail(f"{at}.scope", "conflict", f"is not the same as in {one.part.field}, expected the same tokens")
            if set(one.keys) != set(keys):
                fail(f"{at}.when", "conflict", f"is not the same as in {one.part.field}, expected equal conditions")
        if edit.error == "drop":
            _refuse_partial(name, info, at)
            reads, target = reading_site(self.catalog, name, info, at), Whole(name)
            held = self.reads.held(target, reads, site, at)
            change = Change(target, spans, at, part=edit.scope.part, gain=step.scale, op=edit.op)
            self._join(site, name, step, change, str(info.site_out), held)
            clamps = self.last[site]
        assert clamps is not None
        clamps.of = None  # what follows reads the reconstruction

    @take.register
    def rule(self, edit: Rule, step: Step) -> None:
        self.rules.note(edit, self._windows(edit.scope, step.at), step.at)

    def finish(self) -> Plan:
        """The plan, once all edits have been added."""
        conditions, reads = self.reads.settle()
        inputs: dict[Key, Condition | Read] = {**conditions, **reads}
        for group in self.groups if self.catalog.stages else ():
            for one in group.members:
                needed = [inputs[key] for key in (*one.keys, one.held, one.strength) if key is not None]
                refuse_stages(group.site, one.part.field, needed, self.catalog)
        groups = tuple(
            Group(group.site, tuple(_settled(member, conditions, reads) for member in group.members))
            for group in self.groups
        )
        found = Plan(groups, (*conditions.values(),), (*reads.values(),), self.relative)
        refuse(found, self.catalog)
        return found

    def _windows(self, scope: Scope, at: str, skip_first: int = 1) -> tuple[Window, ...]:
        key = id(scope), skip_first  # a module's scope comes again with each use of the module
        if key in self._known:
            return self._known[key]
        check_scope(scope, self.catalog, at)
        self.relative = self.relative or is_relative(scope)
        found = windows(scope, self.prompt_len, skip_first)
        if not found and is_own(at):  # a module may have edits that this prompt has no tokens for
            left = f" and positions {max(1, skip_first)} or later" if scope.positions is None else ""
            message = f"holds no position with a prompt of {self.prompt_len} tokens, expected at least one{left}"
            fail(f"{at}.scope", "empty_scope", message)
        self._known[key] = found
        return found

    def _join(
        self,
        site: str,
        of: object,
        step: Step,
        part: Change | Clamps,
        stands: str,
        held: Key | None = None,
    ) -> None:
        """Put a change into the last group of its site, or begin another.

        An edit reads what it waits for, and its strength, where it ``stands``: at its only or first site, as written.
        """
        keys = self.reads.gates(step.edit.when, stands, step.at, site)
        group = self.last.get(site)
        if group is None or of is None or group.of != of or group.run != step.run:
            group = self.last[site] = _Growing(site, of, step.run)
            self.groups.append(group)
        strength = (
            None if step.strength is None else self.reads.strength(step.strength[1], stands, step.strength[0], site)
        )
        if not _made_band(group, step.edit, part, (*keys, strength)):
            group.members.append(_Member(part, keys, held, strength))
            self.entries += max(1, len(part.windows)) * step.alike.size
        most = self.catalog.max_entries
        if self.entries + len(self.reads) > most:
            at = step.at.removeprefix("saesteer.")  # a module's field begins with another word
            message = f"makes more than {most} entries with {at}, expected at most {most}"
            what = "an entry is a condition or a read, or one feature or vector in one window of positions"
            hint = "the server takes more when started with a higher --max-edits"
            fail("saesteer.edits", "too_many", f"{message} ({what}); {hint}")


def _settled(member: _Member, conditions: Mapping[Key, Condition], reads: Mapping[Key, Read]) -> Change | Clamps:
    part, keys, *taken = member
    if not keys and taken == [None, None]:
        return part
    held, strength = (None if key is None else reads[key] for key in taken)
    known: dict[str, Any] = {"gates": sum({conditions[key].bit for key in keys}), "held": held, "strength": strength}
    return replace(part, first=replace(part.first, **known)) if isinstance(part, Clamps) else replace(part, **known)


def _refuse_partial(name: str, info: "CoderInfo", at: str) -> None:
    if not info.can_reconstruct:
        message = f"the file of {name!r} lacks the output bias or some features, so it cannot reconstruct"
        fail(f"{at}.dictionary", "not_served", f"{message}; expected a whole dictionary, or error keep")
    if info.activation == "groupmax":
        message = f"{name!r} uses groupmax, whose reconstructions are not served by this version"
        fail(f"{at}.dictionary", "not_served", f"{message}; expected another activation, or error keep")


def _made_band(group: _Growing, edit: Edit, change: Change | Clamps, keys: Sequence[Key | None]) -> bool:
    """Join a min or max to its other half, with the same windows and gate, as a band; return whether there is one."""
    if not isinstance(edit, Clamp) or edit.mode not in _OTHER:
        return False
    assert isinstance(change, Change)
    alike = change.target, change.windows, change.part, change.only_if_active, change.unit, frozenset(keys)
    place = group.halves.pop((*alike, _OTHER[edit.mode]), None)
    if place is None:
        group.halves.setdefault((*alike, edit.mode), len(group.members))
        return False
    first = group.members[place].part
    assert isinstance(first, Change)
    low, high = max(first.low, change.low), min(first.high, change.high)
    if low > high:
        message = f"makes a band from min {low} to max {high} with {first.field}, expected min at most max"
        fail(f"{change.field}.value", "conflict", message)
    band = replace(first, low=low, high=high, asked=("band", [low, high]))
    group.members[place] = group.members[place]._replace(part=band)
    return True


_OTHER = {"min": "max", "max": "min"}
