"""Folders below /tmp that another user has put where the server's was removed. Starts no engine."""

import json
import os
import shutil
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from saesteer.errors import SpecError, UnsupportedError
from saesteer.plugin.names.board import Board
from tests.plugin.results import CONTENT, kept, results, room

TAKEN = ["a link", "a link above", "open to others", "another user's"]


@pytest.mark.parametrize("taken", TAKEN)
def test_a_folder_that_another_user_has_put_there_gets_nothing_and_gives_nothing(taken: str, tmp_path: Path) -> None:
    """As one can once a cleaner of /tmp has removed the server's: its links lead to files of the server's user."""
    above, victim = tmp_path / "above", tmp_path / "victim"
    above.mkdir(mode=0o700)
    found = results(above)
    handle, spool = kept(found), room(found, 12)
    own = [handle, "lock", spool._path.name]
    (victim / "results").mkdir(mode=0o700, parents=True)
    shutil.rmtree(above)
    if taken == "a link above":
        above.symlink_to(victim)
    else:
        above.mkdir(mode=0o700)
    if taken == "a link":
        found.folder.symlink_to(victim / "results")
    elif taken != "a link above":
        found.folder.mkdir(mode=0o700)
    for name in own:
        (victim / "results" / name).write_text("own")
        if taken not in ("a link", "a link above"):
            (found.folder / name).symlink_to(victim / "results" / name)
    if taken == "open to others":
        found.folder.chmod(0o777)
    elif taken == "another user's":
        if os.geteuid():
            pytest.skip("only root can give a folder away")
        os.chown(found.folder, 12002, -1)
    with pytest.raises(SpecError, match="its folder is not this user's alone") as caught:
        room(found, 1)
    assert caught.value.code == "no_space" and str(tmp_path) not in str(caught.value)
    if taken != "a link above":  # a room has a name that nobody can guess, and no new one is made
        for act in (found.open, found.delete):
            with pytest.raises(SpecError, match="was deleted"):
                act(handle)
        with pytest.raises(PermissionError):
            found.sweep()
        spool.write([(0, 1)], bytes(12))
        with pytest.raises(PermissionError):
            spool.keep(CONTENT, [0])
    held = [path.read_text() for path in (victim / "results").iterdir()]
    assert "own" in held and {*held} == {"own"}


def test_what_names_stand_for_is_neither_read_from_nor_written_to_such_a_folder(tmp_path: Path) -> None:
    folder, victim = tmp_path / "board", tmp_path / "victim"
    board = Board(folder, 0, 1)
    board.put(1, ["ours"])
    board.post(1, {"a": 1}, [1])
    shutil.rmtree(folder)
    folder.mkdir(mode=0o777)
    victim.write_text("own")
    (folder / "names").write_text(json.dumps({"a": "theirs"}))
    for name in ("new", "change-1", "change-2"):
        (folder / name).symlink_to(victim)
    for act in (board.read, lambda: board.change(1), lambda: board.put(2, []), lambda: board.post(2, {}, [])):
        with pytest.raises(FileNotFoundError):
            act()
    assert victim.read_text() == "own" and len(os.listdir(folder)) == 4
    folder.chmod(0o755)
    with pytest.raises(UnsupportedError, match="is not this user's alone"):
        Board(folder, 0, 1)
