"""The changes that tools/mutants.py makes: each parses, and each says another thing."""

import ast
from pathlib import Path

from tools.mutants import Finder, mutants

TEXT = """
LIMIT = 3
def late(at: int = 0, é: bool = True) -> bool:
    if at < LIMIT and not é:
        raise ValueError(f"{at + 1}")
    return at + 2 == 4 if é else False
"""


def test_each_change_is_one_place_of_a_function() -> None:
    found = list(mutants("late.py", TEXT))
    whole = [(TEXT.encode()[: one.begin] + one.new.encode() + TEXT.encode()[one.end :]).decode() for one in found]
    trees = {ast.unparse(ast.parse(text)) for text in whole}
    assert len(trees) == len(found) == 11 and ast.unparse(ast.parse(TEXT)) not in trees
    assert ("at < LIMIT", "(at <= LIMIT)") in {(one.old, one.new) for one in found}
    assert not any(one.old == "at + 1" or one.line == 2 for one in found)


def test_what_fails_without_a_change_finds_none(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(TEXT)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow\n    network\n    gpu\n")
    good = "from late import late\ndef test_good(): assert late(2)\n"
    (tmp_path / "test_late.py").write_text(f"def test_bad(): assert False\n{good}")
    change = next(one for one in mutants("late.py", TEXT) if one.old == "at + 2")
    finder = Finder(tmp_path, 60)
    assert finder.found(change, ["test_late.py"]) == "test_late.py::test_good"
    assert finder.out == {"test_late.py::test_bad"} and (tmp_path / "late.py").read_text() == TEXT
    change = next(one for one in mutants("late.py", TEXT) if one.old == "at < LIMIT")
    assert not finder.found(change, ["test_late.py"])
