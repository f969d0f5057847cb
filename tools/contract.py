"""Says whether a release of vLLM has every function that saesteer relies on, from its sources (`make contract`).

The rows are those of saesteer/plugin/contract.py, which checks them at each start in the installed vLLM. Here nothing
is installed and nothing of vLLM is imported: a wheel is fetched and read as syntax, in less than a minute. What a
function does is not looked at, so a release that keeps the contract still has to be run in tests. But what has come to
take more than in the last release that somebody read is named: a new parameter can take the place of what ours does.
"""

import argparse
import ast
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from packaging.version import Version

from saesteer.plugin.contract import HOOKS, KNOWN, Hook

Read = Callable[[str], str | None]  # path in the package → text; None: no such file
Found = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
# The newest release of each version when `make contract` was last run on it, and which tests have run with it.
_IN_PART = "isolation, refusals and rules, on a CPU"  # make test-vllm
RELEASES = {
    "0.26.0": "those marked `gpu`, and the benchmarks, on an H100 or H200",
    "0.27.1": _IN_PART,
    "0.28.0": _IN_PART,
    "0.29.0": _IN_PART,
    "0.30.0": _IN_PART,
    "0.31.0": _IN_PART,
    "0.32.0": "all that need no GPU, on a CPU",
    "0.33.0": "",
}
LAST_READ = Path(__file__).with_name(
    "vllm_parameters.json"
)  # of the newest release that somebody has read: what each takes
_UNREADABLE = 2  # exit code where the sources could not be had: nothing was found out


class Sources:
    """The definitions in a package that is not imported.

    Args:
        read: its files.
    """

    def __init__(self, read: Read) -> None:
        self._read = read
        self.tree = cache(self._parse)

    def _parse(self, module: str) -> tuple[str, ast.Module] | None:
        """The package that relative imports in a module begin at, and its syntax; None: no such module."""
        path = module.replace(".", "/")
        for file, package in ((f"{path}.py", module.rpartition(".")[0]), (f"{path}/__init__.py", module)):
            if (text := self._read(file)) is not None:
                return package, ast.parse(text)
        return None

    def find(self, module: str, path: str) -> tuple[str, Found] | None:
        """Where something is defined, and its definition: followed through imports, other names and base classes.

        Args:
            module: such as vllm.v1.engine.
            path: in the module, such as Class.method.
        """
        owner, _, name = path.rpartition(".")
        if not owner:
            return self._in_module(module, name)
        home, defined = self.find(module, owner) or (module, None)
        return self._in_class(home, defined, name) if isinstance(defined, ast.ClassDef) else None

    def _in_module(
        self, module: str, name: str, seen: frozenset[tuple[str, str]] = frozenset()
    ) -> tuple[str, Found] | None:
        parsed = self.tree(module)
        if parsed is None or (module, name) in seen:
            return None
        package, tree = parsed
        for node in _statements(tree.body):
            if isinstance(node, Found) and node.name == name:
                return module, node
            further = _further(node, name, module, package)
            if further is not None and (found := self._in_module(*further, seen | {(module, name)})) is not None:
                return found
        return None

    def _in_class(self, module: str, owner: ast.ClassDef, name: str) -> tuple[str, Found] | None:
        for node in _statements(owner.body):
            if isinstance(node, Found) and node.name == name:
                return module, node
        for base in owner.bases:
            home = self._in_module(module, base.id) if isinstance(base, ast.Name) else None
            if home is None or not isinstance(home[1], ast.ClassDef):
                continue
            if (found := self._in_class(home[0], home[1], name)) is not None:
                return found
        return None

    def parameters(self, module: str, path: str) -> list[str] | None:
        """The names of what something takes, without self, as ``inspect.signature`` has them; None: it is not there."""
        found = self.find(module, path)
        if found is None:
            return None
        home, node = found
        if isinstance(node, ast.ClassDef):
            own = self._in_class(home, node, "__init__")
            if own is None:  # a named tuple or a dataclass
                return [str(ast.unparse(one.target)) for one in node.body if isinstance(one, ast.AnnAssign)]
            node = own[1]
            assert not isinstance(node, ast.ClassDef)
        given = node.args
        listed = [*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg]
        return [one.arg for one in listed if one is not None and one.arg not in ("self", "cls")]


def _further(node: ast.stmt, name: str, module: str, package: str) -> tuple[str, str] | None:
    """Module and name that a statement takes a name from; None: it does not."""
    if isinstance(node, ast.ImportFrom):
        parts = package.split(".")
        base = parts[: len(parts) - node.level + 1] if node.level else []
        home = ".".join([*base, node.module] if node.module else base)
        named = {one.asname or one.name: one.name for one in node.names}
        return (home, named.get(name, name)) if name in named or "*" in named else None
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
        targets = {target.id for target in node.targets if isinstance(target, ast.Name)}
        return (module, node.value.id) if name in targets else None
    return None


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """All statements that may define something there, below a condition or in a try as well; the last one first."""
    for node in reversed([*body]):
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            handlers = (one for handler in getattr(node, "handlers", ()) for one in handler.body)
            yield from _statements([*node.body, *handlers, *getattr(node, "orelse", ())])


def broken(read: Read, hooks: Sequence[Hook] = HOOKS) -> list[str]:
    """What keeps a package from having each function, a sentence each; rows that only newer versions need are passed.

    Args:
        read: the package's files.
        hooks: the rows.
    """
    sources, found = Sources(read), []
    for hook in hooks:
        names = sources.parameters(hook.module, hook.path)
        where = f"{hook.module}.{hook.path}"
        if names is None and hook.use != "late":
            found.append(f"has no {where} ({hook.why}; {hook.place})")
        elif names is not None and tuple(names[: len(hook.parameters)]) != hook.parameters:
            expected = f"expected it to begin with ({', '.join(hook.parameters)})"
            found.append(f"has {where}({', '.join(names)}), {expected} ({hook.why}; {hook.place})")
    return found


def taken(read: Read, hooks: Sequence[Hook] = HOOKS) -> dict[str, list[str]]:
    """What each function that a package has takes, by module and path: a function of the package may gain a meaning.

    Args:
        read: the package's files.
        hooks: the rows.
    """
    sources = Sources(read)
    found = {f"{hook.module}.{hook.path}": sources.parameters(hook.module, hook.path) for hook in hooks}
    return {name: names for name, names in sorted(found.items()) if names is not None}


def gained(now: Mapping[str, Sequence[str]], before: Mapping[str, Sequence[str]]) -> list[str]:
    """Which functions take more than before, a sentence each: ours call or replace them, and may have to know it.

    Args:
        now: as ``taken`` has it.
        before: the same, of a release that somebody has read.
    """
    return [
        f"{name} has come to take {', '.join(new)}: does this change what it means to saesteer?"
        for name, names in now.items()
        if name in before and (new := [one for one in names if one not in before[name]])
    ]


def fetch(version: str, folder: Path) -> Path:
    """The wheel of a version, or of the newest, from the index that pip is configured with.

    Args:
        version: such as 0.33 or 0.33.0; empty for the newest.
        folder: where it goes.

    Raises:
        RuntimeError: pip could not get it; the message has its words.
    """
    wanted = f"vllm=={version}.*" if version else "vllm"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run(
        [*command, "--dest", str(folder), wanted], capture_output=True, text=True, timeout=1800, check=False
    )
    wheels = [*folder.glob("*.whl")]
    if done.returncode != 0 or len(wheels) != 1:
        raise RuntimeError(f"pip could not fetch {wanted}: {done.stderr.strip()[-1000:]}")
    return wheels[0]


def of_wheel(path: Path) -> Read:
    """The files of a wheel."""
    archive = zipfile.ZipFile(path)
    names = frozenset(archive.namelist())
    return lambda name: archive.read(name).decode() if name in names else None


def _issue(version: str, told: Sequence[str]) -> str:
    """The title, and behind an empty line the text."""
    title = f"vLLM {version} differs from what saesteer relies on"
    rows = "\n".join(f"- {sentence}" for sentence in told)
    way = "docs/versions.md says how a release is taken in."
    return f"{title}\n\n`make contract VLLM={version}`:\n\n{rows}\n\n{way}\n"


def main(words: Sequence[str] | None = None) -> int:
    """Check a version: 0 if it keeps the contract, 1 if not, 2 if its sources could not be had."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("version", nargs="?", default="", help="such as 0.33, or a wheel's file; default: the newest")
    parser.add_argument(
        "--read", action="store_true", help=f"somebody has read this version: keep it in {LAST_READ.name}"
    )
    parser.add_argument("--issue", type=Path, help="a file: the text of an issue, if a row fails or more is taken")
    options = parser.parse_args(words)
    chosen = options.version
    with tempfile.TemporaryDirectory() as folder:
        try:
            wheel = Path(chosen) if chosen.endswith(".whl") else fetch(chosen, Path(folder))
            files = of_wheel(wheel)
            found, now = broken(files), taken(files)
        except (RuntimeError, OSError, zipfile.BadZipFile, subprocess.TimeoutExpired) as error:
            print(f"nothing was found out: {error}")
            return _UNREADABLE
    version = wheel.name.split("-")[1]
    known = KNOWN[0] <= Version(Version(version).base_version) < KNOWN[1]
    if options.read:
        LAST_READ.write_text(json.dumps({"vllm": version, "takes": now}, indent=1) + "\n")
    before = json.loads(LAST_READ.read_text())
    newer = gained(now, before["takes"]) if Version(version) > Version(before["vllm"]) else ()
    told = [f"since vLLM {before['vllm']}, {sentence}" for sentence in newer]
    told += [f"vLLM {version} {sentence}" for sentence in found]
    for sentence in told:
        print(sentence)
    if options.issue and told:
        options.issue.parent.mkdir(parents=True, exist_ok=True)
        options.issue.write_text(_issue(version, told))
    if found:
        print(f"vLLM {version} breaks the contract at {len(found)} of {len(HOOKS)} functions")
    else:
        print(f"vLLM {version} keeps the contract: it has all {len(HOOKS)} functions")
    if not known:
        print("saesteer refuses it until KNOWN in saesteer/plugin/contract.py covers it: run the tests with it first")
    return 1 if found or (options.issue and told) else 0


if __name__ == "__main__":
    sys.exit(main())
