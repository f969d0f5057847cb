"""What a spec means for one prompt on one server: which features change, where, and at which positions.

Decided once at admission, so chunked prefill, preemption and recomputation edit the same tokens. Knows no weights, no
tensors and no engine; the length of the answer and of the context are unknown to it, too: positions never reached do
nothing. Served so far: clamps, with every scope. What is not served is refused here by name, never ignored.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

from saesteer.checks import INT32_MAX, closest, fail, listing, show
from saesteer.edits import Clamp, Edit, Scope
from saesteer.sites import canonical
from saesteer.spec import Return, Spec

END = INT32_MAX  # the open end of a window

Window = tuple[int, int]  # absolute positions [lo, hi)


class Dictionary(Protocol):
    """What the plan asks of a dictionary: a part of ``CoderInfo``."""

    @property
    def features(self) -> int:
        """Number of features."""

    @property
    def site_in(self) -> str | None:
        """Where it reads."""

    @property
    def site_out(self) -> str | None:
        """Where it writes."""

    @property
    def has_max_act(self) -> bool:
        """Whether the largest activation of each feature is known."""

    @property
    def skip_first(self) -> int:
        """First positions that its format leaves alone."""


@dataclass(frozen=True, slots=True)
class Catalog:
    """What requests may name on a server."""

    dictionaries: Mapping[str, Dictionary]
    sites: frozenset[str] | None  # canonical names of the instrumented sites; None: all
    max_entries: int  # of one request: feature edits times windows


@dataclass(frozen=True, slots=True)
class FeatureEdit:
    """f' = min(max(scale · f + shift, low), high) for one feature, in windows of positions.

    With ``max_act``, shift, low and high are still to be multiplied by the feature's largest known activation.
    """

    feature: int
    scale: float
    shift: float
    low: float  # −inf: no bound
    high: float  # inf: no bound
    only_if_active: bool
    max_act: bool
    windows: tuple[Window, ...]  # disjoint, ascending
    field: str  # path of the edit in the request


@dataclass(frozen=True, slots=True)
class Group:
    """Neighbouring clamps of one dictionary at one site: all read the same x, then all deltas are added."""

    site: str  # canonical
    dictionary: str
    edits: tuple[FeatureEdit, ...]


@dataclass(slots=True)
class _Growing:
    site: str
    dictionary: str
    members: list[tuple[Clamp, FeatureEdit]]


def plan(spec: Spec, catalog: Catalog, prompt_len: int) -> tuple[Group, ...]:
    """The groups of a spec, those of one site in the order in which they apply.

    Raises:
        SpecError: an unknown name, a feature out of range, an empty scope, a feature clamped twice at a position, too
            many entries, or something that this version does not serve.
    """
    assert prompt_len >= 0
    groups: list[_Growing] = []
    last: dict[str, _Growing] = {}  # by site; an edit at another site in between does not end a group
    for i, edit in enumerate(spec.edits):
        at = f"saesteer.edits[{i}]"
        clamp = _served(edit, at)
        info = _dictionary(clamp, catalog, at)
        site = _site(clamp, info, catalog, at)
        if site not in last or last[site].dictionary != clamp.dictionary:
            last[site] = _Growing(site, clamp.dictionary, [])
            groups.append(last[site])
        last[site].members.append((clamp, _feature_edit(clamp, info, prompt_len, at)))
    if spec.returns != Return():
        fail("saesteer.return", "not_served", "reading values out is not served by this version, expected edits only")
    found = tuple(Group(one.site, one.dictionary, _together(one)) for one in groups)
    _count(found, catalog.max_entries)
    return found


def windows(scope: Scope, prompt_len: int, skip_first: int = 1) -> tuple[Window, ...]:
    """The positions of a scope, as disjoint ascending windows; empty when it holds none.

    ``prompt`` is the positions below ``prompt_len``, ``generated`` those from there on; a flag that is missing is the
    negation of the one given, and without both, all count. The token at position p is edited while it is computed, and
    what is sampled from it stands at p + 1. So ``generated`` does not change the first generated token, which is
    sampled from the last prompt token, at ``prompt_len − 1``; the first that it changes is the second generated one. To
    steer the first as well, clamp a second time with ``positions: [[-1, null]]``: the windows do not meet.

    ``positions`` meet with the flags. Negative ones count from the end of the prompt as in a slice of it: one before
    its start is its start. A null end is open after a start that is not negative, and the end of the prompt after a
    negative one: ``[-1, null]`` is the last prompt token, whatever follows.

    Without ``positions`` the first ``skip_first`` positions of the dictionary's format are left alone, position 0
    always; ``positions`` may name them. The scope's own ``skip_first`` holds with ``positions`` as well.

    Args:
        scope: of the edit.
        prompt_len: in tokens.
        skip_first: of the dictionary's format.
    """
    if scope.positions is None:
        spans: Iterable[Window] = [(max(1, skip_first), END)]
    else:
        spans = [_resolve(start, end, prompt_len) for start, end in scope.positions]
    prompt = scope.prompt if scope.prompt is not None else not scope.generated
    generated = scope.generated if scope.generated is not None else not scope.prompt
    low = max(scope.skip_first or 0, 0 if prompt else prompt_len)
    high = END if generated else prompt_len
    merged: list[Window] = []
    for start, end in sorted((max(start, low), min(end, high)) for start, end in spans):
        if start >= end:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return tuple(merged)


def _resolve(start: int, end: int | None, prompt_len: int) -> Window:
    """Absolute positions; below 0 where they count from before the prompt, which is cut off with the flags."""
    if end is None:
        end = prompt_len if start < 0 else END
    elif end < 0:
        end += prompt_len
    return start + prompt_len if start < 0 else start, end


def _served(edit: Edit, at: str) -> Clamp:
    if not isinstance(edit, Clamp):
        fail(f"{at}.op", "not_served", f"{edit.op} is not served by this version, expected clamp")
    if edit.when:
        fail(f"{at}.when", "not_served", "a condition is not served by this version, expected a clamp without when")
    return edit


def _dictionary(clamp: Clamp, catalog: Catalog, at: str) -> Dictionary:
    name, known = clamp.dictionary, catalog.dictionaries
    info = known.get(name)
    if info is None:
        fail(
            f"{at}.dictionary",
            "unknown_name",
            f"got {show(name)}{closest(name, known)}, expected one of: {listing(known)}",
        )
    held = getattr(info, "feature_ids", None)  # a file that holds only some features, by their original index
    if held is not None and clamp.feature not in held:
        expected = f"one of the {len(held)} features that its file holds: {listing(held)}"
        fail(f"{at}.feature", "out_of_range", f"got {clamp.feature} for dictionary {name!r}, expected {expected}")
    if held is None and clamp.feature >= info.features:
        expected = f"a feature of dictionary {name!r}, 0 to {info.features - 1}"
        fail(f"{at}.feature", "out_of_range", f"got {clamp.feature}, expected {expected}")
    if clamp.unit == "max_act" and not info.has_max_act:
        expected = f"raw: the max activations of {name!r} are not known, `saesteer calibrate` finds them"
        fail(f"{at}.unit", "unknown_max_act", f"got max_act, expected {expected}")
    return info


def _site(clamp: Clamp, info: Dictionary, catalog: Catalog, at: str) -> str:
    site = None if info.site_out is None else canonical(info.site_out)
    reads = site if info.site_in is None else canonical(info.site_in)
    if site is None or site != reads or not (catalog.sites is None or site in catalog.sites):
        place = f"dictionary {clamp.dictionary!r} reads {reads} and writes {site}, which is not served by this version"
        expected = "any site" if catalog.sites is None else f"one of {listing(catalog.sites)}"
        fail(f"{at}.dictionary", "not_served", f"{place}, expected {expected}, read and written")
    return site


def _feature_edit(clamp: Clamp, info: Dictionary, prompt_len: int, at: str) -> FeatureEdit:
    found = windows(clamp.scope, prompt_len, info.skip_first)
    if not found:
        left = f" and positions {max(1, info.skip_first)} or later" if clamp.scope.positions is None else ""
        message = f"holds no position with a prompt of {prompt_len} tokens, expected at least one{left}"
        fail(f"{at}.scope", "empty_scope", message)
    value = clamp.value
    return FeatureEdit(
        feature=clamp.feature,
        scale={"set": 0.0, "scale": value}.get(clamp.mode, 1.0),
        shift=value if clamp.mode in ("set", "add") else 0.0,
        low=value if clamp.mode == "min" else -math.inf,
        high=value if clamp.mode == "max" else math.inf,
        only_if_active=clamp.only_if_active,
        max_act=clamp.unit == "max_act",
        windows=found,
        field=at,
    )


def _together(group: _Growing) -> tuple[FeatureEdit, ...]:
    """The edits of a group, min and max of the same windows and gate made one band; no feature twice at a position."""
    found: list[FeatureEdit] = []
    halves: dict[object, int] = {}  # half of a band → its place in found
    for clamp, one in group.members:
        other = {"min": "max", "max": "min"}.get(clamp.mode)
        alike = (one.feature, one.windows, one.only_if_active, one.max_act)
        place = halves.pop((*alike, other), None)
        if place is None:
            halves.setdefault((*alike, clamp.mode), len(found))
            found.append(one)
        else:
            found[place] = _band(found[place], one)
    _refuse_twice(group.dictionary, found)
    return tuple(found)


def _band(first: FeatureEdit, second: FeatureEdit) -> FeatureEdit:
    low, high = max(first.low, second.low), min(first.high, second.high)
    if low > high:
        message = f"makes a band from min {low} to max {high} with {first.field}, expected min at most max"
        fail(f"{second.field}.value", "conflict", message)
    return replace(first, low=low, high=high)


def _refuse_twice(dictionary: str, edits: Sequence[FeatureEdit]) -> None:
    spans: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for place, edit in enumerate(edits):
        spans[edit.feature] += [(lo, hi, place) for lo, hi in edit.windows]
    for feature, found in spans.items():
        found.sort()
        for (_, end, one), (start, _, two) in pairwise(found):
            if start < end:
                first, second = edits[min(one, two)], edits[max(one, two)]
                message = f"clamps feature {feature} of {dictionary!r} at position {start} as {first.field} does"
                expected = "windows that do not meet, or a min and a max with the same windows, unit and only_if_active"
                fail(f"{second.field}.feature", "duplicate", f"{message}, expected {expected}")


def _count(groups: Iterable[Group], most: int) -> None:
    count = 0
    for edit in (edit for group in groups for edit in group.edits):
        count += len(edit.windows)
    if count > most:
        message = f"makes {count} entries, expected at most {most} (an entry is one feature in one window of positions)"
        fail("saesteer.edits", "too_many", f"{message}; the server takes more when started with a higher --max-edits")
