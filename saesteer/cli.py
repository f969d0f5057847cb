"""The command `saesteer`: what its words mean and how mistakes are told. What it does is in the files it calls."""

import logging
import sys
from typing import Annotated

import typer
from rich.console import Console

from saesteer import __version__
from saesteer.errors import SaesteerError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Clamp features of sparse autoencoders, per request, inside a stock vLLM server.",
)

Dictionaries = Annotated[
    list[str] | None,
    typer.Option(
        "--dictionary",
        metavar="NAME=PLACE[@SITE]",
        help="A dictionary and its name in requests: a path or hub id, @SITE if its files do not say it. Repeatable.",
    ),
]
Verbose = Annotated[bool, typer.Option("--verbose", help="Show what vLLM says.")]


def _say_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"saesteer {__version__}")
        raise typer.Exit


@app.callback()
def _saesteer(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and end.", is_eager=True, callback=_say_version)
    ] = False,
) -> None:
    pass


@app.command()
def demo(verbose: Verbose = False) -> None:
    """Ask a small model two questions, without and with a feature clamped. Needs no network after the first time."""
    from saesteer import launch
    from saesteer.demo import run

    launch.need_vllm()
    run(Console(), verbose=verbose)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A folder, a hub id, or `demo` for the embedded model and dictionary.")],
    dictionary: Dictionaries = None,
    sites: Annotated[
        list[str] | None,
        typer.Option(
            "--sites", metavar="SITE,...", help="Sites to instrument beside those of the dictionaries. Repeatable."
        ),
    ] = None,
    max_edits: Annotated[int, typer.Option("--max-edits", help="Table entries that one request may use.")] = 64,
) -> None:
    """Start vLLM's OpenAI server with steering. Every other flag goes to `vllm serve` as it is; MODEL comes first."""
    from saesteer import launch

    launch.serve(model, launch.config_from(dictionary or [], sites or [], max_edits), context.args)


@app.command()
def inspect(
    place: Annotated[str, typer.Argument(metavar="PLACE", help="A file, a folder or a hub id (org/repo/folder).")],
) -> None:
    """Say what a weight file is: format, site, shapes, activation, units. Reads no weights."""
    from saesteer.inspect import report

    typer.echo(report(place))


@app.command()
def doctor(
    model: Annotated[str, typer.Argument(help="A folder, a hub id, or `demo` for the embedded one.")] = "demo",
    dictionary: Dictionaries = None,
    feature: Annotated[
        int | None, typer.Option("--feature", help="The feature to clamp; default: the strongest.")
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Prove on this machine that steering works and touches nobody else. Exit code 1 where it does not."""
    from saesteer import launch
    from saesteer.doctor import run

    launch.need_vllm()
    if not run(Console(), model, launch.config_from(dictionary or []), feature, verbose=verbose):
        raise typer.Exit(1)


def main() -> None:
    """Run a command; a mistake is one sentence on stderr and exit code 2."""
    # Its retries are told line by line, before the one sentence that counts.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        app()
    except SaesteerError as error:
        typer.echo(f"saesteer: {' '.join(str(error).split())}", err=True)
        sys.exit(2)
