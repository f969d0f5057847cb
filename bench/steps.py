"""GPU time that ops add to a step of a model, in replays of two of its captured graphs in turn; to a few microseconds.

    python -m bench.steps --out DIR [--model gemma-3-27b] [--stock]     a dummy model in vLLM, 16 requests that decode
    python -m bench.steps --out DIR --requests 1 16 64 256              more of them, with one engine
    python -m bench.steps --out DIR --prompt-tokens 64 512 2048         further on in their texts
    python -m bench.steps --out DIR --modes clamp clamps-4 clamps-16 clamps-64 vectors-1 vectors-4 vectors-16 named
                                                                        more edits, at more layers
    python -m bench.steps --out DIR --modes capture --requests 64      one layer captured; with probes, ten for them
    python -m bench.steps --out DIR --modes captures --requests 64              all layers

saesteer captures every step without ops, with some of them and with all (engine/graph_sets.py). All these graphs stand
in one process and read the same inputs, so a difference of two is what their ops take, whatever the clocks of the GPU
do meanwhile. Each mode is compared with the graphs without ops. With --stock another process captures stock vLLM's
graphs, and the kernels of the two are compared by name. A graph holds a step from the embedding to the last norm.
What capturing a set took is read from saesteer's log. Of the set with all ops it says nothing: vLLM captures that one.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise, product
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench import engines
from bench.asks import MODES, VARIED, Load, Shape, prompts, reads, specs
from bench.dummy import MODELS
from bench.nodes import keep_graphs, kernels, plain
from bench.timing import machine
from saesteer.plugin.contract import vllm_version

USUAL = ("idle", "clamp", "named")
PROMPT, TOKENS = 256, 200  # of a request; it decodes until its mode has been measured
SETTLE = 8  # steps in which all requests decode, before the one that is replayed
RUN_IN = 6  # replays of each graph that count for nothing
_LINE = re.compile(r"saesteer captured graphs for (.+), in ([\d.]+) s and (-?[\d.]+) GiB")

Row = dict[str, Any]


class Captures(logging.Filter):
    """Listens to saesteer's log while an engine starts: seconds and GiB of each set of graphs, by its name there.

    It lets all lines through. It is no handler, since vLLM takes those away when it sets up its log.
    """

    def __init__(self) -> None:
        super().__init__()
        self._found: dict[str, Row] = {}

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Until this ends, it hears the lines, also those that VLLM_LOGGING_LEVEL would leave out."""
        log = logging.getLogger("vllm.saesteer")
        before = log.level
        log.addFilter(self)
        log.setLevel(logging.INFO)
        try:
            yield
        finally:
            log.setLevel(before)
            log.removeFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        """Remember what a set took, should the line tell it."""
        told = _LINE.fullmatch(record.getMessage())
        if told:
            self._found[told[1]] = {"set_s": float(told[2]), "set_gib": float(told[3])}
        return True

    def of(self, sets: Sequence[Any]) -> list[Row]:
        """``set_s`` and ``set_gib`` of each of these sets; None where the log told nothing."""
        from saesteer.plugin.worker.graphs import name_of

        return [self._found.get(name_of(sites), {"set_s": None, "set_gib": None}) for sites in sets]


def turns(first: Any, second: Any, pairs: int) -> tuple[list[float], list[float]]:
    """Microseconds of the first graph, and those that each replay of the second takes longer than its neighbours.

    All replays are queued at once, so the host's time to launch them does not show.
    """
    order = [first, second] * (pairs + RUN_IN) + [first]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(order) + 1)]  # type: ignore[no-untyped-call]
    marks[0].record()
    for graph, mark in zip(order, marks[1:], strict=True):
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    times = [begin.elapsed_time(end) * 1e3 for begin, end in pairwise(marks)][2 * RUN_IN :]
    longer = [times[at] - (times[at - 1] + times[at + 1]) / 2 for at in range(1, len(times), 2)]
    return times[::2], longer


def measure(first: Any, second: Any, *, rounds: int, pairs: int) -> Row:
    """What the second graph takes beside the first: the median of all rounds' medians, and the smallest and largest."""
    found = [turns(first, second, pairs) for _ in range(rounds)]
    base = median(median(times) for times, _ in found)
    added = sorted(median(longer) for _, longer in found)
    percent = [round(100 * one / base, 3) for one in (median(added), added[0], added[-1])]
    return {
        "base_us": round(base, 2),
        "us": round(median(added), 2),
        **dict(zip(("percent", "low", "high"), percent, strict=True)),
        "rounds": rounds,
        "pairs": pairs,
    }


class Meter:
    """An engine in this process, whose full graphs are replayed in the middle of a step.

    Args:
        model: one of ``bench.dummy.MODELS``.
        requests: that decode at once, at most.
        prompt: tokens of a request's prompt, at most.
        folder: for the model's files.
        modes: that it will be asked for.
    """

    def __init__(self, model: str, requests: int, prompt: int, folder: Path, modes: Sequence[str]) -> None:
        from saesteer import LLM

        self.shape = Shape.of(model)
        given = engines.options(model, folder, at_once=requests, length=prompt + TOKENS)
        captures = Captures()
        with captures.listening():
            self.llm: Any = LLM(**given, **engines.settings(model, folder, modes=modes))
        [(self.manager, self.steering)] = self.llm.collective_rpc(_parts)
        self._took = captures.of(self.steering.choice.sets)
        self._then: Callable[[Any], None] | None = None
        usual = self.manager.run_fullgraph

        def run_fullgraph(shape: Any) -> Any:
            then, self._then = self._then, None
            if then is not None:
                then(shape)
            return usual(shape)

        self.manager.run_fullgraph = run_fullgraph

    def rows(self, name: str, requests: int, prompt: int, seed: int, **how: int) -> list[Row]:
        """What the ops of each set take in a step in which all requests of a mode decode; none are in the first set.

        Args:
            name: of the mode.
            requests: that decode.
            prompt: tokens before the first that they decode.
            seed: of their prompts, which the prefix cache must not have.
            **how: for ``measure``.
        """
        load = Load(name, seed, 0, requests, prompt, TOKENS)
        asked = zip(prompts(load, self.shape), specs(load, self.shape), strict=True)
        names = [self._admit(f"{seed} {number}", ids, spec) for number, (ids, spec) in enumerate(asked)]
        made: Counter[str] = Counter()
        while min(made[one] for one in names) < SETTLE:
            for output in self.llm.llm_engine.step():
                made[output.request_id] = len(output.outputs[0].token_ids)
        found: list[Row] = []

        def replay(shape: Any) -> None:
            graphs, choice = self.manager.graphs[shape].graphs, self.steering.choice
            for number, sites in enumerate(choice.sets):
                if number in (0, len(choice.sets) - 1) or choice.fits >> number & 1:  # another one would not do
                    row = measure(graphs[0], graphs[number], **how)
                    about = {"mode": name, "requests": requests, "prompt_tokens": prompt}
                    about |= {"set": number, "sites": sites.ops, "served": number == choice.at}
                    found.append(about | row)

        self._between(replay)
        self.llm.llm_engine.abort_request(names)
        while self.llm.llm_engine.has_unfinished_requests():
            self.llm.llm_engine.step()
        return found

    def sets(self, held: Sequence[Counter[str]]) -> list[Row]:
        """Each set's number, sites, kernels in a step, and what capturing it took.

        Args:
            held: the kernels of each set.
        """
        each = zip(self.steering.choice.sets, held, self._took, strict=True)
        return [
            {"set": number, "sites": sites.ops, "kernels": found.total(), **took}
            for number, (sites, found, took) in enumerate(each)
        ]

    def kernels(self, requests: int) -> list[Counter[str]]:
        """The kernels of each set's graphs for so many requests."""
        shape = next(shape for shape in self.manager.graphs if shape.num_tokens == requests)
        return [kernels(graph) for _, graph in sorted(self.manager.graphs[shape].graphs.items())]

    def _admit(self, name: str, ids: list[int], spec: Any) -> str:
        from vllm import SamplingParams

        extra = None if spec is None else {"saesteer": spec}
        params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False, extra_args=extra)
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": ids}, params)
        return name

    def _between(self, then: Callable[[Any], None]) -> None:
        """Do it within the next step that replays a full graph, and leave no trace of it but in the KV cache."""
        engine = self.steering.engine

        def undone(shape: Any) -> None:
            torch.cuda.synchronize()
            kept = [(one, one.clone()) for one in (engine.steps, engine.published, engine.counts)]
            then(shape)
            torch.cuda.synchronize()
            for one, before in kept:
                one.copy_(before)
            torch.cuda.synchronize()

        self._then = undone
        while self._then is not None:
            self.llm.llm_engine.step()


def _parts(worker: Any) -> Any:
    """Of the V2 runner's worker: its graphs' manager, and what saesteer knows of the step."""
    worker = getattr(worker, "worker", worker)  # out of vLLM's own wrapper
    manager = getattr(worker.model_runner, "cudagraph_manager", None)
    if manager is None or not manager.graphs:
        raise SystemExit("this engine has no full graphs of vLLM's V2 runner: bench.steps needs a GPU")
    return manager, getattr(worker, "saesteer", None)


def stock(model: str, requests: int) -> Counter[str]:
    """The kernels of stock vLLM's graph for so many requests; in a process of its own."""
    from vllm import LLM

    with engines.workplace(None) as folder:
        given = engines.options(model, folder, at_once=requests, length=PROMPT + TOKENS)
        llm: Any = LLM(**given, cudagraph_capture_sizes=[requests])
    [(manager, _)] = llm.collective_rpc(_parts)
    return kernels(next(graph for shape, graph in manager.graphs.items() if shape.num_tokens == requests))


def differences(ours: Counter[str], theirs: Counter[str]) -> list[str]:
    """The kernels of which one side has more; names are ``plain``."""
    ours, theirs = plain(ours), plain(theirs)
    names = sorted({*(ours - theirs), *(theirs - ours)})
    return [f"{ours[name]:5} instead of {theirs[name]:5}  {name}" for name in names]


def table(rows: Sequence[Row]) -> str:
    """For people."""
    titles = f"{'step us':>10}{'added us':>10}{'%':>8}{'from':>8}{'to':>8}"
    lines = [f"{'mode':11}{'requests':>9}{'prompt':>8}{'ops':>5}{titles}"]
    for r in rows:
        figures = f"{r['base_us']:10.1f}{r['us']:10.2f}{r['percent']:8.2f}{r['low']:8.2f}{r['high']:8.2f}"
        place = f"{r['mode']:11}{r['requests']:9}{r['prompt_tokens']:8}{r['sites']:5}"
        lines.append(f"{place}{figures}{'  served' if r['served'] else ''}")
    return "\n".join(lines)


def sets_table(sets: Sequence[Row]) -> str:
    """For people: what each set of graphs holds, and what capturing it took."""
    lines = [f"{'set':>3}{'ops':>5}{'kernels':>9}{'captured in s':>15}{'GiB':>7}"]
    for one in sets:
        took = "" if one["set_s"] is None else f"{one['set_s']:15.1f}{one['set_gib']:7.2f}"
        lines.append(f"{one['set']:3}{one['sites']:5}{one['kernels']:9}{took}")
    return "\n".join(lines)


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ours = [name for name, mode in (MODES | VARIED).items() if mode.engine == "saesteer"]
    parser.add_argument("--model", choices=MODELS, default="gemma-3-4b")
    parser.add_argument("--modes", nargs="+", choices=ours, default=list(USUAL), metavar="MODE", help=", ".join(ours))
    parser.add_argument("--requests", type=int, nargs="+", default=[16], help="that decode; each needs its own graph")
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[PROMPT], help="before those that they decode")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--pairs", type=int, default=60, help="replays of each graph in a round")
    parser.add_argument("--stock", action="store_true", help="compare the kernels with stock vLLM's")
    parser.add_argument("--stock-kernels", type=Path, help=argparse.SUPPRESS)  # where that process puts them
    parser.add_argument("--out", type=Path, help="folder of steps.jsonl, which grows; nothing is written without it")
    parser.add_argument("--keep", type=Path, help=engines.KEEP)
    parser.add_argument("--commit", default="", help="that is measured, where git cannot tell")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print a table, and add JSON lines to a file."""
    given = arguments(words)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    keep_graphs()
    if given.stock_kernels is not None:
        given.stock_kernels.write_text(json.dumps(stock(given.model, given.requests[0])))
        return 0
    with engines.workplace(given.keep) as folder:
        said = folder / "stock.json"
        other = _beside(given, said) if given.stock else None
        meter = Meter(given.model, max(given.requests), max(given.prompt_tokens), folder, given.modes)
        if other is not None and other.wait():
            raise SystemExit("stock vLLM failed, see above")
        theirs = None if other is None else Counter[str](json.loads(said.read_text()))
    held = meter.kernels(given.requests[0])
    sets = meter.sets(held)
    print(f"\nsets of graphs, kernels in a step of {given.requests[0]} requests", sets_table(sets), sep="\n")
    unlike = None if theirs is None else differences(held[0], theirs)
    if theirs is not None and unlike is not None:
        print(f"stock vLLM has {theirs.total()} kernels; those without ops differ in {len(unlike)}", *unlike, sep="\n")
    about = machine(given.commit) | {"vllm": vllm_version(), "model": given.model}
    about |= {"base_kernels": sets[0]["kernels"], "unlike_stock": unlike}
    file = None if given.out is None else given.out / ("steps_read.jsonl" if reads(given.modes) else "steps.jsonl")
    rows: list[Row] = []
    for seed, (requests, prompt, name) in enumerate(product(given.requests, given.prompt_tokens, given.modes), 1):
        found = meter.rows(name, requests, prompt, seed, rounds=given.rounds, pairs=given.pairs)
        if file is not None:  # at once: a run that is cut short keeps what it has measured
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a") as lines:
                lines.writelines(json.dumps({**about, **row, **sets[row["set"]]}) + "\n" for row in found)
        rows += found
    print(f"\n{given.model}: a step without ops, and what the ops at so many sites add")
    print(table(rows))
    return 1 if unlike else 0


def _beside(given: argparse.Namespace, said: Path) -> subprocess.Popen[bytes]:
    """Stock vLLM in another process; it starts beside ours, and has ended before anything is measured."""
    command = [sys.executable, "-m", "bench.steps", "--model", given.model, "--requests", str(given.requests[0])]
    environment = {**os.environ, "VLLM_PLUGINS": ""}
    return subprocess.Popen([*command, "--stock-kernels", str(said)], cwd=engines.ROOT, env=environment)


if __name__ == "__main__":
    sys.exit(main())
