"""`saesteer demo`: the stored cases of the playground, put to the embedded model without and with their clamps."""

import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from saesteer.commands.embedded import (
    DEMO_DICTIONARY,
    GALLERY,
    clamp,
    dictionaries,
    engine_options,
    ensure_model,
)
from saesteer.commands.waiting import steps
from saesteer.plugin import job
from saesteer.workbench.written import rounded, say

_SENTENCES = re.compile(r".*(?<!\d)[.!?][\"”')]?(?=\s|$)", re.DOTALL)


def run(console: Console, *, verbose: bool = False) -> None:
    """Set up the model, ask the questions and print the answers.

    Raises:
        SaesteerError: the model cannot be obtained, or the engine does not start.
    """
    cases = json.loads(GALLERY.read_text())["cases"]
    with steps(console, hidden=verbose) as show:
        show("Looking for the model")
        own = {DEMO_DICTIONARY: str(dictionaries()[DEMO_DICTIONARY])}
        model = ensure_model(show)
        show("Starting vLLM and asking, less than a minute on most machines")
        options = engine_options()
        [answers] = job.run(str(model), [batch_of(cases)], dictionaries=own, options=options, verbose=verbose)
    texts = [whole(answer.text) for answer in answers]
    console.print(
        f"\nSmolLM2-135M-Instruct in stock vLLM, {len(texts)} requests in one batch. Half of them clamp one feature of "
        "a sparse autoencoder at layer 15 to a multiple of the strongest activation that was seen of it.\n"
    )
    table = rounded("", "as it is", "clamped", show_lines=True)
    for case, plain, clamped in zip(cases, texts[: len(cases)], texts[len(cases) :], strict=True):
        asked = Text.assemble((f"{case['name']}\n", "bold yellow"), f"feature {case['feature']} × {case['value']:g}\n")
        table.add_row(asked.append(f"\n{case['question']}", "bold"), Text(plain), Text(clamped, style="yellow"))
    console.print(table)
    say(console, next_steps())


def batch_of(cases: list[Any]) -> job.Batch:
    """The questions of the stored cases as they are, then again with the clamps."""
    questions = [case["question"] for case in cases]
    specs = [clamp(case["dictionary"], case["feature"], case["value"]) for case in cases]
    steer = [*[None] * len(cases), *specs]
    return job.Batch(prompts=questions * 2, steer=steer, max_tokens=64, repetition_penalty=1.1, chat=True)


def whole(text: str) -> str:
    """A text up to its last whole sentence; with an ellipsis if it has none."""
    found = _SENTENCES.match(text)
    return found[0].strip() if found else f"{text.strip()} …"


def next_steps() -> str:
    """The commands to try next, as text; saesteer may be in an environment that is not activated."""
    command = "saesteer" if shutil.which("saesteer") else os.path.relpath(Path(sys.executable).with_name("saesteer"))
    return (
        f"\nProve that steering works on this machine and affects no other request:\n\n  {command} doctor\n\n"
        "Try it yourself, on a page at http://localhost:8000/saesteer/ and as an OpenAI server:\n\n"
        f"  {command} serve {DEMO_DICTIONARY}"
    )
