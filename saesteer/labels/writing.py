"""Writes the file of labels next to a dictionary, completely or not at all. Knows no torch and no request."""

import json
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from saesteer.errors import LoadError
from saesteer.labels.search import RANKS
from saesteer.labels.store import EFFECTS, NEAR, SCHEMA, VERSION, About, Effect, Entry, word_at, words_in


def write(path: Path, about: About, texts: Sequence[str], entries: Iterable[Entry]) -> None:
    """Write a file completely or not at all, and replace an older one; equal content gives equal bytes.

    Raises:
        LoadError: the file cannot be written.
    """
    with _replacing(path) as made, closing(sqlite3.connect(made)) as base:
        base.executescript(f"PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF; {SCHEMA}")
        _fill(base, about, texts, entries)


def keep(path: Path, effects: Iterable[Effect], alike: Iterable[tuple[str, str]] | None = None) -> None:
    """Put effects into a file that ``Labels.open`` has accepted, in place of older ones of the same features.

    Args:
        path: the file.
        effects: what clamps do.
        alike: words that no feature has, each with the written word that is most like it; None: as they are.

    Raises:
        LoadError: the file cannot be written.
    """
    with _replacing(path) as made:
        made.write_bytes(path.read_bytes())
        with closing(sqlite3.connect(made)) as base:
            known = base.execute("SELECT 1 FROM sqlite_master WHERE name = 'clamps'").fetchone()
            base.executescript(f"PRAGMA journal_mode=OFF; {'' if known else EFFECTS}")
            for one in effects:
                first = one.feature * RANKS
                base.execute("INSERT OR REPLACE INTO clamps VALUES (?, ?)", (one.feature, one.breaks))
                base.execute("DELETE FROM writes WHERE id BETWEEN ? AND ?", (first, first + RANKS - 1))
                rows = [(first + n, w.word, w.dose, w.share) for n, w in enumerate(one.writes[:RANKS])]
                base.executemany("INSERT INTO writes VALUES (?, ?, ?, ?)", rows)
            if alike is not None:
                base.execute("DELETE FROM alike")
                base.executemany("INSERT INTO alike VALUES (?, ?)", alike)
            base.execute("INSERT INTO written(written) VALUES ('rebuild')")
            base.commit()
            base.execute("VACUUM")


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A file to be written, which takes the place of another once it is whole."""
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".making-") as scratch:
            made = Path(scratch) / "labels"
            yield made
            made.chmod(0o644)
            made.replace(path)
    except (OSError, sqlite3.Error) as exc:
        raise LoadError(f"{path}: cannot be written ({exc}); expected a folder that can be written to") from exc


def _fill(base: sqlite3.Connection, about: About, texts: Sequence[str], entries: Iterable[Entry]) -> None:
    facts = about._asdict() | {"version": VERSION}
    base.executemany("INSERT INTO about VALUES (?, ?)", [(k, str(v)) for k, v in facts.items() if v is not None])
    base.executemany("INSERT INTO texts VALUES (?, ?)", enumerate(texts))
    for one in entries:
        tokens = [json.dumps(list(part), ensure_ascii=False) for part in (one.promotes, one.suppresses)]
        row = (one.feature, one.label, one.label_by, one.max_act, one.density, *tokens)
        base.execute("INSERT INTO features VALUES (?, ?, ?, ?, ?, ?, ?)", row)
        spots = [(one.feature, n, s.value, s.text, s.start, s.stop) for n, s in enumerate(one.spots)]
        base.executemany("INSERT INTO examples VALUES (?, ?, ?, ?, ?, ?)", spots)
        # A word that is the strongest several times counts several times, one that is only near counts once.
        peaks = [word_at(texts[s.text], s.start, s.stop) for s in one.spots]
        around = " ".join(texts[s.text][max(0, s.start - NEAR[0]) : s.stop + NEAR[1]] for s in one.spots)
        near = [word for word in words_in(around) if word not in peaks]
        words = one.feature, one.label, " ".join(peaks), " ".join(near), " ".join(one.promotes)
        base.execute("INSERT INTO words(rowid, label, peaks, near, promotes) VALUES (?, ?, ?, ?, ?)", words)
    base.execute("INSERT INTO words(words) VALUES ('optimize')")
    base.commit()
    base.execute("VACUUM")
