"""The commands of the workbench, put beside `saesteer serve`: their arguments. The files that they call do the work."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from saesteer.commands.cli import Dictionaries, Verbose, app
from saesteer.config.settings import read_settings
from saesteer.errors import ConfigError

__all__ = ["app"]

Place = Annotated[str, typer.Argument(metavar="PLACE[@SITE]", help="A file, a folder, a hub id, or np:MODEL/SOURCE.")]
MaxTokens = Annotated[int, typer.Option(help="How many tokens of the text to read.")]
Model = Annotated[str, typer.Option(help="A folder, a hub id, `demo` for the embedded one, or `gemma`.")]
Positive = Annotated[
    Path, typer.Option(metavar="FILE", help="Texts that show it, one on each line; .jsonl: texts or chats as JSON.")
]
Negative = Annotated[Path, typer.Option(metavar="FILE", help="Texts or chats that do not.")]
Contrasted = Annotated[
    list[str],
    typer.Option(metavar="SITE,...", help="Where to look for it; resid_post.all is every layer. Repeatable."),
]
Out = Annotated[Path, typer.Option(metavar="FILE", help="The .safetensors file to write.")]
Read = Annotated[
    Literal["mean", "last", "second-last"], typer.Option(help="Which tokens of a text, or of a chat's answer, to read.")
]
Runs = Annotated[
    str | None,
    typer.Option(metavar="vllm|hf", help="What runs the model; default: vLLM if it is installed."),
]


def _need_vllm() -> None:
    from saesteer.commands import serve

    serve.need_vllm()


@app.command()
def demo(verbose: Verbose = False) -> None:
    """Ask a small model five questions, without and with a feature clamped. Needs no network after the first run."""
    from saesteer.workbench.demo import run

    _need_vllm()
    run(Console(), verbose=verbose)


@app.command()
def inspect(
    place: Place,
    measure: Annotated[
        bool, typer.Option("--measure", help="Also measure L0, FVU and loss recovered on a model and a text.")
    ] = False,
    model: Model = "demo",
    text_file: Annotated[Path | None, typer.Option(help="Text for --measure, in UTF-8.")] = None,
    max_tokens: MaxTokens = 10_000,
) -> None:
    """Describe a weight file: format, site, shapes, activation, units. Reads no weights, except to measure."""
    from saesteer.workbench.inspect import report

    typer.echo(report(place))
    if measure or text_file is not None:
        from saesteer.workbench.measure import run

        run(Console(), model, place, text_file, max_tokens=max_tokens)


@app.command()
def convert(
    place: Place,
    target: Annotated[Path, typer.Argument(metavar="FILE", help="A new .safetensors file.")],
    dtype: Annotated[str | None, typer.Option(help="Store the matrices in this dtype; default: as they are.")] = None,
) -> None:
    """Write a dictionary as saesteer's own file, whose rows are read fastest."""
    from saesteer.workbench.convert import run

    typer.echo(run(place, target, dtype=dtype))


@app.command()
def features(
    text: Annotated[str, typer.Option(help="Text that the model reads.")],
    dictionary: Dictionaries = None,
    model: Model = "demo",
    top_k: Annotated[int, typer.Option(min=1, max=64, help="Features for each token.")] = 5,
    chat: Annotated[bool, typer.Option("--chat", help="Treat TEXT as a user's message in the chat template.")] = False,
    backend: Runs = None,
    verbose: Verbose = False,
) -> None:
    """Show the strongest features of a text, token by token."""
    from saesteer.workbench.features import choose, run

    config, chosen = read_settings(dictionary), choose(backend)
    run(Console(), model, config, text, top_k=top_k, chat=chat, backend=chosen, verbose=verbose)


@app.command()
def calibrate(
    text_file: Annotated[Path, typer.Option(help="Text that the model reads, in UTF-8.")],
    dictionary: Dictionaries = None,
    model: Model = "demo",
    max_tokens: MaxTokens = 100_000,
) -> None:
    """Find the largest activation of each feature over a text and save it next to the dictionary, for unit max_act."""
    from saesteer.workbench.calibrate import run

    run(Console(), model, read_settings(dictionary), text_file, max_tokens=max_tokens)


@app.command()
def label(
    text_file: Annotated[Path | None, typer.Option(help="Text that the model reads, in UTF-8.")] = None,
    from_neuronpedia: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Export of a source, in place of a text."),
    ] = None,
    features: Annotated[
        list[int] | None,
        typer.Option("--effects", metavar="FEATURE", min=0, help="Measure what its clamp does; repeatable."),
    ] = None,
    dictionary: Dictionaries = None,
    model: Model = "demo",
    max_tokens: MaxTokens = 100_000,
    backend: Runs = None,
    verbose: Verbose = False,
) -> None:
    """Find out what features are about, or what their clamps do, and save it next to the dictionary."""
    from saesteer.workbench import effects
    from saesteer.workbench.features import choose
    from saesteer.workbench.label import run, run_import

    config = read_settings(dictionary)
    if (text_file is not None) + (from_neuronpedia is not None) + bool(features) > 1:
        raise ConfigError("label takes one of --text-file, --from-neuronpedia and --effects")
    if features:
        _need_vllm()
        effects.run(Console(), model, config, features, verbose=verbose)
    elif text_file is not None:
        run(Console(), model, config, text_file, max_tokens=max_tokens, backend=choose(backend))
    elif from_neuronpedia is not None:
        run_import(Console(), config, from_neuronpedia)
    else:
        raise ConfigError("label needs --text-file FILE, --from-neuronpedia FOLDER or --effects FEATURE")


@app.command()
def find(
    words: Annotated[str, typer.Argument(metavar="WORDS", help="What to look for in labels and examples.")] = "",
    feature: Annotated[int | None, typer.Option(min=0, help="Describe this feature instead.")] = None,
    positive: Annotated[
        Path | None,
        typer.Option(help="A file with one text, not one per line, that has what is looked for."),
    ] = None,
    negative: Annotated[Path | None, typer.Option(help="A file with one text that does not have it.")] = None,
    dictionary: Dictionaries = None,
    model: Model = "demo",
    limit: Annotated[int, typer.Option(min=1, max=100, help="Features of each dictionary.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object for each feature.")] = False,
    max_tokens: Annotated[int, typer.Option(help="How many tokens of each text to read.")] = 10_000,
    backend: Runs = None,
) -> None:
    """Find features by words in their labels and examples, or by what tells two texts apart. Needs no network."""
    from saesteer.workbench.find import run, run_contrast

    contrast = positive is not None or negative is not None
    if bool(words) + (feature is not None) + contrast > 1:
        raise ConfigError("find takes one of WORDS, --feature, or --positive with --negative")
    config = read_settings(dictionary)
    if positive is not None and negative is not None:
        from saesteer.workbench.features import choose  # it imports torch, which no search needs

        how, sides = choose(backend), (positive, negative)
        run_contrast(Console(), model, config, *sides, most=limit, max_tokens=max_tokens, as_json=as_json, backend=how)
    elif not contrast:
        if backend is not None or model != "demo":
            raise ConfigError("find takes --model and --backend with --positive and --negative: labels need no model")
        run(Console(), config, words, feature=feature, most=limit, as_json=as_json)
    else:
        raise ConfigError("find needs both --positive FILE and --negative FILE, or neither")


def _contrast(kind: Literal["vector", "probe"]) -> Callable[..., None]:
    def run(
        positive: Positive,
        negative: Negative,
        site: Contrasted,
        out: Out,
        model: Model = "demo",
        tokens: Read = "mean",
        verbose: Verbose = False,
    ) -> None:
        from saesteer.workbench import contrast

        _need_vllm()
        getattr(contrast, kind)(Console(), model, positive, negative, site, out=out, tokens=tokens, verbose=verbose)

    return run


_MEANS = "Make a vector from two files of texts: the difference of their means at each site. The engine reads them."
_FIT = "Train a probe on two files of texts, by logistic regression, and write that of the site which does best."
app.command("vector", help=_MEANS)(_contrast("vector"))
app.command("probe", help=_FIT)(_contrast("probe"))


@app.command()
def prove(
    feature: Annotated[
        list[int] | None, typer.Option(min=0, help="Repeatable; default: the first 100 with examples.")
    ] = None,
    dictionary: Dictionaries = None,
    model: Model = "demo",
    random: Annotated[int, typer.Option(min=2, max=1000, help="Other features to compare with.")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the other features, noise and bootstrap.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write all as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Also draw the doses, as SVG.")] = None,
    verbose: Verbose = False,
) -> None:
    """Measure whether clamps of features do what their labels say, against controls. Needs no network and no judge."""
    from saesteer.workbench import prove

    _need_vllm()
    config, files = read_settings(dictionary), {"json_file": json_file, "plot": plot}
    prove.run(Console(), model, config, feature or [], random=random, seed=seed, **files, verbose=verbose)


@app.command()
def doctor(
    model: Annotated[str, typer.Argument(help="A folder, a hub id, `demo` for the embedded one, or `gemma`.")] = "demo",
    dictionary: Dictionaries = None,
    feature: Annotated[
        int | None,
        typer.Option(min=0, help="The feature to clamp; default: the strongest, and for `demo` the bridge."),
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Prove on this machine that steering works and affects no other request. Exits with code 1 if it does not."""
    from saesteer.workbench.doctor import run

    _need_vllm()
    if not run(Console(), model, read_settings(dictionary), feature, verbose=verbose):
        raise typer.Exit(1)
