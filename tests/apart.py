"""Code of the tests in a Python process of its own, and what it found: ``tell`` there, ``hear`` here; or in a fork.

For what a process decides once, such as its environment, and for what an engine holds until its process ends.
"""

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tests.forks import Fork

CUDA = torch.cuda.device_count() > 0  # unlike is_available, it leaves CUDA usable in forked children
_MARK = "answer "  # libraries print beside it


def tell(found: Any) -> None:
    """Say what was found, as JSON; once in a process."""
    print(f"\n{_MARK}{json.dumps(found)}")


def hear(
    *words: str,
    environment: Mapping[str, str] = os.environ,
    given: str | None = None,
    timeout: float | None = None,
    fork: bool = False,
) -> Any:
    """Run this Python with these arguments at the root of the project, and take what it tells.

    Args:
        words: such as ``-m`` and a module.
        environment: all of it.
        given: its standard input.
        timeout: in seconds.
        fork: from a process that has imported vLLM (``tests.forks``), on a CPU.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        if fork and not CUDA:
            code = _ended(Fork(words, environment, log, given), timeout)
        else:
            with log.open("w") as out:
                done = subprocess.run(
                    [sys.executable, *words],
                    cwd=Path(__file__).parents[1],
                    env=environment,
                    input=given,
                    stdout=out,
                    stderr=out,
                    text=True,
                    timeout=timeout,
                    check=False,
                )
            code = done.returncode
        told = log.read_text()
    assert code == 0, told[-4000:]
    (line,) = [line for line in told.splitlines() if line.startswith(_MARK)]
    return json.loads(line.removeprefix(_MARK))


def forked(work: Callable[..., Any], *given: Any) -> Any:
    """Return what a function returns in a process of its own that begins as a copy of this one.

    Importing vLLM costs eight seconds of a core; an engine of a tiny model starts in one where that is done.

    Raises:
        AssertionError: the process ended without an answer; its standard error says why.
    """
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)
    process = fork.Process(target=lambda: theirs.send(work(*given)))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        raise AssertionError(f"{work.__name__}{given} gave no answer") from None
    finally:
        ours.close()
        process.join()


def _ended(process: Fork, timeout: float | None) -> int:
    try:
        return process.wait(timeout)
    finally:
        process.kill()
