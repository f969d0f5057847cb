"""`saesteer serve` on a terminal: vLLM in a process of its own, its output in a file, and on the terminal what matters.

That is how to use the server, warnings of saesteer, and errors. vLLM has a process group of its own, so Ctrl-C reaches
this process alone.
"""

import ctypes
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from saesteer.commands.waiting import steps
from saesteer.errors import printable
from saesteer.plugin.job import reason_in

_READY = "Application startup complete."  # of uvicorn, which listens now
_TOLD = re.compile(r"The (playground|API) is at (\S+)(?: and edits at (.+))?")  # of saesteer, the API last
# A record of vLLM's log, where the file names of saesteer's own loggers begin with saesteer/.
_RECORD = re.compile(r"(?:\(.*?\) )?((WARNING|ERROR|CRITICAL) \S+ \S+ \[(saesteer/)?.*?\]) (.*)")
_LAST = 1 << 16  # bytes of the log in which the reason of an end is looked for
_LIBRARY = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def run(
    console: Console,
    words: Sequence[str],
    environment: Mapping[str, str],
    about: Callable[[Mapping[str, str]], Mapping[str, str]],
) -> int:
    """Run a server until it ends. SIGINT, SIGTERM and SIGHUP end it as SIGTERM does, and a second SIGINT kills it.

    The server also ends as by SIGTERM when this process does, however that happens.

    Args:
        console: where to print.
        words: the command.
        environment: of the server.
        about: what to print of a server that is ready, a line for each word, from what its log tells: API, playground
            and sites.

    Returns:
        The server's exit code, 128 + the signal that killed it, or 1 where it ended without an error and unasked, as
        vLLM does when its engine has died.
    """
    handle, log = tempfile.mkstemp(prefix="saesteer-", suffix=".log")  # which only its user may read
    with os.fdopen(handle, "wb") as out, open(log, encoding="utf-8", errors="replace") as said:
        server = subprocess.Popen(
            words,
            env={**environment, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            process_group=0,
            preexec_fn=lambda: _LIBRARY.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),  # noqa: PLW1509  # which has no threads yet
        )
        asked: list[int] = []

        def stop(number: int, _: Any) -> None:
            if number == signal.SIGINT and number in asked:
                server.kill()
            server.terminate()
            asked.append(number)
            if number == signal.SIGINT:
                _say(console, "Stopping; Ctrl-C again kills the server.")

        for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(one, stop)
        lines = _lines(said, server)
        with steps(console, hidden=False) as show:
            show("Starting vLLM, a minute or more")
            ready = _follow(console, lines, asked)
        if ready is not None:
            for name, value in [*about(ready).items(), ("log", log), ("stop", "Ctrl-C")]:
                _say(console, f"{name:6} {value}")
            _follow(console, lines, asked)
        code = server.wait()
        if code < 0:  # its own processes may be left
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
        if not asked:
            said.seek(max(0, os.path.getsize(log) - _LAST))
            text = said.read()
            why = reason_in(text) or " ".join(text.split("\n")[-4:]).strip() or f"exit code {code}"
            _say(console, f"vLLM {'did not start' if ready is None else 'ended'}: {why}. All of its output is in {log}")
        return 128 - code if code < 0 else code or int(not asked)


def _lines(said: TextIO, server: "subprocess.Popen[bytes]") -> Iterator[str]:
    """The lines of the log as they are written, until the server has ended."""
    rest, ended = "", False
    while not ended:
        ended = server.poll() is not None  # before the last read
        *lines, rest = (rest + said.read()).split("\n")
        yield from lines
        time.sleep(0.2)


def _follow(console: Console, lines: Iterator[str], asked: Sequence[int]) -> dict[str, str] | None:
    """Print what matters of the log until the server is ready or has ended; nothing matters once it stops as asked.

    Returns:
        What the log tells of a server that is ready; None: it has ended.
    """
    found: dict[str, str] = {}
    last = None
    for line in lines:
        if told := _TOLD.search(line):
            found |= {told[1]: told[2], "sites": told[3]}
        if _READY in line:
            return found
        if record := _RECORD.match(line):
            if not asked and record[1] != last and (record[3] or record[2] != "WARNING"):
                _say(console, f"{record[2].lower()}: {record[4]}")
            last = record[1]  # of a record in several lines the first is shown
    return None


def _say(console: Console, text: str) -> None:
    console.print(Text(printable(text)), soft_wrap=True)
