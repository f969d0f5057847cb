"""Python processes that are forked from one which has imported vLLM: an import takes 8 s, and an engine needs three.

The server of forks is multiprocessing's own. A fork has the environment of the process that started it, and so have
vLLM's engine and workers, which would be spawned otherwise. What a library decides at import, by the environment or by
what is installed, cannot differ between forks: a test of that starts a Python of its own. So does every test on a GPU,
where vLLM spawns.
"""

import atexit
import contextlib
import importlib
import io
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver, process, spawn
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any, NoReturn

# In the environment of a fork: the process group that what it starts joins, and the file of what these print.
GROUP, LOG = "SAESTEER_TEST_GROUP", "SAESTEER_TEST_LOG"
IMPORTED = (
    "vllm.entrypoints.openai.api_server",
    "vllm.entrypoints.cli.main",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
    "saesteer.commands.cli",
    "saesteer.plugin.worker.worker",
    "saesteer.plugin.door.frontend",
)
_prepared, _prepare = spawn.get_preparation_data, spawn.prepare
_context = multiprocessing.get_context


def _with_environment(name: str) -> dict[str, Any]:
    return {**_prepared(name), "environment": dict(os.environ)}


def _in_environment(data: Any) -> None:
    _enter(data.pop("environment"))
    with contextlib.suppress(OSError):  # the group has ended
        if group := os.environ.get(GROUP):
            os.setpgid(0, int(group))
    _prepare(data)


def _enter(environment: Mapping[str, str]) -> None:
    """Take over an environment, and what libraries have derived from the one of the server of forks."""
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[method-assign]  # forks have the same server
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    places = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [place for place in places if place and place not in sys.path]
    if threads := environment.get("OMP_NUM_THREADS"):
        importlib.import_module("torch").set_num_threads(int(threads))
    if log := environment.get(LOG):
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for number in (1, 2):
            os.dup2(out, number)


def _forking(method: str | None = None) -> Any:
    return _context("forkserver" if method == "spawn" else method)


def install() -> None:
    """Make multiprocessing's spawned processes forks in all that this process forks."""
    spawn.get_preparation_data, spawn.prepare = _with_environment, _in_environment
    multiprocessing.get_context = _forking


class Fork:
    """A running Python, with the methods of ``subprocess.Popen`` that tests use; it leads a process group."""

    def __init__(
        self, words: Sequence[str], environment: Mapping[str, str], log: Path, given: str | None = None
    ) -> None:
        Path(log).touch()
        context: Any = _context("forkserver")
        context.set_forkserver_preload(["tests.forks_preload"])
        self._process = context.Process(target=_become, args=(list(words), dict(environment), str(log), given))
        spawn.get_preparation_data = _with_environment
        try:
            self._process.start()
        finally:
            spawn.get_preparation_data = _prepared
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        code: int | None = self._process.exitcode
        return code

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code at the end.

        Raises:
            subprocess.TimeoutExpired: the process runs on.
        """
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise TimeoutExpired("fork", timeout or 0)
        return code

    def terminate(self) -> None:
        """Send SIGTERM to the process."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Kill what is left of the process and of what it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


def _become(words: list[str], environment: dict[str, str], log: str, given: str | None) -> None:
    os.setpgid(0, 0)
    process._parent_process = None  # type: ignore[attr-defined]  # a program of its own: saesteer looks at its parent
    _enter(environment | {GROUP: str(os.getpid()), LOG: log})
    sys.stdin = io.StringIO(given or "")
    os.execve = _replaced  # type: ignore[assignment]
    try:
        _run(words)
    finally:
        atexit._run_exitfuncs()


def _run(words: Sequence[str]) -> None:
    words = [word for word in words if word != "-P"]
    sys.argv = list(words[1:])
    if words[0] == "-c":
        sys.argv[0] = "-c"
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)


def _replaced(path: str, words: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Run another module in place of this one, as ``os.execve`` does for another program."""
    assert path == sys.executable, path
    os.environ.clear()
    os.environ.update(environment)  # which has the group and the log
    _run(words[1:])
    raise SystemExit(0)
