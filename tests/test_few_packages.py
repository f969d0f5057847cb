"""What works where only the packages are installed that `pip install saesteer` brings, and what is said of the rest."""

import json
import os
import re
import subprocess
import sys
import tomllib
import venv
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import httpx
import pytest
from packaging.requirements import Requirement

from saesteer.commands import embedded
from tests.cli.commands import mistake
from tests.test_architecture import ROOT
from tests.test_packages import built

__all__ = ["built"]

DEPENDENCIES = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
MISSING = "is not installed; pip install 'saesteer[hf]', or with vLLM 'saesteer[gpu]' or 'saesteer[cpu]' (docs/"
# Sends a steered request to a server that is no part of saesteer, and prints what that received.
ASKS = """
import json, threading
from http.server import BaseHTTPRequestHandler, HTTPServer
import saesteer
from saesteer.client import Client
class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        print(json.dumps(json.loads(self.rfile.read(int(self.headers["content-length"])))))
        choice = {"index": 0, "message": {"role": "assistant", "content": "bridge"}, "finish_reason": "stop"}
        found = {"choices": [choice], "saesteer": {"applied": []}}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(found).encode())
    def log_message(self, *words): pass
server = HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
with Client(f"http://127.0.0.1:{server.server_port}", model="demo") as client:
    answer = client.chat("Who are you?", steer=saesteer.clamp("demo", feature=3497, value=2.0))
assert answer.text == "bridge"
"""
NUMBERS = """
from saesteer.client.results import numbers
numbers({"data": "AACAPw==", "dtype": "float32", "shape": [1, 1]})
"""


def brought() -> set[str]:
    """The packages that the dependencies bring, as they are installed here."""
    found, left = set[str](), [*DEPENDENCIES]
    while left:
        one = Requirement(left.pop())
        if one.name not in found and (one.marker is None or one.marker.evaluate({"extra": ""})):
            found.add(one.name)
            try:
                left += requires(one.name) or []
            except PackageNotFoundError:  # another Python has it
                continue
    return found


BLOCKS = f"""
import re, sys
from importlib.metadata import packages_distributions
plain = lambda name: re.sub("[-_.]+", "-", name).lower()
kept = {{plain(name) for name in {sorted(brought())!r}}} | {{"saesteer", "saesteer-demo"}}
for module, homes in packages_distributions().items():
    if kept.isdisjoint(map(plain, homes)):
        sys.modules[module] = None
"""


def few(code: str) -> "subprocess.CompletedProcess[str]":
    paths = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"  # an archive has the demo beside it
    env = os.environ | {"PYTHONPATH": paths, "NO_COLOR": "1"}
    return subprocess.run([sys.executable, "-c", BLOCKS + code], env=env, capture_output=True, text=True, check=False)


def command(*words: str) -> "subprocess.CompletedProcess[str]":
    return few(f"sys.argv = ['saesteer', *{words!r}]\nfrom saesteer.commands.cli import main\nmain()")


def test_a_client_steers() -> None:
    done = few(ASKS)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["saesteer"]["edits"][0]["feature"] == 3497


def test_commands_without_a_model_run() -> None:
    assert "serve" in command("--help").stdout
    found = command("find", "bridges")
    assert found.returncode == 0, found.stderr
    assert "bridge" in found.stdout


@pytest.mark.parametrize(
    "words", [["serve", "demo"], ["demo"], ["inspect", "demo"], ["doctor"]], ids=lambda words: str(words[0])
)
def test_other_commands_name_the_extras(words: list[str]) -> None:
    done = command(*words)
    assert done.returncode == 2
    assert re.fullmatch(rf"saesteer: \w+ {re.escape(MISSING)}.*\n", done.stderr)


@pytest.mark.parametrize("code", ["import saesteer; saesteer.load", "import saesteer.hf"])
def test_python_names_the_extras(code: str) -> None:
    assert re.search(rf"\w+ {re.escape(MISSING)}.*\n$", few(code).stderr)


def test_numbers_name_their_extra() -> None:
    last = few(NUMBERS).stderr.splitlines()[-1]
    assert last.endswith("numpy is not installed; pip install 'saesteer[arrays]' (docs/install.md)")


def test_the_demo_names_its_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where all is installed but the package of the embedded dictionaries."""
    monkeypatch.setattr(embedded, "DEMO_SAE", tmp_path / "none")
    for words in (["find", "bridges"], ["inspect", "demo"], ["serve", "demo"], ["demo"]):
        assert mistake(*words).startswith("the embedded dictionaries are not installed; pip install 'saesteer[demo]'")


@pytest.mark.slow
@pytest.mark.long
def test_a_client_in_an_empty_environment(built: Path, demo_server: httpx.Client, tmp_path: Path) -> None:
    """Installed from the wheel within 10 s of processor and 40 MB, it gets a steered answer from a real server."""
    venv.create(tmp_path, with_pip=True)
    place, python = tmp_path / "lib", tmp_path / "bin/python"

    def size() -> int:
        return sum(path.stat().st_size for path in place.rglob("*") if path.is_file())

    [wheel] = built.glob("saesteer-*.whl")
    before, empty = sum(os.times()[2:4]), size()
    subprocess.run([python, "-m", "pip", "install", "-q", str(wheel)], check=True, capture_output=True)
    took, grown = sum(os.times()[2:4]) - before, (size() - empty) / 1e6
    print(f"{took:.1f} s, {grown:.1f} MB")
    assert took <= 10 and grown <= 40
    asks = f"""
import saesteer
from saesteer.client import Client
with Client({str(demo_server.base_url)!r}, timeout=120) as client:
    bridge = saesteer.clamp("demo", 3497, 2.0, unit="max_act")
    print(client.chat("Who are you?", steer=bridge, temperature=0, max_tokens=24).text)
"""
    done = subprocess.run([python, "-c", asks], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "ridge" in done.stdout
