"""The command `saesteer`: its arguments and how it reports mistakes. The files that it calls do the work."""

import os
import sys
from collections.abc import Mapping
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, Literal, get_origin, get_type_hints

import typer

from saesteer import __version__
from saesteer.config.config import ADMIN_KEY, CONFIG_FILE, OPTIONS, SaesteerConfig
from saesteer.config.settings import read_settings
from saesteer.errors import SaesteerError, needs, printable
from saesteer.wings import find

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Clamp features of sparse autoencoders, per request, inside a stock vLLM server.",
)

_SHORT = {"--require-spec": "spec", "--default-module-required": "default"}  # flag → the value of --require


def _flag(name: str) -> Any:
    one = OPTIONS[name]
    return typer.Option(one.flag, metavar=one.metavar, help=one.help)


Dictionaries = Annotated[list[str] | None, _flag("dictionaries")]
Settings = Annotated[
    str | None,
    typer.Option(metavar="FILE", envvar=CONFIG_FILE, help="A YAML file with all these settings; flags override it."),
]
Verbose = Annotated[bool, typer.Option("--verbose", help="Show vLLM's output.")]


def _say_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"saesteer {__version__}")
        raise typer.Exit


@app.callback()
def _saesteer(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_say_version)
    ] = False,
) -> None:
    pass


def _with_settings(command: Any) -> Any:
    """Gives a command a flag for each setting, of which None says that it was not given."""
    kinds = get_type_hints(SaesteerConfig)

    def flag(name: str) -> Parameter:
        kind = {tuple: list[str], Mapping: list[str], Literal: str}.get(get_origin(kinds[name]), kinds[name])
        return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, _flag(name)])

    *own, _ = signature(command).parameters.values()
    command.__signature__ = Signature([*own, *(flag(name) for name, one in OPTIONS.items() if one.flag)])
    return command


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
@_with_settings
def serve(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(help="A folder, a hub id, `demo` for the embedded model with its dictionaries, or `gemma`.")
    ],
    saesteer_config: Settings = None,
    saesteer_admin_key: Annotated[
        str | None,
        typer.Option(
            envvar=ADMIN_KEY,
            show_envvar=True,
            help="Key that the admin routes require as Authorization: Bearer KEY; without it they are off.",
        ),
    ] = None,
    verbose: Verbose = False,
    **settings: Any,
) -> None:
    """Start vLLM's OpenAI server with steering. Every other flag goes to `vllm serve` unchanged; MODEL comes first."""
    from saesteer.commands import serve

    words = {name: value for name, value in settings.items() if value is not None}
    if short := [_SHORT[word] for word in context.args if word in _SHORT]:
        words["require"] = [*words.get("require", ()), *short]
    config = read_settings(file=saesteer_config, **words)
    flags = [word for word in context.args if word not in _SHORT]
    serve.serve(model, config, flags, saesteer_admin_key or None, verbose=verbose)


def main() -> None:
    """Run a command; a mistake is one sentence on stderr and exit code 2."""
    # The hub's library logs its retries line by line, before the one sentence that matters. Its import reads this.
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    find("saesteer.workbench.cli:app")  # it adds its commands
    try:
        with needs():
            app()
    except SaesteerError as error:
        typer.echo(f"saesteer: {printable(' '.join(str(error).split()))}", err=True)
        sys.exit(2)
