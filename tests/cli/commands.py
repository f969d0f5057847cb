"""The commands as a user runs them: in a process of their own, or in this one; 200 columns wide, without the hub."""

import os
import subprocess
import sys

import huggingface_hub.constants
import pytest
from typer.testing import CliRunner

from saesteer.errors import SaesteerError
from saesteer.workbench.cli import app

# Whatever the machine can reach: an unknown hub id is looked up in the cache alone, at once.
ENVIRONMENT = {**os.environ, "COLUMNS": "200", "HF_HUB_OFFLINE": "1"}


def saesteer(*words: str, before: str = "") -> "subprocess.CompletedProcess[str]":
    """Run `saesteer` with these words, and wait for its end.

    Args:
        words: behind the name of the program.
        before: Python that runs before it.
    """
    code = ["-c", f"{before}\nfrom saesteer.commands.cli import main\nmain()"] if before else ["-m", "saesteer"]
    command = [sys.executable, *code, *words]
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=600, check=False)


def mistake(*words: str) -> str:
    """What `saesteer` would print of a mistake in these words, and nothing else; in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        patch.setattr(os, "execve", lambda *_: pytest.fail("a server starts"))
        done = CliRunner().invoke(app, [*words])
    assert isinstance(done.exception, SaesteerError) and done.output == "", (words, done.exception)
    return " ".join(str(done.exception).split())
