"""The order in which features answer a query: by how well words match, and by what a clamp has been seen to do.

The score is ``bm25 * effect + WRITES * share``. The first is that of the words in labels and examples; its effect is
ELSE for a feature whose clamp makes the model write other words, READS for one that makes it write none of its own, or
else 1. The share is the part of the query's words that a clamp makes the model write, times the part of the answers
that have them. So of equal matches, one that writes comes before one that only reads. Without measured effects the
score is bm25. Knows no file.
"""

import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from difflib import get_close_matches
from typing import Any, NamedTuple

RANKS = 64  # ids of the table `writes` that belong to one feature, its strongest word first
WRITES = 20.0  # bm25 is seldom more than 10
ELSE, READS = 0.5, 0.25
_POOL = 400  # matches of each kind that are put in order
_SIMILAR = 0.8  # of difflib, 1 for equal words: "ocen" and "ocean" have 0.89
# A word in somebody's label says most, then one that the feature is strongest on.
_LABELS = "SELECT rowid, bm25(words, 8, 6, 1, 1) FROM words WHERE words MATCH ? ORDER BY 2, 1 LIMIT ?"
_MEASURED = f"""
SELECT words.rowid, bm25(words, 8, 6, 1, 1), CASE WHEN clamps.feature IS NULL THEN 1.0 WHEN EXISTS
  (SELECT 1 FROM writes WHERE id BETWEEN words.rowid * {RANKS} AND words.rowid * {RANKS} + {RANKS - 1})
  THEN {ELSE} ELSE {READS} END
FROM words LEFT JOIN clamps ON clamps.feature = words.rowid WHERE words MATCH ? ORDER BY 2, 1 LIMIT ?"""
_WRITES = f"""
SELECT writes.id / {RANKS}, writes.dose, min(max(CAST(writes.share AS INTEGER), 0), 100)
FROM written JOIN writes ON writes.id = written.rowid
WHERE written MATCH ? ORDER BY 3 DESC, 1 LIMIT ?"""
_ALIKE = "SELECT CAST(known AS TEXT) FROM alike WHERE alike MATCH ? AND length(known) < 32 LIMIT 1"
_VOCABULARY = "SELECT DISTINCT CAST(word AS TEXT) FROM writes WHERE length(word) < 32 ORDER BY 1 LIMIT 20000"
_STEMS = """
CREATE VIRTUAL TABLE words USING fts5(word, tokenize='porter unicode61');
CREATE VIRTUAL TABLE terms USING fts5vocab(words, instance);
"""

Ask = Callable[..., list[Any]]  # SQL and its values


class Hit(NamedTuple):
    """A feature, and the dose at which its clamp writes the words, if it does."""

    score: float
    feature: int
    dose: float | None = None


def ranked(ask: Ask, words: Sequence[str], *, measured: bool) -> tuple[list[Hit], str | None]:
    """The features that match words, best first, and what was looked for instead of words that no feature has.

    Args:
        ask: runs SQL.
        words: at least one.
        measured: whether the file has effects.
    """
    if not measured:
        return [Hit(-score, feature) for feature, score in ask(_LABELS, _either(words), _POOL)], None
    instead: str | None = None
    known = [one for one in words if is_known(ask, one)]
    if not known:
        near = []  # the written word that each is closest to in meaning, or else in spelling; none if nothing is close
        for one in words:
            alike = [found for (found,) in ask(_ALIKE, f'"{one}"')]
            near += alike or get_close_matches(one, [found for (found,) in ask(_VOCABULARY)], 1, _SIMILAR)
        known, instead = near or [*words], " ".join(near) or None
    query = _either(known)
    matches = {feature: (-score, effect) for feature, score, effect in ask(_MEASURED, query, _POOL)}
    found = {feature: Hit(score * effect, feature) for feature, (score, effect) in matches.items()}
    for feature, dose, share in ask(_WRITES, query, _POOL):  # the largest share comes first
        before = found.get(feature)
        if before is None or before.dose is None:
            before = Hit(matches.get(feature, (0.0,))[0], feature, dose)
        found[feature] = before._replace(score=before.score + WRITES * share / 100 / len(known))
    return sorted(found.values(), key=lambda one: (-one.score, one.feature)), instead


def _either(words: Sequence[str]) -> str:
    return " OR ".join(f'"{word}"' for word in words)


def is_known(ask: Ask, word: str) -> bool:
    """Whether a feature writes a word or is strongest on it; a word that is only near may be cut off."""
    named = ask("SELECT 1 FROM words WHERE words MATCH ? LIMIT 1", f'{{label peaks}}: "{word}"')
    return bool(named or ask("SELECT 1 FROM written WHERE written MATCH ? LIMIT 1", f'"{word}"'))


def stems(words: Sequence[str]) -> dict[str, str]:
    """What the search takes for one word: the stem of each of some words."""
    with closing(sqlite3.connect(":memory:")) as base:
        base.executescript(_STEMS)
        base.executemany("INSERT INTO words(rowid, word) VALUES (?, ?)", enumerate(words))
        return {words[row]: stem for stem, row in base.execute("SELECT term, doc FROM terms")}
