"""Rules of a request: what ends it or marks its answer when conditions hold for some tokens in a row. Knows no server.

A rule stands among the edits and changes no tensor. ``saesteer.planning.rules`` finds when it fires.
"""

from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar

from saesteer.language.edits import GENERATED, MAX_CONDITIONS, Edit, Gate, Scope, TokenEdit
from saesteer.language.fields import INT32_MAX, by, fail, integer, list_of, may, read, record, site


@dataclass(frozen=True)
class Watched(Gate):
    """One condition of a rule: that of an edit, and a site for a probe whose layer does not say where to read."""

    _: KW_ONLY
    site: str | None = may(site)

    def _whole(self, at: str) -> None:
        Gate._whole(self, at)
        if self.site is not None and self.probe is None:
            fail(f"{at}.site", "conflict", "stands next to a feature, whose dictionary has its site; expected a probe")


def _watched(value: Any, at: str) -> Watched:
    return read(Watched, value.to_json() if type(value) is Gate else value, at)


_conditions = list_of(_watched, MAX_CONDITIONS, least=("missing_field", "condition"), alone=True)  # must all hold


@dataclass(frozen=True)
class Rule(TokenEdit):
    """Fires at the first token at which its conditions have held for ``run`` neighbouring tokens of its scope."""

    run: int = may(integer(1, INT32_MAX), 1, key="for")
    _: KW_ONLY
    when: tuple[Watched, ...] = field(metadata=by(_conditions, single=True))
    scope: Scope = may(record(Scope), GENERATED)


@dataclass(frozen=True)
class Stop(Rule):
    """Ends the request: the token that is sampled at the firing position is its last one."""

    op: ClassVar[str] = "stop"


@dataclass(frozen=True)
class Flag(Rule):
    """Marks the answer with the firing position."""

    op: ClassVar[str] = "flag"


RULES: dict[str, type[Edit]] = {one.op: one for one in (Stop, Flag)}
