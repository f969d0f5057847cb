"""Scopes around the border of a prompt, which positions one holds by the fine print, and windows."""

from dataclasses import replace

from hypothesis import strategies as st

from saesteer.language.edits import Scope
from saesteer.planning.plan import END, Window

near = st.integers(-25, 45)
near_positions = st.none() | st.lists(
    st.tuples(near, st.none() | near).filter(
        lambda s: s[1] is None or (s[1] != 0 and ((s[0] < 0) != (s[1] < 0) or s[0] < s[1]))
    ),
    min_size=1,
    max_size=4,
).map(tuple)
_rest = {"positions": near_positions, "skip_first": st.none() | st.integers(0, 30)}
near_scopes = st.builds(Scope, prompt=st.none() | st.booleans(), generated=st.none() | st.just(True), **_rest)
near_scopes |= st.builds(Scope, response=st.just(True), **_rest)


def holds(scope: Scope, p: int, prompt_len: int, format_skips: int) -> bool:
    """The fine print for one position; shares nothing with the plan."""
    in_prompt = p < prompt_len
    if scope.response:
        scope = replace(scope, response=False)
        return p >= prompt_len - 1 and holds(scope, p, prompt_len, format_skips)
    wanted = scope.prompt if in_prompt else scope.generated
    if wanted is None:
        other = scope.generated if in_prompt else scope.prompt
        wanted = other is None or not other
    if not wanted:
        return False
    if scope.skip_first is not None and p < scope.skip_first:
        return False
    if scope.positions is None:
        return p != 0 and p >= format_skips
    prompt = list(range(prompt_len))
    for start, end in scope.positions:
        if start >= 0 and end is None:
            named = p >= start
        elif start >= 0 and end is not None and end >= 0:
            named = start <= p < end
        elif start < 0 and (end is None or end < 0):
            named = p in prompt[start:end]  # Python's own slice of the prompt
        elif start < 0:
            assert end is not None
            named = (p in prompt[start:] or p >= prompt_len) and p < end
        else:
            assert end is not None
            named = p >= start and p in prompt[:end]
        if named:
            return True
    return False


@st.composite
def windows(draw: st.DrawFn, furthest: int = 24) -> list[Window]:
    """Positions in pieces: disjoint, ascending; the last may be open."""
    cuts = sorted(draw(st.sets(st.integers(0, furthest), max_size=6)))
    found = [*zip(cuts[::2], cuts[1::2], strict=False)]
    return found + ([(cuts[-1], END)] if len(cuts) % 2 else [])
