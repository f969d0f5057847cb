"""An ``LLM`` in a process of its own, asked over its standard input: so many requests at a time, each one's times back.

Each line in is a ``Load``, each line out ``Times``. A request begins when it is handed to vLLM and has its first token
when ``LLMEngine.step`` returns it. vLLM's own figures begin later, after a spec has been read, and would count the time
that prompts wait for a free place; here a place is free whenever a request begins.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

from bench.asks import Load, Shape, answers, probe, prompts, specs

READS = ("features", "probes", "activations")  # in an answer's field


@dataclass(frozen=True, slots=True)
class Times:
    """Of the requests of one run behind its run-in, in seconds from when each began."""

    first: list[float]  # its first token is there
    whole: list[float]  # its last one
    served: int  # answers that say that every edit has changed tokens, and have what they read


Prepared = tuple[Any, Any]  # prompt and sampling params


def prepare(load: Load, shape: Shape) -> list[Prepared]:
    """The requests as vLLM takes them; made before the clock runs."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return [
        (
            {"prompt_token_ids": ids},
            SamplingParams(
                temperature=0,
                max_tokens=tokens,
                ignore_eos=True,
                output_kind=RequestOutputKind.FINAL_ONLY if load.whole else RequestOutputKind.DELTA,
                extra_args=None if spec is None else {"saesteer": spec},
            ),
        )
        for ids, spec, tokens in zip(prompts(load, shape), specs(load, shape), answers(load), strict=True)
    ]


def drive(engine: Any, requests: list[Prepared], at_once: int, run_in: int = 0, *, whole_ones: bool = False) -> Times:
    """Run them through an ``LLMEngine``; one begins whenever another has ended, and the first few take no times.

    Of answers that come whole, vLLM's own state of a request tells that its first token is there.
    """
    waiting: Iterator[tuple[int, Prepared]] = iter(enumerate(requests))
    begun: dict[str, float] = {}
    first: dict[str, float] = {}
    whole: dict[str, float] = {}
    served = 0
    kept: list[Any] = []  # handles

    def admit() -> None:
        number, (prompt, params) = next(waiting, (0, (None, None)))
        if params is not None:
            begun[str(number)] = perf_counter()
            engine.add_request(str(number), prompt, params)

    for _ in range(at_once):
        admit()
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = perf_counter()
        if whole_ones and len(first) < len(begun):
            states = engine.output_processor.request_states
            young = [key for key in begun if key not in first]
            first |= {key: now for key in young if key not in states or not states[key].is_prefilling}
        for output in outputs:
            if output.outputs[0].token_ids:
                first.setdefault(output.request_id, now)
            if output.finished:
                whole[output.request_id] = now
                assert not output.num_cached_tokens, "a prompt was in the prefix cache: two runs with one seed"
                said = getattr(output.outputs[0], "saesteer", None)
                served += int(output.request_id) >= run_in and is_served(said)
                kept += handles(said)
                admit()
    assert len(whole) == len(requests)
    for handle in kept:
        handle.delete()
    timed = [key for key in whole if int(key) >= run_in]
    return Times([first[key] - begun[key] for key in timed], [whole[key] - begun[key] for key in timed], served)


def is_served(said: Any) -> bool:
    """Whether an answer says that all its edits have changed tokens, and has something of everything that it reads."""
    if not said or not all(one["tokens_edited"] > 0 for one in said["applied"]):
        return False
    return all(said[word] for word in READS if word in said)


def handles(said: Any) -> list[Any]:
    """Those of an answer; a client deletes what it has fetched."""
    return [one["handle"] for one in (said or {}).get("activations", ()) if "handle" in one]


def judge(engine: Any, shape: Shape) -> str:
    """Which engine this is, by what it makes of a spec: applied, refused or ignored."""
    prompt, params = prepare(Load("stock", 0, 1, 1, 8, 2), shape)[0]
    params.extra_args = {"saesteer": probe()}
    try:
        return "applied" if drive(engine, [(prompt, params)], 1).served else "ignored"
    except ValueError:  # with which vLLM refuses a request
        return "refused"


def main() -> None:
    """Start, then serve."""
    job = json.loads(sys.argv[1])
    # What libraries print goes to the log; answers have the pipe to themselves.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if job["settings"] is None:
        from vllm import LLM

        llm: Any = LLM(**job["options"])
    else:
        import saesteer

        llm = saesteer.LLM(**job["options"], **job["settings"])
    shape = Shape(**job["shape"])
    print(json.dumps(judge(llm.llm_engine, shape)), file=answers, flush=True)
    for line in sys.stdin:
        load = Load(**json.loads(line))
        times = drive(llm.llm_engine, prepare(load, shape), load.at_once, run_in=load.run_in, whole_ones=load.whole)
        print(json.dumps(asdict(times)), file=answers, flush=True)


if __name__ == "__main__":
    main()
