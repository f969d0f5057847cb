"""What the gate calls slower, and where it finds the tree that it compares with; no kernel runs here."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from bench import base


def runs(*times: float, case: str = "16 x 1") -> list[list[dict[str, Any]]]:
    """Runs of one line."""
    about = {"op": "edit", "case": case, "width": 2304, "form": "normed", "cache": "cold"}
    return [[{**about, "us": us}] for us in times]


@pytest.mark.parametrize(
    ("before", "after", "word"),
    [
        ((4.0, 4.02, 4.01), (4.2, 4.21, 4.15), "slower"),
        ((4.2, 4.21, 4.15), (4.0, 4.02, 4.01), "faster"),
        ((4.0, 4.02, 4.01), (4.03, 4.04, 4.05), ""),  # always, but within noise
        ((4.0, 4.3, 4.01), (4.2, 4.21, 4.4), ""),  # the runs of one tree are as far apart
    ],
)
def test_slower_is_what_every_run_shows(before: tuple[float, ...], after: tuple[float, ...], word: str) -> None:
    [found] = base.changes(runs(*before), runs(*after))
    assert (found.slower, found.faster) == (word == "slower", word == "faster")
    said = base.report([found])
    assert ("SLOWER" in said) == (word == "slower")
    assert said.endswith(
        f"of 1 lines {int(word == 'slower')} are slower and {int(word == 'faster')} faster, the others as before"
    )


def test_a_line_that_one_tree_lacks_is_left_out() -> None:
    assert base.changes(runs(1.0), runs(2.0, case="new")) == []


def test_a_line_that_this_tree_does_not_time_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A kernel whose answer is wrong is not timed, so it cannot be slower; here in one of two runs."""
    kept = runs(4.0, case="16 x 32")[0]
    answers = iter([[*runs(4.0)[0], *kept], [*runs(4.0)[0], *kept], [*runs(4.0)[0], *kept], kept])
    monkeypatch.setattr(base, "run", lambda *_: next(answers))
    monkeypatch.setattr(base, "tree_of", lambda *_: tmp_path)
    assert base.compare("main", [], rounds=2) == 1
    said = capsys.readouterr().out
    assert "LOST    wrong or gone in a run of this tree: edit 16 x 1 2304 normed cold\n" in said
    assert "16 x 32" not in said and "of 2 lines 0 are slower" in said


def test_a_checkout_is_taken_as_it_is_and_nonsense_is_refused(tmp_path: Path) -> None:
    assert base.tree_of(str(base.ROOT), tmp_path) == base.ROOT
    with pytest.raises(SystemExit, match="expected a commit or the folder of a checkout"):
        base.tree_of("no-such-commit", tmp_path)


def test_a_commit_is_unpacked_with_its_links(tmp_path: Path) -> None:
    if subprocess.run(["git", "rev-parse", "HEAD"], cwd=base.ROOT, capture_output=True, check=False).returncode:
        pytest.skip("this copy has no history")
    tree = base.tree_of("HEAD", tmp_path / "tree")
    assert (tree / "saesteer" / "kernels" / "ops.py").samefile(tree / "kernels" / "ops.py")


def test_both_trees_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Path] = []

    def run(tree: Path, words: Any, out: Path) -> Any:
        assert words == ["--cases", "16 x 1"] and not out.exists()
        seen.append(tree)
        return runs(5.0 if tree == base.ROOT else 4.0)[0]

    monkeypatch.setattr(base, "run", run)
    monkeypatch.setattr(base, "tree_of", lambda *_: tmp_path)
    assert base.compare("main", ["--cases", "16 x 1"], rounds=2) == 1
    assert seen == [tmp_path, base.ROOT] * 2
    assert "SLOWER" in capsys.readouterr().out


def test_the_benchmark_of_a_tree_is_its_own(tmp_path: Path) -> None:
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "__init__.py").write_text("")
    kernels = tmp_path / "bench" / "kernels.py"
    kernels.write_text("raise SystemExit('its own')")
    with pytest.raises(SystemExit, match="failed:\nits own"):
        base.run(tmp_path, [], tmp_path / "out")
    kernels.write_text(
        "import json, pathlib, sys\n"
        "out = pathlib.Path(sys.argv[sys.argv.index('--out') + 1])\n"
        "out.mkdir()\n"
        "(out / 'kernels.jsonl').write_text(json.dumps({'words': sys.argv[1:]}))\n"
    )
    [row] = base.run(tmp_path, ["--cases", "16 x 1"], tmp_path / "out")
    assert row["words"] == ["--no-curves", "--out", str(tmp_path / "out"), "--cases", "16 x 1"]
