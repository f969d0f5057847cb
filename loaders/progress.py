"""What a terminal shows while a large array is read. Knows no file and no format."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SHOWN_BYTES = 1 << 30  # arrays smaller than this are read before anybody looks


@contextmanager
def shown(what: str, size: int) -> Iterator[Callable[[int], None]]:
    """Show on a terminal how much of an array has been read; gives the function that adds bytes to it.

    Args:
        what: the array's name.
        size: its bytes.
    """
    if size < SHOWN_BYTES or not sys.stderr.isatty():
        yield lambda more: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=size)
        yield lambda more: progress.advance(task, more)
