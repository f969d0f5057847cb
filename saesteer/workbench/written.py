"""What commands write when their work is done: files, and words to a terminal. Knows nothing of what is in them."""

from functools import partial
from pathlib import Path

from rich.box import ROUNDED
from rich.console import Console
from rich.table import Table

from saesteer.errors import ConfigError

rounded = partial(Table, box=ROUNDED)  # a table, as all commands draw theirs


def say(console: Console, text: str) -> None:
    """Print a text as it is, in one line however long: users copy what is in it."""
    console.print(text, soft_wrap=True, highlight=False, markup=False)


def check_folder(flag: str, file: Path | None) -> None:
    """Refuse a file in a folder that is not there, before minutes of work are lost for it.

    Args:
        flag: that names the file.
        file: None: it is not written.

    Raises:
        ConfigError: its folder does not exist.
    """
    if file is not None and not file.expanduser().absolute().parent.is_dir():
        raise ConfigError(f"{flag} {file}: its folder does not exist")


def write(flag: str, file: Path, text: str) -> None:
    """Write a text; an older file is replaced.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        file.expanduser().write_text(text, encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"{flag} {file}: cannot be written ({exc.strerror or exc})") from exc
