"""What `make contract` finds in sources that are not imported: as the installed vLLM is, and what a release breaks."""

import inspect
import json
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from saesteer.plugin.contract import HOOKS, KNOWN, Hook
from tools import contract

KEPT = {
    "lib/__init__.py": "from lib.deep.home import Base as Named\nfrom .other import *\n",
    "lib/deep/home.py": """
class Oldest:
    def inherited(self, first, /, second, *rest, third=None, **more): ...

class Base(Oldest):
    @staticmethod
    def still(first): ...

    if True:
        async def below(self, first): ...
""",
    "lib/other.py": """
from typing import NamedTuple
from . import deep
from lib.other import circle  # leads nowhere

class State(NamedTuple):
    first: int
    second: int = 0

class Made:
    def __init__(self, first): ...

try:
    from lib.nowhere import function
except ImportError:
    def function(first, second): ...

alias = function
""",
    "lib/deep/__init__.py": "",
}
TAKEN = {
    ("lib", "Named.inherited"): ["first", "second", "rest", "third", "more"],
    ("lib", "Named.still"): ["first"],
    ("lib", "Named.below"): ["first"],
    ("lib", "State"): ["first", "second"],
    ("lib", "State.__init__"): None,
    ("lib", "Made"): ["first"],
    ("lib", "Made.__init__"): ["first"],
    ("lib", "alias"): ["first", "second"],
    ("lib.other", "circle"): None,
    ("lib", "Named.gone"): None,
    ("lib", "alias.gone"): None,
    ("lib.nowhere", "function"): None,
}


@pytest.mark.parametrize(("module", "path"), TAKEN)
def test_a_definition_is_followed_to_where_it_stands(module: str, path: str) -> None:
    assert contract.Sources(KEPT.get).parameters(module, path) == TAKEN[module, path]


def test_the_installed_vllm_reads_as_it_imports() -> None:
    """Each row's parameters are those of ``inspect.signature``; so what is read of other versions can be believed."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    folder = Path(spec.origin).parents[1]

    def read(name: str) -> str | None:
        return (folder / name).read_text() if (folder / name).is_file() else None

    sources = contract.Sources(read)
    for hook in HOOKS:
        found: Any = hook.find()
        listed = None
        if found is not None:
            listed = [name for name in inspect.signature(found).parameters if name not in ("self", "cls")]
        assert sources.parameters(hook.module, hook.path) == listed, hook
    assert contract.broken(read) == []


def hook(path: str, *parameters: str, use: str = "") -> Hook:
    return Hook("every", "lib", path, parameters, use, "door.logs:_of_body", "logs")


def test_what_a_release_breaks_is_named() -> None:
    hooks = [
        hook("Named.still", "first"),
        hook("Named.still", "second"),
        hook("Named.gone", "first"),
        hook("Named.later", use="late"),
        hook("alias", "first", "third", use="late"),
    ]
    assert contract.broken(KEPT.get, hooks) == [
        "has lib.Named.still(first), expected it to begin with (second) (logs; door.logs:_of_body)",
        "has no lib.Named.gone (logs; door.logs:_of_body)",
        "has lib.alias(first, second), expected it to begin with (first, third) (logs; door.logs:_of_body)",
    ]


def test_the_newest_release_that_is_served_has_been_read() -> None:
    """Before KNOWN covers another one, somebody looks at what its functions take, and keeps it by --read."""
    kept = json.loads(contract.LAST_READ.read_text())
    assert kept["vllm"] == max(contract.RELEASES, key=Version)
    assert kept["takes"].keys() <= {f"{hook.module}.{hook.path}" for hook in HOOKS}
    needed = {f"{hook.module}.{hook.path}" for hook in HOOKS if hook.use != "late"}
    assert needed <= kept["takes"].keys(), "a new row: python -m tools.contract --read with the newest release"


def test_pages_and_the_extra_have_the_window_that_is_served() -> None:
    least, end = (f"{one.major}.{one.minor}" for one in KNOWN)
    root = Path(contract.__file__).parents[1]
    assert f'gpu = ["saesteer[hf]", "vllm>={least},<{end}"]' in (root / "pyproject.toml").read_text()
    assert f"{least}\nup to but not including {end}." in (root / "docs/versions.md").read_text()


@pytest.fixture
def wheel(tmp_path: Path) -> Callable[[str], Path]:
    def made(version: str) -> Path:
        path = tmp_path / f"vllm-{version}-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for name, text in KEPT.items():
                archive.writestr(name, text)
        return path

    return made


def test_what_the_command_says_and_how_it_ends(
    wheel: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(contract, "HOOKS", ())
    known, new = str(wheel(str(KNOWN[0]))), str(wheel("9.9.0"))
    monkeypatch.setattr(contract.broken, "__defaults__", ((hook("alias", "first"),),))
    assert contract.main([known]) == 0
    assert "keeps the contract" in (said := capsys.readouterr().out) and "refuses" not in said
    assert contract.main([new]) == 0
    assert "saesteer refuses it until KNOWN" in capsys.readouterr().out
    monkeypatch.setattr(contract.broken, "__defaults__", ((hook("gone"),),))
    assert contract.main([new]) == 1
    assert "vLLM 9.9.0 has no lib.gone" in capsys.readouterr().out
    monkeypatch.setattr(contract.taken, "__defaults__", ((hook("alias"),),))
    monkeypatch.setattr(contract, "LAST_READ", tmp_path / "parameters.json")
    contract.main([known, "--read"])
    kept = json.loads((tmp_path / "parameters.json").read_text())
    assert kept == {"vllm": str(KNOWN[0]), "takes": {"lib.alias": ["first", "second"]}}
    kept["takes"]["lib.alias"].remove("second")
    (tmp_path / "parameters.json").write_text(json.dumps(kept))
    contract.main([new])
    assert f"since vLLM {KNOWN[0]}, lib.alias has come to take second" in capsys.readouterr().out
    capsys.readouterr()
    assert contract.main([new, "--issue", str(tmp_path / "made/issue.md")]) == 1
    title, _, *text = (tmp_path / "made/issue.md").read_text().splitlines()
    assert title == "vLLM 9.9.0 differs from what saesteer relies on"
    assert {f"- {line}" for line in capsys.readouterr().out.splitlines()} & {*text}
    (tmp_path / "vllm-1-none.whl").write_text("no archive")
    assert contract.main([str(tmp_path / "vllm-1-none.whl")]) == 2
    assert contract.main([str(tmp_path / "none.whl")]) == 2
    assert "nothing was found out" in capsys.readouterr().out
