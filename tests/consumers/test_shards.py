"""Shards hold each row once with its position, however requests are interleaved, and whatever dies in between."""

import errno
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from saesteer.consumers import DiskError, shards
from saesteer.consumers.filesystem import Filesystem
from saesteer.consumers.runner import Policy, Runner, Ticket
from saesteer.errors import ConfigError, SpecError
from tests.consumers.rows import request, rows, token, value

WIDE = 100  # numbers
MOST = rows(0, 0, 10, WIDE).nbytes  # ten such rows


def filesystem(folder: Path) -> Filesystem:
    """One whose shards are small."""
    made = Filesystem({"folder": str(folder), "shard_mib": 1})
    made._most = MOST
    return made


def found(folder: Path) -> list[tuple[str, int]]:
    """The request and position of every row in a folder, whose numbers and tokens are checked."""
    told = []
    for tensors, about in shards.shards(folder):
        arrays = load_file(tensors)
        assert arrays.keys() == about["tensors"].keys()
        assert sum(one.nbytes for one in arrays.values()) <= MOST
        ahead = dict.fromkeys(arrays, 0)
        for piece in about["pieces"]:
            (name, first), *rest = piece["first"].items()
            assert not rest and first == ahead[name] and about["tensors"][name]["site"] == "resid_post.3"
            ahead[name] += piece["rows"]
            numbers = arrays[name][first : first + piece["rows"]]
            for row, at, id in zip(numbers, piece["positions"], piece["tokens"], strict=True):
                number = int(piece["request"].removeprefix("request "))
                assert (row == value(number, at)).all() and id == token(at)
                told.append((piece["request"], at))
        assert ahead == {name: len(one) for name, one in arrays.items()}
    return told


Step = tuple[int, int]  # which request goes on, and by how many rows
steps = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 25)), max_size=12)


def play(consumer: Filesystem, steps: list[Step], ending: list[int]) -> list[tuple[str, int]]:
    """Give rows of requests 0 and 1, which ask, and of 2 and 3, which are captured; some end, the others are gone."""
    asked = [request(number, captured=number > 1) for number in range(4)]
    at, expected = [0] * 4, []
    for number, count in steps:
        consumer.take(asked[number], rows(number, at[number], at[number] + count, WIDE))
        expected += [(asked[number].id, position) for position in range(at[number], at[number] + count)]
        at[number] += count
    for number, one in enumerate(asked):
        if number in ending:
            consumer.end(one)
        else:
            consumer.drop(one)
    return expected


@settings(deadline=None, max_examples=30)
@given(steps)
def test_every_row_is_there_once(steps: list[Step]) -> None:
    with TemporaryDirectory() as name:
        consumer = filesystem(Path(name))
        expected = play(consumer, steps, [0, 1, 2, 3])
        consumer.close()
        assert sorted(found(Path(name))) == sorted(expected)
        assert all(not path.name.startswith(".") for path in Path(name).iterdir())


@settings(deadline=None, max_examples=20)
@given(steps)
def test_what_is_dropped_leaves_whole_shards(steps: list[Step]) -> None:
    with TemporaryDirectory() as name:
        consumer = filesystem(Path(name))
        expected = play(consumer, steps, [])
        consumer.close()
        there = found(Path(name))
        assert len(set(there)) == len(there) and {*there} <= {*expected}
        assert not consumer._series
        assert {one for one in expected if one[0] in ("request 2", "request 3")} <= {*there}


class Died(BaseException):
    """The process ends here."""


@contextmanager
def dying_at(number: int, error: Callable[[], BaseException]) -> Iterator[list[int]]:
    """Raise at one of the calls that change the disk; counts them."""
    calls = [0]
    with pytest.MonkeyPatch.context() as patch:

        def wrap(owner: Any, name: str) -> None:
            stock = getattr(owner, name)

            def call(*args: Any, **kwargs: Any) -> Any:
                calls[0] += 1
                if calls[0] == number:
                    raise error()
                return stock(*args, **kwargs)

            patch.setattr(owner, name, call)

        for owner, name in ((shards, "_put"), (os, "fsync"), (Path, "rename"), (Path, "mkdir")):
            wrap(owner, name)
        yield calls


SCRIPT: list[Step] = [(0, 3), (2, 12), (1, 4), (3, 9), (0, 20)]


def calls_of_script() -> int:
    with TemporaryDirectory() as name, dying_at(0, Died) as calls:
        consumer = filesystem(Path(name))
        play(consumer, SCRIPT, [0, 1, 2, 3])
        consumer.close()
        return calls[0]


def test_a_crash_leaves_whole_shards_and_nothing_else() -> None:
    calls = calls_of_script()
    assert calls > 50
    for number in range(1, calls + 1):
        with TemporaryDirectory() as name:
            crash(number, Path(name))


def crash(number: int, tmp_path: Path) -> None:
    """Die at one of the calls, then open the folder again and go on."""
    with dying_at(number, Died):
        try:
            consumer = filesystem(tmp_path)
        except Died:
            return  # nothing has been written
        try:
            expected = play(consumer, SCRIPT, [0, 1, 2, 3])
            consumer.close()
        except Died:
            consumer._place._lock.close()  # as the system does with a dead process's
            expected = []
    before = found(tmp_path)
    again = filesystem(tmp_path)
    assert [path.name for path in tmp_path.glob(".*")] == [Path(again._place._lock.name).name], "leftovers are gone"
    assert found(tmp_path) == before and len({*before}) == len(before)
    assert not expected or sorted(before) == sorted(expected)
    again.take(request(9, captured=True), rows(9, 0, 2))
    again.close()
    assert sorted(found(tmp_path)) == sorted([*before, ("request 9", 0), ("request 9", 1)])


def test_processes_that_live_keep_what_they_write(tmp_path: Path) -> None:
    one = filesystem(tmp_path)
    (tmp_path / f".writing-{one._place._own}-000009").mkdir()
    other = filesystem(tmp_path)
    assert len([*tmp_path.glob(".writing-*")]) == 1
    other.close()
    one._place._lock.close()
    filesystem(tmp_path).close()
    assert not [*tmp_path.glob(".*")]


def no_space() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_fails_the_request_that_it_meets(tmp_path: Path) -> None:
    consumer = filesystem(tmp_path)
    one, other, captured = request(0), request(1), request(2, captured=True)
    for number, asked in enumerate((one, other, captured)):
        consumer.take(asked, rows(number, 0, 3))
    with dying_at(2, no_space), pytest.raises(DiskError, match="3 rows could not be written: No space left on device"):
        consumer.end(one)
    assert str(tmp_path) not in str(DiskError("x"))
    consumer.drop(one)
    assert consumer.end(other)["rows"] == 3
    consumer.close()
    assert {id for id, _ in found(tmp_path)} == {"request 1", "request 2"}
    assert not [*tmp_path.glob(".*")]


def test_rows_that_are_lost_are_counted_as_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of a shard that cannot be written, and what came with the rows that filled it; also where nothing follows."""
    counted: Counter[str] = Counter()

    def count(what: str, _: str, by: int) -> None:
        counted[what] += by

    runner = Runner("disk", filesystem(tmp_path), Policy(), count)
    one, two, last = (Ticket(request(number, captured=True)) for number in range(3))
    with dying_at(1, no_space):
        runner._serve(one, rows(0, 0, 8, WIDE))
        runner._serve(one, rows(0, 8, 25, WIDE))  # fills a shard, which cannot be written
        runner._serve(one, rows(0, 25, 27, WIDE))
    assert counted == {"rows": 8, "failures": 1, "dropped": 27}
    assert "a shard of 9 rows could not be written" in caplog.text
    runner._serve(two, rows(1, 0, 3, WIDE))
    runner._serve(last, rows(2, 0, 2, WIDE))
    with dying_at(1, no_space):
        runner.close()
    assert counted == {"rows": 13, "failures": 2, "dropped": 32}
    assert "a shard of 5 rows could not be written" in caplog.text
    assert found(tmp_path) == []


@pytest.mark.parametrize(
    "tag", ["", "..", "a/b", "/a", ".a", "-a", "a.b", "a b", "ä", "a" * 65, "a\n", "%2e", 1, None, ["a"]]
)
def test_a_tag_is_no_path(tag: Any, tmp_path: Path) -> None:
    consumer = filesystem(tmp_path)
    with pytest.raises(SpecError) as caught:
        consumer.check({"tag": tag}, "saesteer.return.consumers.filesystem")
    assert caught.value.field == "saesteer.return.consumers.filesystem.tag"
    consumer.close()


def test_requests_give_no_folder(tmp_path: Path) -> None:
    consumer = filesystem(tmp_path)
    with pytest.raises(SpecError, match="folder: is not a field"):
        consumer.check({"folder": "/tmp"}, "saesteer.return.consumers.filesystem")
    assert consumer.check({}, "at") == "untagged"
    consumer.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "has no folder, expected a path"),
        ({"folder": ""}, "folder ''"),
        ({"folder": "/proc/nobody/here"}, "cannot be written to"),
    ],
)
def test_wrong_options_stop_the_start(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Filesystem(options)
