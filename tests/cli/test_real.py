"""The commands as a newcomer runs them, on the real engine."""

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from saesteer.commands.embedded import GALLERY, clamp
from saesteer.workbench.demo import whole

CASES = json.loads(GALLERY.read_text())["cases"]
WIDE = {**os.environ, "COLUMNS": "200"}


def test_demo_changes_the_models_mind() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "saesteer", "demo"], capture_output=True, text=True, env=WIDE, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    table = done.stdout[done.stdout.index("├") : done.stdout.index("╰")]
    for case, rows in zip(CASES, table.split("├")[1:], strict=True):
        cells = [line.split("│") for line in rows.splitlines() if line.startswith("│")]
        named, plain, clamped = (" ".join(" ".join(row[column] for row in cells).split()) for column in (1, 2, 3))
        assert f"feature {case['feature']} × {case['value']:g}" in named and case["question"] in named
        assert (plain, clamped) == (" ".join(case["plain"].split()), " ".join(steered(case).split()))
        assert case["label"].split(",")[0] in clamped.lower() and case["label"].split(",")[0] not in plain.lower()
        assert {plain[-1], clamped[-1]} <= set(".!?"), "whole sentences"
    *_, last = done.stdout.splitlines()
    script = os.path.relpath(Path(sys.executable).with_name("saesteer"))
    assert last.strip() in ("saesteer serve demo", f"{script} serve demo")
    assert "INFO" not in done.stdout + done.stderr  # vLLM is silent


def steered(case: dict[str, Any]) -> str:
    """Its stored answer."""
    return "".join(piece for piece, _ in case["steered"])


@pytest.mark.slow
@pytest.mark.long  # five engines; test_doctor_run.py runs the command with stand-ins
def test_doctor_finds_nothing_wrong() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "saesteer", "doctor"], capture_output=True, text=True, env=WIDE, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" ok ") == 13
    assert "FAILED" not in done.stdout


# A light stand-in for vLLM: it writes what vLLM's log may hold, and ends as each case needs it.
STAND_IN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN if sys.argv[1] == "stubborn" else lambda *_: sys.exit(7))
if sys.argv[1] == "broken":
    print("(EngineCore pid=1) ERROR 11-29 00:26:18 [core.py:9] OSError: no such device")
    sys.exit(3)
if sys.argv[1] == "misused":
    print("usage: vllm [-h]\\nvllm_cli.py: error: unrecognized arguments: --foo 3")
    sys.exit(2)
print("(APIServer pid=1) INFO 11-29 00:26:06 [saesteer/admin.py:1] The playground is at http://here/saesteer/")
print("(APIServer pid=1) INFO 11-29 00:26:06 [saesteer/admin.py:1] The API is at http://here/v1 and edits at z.1, z.2")
print("(Worker pid=1) WARNING 11-29 00:26:06 [cpu_worker.py:114] of vLLM")
print("(Worker pid=1) WARNING 11-29 00:26:06 [saesteer/worker.py:114] of ours \x1b[2J")
for text in ("first", "second"):
    print(f"(Worker pid=1) ERROR 11-29 00:26:06 [worker.py:114] {text}")
print("INFO:     Application startup complete.", os.getpid(), os.getppid(), sep="\\n")
time.sleep(1 if sys.argv[1] == "dead" else 60)  # also where a test fails
"""
ATTENDED = (
    "import os, sys; from rich.console import Console; from saesteer.commands import attended\n"
    "about = lambda told: {'page': told['playground'], 'sites': told['sites']}\n"
    "sys.exit(attended.run(Console(width=200), [sys.executable, '-c', *sys.argv[1:]], os.environ, about))"
)


class Terminal:
    """A command in a pty of its own."""

    def __init__(self, *command: str) -> None:
        self.pid, self._end = pty.fork()
        if self.pid == 0:
            os.closerange(3, 1 << 10)  # what the tests have open
            os.execve(sys.executable, [sys.executable, *command], {**os.environ, "PYTHONSAFEPATH": ""})
        self.text = ""

    def read(self, until: str = "", seconds: float = 300) -> str:
        """What the terminal has shown once it shows a text, or once the command has ended; without the spinner."""
        last = time.monotonic() + seconds
        while not until or until not in self.text:
            assert time.monotonic() < last, self.text
            try:
                shown = os.read(self._end, 4096).decode("utf-8", "replace")
                self.text += re.sub(r"\x1b\[[\d;?]*\w", "", re.sub(r"[^\r\n]*Starting vLLM[^\r\n]*", "", shown))
            except OSError:  # as the end of a pty is reported
                break
        return self.text

    def press(self, keys: bytes) -> None:
        os.write(self._end, keys)

    def code(self) -> int:
        """The exit code, once the command has ended."""
        self.read()
        os.close(self._end)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def log_of(text: str) -> Path:
    return Path(re.findall(r"/\S+\.log", text)[-1])


def gone(pid: int) -> bool:
    """Whether a process ends within some seconds."""
    for _ in range(100):
        status = Path(f"/proc/{pid}/status")
        if not status.exists() or "State:\tZ" in status.read_text():
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize(
    ("case", "presses", "code", "shown"),
    [
        ("broken", 0, 3, "vLLM did not start: OSError: no such device. All of its output is in /"),
        ("misused", 0, 2, "vLLM did not start: error: unrecognized arguments: --foo 3. All"),
        ("dead", 0, 1, "vLLM ended: "),
        ("kind", 1, 7, "Stopping; Ctrl-C again kills the server."),
        ("stubborn", 2, 137, "Stopping; Ctrl-C again kills the server."),
    ],
)
def test_a_terminal_shows_what_matters_and_passes_on_how_it_ends(
    case: str, presses: int, code: int, shown: str
) -> None:
    terminal = Terminal("-c", ATTENDED, STAND_IN, case)
    if presses:
        text = terminal.read("stop   Ctrl-C")
        assert re.search(r"page   http://here/saesteer/\r\nsites  z.1, z.2\r\nlog    /", text)
        assert "warning: of ours ·[2J\r\n" in text and "error: first\r\n" in text
        assert "of vLLM" not in text and "second" not in text
        assert log_of(text).stat().st_mode & 0o777 == 0o600 and "of vLLM" in log_of(text).read_text()
    for _ in range(presses):
        terminal.press(b"\x03")
        terminal.read(shown)
    assert terminal.code() == code and shown in terminal.text
    log_of(terminal.text).unlink()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 7), (signal.SIGHUP, 7), (signal.SIGKILL, -9)])
def test_the_server_ends_with_its_parent(number: int, code: int) -> None:
    terminal = Terminal("-c", ATTENDED, STAND_IN, "kind")
    log = log_of(terminal.read("stop   Ctrl-C"))
    server, parent = map(int, log.read_text().split()[-2:])
    assert parent == terminal.pid and os.getpgid(server) == server
    os.kill(terminal.pid, number)
    assert terminal.code() == code and gone(server)
    log.unlink()


def post(address: str, body: dict[str, Any]) -> tuple[int, Any]:
    request = urllib.request.Request(
        f"{address}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, json.load(refused)


@pytest.mark.slow
def test_serve_demo_on_a_terminal() -> None:
    """Six lines, of which one asks for the bridge. Others are answered as the page has stored them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    terminal = Terminal("-m", "saesteer", "serve", "demo", "--port", str(port))
    lines = [line for line in terminal.read("stop   Ctrl-C").splitlines() if re.match(r"[a-z]+ +\S", line)]
    names = [line.split()[0] for line in lines]
    assert names == ["page", "curl", "model", "sites", "log", "stop"], terminal.text
    assert "INFO" not in terminal.text and "WARNING" not in terminal.text
    about = {line.split()[0]: line.split(maxsplit=1)[1].strip() for line in lines}
    assert about["page"] == f"http://127.0.0.1:{port}/saesteer/"
    assert about["sites"] == "mlp_in.12, resid_post.12, resid_post.15"
    found = subprocess.run(about["curl"], shell=True, capture_output=True, text=True, check=True)  # as a user pastes it
    assert "ridge" in json.loads(found.stdout)["choices"][0]["message"]["content"]
    sampling = {"temperature": 0, "repetition_penalty": 1.1, "max_tokens": 64}  # as the page sends
    for case in CASES:
        body = {"model": "demo", "messages": [{"role": "user", "content": case["question"]}], **sampling}
        spec = clamp(case["dictionary"], case["feature"], case["value"])
        for sent, stored in ((body, case["plain"]), ({**body, "saesteer": spec}, steered(case))):
            status, answer = post(f"http://127.0.0.1:{port}", sent)
            assert (status, whole(answer["choices"][0]["message"]["content"])) == (200, stored)
    spec["edits"][0]["feature"] = 9216
    status, answer = post(f"http://127.0.0.1:{port}", {**body, "saesteer": spec})
    assert status == 400 and "saesteer.edits[0].feature" in json.dumps(answer)
    log = log_of(about["log"])
    started = {int(pid) for pid in re.findall(r"pid=(\d+)", log.read_text())}
    terminal.press(b"\x03")
    assert terminal.code() == 0 and len(started) > 1 and all(map(gone, started))
    assert "leaked" not in terminal.text and "Application startup complete" in log.read_text()
    log.unlink()
