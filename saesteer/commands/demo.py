"""`saesteer demo`: two questions to the embedded model, as it is and with two features clamped, in one batch."""

import json
import os
import shutil
import sys
import textwrap
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from saesteer.commands.embedded import (
    BRIDGE,
    DEMO_DICTIONARY,
    DEMO_MLP,
    DEMO_SAE,
    DEMO_TRANSCODER,
    DICTIONARIES,
    FRENCH,
    GOLD,
    MLP_FEATURE,
    MLP_VALUE,
    OCEAN,
    bridge,
    engine_options,
    ensure_model,
    mlp,
)
from saesteer.commands.waiting import steps
from saesteer.plugin import job

QUESTIONS = ("Who are you?", "What should I do this weekend?")


def run(console: Console, *, verbose: bool = False) -> None:
    """Set up the model, ask the questions and print the answers.

    Raises:
        SaesteerError: the model cannot be obtained, or the engine does not start.
    """
    specs = (None, bridge(), mlp())
    batch = job.Batch(
        prompts=QUESTIONS * len(specs),
        steer=[spec for spec in specs for _ in QUESTIONS],
        max_tokens=48,
        repetition_penalty=1.1,
        chat=True,
    )
    with steps(console, hidden=verbose) as show:
        show("Looking for the model")
        model = ensure_model(show)
        show("Starting vLLM and asking, less than a minute on most machines")
        dictionaries = {name: str(file) for name, file in DICTIONARIES.items()}
        [answers] = job.run(str(model), [batch], dictionaries=dictionaries, options=engine_options(), verbose=verbose)
    texts = [answer.text.strip() for answer in answers]
    _show(console, [texts[at :: len(QUESTIONS)] for at in range(len(QUESTIONS))])


def _show(console: Console, rows: list[list[str]]) -> None:
    console.print(
        "\nSmolLM2-135M-Instruct in stock vLLM, six requests in one batch. Two of them clamp one feature of a sparse "
        f"autoencoder at layer 15, number {BRIDGE}, to twice the strongest activation that was seen of it. Two clamp "
        f"feature {MLP_FEATURE} of a skip transcoder of layer 12's MLP to {MLP_VALUE:g} times its own.\n"
    )
    heads = ("", "as it is", f"feature {BRIDGE} clamped", f"{MLP_FEATURE} of the MLP clamped")
    table = Table(*heads, box=box.ROUNDED, show_lines=True)
    for question, (plain, clamped, inside) in zip(QUESTIONS, rows, strict=True):
        table.add_row(Text(question, style="bold"), Text(plain), Text(clamped, style="yellow"), Text(inside))
    console.print(table)
    console.print("\nWhat to try next\n", style="bold")
    # soft_wrap: users copy these commands.
    console.print(next_steps(), soft_wrap=True, highlight=False, markup=False)


def next_steps() -> str:
    """The commands to try next, as text."""
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
        Run the same model as an OpenAI server:

          {command} serve {DEMO_DICTIONARY}

        and, once it is listening, send a request from another terminal:

          curl -s localhost:8000/v1/chat/completions -H 'Content-Type: application/json' -d '{json.dumps(body)}'

        Other features to clamp: {OCEAN} the ocean (value 1), {GOLD} gold, {FRENCH} French.
        The transcoder is the dictionary {DEMO_MLP}. Describe the two:

          {command} inspect {_short(DEMO_SAE)}
          {command} inspect {_short(DEMO_TRANSCODER)}

        Prove that steering works on this machine and affects no other request:

          {command} doctor"""
    )


def _command() -> str:
    """How to call saesteer from here: it may be in an environment that is not activated."""
    return "saesteer" if shutil.which("saesteer") else _short(Path(sys.argv[0]).absolute())


def _short(path: Path) -> str:
    here = os.path.relpath(path)
    return str(path) if here.startswith("..") else here
