"""The label file: what is written is read again, words find features, and whatever else a file holds is refused."""

import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from saesteer.errors import LoadError
from saesteer.labels import store, writing
from saesteer.labels.store import About, Entry, Example, Labels, Spot

TEXTS = ['The old bridge\nover the bay, and Bridges of "gold".', "In the ocean there are whales; the oceans are wide."]
ABOUT = About("digest", 8, "2 texts", "some/model", 20)
ENTRIES = [
    Entry(3, None, None, 2.5, 0.125, (" bridge", "span"), ("zz",), (Spot(2.5, 0, 7, 14), Spot(1.0, 0, 33, 40))),
    Entry(5, "Marine life", "gpt-x", 4.0, None, (), (), (Spot(4.0, 1, 6, 12),)),
    Entry(7),
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    writing.write(tmp_path / "d.labels", ABOUT, TEXTS, ENTRIES)
    return tmp_path / "d.labels"


def change(file: Path, *statements: str) -> Path:
    with closing(sqlite3.connect(file)) as base:
        for statement in statements:
            base.execute(statement)
        base.commit()
    return file


def test_what_is_written_is_read(file: Path) -> None:
    with Labels.open(file, dictionary="digest") as labels:
        assert labels.about == ABOUT
        one, other, dead = (labels.feature(number) for number in (3, 5, 7))
        assert labels.feature(4) is None
    assert one is not None and other is not None and dead is not None
    assert one.examples[0] == Example(2.5, "The old", " bridge", '\nover the bay, and Bridges of "g')
    assert [example.token for example in one.examples] == [" bridge", "Bridges"]
    assert (one.label, one.label_by) == ("bridge, bridges", "rule")
    assert (one.max_act, one.density, one.promotes, one.suppresses) == (2.5, 0.125, (" bridge", "span"), ("zz",))
    assert (other.label, other.label_by, other.density) == ("Marine life", "gpt-x", None)
    assert (dead.label, dead.label_by, dead.examples) == (None, None, ())
    assert one.to_json()["examples"][1] == {
        "value": 1.0,
        "before": TEXTS[0][:33],
        "token": "Bridges",
        "after": ' of "gold".',
    }


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("bridge", [3]),
        ("Bridges", [3]),  # by its stem
        ("marine", [5]),
        ("ocean gold", [5, 3]),  # one word is enough; where a feature is strongest counts more than what is near
        ("span", [3]),
        ("nothing", []),
        ("", []),
        ("?! -", []),
    ],
)
def test_words_find_features(file: Path, words: str, expected: list[int]) -> None:
    with Labels.open(file) as labels:
        found = labels.find(words)
        assert [one.feature for _, one in found] == expected
        assert [score for score, _ in found] == sorted((score for score, _ in found), reverse=True)
        assert labels.find(words, 1) == found[:1]


@pytest.mark.parametrize(
    "words", ['bridge"', "bridge*", "NEAR(bridge)", "label:bridge", "bridge' OR 1=1 --", "^bridge"]
)
def test_nothing_in_a_query_is_syntax(file: Path, words: str) -> None:
    with Labels.open(file) as labels:
        assert [one.feature for _, one in labels.find(words)] == [3]
        assert labels.find(f"{words} AND NOT ocean") == labels.find("bridge near label or 1 and not ocean")


def test_an_older_file_is_replaced_and_a_failure_leaves_it(file: Path) -> None:
    with Labels.open(file) as before:
        writing.write(file, ABOUT, TEXTS, ENTRIES[:1])
        assert before.feature(5) is not None  # who has it open reads on
        with Labels.open(file) as after:
            assert after.feature(5) is None

    def failing() -> object:
        yield ENTRIES[1]
        raise LoadError("line 2")

    with pytest.raises(LoadError, match="line 2"):
        writing.write(file, ABOUT, TEXTS, failing())  # type: ignore[arg-type]
    assert [path.name for path in file.parent.iterdir()] == ["d.labels"]
    with Labels.open(file) as labels:
        assert labels.feature(3) is not None
    with pytest.raises(LoadError, match=r"/no/such/d\.labels: cannot be written"):
        writing.write(Path("/no/such/d.labels"), ABOUT, TEXTS, ENTRIES)


def test_a_file_is_never_written_to(file: Path) -> None:
    state = file.stat()
    with Labels.open(file) as labels:
        for statement in (
            "DELETE FROM features",
            "CREATE TABLE x (y)",
            "ATTACH 'other' AS other",
            "PRAGMA user_version=9",
        ):
            with pytest.raises(sqlite3.Error):
                labels._base.execute(statement)
    assert (file.stat().st_mtime_ns, file.stat().st_size) == (state.st_mtime_ns, state.st_size)
    assert [path.name for path in file.parent.iterdir()] == ["d.labels"]
    os.chmod(file.parent, 0o555)
    try:
        with Labels.open(file) as labels:
            assert labels.find("bridge")
    finally:
        os.chmod(file.parent, 0o755)


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda file: file.unlink(), "cannot be read"),
    "text": (lambda file: file.write_text("labels"), "is no SQLite database"),
    "cut": (lambda file: file.write_bytes(file.read_bytes()[:5000]), "cannot be read|has another schema"),
    "version": (lambda file: change(file, "UPDATE about SET value='2' WHERE key='version'"), "expected version 1"),
    "no version": (lambda file: change(file, "DELETE FROM about"), "has version 'None'"),
    "features": (lambda file: change(file, "UPDATE about SET value='x' WHERE key='features'"), "how many features"),
    "long fact": (
        lambda file: change(file, "UPDATE about SET value=printf('%9999d', 1) WHERE key='source'"),
        "no text",
    ),
    "view": (lambda file: change(file, "CREATE VIEW v AS SELECT load_extension('x')"), "has another schema"),
    "trigger": (
        lambda file: change(file, "CREATE TRIGGER t AFTER INSERT ON texts BEGIN SELECT 1; END"),
        "has another schema",
    ),
    "table": (lambda file: change(file, "CREATE TABLE words_more (x)"), "has another schema"),
    "column": (lambda file: change(file, "ALTER TABLE features ADD COLUMN x"), "has another schema"),
    "no index": (lambda file: change(file, "DROP TABLE words"), "has another schema"),
    "other index": (
        lambda file: change(file, "DROP TABLE words", "CREATE VIRTUAL TABLE words USING fts5(label, content='texts')"),
        "has another schema",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_refused_by_name(file: Path, name: str) -> None:
    spoil, told = WRONG[name]
    spoil(file)
    with pytest.raises(LoadError, match=told) as caught:
        Labels.open(file)
    assert str(caught.value).startswith(f"{file}: ") and "; expected " in str(caught.value)


def test_labels_of_other_weights_are_refused(file: Path) -> None:
    with pytest.raises(LoadError, match="belongs to other weights; expected labels of this dictionary"):
        Labels.open(file, dictionary="another")


BROKEN = {
    "UPDATE features SET label=printf('%5000d', 1) WHERE id=3": "no text of 4096 characters",
    "UPDATE features SET label=x'00' WHERE id=3": "no text",
    "UPDATE features SET max_act='much' WHERE id=3": "a number that is none",
    "UPDATE features SET max_act=9e999 WHERE id=3": "a number that is none",
    "UPDATE features SET promotes='[1]' WHERE id=3": "a list of tokens that is none",
    "UPDATE features SET promotes='[' WHERE id=3": "a list of tokens that is none",
    "UPDATE features SET promotes='{}' WHERE id=3": "a list of tokens that is none",
    "UPDATE features SET suppresses=printf('%99999d', 1) WHERE id=3": "no text of",
    "UPDATE examples SET start=-1": "a broken example of feature 3",
    "UPDATE examples SET start='x'": "a broken example of feature 3",
    "UPDATE examples SET start=20, stop=10": "a broken example of feature 3",
    "UPDATE examples SET text=99": "an example of feature 3 without a text",
    "UPDATE texts SET text=x'ff'": "an example of feature 3 without a text|cannot be read",
    "UPDATE texts SET text=zeroblob(2000000)": "an example of feature 3 without a text|cannot be read|too big",
    "UPDATE texts SET text=CAST(x'ffff41ffff4141414141414141' AS TEXT)": "cannot be read",
}


@pytest.mark.parametrize("statement", BROKEN)
def test_a_broken_value_is_refused_when_it_is_read(file: Path, statement: str) -> None:
    change(file, statement)
    with Labels.open(file) as labels, pytest.raises(LoadError, match=BROKEN[statement]) as caught:
        labels.feature(3)
    assert str(caught.value).startswith(f"{file}: ") and "; expected " in str(caught.value)


def test_no_bytes_crash_it(file: Path) -> None:
    """Every page changed somewhere: a LoadError, or an answer."""
    whole = file.read_bytes()
    for place in range(16, len(whole), 97):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        try:
            with Labels.open(file) as labels:
                labels.find("bridge ocean")
                labels.feature(3)
        except LoadError:
            pass


@pytest.mark.parametrize(
    ("text", "span", "word"),
    [
        ("The Bridge.", (3, 10), "bridge"),
        ("suspension", (4, 7), "suspension"),
        ("a, b", (1, 2), ","),
        ("a  b", (1, 3), ""),
        ("Çatal höyük", (6, 8), "höyük"),
    ],
)
def test_the_word_of_a_token(text: str, span: tuple[int, int], word: str) -> None:
    assert store.word_at(text, *span) == word
