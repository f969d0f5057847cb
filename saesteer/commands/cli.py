"""The command `saesteer`: its arguments and how it reports mistakes. The files that it calls do the work."""

import logging
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from saesteer import __version__
from saesteer.config.config import ADMIN_KEY, OPTIONS
from saesteer.errors import ConfigError, SaesteerError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Clamp features of sparse autoencoders, per request, inside a stock vLLM server.",
)


def _flag(name: str) -> Any:
    one = OPTIONS[name]
    return typer.Option(one.flag, metavar=one.metavar, help=one.help)


Dictionaries = Annotated[list[str] | None, _flag("dictionaries")]
Settings = Annotated[
    str | None,
    typer.Option("--saesteer-config", metavar="FILE", help="A YAML file with all these settings; flags override it."),
]
Model = Annotated[str, typer.Option("--model", help="A folder, a hub id, or `demo` for the embedded one.")]
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


@app.command()
def demo(verbose: Verbose = False) -> None:
    """Ask a small model two questions, without and with features clamped. Needs no network after the first run."""
    from saesteer.commands import serve
    from saesteer.commands.demo import run

    serve.need_vllm()
    run(Console(), verbose=verbose)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A folder, a hub id, or `demo` for the embedded model with its own.")],
    dictionary: Dictionaries = None,
    sites: Annotated[list[str] | None, _flag("sites")] = None,
    reads: Annotated[list[str] | None, _flag("reads")] = None,
    vector: Annotated[list[str] | None, _flag("vectors")] = None,
    module: Annotated[list[str] | None, _flag("modules")] = None,
    max_read_mib: Annotated[int | None, _flag("max_read_mib")] = None,
    max_edits: Annotated[int | None, _flag("max_edits")] = None,
    pool_rows: Annotated[int | None, _flag("pool_rows")] = None,
    inline_rows: Annotated[int | None, _flag("inline_rows")] = None,
    registers: Annotated[int | None, _flag("registers")] = None,
    graph_sets: Annotated[int | None, _flag("graph_sets")] = None,
    dictionary_folder: Annotated[str | None, _flag("dictionary_folder")] = None,
    default_module: Annotated[str | None, _flag("default_module")] = None,
    max_dose: Annotated[float | None, _flag("max_dose")] = None,
    max_dose_action: Annotated[str | None, _flag("max_dose_action")] = None,
    saesteer_config: Settings = None,
    saesteer_admin_key: Annotated[
        str | None,
        typer.Option(
            "--saesteer-admin-key",
            envvar=ADMIN_KEY,
            show_envvar=True,
            help="Key that the admin routes require as Authorization: Bearer KEY; without it they are off.",
        ),
    ] = None,
) -> None:
    """Start vLLM's OpenAI server with steering. Every other flag goes to `vllm serve` unchanged; MODEL comes first."""
    from saesteer.commands import serve
    from saesteer.config.settings import read_settings

    config = read_settings(
        dictionary or [],
        sites or [],
        reads=reads or [],
        vectors=vector or [],
        modules=module or [],
        file=saesteer_config,
        max_read_mib=max_read_mib,
        max_edits=max_edits,
        pool_rows=pool_rows,
        inline_rows=inline_rows,
        registers=registers,
        graph_sets=graph_sets,
        dictionary_folder=dictionary_folder,
        default_module=default_module,
        max_dose=max_dose,
        max_dose_action=max_dose_action,
    )
    serve.serve(model, config, context.args, saesteer_admin_key or None)


@app.command()
def inspect(
    place: Annotated[
        str, typer.Argument(metavar="PLACE[@SITE]", help="A file, a folder or a hub id (org/repo/folder).")
    ],
    measure: Annotated[bool, typer.Option("--measure", help="Also measure L0 and FVU on a model and a text.")] = False,
    model: Model = "demo",
    text_file: Annotated[Path | None, typer.Option("--text-file", help="Text for --measure, in UTF-8.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="How many tokens of the text to read.")] = 10_000,
) -> None:
    """Describe a weight file: format, site, shapes, activation, units. Reads no weights, except to measure."""
    from saesteer.commands.inspect import report

    typer.echo(report(place))
    if measure or text_file is not None:
        from saesteer.commands.measure import run

        run(Console(), model, place, text_file, max_tokens=max_tokens)


@app.command()
def convert(
    place: Annotated[
        str, typer.Argument(metavar="PLACE[@SITE]", help="A file, a folder or a hub id (org/repo/folder).")
    ],
    target: Annotated[Path, typer.Argument(metavar="FILE", help="A new .safetensors file.")],
    _rows: Annotated[bool, typer.Option("--rows", help="Row by row; it writes nothing else.")] = True,
    dtype: Annotated[str | None, typer.Option("--dtype", help="Of the matrices; default: as stored.")] = None,
) -> None:
    """Write a dictionary of any format as saesteer's own file, from which a server reads rows fastest."""
    from saesteer.commands.convert import run

    typer.echo(run(place, target, dtype=dtype))


@app.command()
def features(
    text: Annotated[str, typer.Option("--text", help="Text that the model reads.")],
    dictionary: Dictionaries = None,
    model: Model = "demo",
    top_k: Annotated[int, typer.Option("--top-k", min=1, max=64, help="Features for each token.")] = 5,
    chat: Annotated[bool, typer.Option("--chat", help="Treat TEXT as a user's message in the chat template.")] = False,
) -> None:
    """Show the strongest features of a text, token by token. The model runs in Transformers."""
    from saesteer.commands.features import run
    from saesteer.config.settings import read_settings

    run(Console(), model, read_settings(dictionary or []), text, top_k=top_k, chat=chat)


@app.command()
def calibrate(
    text_file: Annotated[Path, typer.Option("--text-file", help="Text that the model reads, in UTF-8.")],
    dictionary: Dictionaries = None,
    model: Model = "demo",
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="How many tokens of the text to read.")] = 100_000,
) -> None:
    """Find the largest activation of each feature over a text and save it next to the dictionary, for unit max_act."""
    from saesteer.commands.calibrate import run
    from saesteer.config.settings import read_settings

    run(Console(), model, read_settings(dictionary or []), text_file, max_tokens=max_tokens)


@app.command()
def label(
    text_file: Annotated[Path | None, typer.Option("--text-file", help="Text that the model reads, in UTF-8.")] = None,
    from_neuronpedia: Annotated[
        Path | None,
        typer.Option("--from-neuronpedia", metavar="FOLDER", help="Export of a source, in place of a text."),
    ] = None,
    dictionary: Dictionaries = None,
    model: Model = "demo",
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="How many tokens of the text to read.")] = 100_000,
) -> None:
    """Find out what features are about, from a text or Neuronpedia's export, and save it next to the dictionary."""
    from saesteer.commands.label import run, run_import
    from saesteer.config.settings import read_settings

    config = read_settings(dictionary or [])
    if text_file is not None and from_neuronpedia is None:
        run(Console(), model, config, text_file, max_tokens=max_tokens)
    elif from_neuronpedia is not None and text_file is None:
        run_import(Console(), config, from_neuronpedia)
    else:
        raise ConfigError("label needs either --text-file FILE or --from-neuronpedia FOLDER")


@app.command()
def find(
    words: Annotated[str, typer.Argument(metavar="WORDS", help="What to look for in labels and examples.")] = "",
    feature: Annotated[int | None, typer.Option("--feature", min=0, help="Describe this feature instead.")] = None,
    positive: Annotated[Path | None, typer.Option("--positive", help="Text that has what is looked for.")] = None,
    negative: Annotated[Path | None, typer.Option("--negative", help="Text that does not have it.")] = None,
    dictionary: Dictionaries = None,
    model: Model = "demo",
    limit: Annotated[int, typer.Option("--limit", min=1, max=100, help="Features of each dictionary.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object for each feature.")] = False,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="How many tokens of each text to read.")] = 10_000,
) -> None:
    """Find features by words in their labels and examples, or by what tells two texts apart. Needs no network."""
    from saesteer.commands.find import run, run_contrast
    from saesteer.config.settings import read_settings

    config = read_settings(dictionary or [])
    if positive is not None and negative is not None:
        run_contrast(Console(), model, config, positive, negative, most=limit, max_tokens=max_tokens)
    elif positive is None and negative is None:
        run(Console(), config, words, feature=feature, most=limit, as_json=as_json)
    else:
        raise ConfigError("find needs both --positive FILE and --negative FILE, or neither")


@app.command()
def doctor(
    model: Annotated[str, typer.Argument(help="A folder, a hub id, or `demo` for the embedded one.")] = "demo",
    dictionary: Dictionaries = None,
    feature: Annotated[
        int | None, typer.Option("--feature", help="The feature to clamp; default: the strongest.")
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Prove on this machine that steering works and affects no other request. Exits with code 1 if it does not."""
    from saesteer.commands import serve
    from saesteer.commands.doctor import run
    from saesteer.config.settings import read_settings

    serve.need_vllm()
    if not run(Console(), model, read_settings(dictionary or []), feature, verbose=verbose):
        raise typer.Exit(1)


def main() -> None:
    """Run a command; a mistake is one sentence on stderr and exit code 2."""
    # It logs its retries line by line, before the one sentence that matters.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        app()
    except SaesteerError as error:
        typer.echo(f"saesteer: {' '.join(str(error).split())}", err=True)
        sys.exit(2)
