"""What commands do while their user waits: show the present step, load a model in Transformers. Knows no command."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


@contextmanager
def steps(console: Console, *, hidden: bool) -> Iterator[Callable[[str], None]]:
    """A spinner with the time so far, on a terminal unless hidden; gives the function that names the present step."""
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=hidden or not console.is_terminal) as progress:
        task = progress.add_task("")
        yield lambda step: progress.update(task, description=step)


def load_model(place: str, dictionaries: Mapping[str, Any], sites: Sequence[str] = ()) -> Any:
    """The ``saesteer.hf.Model`` of a checked model, its dictionaries and more sites, without Transformers' bar."""
    from transformers.utils import logging

    from saesteer import hf

    logging.disable_progress_bar()
    return hf.Model(place, dictionaries=dictionaries, sites=sites)
