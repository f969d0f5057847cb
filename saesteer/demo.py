"""`saesteer demo`: two questions to the embedded model, without and with the bridge clamped, in one batch.

Also the embedded default itself: which dictionary, which features, which engine options suit so small a model.
"""

import json
import os
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from saesteer.model import ensure_model
from saesteer.plugin import job

# Trained on the embedded model's own text; the model is ensure_model's.
DEMO_SAE = Path(__file__).parent / "data" / "smollm2-135m-l15-9216.safetensors"
DEMO_DICTIONARY = "demo"
# Features of it that a person would recognise.
BRIDGE, OCEAN, GOLD, FRENCH = 3497, 6511, 7081, 546

QUESTIONS = ("Who are you?", "What should I do this weekend?")


def bridge(value: float = 2.0) -> dict[str, Any]:
    """The spec of the demo: the bridge at `value` times the strongest activation that was seen of it."""
    edit = {"op": "clamp", "dictionary": DEMO_DICTIONARY, "feature": BRIDGE, "value": value, "unit": "max_act"}
    return {"edits": [edit]}


def engine_options() -> dict[str, Any]:
    """Options of vLLM for the embedded model: a small KV cache, and on a CPU no compilation, which takes a minute.

    float32, because in bf16 the answers hang on the rounding of each machine: the clamp leaves near ties behind.
    """
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 2048, "max_num_seqs": 16}
    options["kv_cache_memory_bytes"] = 1 << 30
    return options | ({"gpu_memory_utilization": 0.2} if _has_gpu() else {"enforce_eager": True})


def run(console: Console, *, verbose: bool = False) -> None:
    """Set up, ask, print.

    Raises:
        SaesteerError: the model cannot be had, or the engine does not start.
    """
    batch = job.Batch(
        prompts=[*QUESTIONS, *QUESTIONS],
        steer=[None] * len(QUESTIONS) + [bridge()] * len(QUESTIONS),
        max_tokens=48,
        repetition_penalty=1.1,
        chat=True,
    )
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=verbose,
    ) as progress:
        task = progress.add_task("Looking for the model")
        model = ensure_model(lambda step: progress.update(task, description=step))
        progress.update(task, description="Starting vLLM and asking, less than a minute on most machines")
        dictionaries = {DEMO_DICTIONARY: str(DEMO_SAE)}
        [answers] = job.run(str(model), [batch], dictionaries=dictionaries, options=engine_options(), verbose=verbose)
    texts = [answer.text.strip() for answer in answers]
    _show(console, texts[: len(QUESTIONS)], texts[len(QUESTIONS) :])


def _show(console: Console, plain: list[str], clamped: list[str]) -> None:
    console.print(
        "\nSmolLM2-135M-Instruct in stock vLLM, four requests in one batch. Two of them clamp one feature of a sparse "
        f"autoencoder at layer 15, number {BRIDGE}, to twice the strongest activation that was seen of it.\n"
    )
    table = Table("", "as it is", f"feature {BRIDGE} clamped", box=box.ROUNDED, show_lines=True)
    for question, left, right in zip(QUESTIONS, plain, clamped, strict=True):
        table.add_row(Text(question, style="bold"), Text(left), Text(right, style="yellow"))
    console.print(table)
    console.print("\nWhat to try next\n", style="bold")
    # soft_wrap: commands are there to be copied.
    console.print(next_steps(), soft_wrap=True, highlight=False, markup=False)


def next_steps() -> str:
    """Commands to go on with, as text."""
    body = {
        "model": DEMO_DICTIONARY,
        "messages": [{"role": "user", "content": QUESTIONS[0]}],
        "temperature": 0,
        "repetition_penalty": 1.1,
        "max_tokens": 48,
        "saesteer": bridge(),
    }
    command = _command()
    return textwrap.dedent(
        f"""\
        The same as an OpenAI server:

          {command} serve {DEMO_DICTIONARY}

        and, when it says that it listens, a request from another terminal:

          curl -s localhost:8000/v1/chat/completions -H 'Content-Type: application/json' -d '{json.dumps(body)}'

        Other features to clamp: {OCEAN} the ocean (value 1), {GOLD} gold, {FRENCH} French.
        What the dictionary is:

          {command} inspect {_short(DEMO_SAE)}

        Proof that steering works on this machine, and touches nobody else:

          {command} doctor"""
    )


def _command() -> str:
    """How to call saesteer from here: it may be in an environment that is not activated."""
    return "saesteer" if shutil.which("saesteer") else _short(Path(sys.argv[0]).absolute())


def _short(path: Path) -> str:
    here = os.path.relpath(path)
    return str(path) if here.startswith("..") else here


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
