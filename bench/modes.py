"""What saesteer costs in each mode over stock vLLM: time to first token, time per token, end to end, paired.

    python -m bench.modes --model gemma-3-4b --way llm --out bench/results     through LLM
    python -m bench.modes --model gemma-3-4b --way http --out bench/results    through the OpenAI server
    python -m bench.modes --model gemma-3-27b --modes disabled                 two of these fit on a GPU, not three
    python -m bench.modes --model tiny --prompts 8 --prompt-tokens 16 --tokens 8 --concurrency 4    without a GPU

Stock vLLM, vLLM with saesteer installed and unused, and saesteer at work are processes on one GPU that take turns. In a
round each mode runs between two runs of stock and is compared with the line between them. A run is 64 requests, 16 at a
time, of 256 tokens and 256 tokens out; whenever one ends the next begins, over HTTP up to 40 ms later, and a run-in of
shorter ones sees to it that they do so one by one. No prompt comes twice to an engine, prefix caching is on. A request
begins when it is handed over, its bytes made before. Results are written after every round, and --budget ends the last
one in time.

Reckoned for one H200 of 139 GiB, 64 requests, 16 at a time, in seconds (4B: 4.4 a run, 3 engines of 15 GiB, their start
120; 27B: 20 a run, 2 of 62 GiB, 165). The steps of a server may be a fifth longer, on the 4B.

    --model gemma-3-4b                                              5 rounds of 14 runs    430, http 510
    --model gemma-3-27b --modes disabled                            5 rounds of 2          380
    --model gemma-3-27b --modes idle named --share 2                5 rounds of 3          480
    --model gemma-3-27b --modes shared clamp --share 2                                     480
    --model gemma-3-27b --modes inline-4 inline-16 --share 2                               480
    --model gemma-2-2b --modes idle clamp --concurrency 1 16 64     5 rounds of 12         270
    --modes clamps-32 --burst --concurrency 64 --tokens 32          first tokens of 64 that come at once
    --modes idle captures --concurrency 64 --spy DIR                where each mode's host time goes, by py-spy

With --keep DIR, the engines of the next command start in a third of that time.

Lengths of answers, requests and graphs are swept by `make bench-sweeps`, with two engines: with --prompts 16, a run of
16 at a time takes 6 ms for each token of an answer on the 4B, and 22 on the 27B.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from bench import engines, spy, streams
from bench.asks import MODES, STOCK, USUAL, VARIED, Load, reads
from bench.deltas import METRICS, PUBLISHED, TARGETS, Run, figures, paired, summary, table
from bench.dummy import MODELS
from saesteer.plugin.contract import vllm_version

PLACES = 4  # requests of a run for each that is under way, unless said otherwise
WARM_TOKENS = 16


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="gemma-3-4b")
    parser.add_argument("--way", choices=engines.WAYS, default="llm")
    every = MODES | VARIED
    parser.add_argument("--modes", nargs="+", choices=every, default=list(USUAL), metavar="MODE", help=", ".join(every))
    parser.add_argument("--rounds", type=_count, default=5)
    parser.add_argument("--share", type=_count, default=1, help="modes between two runs of stock")
    parser.add_argument("--concurrency", type=_count, nargs="+", default=[16], help="requests at a time")
    parser.add_argument("--prompts", type=_count, help=f"of a run, from once to {PLACES} times those at a time")
    parser.add_argument("--prompt-tokens", type=_count, default=256)
    of_each = "of an answer; the first goes with each --concurrency, and the other way round"
    parser.add_argument("--tokens", type=_count, nargs="+", default=[256], help=of_each)
    parser.add_argument("--whole", action="store_true", help="answers come whole, as from LLM.generate; through LLM")
    parser.add_argument("--burst", action="store_true", help="all of a run begin together, as many as --concurrency")
    parser.add_argument("--eager", action="store_true", help="all engines without CUDA graphs and compilation")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds in which the last round has to end")
    where = "folder of modes.jsonl, modes_read.jsonl if one reads, or bursts.jsonl; nothing is written without it"
    parser.add_argument("--out", type=Path, help=where)
    parser.add_argument("--spy", type=Path, help="folder of samples of each mode's processes, taken behind the rounds")
    parser.add_argument("--keep", type=Path, help=engines.KEEP)
    parser.add_argument("--commit", default="", help="that is measured, where git cannot tell")
    given = parser.parse_args(words)
    if len(set(given.modes)) < len(given.modes):
        parser.error("--modes names one twice")
    if min(given.tokens) < 2:
        parser.error("--tokens is 1, expected at least 2: the time per token is between the first and the last")
    if given.burst and given.prompts is not None:
        parser.error("--burst is given with --prompts: all requests begin together, as many as --concurrency")
    if given.spy is not None:
        spy.refuse_without()
    if given.whole and given.way != "llm":
        parser.error(f"--whole is given with --way {given.way}, expected llm")
    return given


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"is {number}, expected at least 1")
    return number


def kinds(modes: Sequence[str]) -> list[str]:
    """The engines that these modes need, stock first."""
    return list(dict.fromkeys(["stock", *((MODES | VARIED)[name].engine for name in modes)]))


def refuse_crowd(given: argparse.Namespace, gpu_bytes: int | None) -> None:
    """Engines that cannot stand on one GPU side by side are refused before a minute is spent on starting them.

    Raises:
        SystemExit: saying what they need.
    """
    needed = kinds(given.modes)
    length = given.prompt_tokens + max(given.tokens)
    each = engines.memory(given.model, at_once=max(given.concurrency), length=length)
    if gpu_bytes is not None and len(needed) * each > gpu_bytes:
        sizes = f"{len(needed)} engines of {each / 2**30:.0f} GiB, and the GPU has {gpu_bytes / 2**30:.0f}"
        raise SystemExit(f"{', '.join(needed)}: {sizes}; name modes of one engine beside stock with --modes")


def order(modes: Sequence[str], share: int, turn: int) -> Iterator[str]:
    """The runs of a round: stock behind each `share` modes, which change direction from round to round; the stock run
    before the first is the last of the round before."""
    turned = list(modes if turn % 2 == 0 else reversed(modes))
    for start in range(0, len(turned), share):
        yield from turned[start : start + share]
        yield STOCK.name


class Bench:
    """Engines that run, and what they gave so far."""

    def __init__(self, given: argparse.Namespace, running: dict[str, engines.Engine]) -> None:
        self.given = given
        self.running = running
        # By requests at a time and tokens of an answer: of either list the first goes with all of the other.
        self.runs: dict[tuple[int, int], list[Run]] = {
            (at_once, tokens): []
            for at_once, tokens in product(given.concurrency, given.tokens)
            if at_once == given.concurrency[0] or tokens == given.tokens[0]
        }
        self._seed = 0
        self._had: set[str] = set()  # the engines that have had its prompts

    def warm_up(self) -> None:
        """Let every engine do once what it will be asked, so that nothing is compiled while the clock runs."""
        for at_once in self.given.concurrency:
            for name in (STOCK.name, *self.given.modes):
                warm = at_once if self.given.burst else 2 * at_once
                self._run(name, at_once, warm, min(WARM_TOKENS, *self.given.tokens))

    def round(self, turn: int) -> None:
        """Run every mode once, for each number of requests at a time and each length of their answers."""
        for (at_once, tokens), runs in self.runs.items():
            names = order(self.given.modes, self.given.share, turn)
            for name in names if runs else (STOCK.name, *names):
                runs.append(self._run(name, at_once, self._requests(at_once), tokens))

    def spy(self, folder: Path) -> str:
        """Run every mode once more while its engine is sampled; a table of where the host's time goes."""
        at_once, tokens = next(iter(self.runs))
        folder.mkdir(parents=True, exist_ok=True)
        found = {}
        for name in (STOCK.name, *self.given.modes):
            work = partial(self._run, name, at_once, self._requests(at_once), tokens)
            run, seen = spy.sampled(self.running[_engine(name)].process.pid, folder / f"{name}.txt", work)
            found[name] = run.figures.per_token, seen
        return spy.table(found, "idle" if "idle" in found else STOCK.name)

    def rows(self) -> list[dict[str, Any]]:
        """A line of the results for each mode, number of requests at a time and length of their answers."""
        given, found = self.given, []
        for (at_once, tokens), runs in self.runs.items():
            pairs = paired(runs)
            for name in given.modes if pairs else ():
                about = {
                    "model": given.model,
                    "way": given.way,
                    "mode": name,
                    "at_once": at_once,
                    "requests": self._requests(at_once),
                    "prompt_tokens": given.prompt_tokens,
                    "tokens": tokens,
                    "eager": given.eager,
                    "whole": given.whole,
                    "burst": given.burst,
                    "pause_s": streams.PAUSE if given.way == "http" else 0.0,
                }
                aims = TARGETS.get(given.model, {}).get((name, at_once), {})
                found.append(about | summary(pairs[name], aims, PUBLISHED.get(given.model, {})))
        return found

    def _requests(self, at_once: int) -> int:
        many = at_once if self.given.burst else PLACES * at_once
        return many if self.given.prompts is None else min(max(self.given.prompts, at_once), many)

    def _run(self, name: str, at_once: int, requests: int, tokens: int) -> Run:
        kind = _engine(name)
        if kind in self._had:  # as when modes share a run of stock: the second would find them cached
            self._seed += 1
            self._had.clear()
        self._had.add(kind)
        given = self.given
        load = Load(name, self._seed, requests, at_once, given.prompt_tokens, tokens, given.whole, given.burst)
        begin = time.monotonic()
        times = self.running[kind].run(load)
        end = time.monotonic()
        return Run(name, (begin + end) / 2, figures(times.first, times.whole, tokens))


def _engine(mode: str) -> str:
    return STOCK.engine if mode == STOCK.name else (MODES | VARIED)[mode].engine


class Results:
    """The lines of this command in a file that may hold those of others; written anew whenever there is more.

    Args:
        folder: of the file; None writes nothing.
        about: what all lines say.
        name: of the file.
    """

    def __init__(self, folder: Path | None, about: dict[str, Any], name: str = "modes.jsonl") -> None:
        self._about = about
        self._path = folder and folder / name
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        self._earlier = self._path.read_text() if self._path is not None and self._path.exists() else ""

    def write(self, rows: Sequence[dict[str, Any]]) -> None:
        """Put these lines behind those of earlier commands; whoever is killed while writing leaves the last state."""
        if self._path is None:
            return
        new = self._path.with_suffix(".new")
        new.write_text(self._earlier + "".join(json.dumps(row | self._about) + "\n" for row in rows))
        os.replace(new, self._path)


def about(commit: str) -> dict[str, Any]:
    """Machine, versions and command. Asked in another process, which then leaves the GPU again."""
    code = f"import json; from bench.timing import machine; print(json.dumps(machine({commit!r})))"
    said = subprocess.run([sys.executable, "-c", code], cwd=engines.ROOT, capture_output=True, text=True, check=True)
    return {
        **json.loads(said.stdout.splitlines()[-1]),
        "vllm": vllm_version(),
        "command": command(sys.argv[1:]),
    }


_OF_A_MACHINE = {"--out", "--keep", "--spy", "--budget", "--commit"}  # options with a value


def command(words: Sequence[str]) -> str:
    """What repeats a run, without where its files were and how much time it had."""
    kept = [word for before, word in pairwise(["", *words]) if not {before, word} & _OF_A_MACHINE]
    return shlex.join(["python", "-m", "bench.modes", *kept])


def gpu_bytes() -> int | None:
    """Memory of the first GPU; None without one."""
    ask = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(ask, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return int(said.split()[0]) << 20


def measure(given: argparse.Namespace, folder: Path, results: Results, since: float) -> list[dict[str, Any]]:
    """Start the engines, run the rounds that fit into the budget, stop the engines."""

    def say(what: str) -> None:
        print(f"{time.monotonic() - since:6.1f} s  {what}", flush=True)

    length = given.prompt_tokens + max(given.tokens)
    shared = engines.options(given.model, folder, at_once=max(given.concurrency), length=length, eager=given.eager)
    own = engines.settings(given.model, folder, modes=given.modes)
    running: dict[str, engines.Engine] = {}
    try:
        for kind in kinds(given.modes):
            running[kind] = engines.WAYS[given.way](kind, given.model, shared, own, folder)
        for kind, engine in running.items():
            engine.ready()
            say(f"{kind} serves")
        bench = Bench(given, running)
        bench.warm_up()
        say("all modes are warm")
        longest = 0.0
        for turn in range(given.rounds):
            begin = time.monotonic()
            if begin - since + longest > given.budget:
                say(f"{turn} rounds of {given.rounds}: another of {longest:.0f} s would end after {given.budget:.0f} s")
                break
            bench.round(turn)
            longest = max(longest, time.monotonic() - begin)
            results.write(bench.rows())
            deltas = []
            for row in bench.rows():
                last = "/".join(f"{row[metric]['each_percent'][-1]:+.1f}" for metric in METRICS)
                deltas.append(f"{row['mode']} {row['at_once']} x {row['tokens']} {last}")
            say(f"round {turn + 1}, % over stock: {', '.join(deltas)}")
        if given.spy is not None:
            print(bench.spy(given.spy), flush=True)
        return bench.rows()
    finally:
        engines.stop(list(running.values()))


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print a table, and add JSON lines to a file."""
    since = time.monotonic()
    given = arguments(words)
    refuse_crowd(given, gpu_bytes())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # engines are stopped on the way
    # The engine of those that read keeps tensors, so its rows stand apart, those of idle as well.
    name = "bursts.jsonl" if given.burst else "modes_read.jsonl" if reads(given.modes) else "modes.jsonl"
    results = Results(given.out, about(given.commit), name)
    with engines.workplace(given.keep) as folder:
        rows = measure(given, folder, results, since)
    said = f"{given.prompts or f'{PLACES} x as many'} requests of {given.prompt_tokens} tokens"
    said += f", {' '.join(map(str, given.tokens))} out{', eager' if given.eager else ''}"
    print(f"\n{given.model} through {given.way}: {said}; medians of {rows[0]['runs'] if rows else 0} runs")
    print(table(rows))
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main())
