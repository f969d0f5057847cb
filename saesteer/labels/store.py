"""Reads the file of labels next to a dictionary: an SQLite database with full-text indexes. writing.py writes it.

A label file may come from anybody, so it is data and nothing else: opened read-only, with the schema that this version
writes or not at all, with bounds on every value and on the time of a query. Knows no model, no torch and no request.

An example is a place in one of the texts that the file holds, so a text is stored once, however many features it shows.
"""

import json
import math
import re
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Self
from urllib.parse import quote

from saesteer.errors import LoadError
from saesteer.labels import rule, search
from saesteer.labels.search import RANKS

VERSION = "1"
MAX_WORDS, MAX_QUERY = 16, 200  # words and characters of a query
MOST = 100  # results of a query
MAX_LABEL, MAX_TOKEN, MAX_TOKENS = 4096, 256, 64  # characters of a label and of a token, tokens of a list
MAX_EXAMPLES = 32  # of one feature
BEFORE, AFTER = 64, 32  # characters of the text that an example shows around its token
NEAR = 24, 12  # characters around an example's token whose words are found

_LARGEST = 1 << 20  # bytes of a value that SQLite may read
_SECONDS = 5.0  # of one query
_HEAD = b"SQLite format 3\0"
_WORD, _WORD_ENDS = re.compile(r"\w+"), re.compile(r"\w+\Z")
_EXPECTED = "a file that `saesteer label` wrote"
# The porter stemmer finds "bridges" for "bridge"; a contentless index holds no text a second time.
SCHEMA = """
CREATE TABLE about (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE texts (id INTEGER PRIMARY KEY, text TEXT NOT NULL);
CREATE TABLE features (id INTEGER PRIMARY KEY, label TEXT, label_by TEXT, max_act REAL, density REAL,
  promotes TEXT, suppresses TEXT);
CREATE TABLE examples (feature INTEGER, rank INTEGER, value REAL, text INTEGER, start INTEGER, stop INTEGER,
  PRIMARY KEY (feature, rank)) WITHOUT ROWID;
CREATE VIRTUAL TABLE words USING fts5(label, peaks, near, promotes, content='', tokenize='porter unicode61');
"""
# What clamps of features make the model write, in a file where that has been measured. `share` is in percent. A
# word that no feature has is looked for as the written word, `known`, that is most like it in meaning.
EFFECTS = """
CREATE TABLE clamps (feature INTEGER PRIMARY KEY, breaks REAL);
CREATE TABLE writes (id INTEGER PRIMARY KEY, word TEXT NOT NULL, dose REAL NOT NULL, share INTEGER NOT NULL);
CREATE VIRTUAL TABLE written USING fts5(word, content='writes', content_rowid='id', columnsize=0,
  tokenize='porter unicode61');
CREATE VIRTUAL TABLE alike USING fts5(word, known UNINDEXED, columnsize=0, tokenize='porter unicode61');
"""


class About(NamedTuple):
    """What a file says about itself."""

    dictionary: str  # the fingerprint of the dictionary's own files
    features: int  # of the dictionary
    source: str  # where the labels come from, for a person to read
    model: str | None = None
    tokens: int | None = None  # of the text that was read
    site: str | None = None  # where the dictionary read it, by the site's one name; None: unknown


class Spot(NamedTuple):
    """Where a feature is strong: characters of a text."""

    value: float
    text: int
    start: int
    stop: int


class Entry(NamedTuple):
    """What is written of one feature. Activations are in the dictionary's own unit."""

    feature: int  # as requests name it
    label: str | None = None
    label_by: str | None = None  # the model that explained the feature
    max_act: float | None = None
    density: float | None = None  # fraction of the tokens on which it is active
    promotes: tuple[str, ...] = ()
    suppresses: tuple[str, ...] = ()
    spots: tuple[Spot, ...] = ()  # strongest first


class Written(NamedTuple):
    """A word that a clamp of a feature makes the model write, whatever it is asked."""

    word: str
    dose: float  # at which it comes in most answers, in max_act
    share: int  # of the answers there that have the word and are sound, in percent


class Effect(NamedTuple):
    """What clamps of a feature do."""

    feature: int
    breaks: float | None  # the smallest dose that was tried at which half of the answers are broken, in max_act
    writes: tuple[Written, ...] = ()  # the most frequent first; none: the feature only reads


@dataclass(frozen=True, slots=True)
class Dose:
    """The value of a clamp."""

    value: float
    unit: str = "max_act"


@dataclass(frozen=True, slots=True)
class Example:
    """A token on which a feature is strong, with the text around it."""

    value: float
    before: str
    token: str
    after: str


@dataclass(frozen=True, slots=True)
class Feature:
    """What a file knows about one feature; fields as in ``Entry``.

    Where nobody has explained a feature, its label comes from ``rule`` when it is read, and ``label_by`` says so.
    """

    feature: int
    label: str | None
    label_by: str | None
    max_act: float | None
    density: float | None
    promotes: tuple[str, ...]
    suppresses: tuple[str, ...]
    examples: tuple[Example, ...]
    writes: tuple[str, ...] = ()  # words that its clamp makes the model write
    best: Dose | None = None  # at which the model writes the first of them, or the one that was looked for
    breaks: Dose | None = None  # the smallest that was tried at which half of the answers are broken
    only_reads: bool | None = None  # whether no clamp that was tried makes the model write its words; None: not tried
    instead: str | None = None  # the word that was looked for, as no feature has the query's own

    def to_json(self) -> dict[str, Any]:
        """A JSON object with every field but ``max_act``, which is not always the number of the unit max_act."""
        return {name: found for name, found in asdict(self).items() if name != "max_act"}


def word_at(text: str, start: int, stop: int) -> str:
    """The word that a token is a part of, or the token itself if it is no part of a word; in lower case."""
    token = text[start:stop].strip()
    if not any(map(str.isalnum, token)):
        return token
    start += len(text[start:stop]) - len(text[start:stop].lstrip())
    before, after = _WORD_ENDS.search(text[max(0, start - BEFORE) : start]), _WORD.match(text[stop : stop + AFTER])
    return f"{before[0] if before else ''}{token}{after[0] if after else ''}".lower()


def words_in(text: str) -> list[str]:
    """The words of a text in lower case, each once."""
    return list(dict.fromkeys(_WORD.findall(text.lower())))


class Labels:
    """An open file. Each thread opens its own, which takes a millisecond."""

    def __init__(self, path: Path, base: sqlite3.Connection) -> None:
        self.path = path
        self._base = base
        self.about = self._about()
        self._measured = bool(self._ask("SELECT 1 FROM sqlite_master WHERE name = 'clamps'"))

    @classmethod
    def open(cls, path: Path, *, dictionary: str | None = None, site: str | None = None) -> Self:
        """Open a file, after a check that it is one and belongs to a dictionary.

        Args:
            path: the file.
            dictionary: the fingerprint of the dictionary's own files; None: do not compare.
            site: where the dictionary reads, by the site's one name; None: do not compare.

        Raises:
            LoadError: naming the file and what was expected.
        """
        with _reading(path):
            with path.open("rb") as stream:
                if stream.read(len(_HEAD)) != _HEAD:
                    raise _wrong(path, "is no SQLite database")
            # A file is only ever replaced as a whole, never changed in place: SQLite needs no lock and no journal.
            base = sqlite3.connect(f"file:{quote(str(path.resolve()))}?mode=ro&immutable=1", uri=True)
            try:
                # No function that a schema names is called, no page is trusted, no value is larger than any of ours.
                for setting in ("trusted_schema=OFF", "query_only=ON", "cell_size_check=ON", "mmap_size=0"):
                    base.execute(f"PRAGMA {setting}")
                base.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LARGEST)
                base.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
                if _objects(base) not in _known_objects():
                    raise _wrong(path, "has another schema")
                found = cls(path, base)
            except BaseException:
                base.close()
                raise
        about, other = found.about, None
        if dictionary not in (None, about.dictionary):
            other = "belongs to other weights"
        elif None not in (site, about.site) and site != about.site:
            other = f"is about what the dictionary reads at {about.site}, but it is at {site} here"
        if other is not None:
            found.close()
            raise _wrong(path, other, "labels of this dictionary: run `saesteer label` again")
        return found

    def close(self) -> None:
        """Close the file."""
        self._base.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def find(self, query: str, most: int = 10) -> list[tuple[float, Feature]]:
        """The features whose clamp writes words of a query, or whose label, examples or promoted tokens have them.

        Where effects have been measured, what a clamp does counts most: ``search.py`` has the order. For a word that no
        feature writes and none is strongest on, the most similar one that some feature writes is looked for.

        Args:
            query: words; whatever else it holds separates them. One of them is enough, more rank higher.
            most: how many features at most.

        Returns:
            Pairs of a score, where larger is better, and a feature.

        Raises:
            LoadError: the file is broken.
        """
        words = words_of(query)
        if not words:
            return []
        with _reading(self.path):
            found, instead = search.ranked(self._ask, words, measured=self._measured)
            hits = [(one, self.feature(one.feature)) for one in found[: min(most, MOST)]]
            return [
                (one.score, replace(known, best=_dose(self._number(one.dose)) or known.best, instead=instead))
                for one, known in hits
                if known is not None
            ]

    def feature(self, feature: int) -> Feature | None:
        """What the file knows about a feature; None if it is not there.

        Raises:
            LoadError: the file is broken.
        """
        with _reading(self.path):
            rows = self._ask(
                "SELECT label, label_by, max_act, density, promotes, suppresses FROM features WHERE id = ?", feature
            )
            if not rows:
                return None
            label, by, max_act, density, *lists = rows[0]
            likely, unlikely = map(self._tokens, lists)
            examples = tuple(self._examples(feature))
            if label is None:
                peaks = [
                    word_at(f"{e.before}{e.token}{e.after}", len(e.before), len(e.before + e.token)) for e in examples
                ]
                label = rule.label(peaks, likely)
                by = None if label is None else rule.NAME
            texts = self._text(label, MAX_LABEL), self._text(by, MAX_LABEL)
            numbers = self._number(max_act), self._number(density)
            return Feature(feature, *texts, *numbers, likely, unlikely, examples, *self._effect(feature))

    def _effect(self, feature: int) -> tuple[Any, ...]:
        """The fields of a feature from ``writes`` to ``only_reads``."""
        sql = "SELECT breaks FROM clamps WHERE feature = ?"
        if not (found := self._ask(sql, feature) if self._measured else []):
            return ()
        sql = "SELECT word, dose FROM writes WHERE id BETWEEN ? AND ? ORDER BY id"
        rows = self._ask(sql, feature * RANKS, feature * RANKS + RANKS - 1)
        words = tuple(self._text(word, MAX_TOKEN) or "" for word, _ in rows)
        best, breaks = (_dose(self._number(one)) for one in (rows[0][1] if rows else None, found[0][0]))
        return words, best, breaks, not words

    def _examples(self, feature: int) -> Iterator[Example]:
        sql = "SELECT value, text, start, stop FROM examples WHERE feature = ? ORDER BY rank LIMIT ?"
        for value, text, start, stop in self._ask(sql, feature, MAX_EXAMPLES):
            places = (text, start, stop)
            if not all(isinstance(one, int) for one in places) or not 0 <= start <= stop:
                raise _wrong(self.path, f"has a broken example of feature {feature}")
            sql = "SELECT substr(text, ?, ?), substr(text, ?, ?), substr(text, ?, ?) FROM texts WHERE id = ?"
            first = max(0, start - BEFORE)
            spans = (first + 1, start - first, start + 1, min(stop - start, MAX_TOKEN), stop + 1, AFTER)
            found = self._ask(sql, *spans, text)
            if not found or not all(isinstance(part, str) for part in found[0]):
                raise _wrong(self.path, f"has an example of feature {feature} without a text")
            number = self._number(value)
            yield Example(0.0 if number is None else number, *found[0])

    def _about(self) -> About:
        found = dict(self._ask("SELECT key, value FROM about LIMIT 16"))
        version, features, tokens = (found.get(key) for key in ("version", "features", "tokens"))
        if version != VERSION:
            raise _wrong(self.path, f"has version {str(version)[:20]!r}", f"version {VERSION}, of this saesteer")
        if not all(isinstance(one, str) and len(one) <= MAX_LABEL for one in found.values()):
            raise _wrong(self.path, "says something that is no text about itself")
        if not re.fullmatch("[0-9]{1,8}", features or "") or not re.fullmatch("[0-9]{0,12}", tokens or ""):
            raise _wrong(self.path, "does not say how many features it is about")
        whose = found.get("dictionary", ""), int(features or 0), found.get("source", "")
        return About(*whose, found.get("model"), int(tokens) if tokens else None, found.get("site"))

    def _ask(self, sql: str, *values: object) -> list[Any]:
        until = time.monotonic() + _SECONDS
        self._base.set_progress_handler(lambda: time.monotonic() > until, 10_000)
        return self._base.execute(sql, values).fetchall()

    def _text(self, value: object, most: int) -> str | None:
        if value is None or (isinstance(value, str) and len(value) <= most):
            return value
        raise _wrong(self.path, f"has a value that is no text of {most} characters at most")

    def _number(self, value: object) -> float | None:
        if value is None or (isinstance(value, int | float) and math.isfinite(value)):
            return None if value is None else float(value)
        raise _wrong(self.path, "has a number that is none")

    def _tokens(self, value: object) -> tuple[str, ...]:
        text = self._text(value, MAX_TOKENS * (MAX_TOKEN + 4))
        try:
            found = json.loads(text or "[]")
        except (ValueError, RecursionError):
            found = None
        fits = isinstance(found, list) and len(found) <= MAX_TOKENS
        if not fits or not all(isinstance(one, str) and len(one) <= MAX_TOKEN for one in found):
            raise _wrong(self.path, "has a list of tokens that is none")
        return tuple(found)


def words_of(query: str) -> list[str]:
    """The words of a query, of which FTS5 sees each in quotes: nothing in a query is syntax."""
    return words_in(query[:MAX_QUERY])[:MAX_WORDS]


def _dose(value: float | None) -> Dose | None:
    return None if value is None else Dose(value)


def _wrong(path: Path, found: str, expected: str = _EXPECTED) -> LoadError:
    return LoadError(f"{path}: {found}; expected {expected}")


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turns whatever SQLite raises for broken bytes, and a query that takes too long, into a LoadError."""
    try:
        yield
    except OSError as exc:
        raise _wrong(path, f"cannot be read ({exc.strerror})") from exc
    except (sqlite3.Error, UnicodeError, OverflowError) as exc:
        raise _wrong(path, f"cannot be read ({exc})") from exc


def _objects(base: sqlite3.Connection) -> Mapping[str, str]:
    """Kind and text of everything in a schema, by name; of FTS5's own tables, whose texts are its own, the kind."""
    rows = base.execute("SELECT name, type, sql FROM sqlite_master LIMIT 64").fetchall()
    own = re.compile("(words|written|alike)_")
    return {str(name): kind if own.match(str(name)) else f"{kind} {sql}" for name, kind, sql in rows}


@cache
def _known_objects() -> tuple[Mapping[str, str], ...]:
    """The same of files that this version writes: without effects, and with them."""
    with closing(sqlite3.connect(":memory:")) as base:
        base.executescript(SCHEMA)
        plain = _objects(base)
        base.executescript(EFFECTS)
        return plain, _objects(base)
