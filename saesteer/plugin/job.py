"""One engine in a process of its own: batches of prompts in, answers out. Stock vLLM, or with saesteer.

Each engine has its own process, because only its end frees what it holds, and whether plugins load is decided once.
This file does not know what the answers are for: the demo and `saesteer doctor` ask.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from saesteer.errors import ConfigError, SaesteerError
from saesteer.language.fields import Fields, Json

_ERROR = re.compile(
    r"^(?:\(.*?\)\s*)?(?:ERROR\b.*?\]\s*|\S+: (?=error: ))?((?:\w+\.)*\w*(?:Error|Exception|error)): (.+)$"
)


@dataclass(frozen=True, slots=True)
class Batch:
    """Prompts that are generated together, greedily.

    Attributes:
        prompts: texts, or lists of token ids.
        steer: a spec as JSON, or None, for each prompt; empty: no steering.
        chat: each prompt is a text, used as a user's turn in the model's chat template.
        fresh: forget the prefix cache first.
        follows: each prompt is a text, the next turn behind the answer of the batch before.
        top: how many of the likeliest first tokens to tell.
    """

    prompts: Sequence[str | Sequence[int]]
    steer: Sequence[Fields | None] = ()
    max_tokens: int = 32
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    chat: bool = False
    fresh: bool = False
    follows: bool = False
    top: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """The completion of one prompt."""

    text: str
    prompt_ids: list[int]
    ids: list[int]
    logprobs: list[float]  # one for each token of ids
    cached: int  # tokens of the prompt that the prefix cache had
    saesteer: Fields = field(default_factory=dict)  # what a steered answer reports
    first: Sequence[tuple[int, str, float]] = ()  # the likeliest first tokens: id, text, logprob
    seconds: float = 0.0  # until the first token, where vLLM was asked for statistics


def run(
    model: str,
    batches: Sequence[Batch],
    *,
    dictionaries: Fields | None,
    options: Fields,
    verbose: bool = False,
) -> list[list[Completion]]:
    """Start an engine, generate the batches one after the other, end it.

    Args:
        model: a folder or hub id.
        batches: what to generate.
        dictionaries: as ``saesteer.LLM`` takes them; None: stock vLLM, which loads no plugin.
        options: anything else that ``vllm.LLM`` takes.
        verbose: show vLLM's output, which is otherwise hidden.

    Raises:
        ConfigError: the engine refuses the model, a dictionary or a spec.
        SaesteerError: the engine failed; the message gives its reason.
    """
    job = {
        "model": model,
        "dictionaries": None if dictionaries is None else dict(dictionaries),
        "options": dict(options),
        "batches": [asdict(batch) for batch in batches],
    }
    # With the scheduler in the same process, all prompts of a batch are there before its first step. Otherwise the last
    # ones may miss it, batches have different shapes from run to run, and stock vLLM does not repeat its own logprobs.
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    environment["PYTHONSAFEPATH"] = "1"  # nothing is imported from the current directory, also by what vLLM starts
    if dictionaries is None:
        environment["VLLM_PLUGINS"] = ""
    with tempfile.TemporaryDirectory(prefix="saesteer-") as scratch:
        answers, log = Path(scratch, "answers.json"), Path(scratch, "log.txt")
        with log.open("w") as said:
            done = subprocess.run(
                [sys.executable, "-P", "-m", "saesteer.plugin.job", str(answers)],
                input=json.dumps(job),
                text=True,
                env=environment,
                stdout=None if verbose else said,
                stderr=None if verbose else said,
                check=False,
            )
        if not answers.is_file():
            reason = reason_in(log.read_text()) or f"exit code {done.returncode}"
            raise SaesteerError(f"the engine could not start ({reason}); --verbose shows all of vLLM's output")
        found = json.loads(answers.read_text())
    if isinstance(found, str):
        raise ConfigError(found)
    return [[Completion(**answer) for answer in batch] for batch in found]


def reason_in(log: str) -> str:
    """The first error of a log: later errors are about the processes that it took down."""
    found = [match for line in log.splitlines() if (match := _ERROR.match(line.strip()))]
    return f"{found[0][1]}: {found[0][2]}"[:400] if found else ""


def _work(job: Json) -> list[list[Json]]:
    import vllm

    from saesteer.plugin.llm import LLM

    if job["dictionaries"] is None:
        llm: Any = vllm.LLM(model=job["model"], **job["options"])
    else:
        llm = LLM(job["model"], dictionaries=job["dictionaries"], **job["options"])
    made: list[list[Any]] = [[]]
    said: list[Any] = []  # of each prompt, what was said before
    for words in job["batches"]:
        batch = Batch(**words)
        said = _prompts(llm, batch, said, made[-1])
        made.append(_generate(llm, batch, said))
    return [[asdict(_completion(output)) for output in outputs] for outputs in made[1:]]


def _prompts(llm: Any, batch: Batch, said: Sequence[Any], answers: Sequence[Any]) -> list[Any]:
    """What vLLM is asked: messages, texts or token ids; what was said before comes first."""
    if batch.chat:
        turns = [[{"role": "user", "content": text}] for text in batch.prompts]
        if not batch.follows:
            return turns
        told = [[{"role": "assistant", "content": answer.outputs[0].text}] for answer in answers]
        return [[*before, *answer, *turn] for before, answer, turn in zip(said, told, turns, strict=True)]
    if not batch.follows:
        return [text if isinstance(text, str) else {"prompt_token_ids": list(text)} for text in batch.prompts]
    encode = llm.get_tokenizer().encode
    return [
        {
            "prompt_token_ids": [
                *one.prompt_token_ids,
                *one.outputs[0].token_ids,
                *encode(text, add_special_tokens=False),
            ]
        }
        for one, text in zip(answers, batch.prompts, strict=True)
    ]


def _generate(llm: Any, batch: Batch, prompts: list[Any]) -> list[Any]:
    from vllm import SamplingParams

    if batch.fresh:
        llm.reset_prefix_cache()
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=batch.max_tokens,
            repetition_penalty=batch.repetition_penalty,
            ignore_eos=batch.ignore_eos,
            logprobs=batch.top,
            extra_args=None if spec is None else {"saesteer": spec},
        )
        for spec in batch.steer or [None] * len(batch.prompts)
    ]
    found: list[Any] = (llm.chat if batch.chat else llm.generate)(prompts, params, use_tqdm=False)
    return found


def _completion(output: Any) -> Completion:
    made = output.outputs[0]
    logprobs = [step[token].logprob for token, step in zip(made.token_ids, made.logprobs, strict=True)]
    cached = output.num_cached_tokens or 0
    said = getattr(made, "saesteer", {})
    tokens = list(output.prompt_token_ids), list(made.token_ids)
    first = [(token, one.decoded_token or "", one.logprob) for token, one in (made.logprobs or [{}])[0].items()]
    seconds = getattr(output.metrics, "first_token_latency", 0.0)
    return Completion(made.text, *tokens, logprobs, cached, said, first, seconds)


def _main() -> None:
    try:
        found: Any = _work(json.load(sys.stdin))
    except SaesteerError as exc:
        found = str(exc)
    Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    _main()
