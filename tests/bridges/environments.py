"""Python environments of their own for harnesses, whose packages are no part of this project's."""

import hashlib
import subprocess
import sys
import sysconfig
from pathlib import Path

from filelock import FileLock

from saesteer.loaders.cache import cache_dir

ROOT = Path(__file__).parents[2]
# What the bridges import of saesteer itself; the rest of it stays out.
_OURS = ("pybase64", "numpy", "rich", "httpx")


def environment(*packages: str, beside: bool = False) -> Path:
    """The Python of an environment with these packages from PyPI; the first call makes it, in one or two minutes.

    Args:
        packages: as pip takes them.
        beside: the packages of this environment can be imported there as well, such as vLLM.
    """
    wanted = [*packages, *([sysconfig.get_path("purelib")] if beside else _OURS)]
    folder = cache_dir() / f"test-{hashlib.sha256(' '.join([sys.version, *wanted]).encode()).hexdigest()[:12]}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if not (folder / ".ready").is_file():
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
            pip = [str(folder / "bin/python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
            if beside:
                [site] = folder.glob("lib/python*/site-packages")
                (site / "beside.pth").write_text(wanted[-1])
            subprocess.run([*pip, *(packages if beside else wanted)], check=True)
            (folder / ".ready").touch()
    return folder / "bin/python"
