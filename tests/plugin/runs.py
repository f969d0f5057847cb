"""One of vLLM's runners in a process of its own: what its engines answer to the table of cases (runner_cases.py)."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.apart import forked, tell
from tests.plugin import runners, tiny_engine
from tests.plugin.conftest import preemptions
from tests.plugin.runner_cases import BROKEN, CASES, PROMPTS, TOKENS, WORLDS, Ask

STEERED = ["everywhere", "generated", "window", "edited and read"]
TABLE = [Ask(case, prompt, spec) for prompt in PROMPTS.values() for case, spec in CASES.items()]
# Of equal lengths, so that batches are of the same shapes without plugin; of prompts that share nothing.
BESIDE = [
    Ask(case, [2 + 5 * n, *PROMPTS["58 tokens"][1:]], CASES[case])
    for n, case in enumerate(name for one in STEERED for name in ("plain", one))
]


def start_one(llm: Any, name: str, one: Ask) -> Ask:
    """Add a request to an engine, whose answer comes when it has ended.

    Raises:
        SpecError: the request is refused.
    """
    from vllm.sampling_params import RequestOutputKind

    params = tiny_engine.params_of(one.spec, max_tokens=one.tokens, output_kind=RequestOutputKind.FINAL_ONLY)
    llm.llm_engine.add_request(name, {"prompt_token_ids": [*one.prompt]}, params)
    return one


def ask(llm: Any, several: Sequence[Ask]) -> list[Any]:
    """What is told of each, the field that was refused, or that it failed. Each comes a step behind the one before."""
    from saesteer import SpecError

    engine, told = llm.llm_engine, dict[str, Any]()
    waiting = [*enumerate(several)]
    while waiting or engine.has_unfinished_requests():
        if waiting:
            number, one = waiting.pop(0)
            try:
                start_one(llm, str(number), one)
            except SpecError as error:
                told[str(number)] = {"refused": error.field}
        told |= {output.request_id: tiny_engine.ended(output) for output in engine.step() if output.finished}
    return [told[str(number)] for number in range(len(several))]


def work(folder: Path, model: str, stock: bool) -> Mapping[str, Any]:
    """Start an engine, ask it everything."""
    llm = runners.start(folder, model, stock=stock)
    beside = [one._replace(spec=None) for one in BESIDE] if stock else BESIDE
    found: dict[str, Any] = {"beside": ask(llm, beside)}
    if stock:
        return found
    runners.break_rows(llm, BROKEN)
    for world, cold in WORLDS.items():
        assert not cold or llm.reset_prefix_cache()
        found[world] = ask(llm, TABLE)
    found["preempted"] = preemptions(llm)
    ask(llm, [Ask("plain", PROMPTS["58 tokens"], None, TOKENS)])
    found["left"] = tiny_engine.left(runners.worker(llm))
    return found


if __name__ == "__main__":
    runner, place = sys.argv[1], Path(sys.argv[2])
    runners.begin(runner)
    engines = {f"{model} stock": (model, True) for model in runners.MODELS} | {
        one: (one, False) for one in runners.MODELS
    }
    tell({name: forked(work, place, *which) for name, which in engines.items()})
