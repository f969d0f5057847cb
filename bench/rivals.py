"""saesteer and other systems under one vLLM, asked for the same in turn, with stock vLLM before and after each.

    python -m bench.rivals --out DIR                                  all that are installed, a 4B dummy model
    python -m bench.rivals --out DIR --contenders hotwire saesteer    these
    python -m bench.rivals --out DIR --fork CHECKOUT                  and the kernels of a fork, see bench/fork.py

Each contender is an engine in a process of its own; they stand side by side on one GPU and take turns. A burst is so
many requests that begin together. Before anything is timed, each contender must show that it does what it is asked: a
vector changes the answer, a clamp says that it changed tokens, a capture has all rows. What cannot be run gets a line
that says why. A system that pins another vLLM than is installed is one of these, unless --any-vllm says to try it.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from select import select
from typing import NoReturn

import torch

from bench import engines
from bench.asks import VECTOR, Shape, vectors
from bench.contend import Answer, Burst, Told
from bench.contenders import ASKS, CONTENDERS, STOCK
from bench.deltas import METRICS, TITLES
from bench.dummy import MODELS
from bench.modes import Results, about, gpu_bytes
from bench.rotation import Failed, Rotation, Row

BURST_S = 120.0  # that one may take before its contender counts as dead


class Process(engines.Offline):
    """A contender's process.

    Args:
        name: a key of ``CONTENDERS``.
        model: one of ``bench.dummy.MODELS``.
        given: what vLLM's engine is started with.
        settings: saesteer's.
        folder: for logs and caches, with the file of the vectors.
    """

    def __init__(self, name: str, model: str, given: engines.Options, settings: engines.Options, folder: Path) -> None:
        self.settings = settings | ({"reads": ["resid_post.all"]} if name == "saesteer-reads" else {})
        super().__init__(name, model, given, {}, folder)

    def _command(self, given: engines.Options, own: engines.Options | None, folder: Path) -> list[str]:
        job = {"name": self.kind, "options": given, "settings": self.settings, "shape": asdict(self.shape)}
        return ["bench.contend", json.dumps(job)]

    def _environment(self, folder: Path) -> dict[str, str]:
        known = CONTENDERS[self.kind]
        own = {key: value.format(vectors=vector_folder(folder)) for key, value in known.environment.items()}
        return super()._environment(folder) | {"VLLM_PLUGINS": known.plugin} | own

    def fail(self, why: str) -> NoReturn:
        """Raise instead of ending the benchmark; the end of the log goes to standard error."""
        print(f"--- {why}\n{self.log.read_text(errors='replace')[-3000:]}", file=sys.stderr)
        raise Failed(why)

    def wait(self, seconds: float) -> None:
        """Wait until it serves.

        Raises:
            Failed: it died, or does not serve after so many seconds.
        """
        assert self.process.stdout is not None
        if not select([self.process.stdout], [], [], max(seconds, 0.0))[0]:
            self.signal(signal.SIGKILL)
            self.fail("did not start in time")
        self._line()

    def ask(self, burst: Burst) -> Told:
        """Run one.

        Raises:
            Failed: it died, took too long, or says that it failed.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(asdict(burst)) + "\n")
            self.process.stdin.flush()
        except OSError:
            self.fail(f"died with exit code {self.process.wait()}")
        if not select([self.process.stdout], [], [], BURST_S)[0]:
            self.signal(signal.SIGKILL)
            self.fail(f"no answer within {BURST_S:.0f} s: {burst}")
        said = self._line()
        if "failed" in said:
            self.fail(said["failed"])
        return Told(said["first"], said["whole"], [Answer(**one) for one in said["answers"]])


def vector_folder(folder: Path) -> Path:
    """Of the file of vectors that other systems read at their start."""
    return folder / "vectors"


def write_vectors(shape: Shape, folder: Path) -> None:
    """The vectors that saesteer has by name, [layers, width], as a file of torch."""
    vector_folder(folder).mkdir()
    bits = torch.from_numpy(vectors(shape, 1).astype("<i2", casting="unsafe"))
    torch.save(bits.view(torch.bfloat16), vector_folder(folder) / f"{VECTOR}.pt")


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [name for name in CONTENDERS if name != STOCK]
    parser.add_argument("--contenders", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--asks", nargs="+", choices=ASKS, default=list(ASKS), metavar="ASK", help=", ".join(ASKS))
    parser.add_argument("--model", choices=MODELS, default="gemma-3-4b")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16, 64], help="that begin together")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--start", type=float, default=engines.START_S, help="seconds after which none may start")
    parser.add_argument("--budget", type=float, default=230.0, help="seconds after which no burst begins")
    parser.add_argument("--any-vllm", action="store_true", help="start what pins another vLLM, too")
    parser.add_argument("--fork", type=Path, metavar="CHECKOUT", help="time the kernels of this checkout at the end")
    parser.add_argument("--fork-commit", default="", help="of that checkout, where it has no .git")
    parser.add_argument("--out", type=Path, help="folder of rivals.jsonl, which grows; nothing is written without it")
    parser.add_argument("--commit", default="", help="that is measured, where git cannot tell")
    return parser.parse_args(words)


def described(row: Row, given: argparse.Namespace) -> Row:
    """A line of the results with what was run, and what it was asked."""
    known = CONTENDERS[row["contender"]]
    what = {"version": known.version, "pins_vllm": known.pin, "settings": known.settings}
    asked = {"asked_for": ASKS[row["ask"]], "asked_by": known.asked} if "ask" in row else {}
    size = {"model": given.model, "prompt_tokens": given.prompt_tokens, "tokens": given.tokens}
    return {**row, **what, **asked, **size}


def table(rows: Sequence[Row]) -> str:
    """For people: of each metric ms and the difference to stock with its spread."""
    lines = [
        f"{'contender':21}{'ask':9}{'at':>4}{'runs':>5}" + "".join(f"{TITLES[one] + ', ms':>34}" for one in METRICS)
    ]
    for row in rows:
        line = f"{row['contender']:21}{row.get('ask', ''):9}{row.get('requests', ''):>4}"
        if "not_run" in row:
            lines.append(f"{line}  not run: {row['not_run']}")
            continue
        line += f"{row['runs']:>5}"
        for metric in METRICS:
            one = row[metric]
            delta = f"{one['delta_percent']:+.1f} % ({one['min_percent']:+.1f} {one['max_percent']:+.1f})"
            line += f"{one['ms']:9.2f} {delta:>24}"
        lines.append(line)
    return "\n".join(lines)


def measure(given: argparse.Namespace, folder: Path, results: Results, since: float) -> list[Row]:
    """Start who can be started, rotate until the time is up, stop."""

    def say(what: str) -> None:
        print(f"{time.monotonic() - since:6.1f} s  {what}", flush=True)

    shape = Shape.of(given.model)
    size = {"at_once": max(given.requests), "length": given.prompt_tokens + given.tokens}
    shared = engines.options(given.model, folder, **size)
    settings = engines.settings(given.model, folder)
    write_vectors(shape, folder)
    shutil.copytree(shared["tokenizer"], shared["model"], dirs_exist_ok=True)  # where interp-engine looks for it
    absent: dict[str, str] = {}
    for name in given.contenders:
        if (why := CONTENDERS[name].missing(any_vllm=given.any_vllm)) is not None:
            absent[name] = why
    names = [STOCK, *(name for name in given.contenders if name not in absent)]
    each, room = engines.memory(given.model, **size), gpu_bytes()
    if room is not None and len(names) * each > room:
        raise SystemExit(f"{len(names)} engines of {each >> 30} GiB do not fit on this GPU; name fewer --contenders")
    running: dict[str, Process] = {}
    try:
        for name in names:
            running[name] = Process(name, given.model, shared, settings, folder)
        for name, process in running.items():
            try:
                process.wait(since + given.start - time.monotonic())
                say(f"{name} serves")
            except Failed as error:
                if name == STOCK:
                    raise SystemExit(str(error)) from error
                absent[name] = str(error)
                say(f"{name}: {error}")
        plans = {
            name: [ask for ask in CONTENDERS[name].asks if ask in given.asks]
            for name in given.contenders
            if name not in absent
        }
        rotation = Rotation(
            plans,
            given.requests,
            lambda name, burst: running[name].ask(burst),
            shape,
            prompt=given.prompt_tokens,
            tokens=given.tokens,
        )
        rotation.check()
        say("all have shown that they do what they are asked" if not rotation.failed else str(rotation.failed))
        rows = []
        for turn in range(given.rounds):
            whole = rotation.round(turn, since + given.budget - time.monotonic())
            found = [*({"contender": name, "not_run": why} for name, why in absent.items()), *rotation.rows()]
            rows = [described(row, given) for row in found]
            results.write(rows)
            say(f"round {turn + 1}")
            if not whole:
                break
        return rows
    finally:
        engines.stop(list(running.values()))


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print a table, and add JSON lines to a file."""
    since = time.monotonic()
    given = arguments(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # engines are stopped on the way
    command = shlex.join(["python", "-m", "bench.rivals", *(words or sys.argv[1:])])
    results = Results(given.out, about(given.commit) | {"command": command}, "rivals.jsonl")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        rows = measure(given, Path(folder), results, since)
    print(f"\n{given.model}: bursts of requests of {given.prompt_tokens} tokens, {given.tokens} out")
    print(table(rows))
    if given.fork is not None:
        more = ["--out", str(given.out)] if given.out is not None else []
        more += ["--commit", given.commit] if given.commit else []
        more += ["--fork-commit", given.fork_commit] if given.fork_commit else []
        fork = [sys.executable, "-m", "bench.fork", str(given.fork), *more]
        return subprocess.run(fork, cwd=engines.ROOT, check=False).returncode
    return 0 if any("not_run" not in row for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
