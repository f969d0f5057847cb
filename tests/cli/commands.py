"""The commands as a user runs them: in a process of their own, on a terminal 200 columns wide, without the hub."""

import os
import subprocess
import sys

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
