"""What reading costs the host in each step, from the rows' gather to the end of an answer; without an engine.

    python -m bench.reading               64 requests that decode, Gemma 3 4B's 34 layers of 2560, on a CPU

Knows the functions that worker, scheduler and front end call for requests that read, and none of vLLM's own work around
them. Where tensors lie does not matter to these functions, but on a CPU the copies of rows are part of "worker". In
µs of processor time for each step, but for the first and the last line, which are for each request:

    admit       front end: the spec is planned, and its results have their room
    worker      what the step's requests read is gathered, and is on its way to a file or the scheduler
    anew        the same in a step whose requests are others than in the step before; every eighth here
    scheduler   what has come is put into outputs, without the copies between processes
    front end   it is put in its place
    end         the answer's entries are made, and files get their names
    all         of all threads of this process; another one writes the files
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import torch
from vllm.sampling_params import RequestOutputKind

from bench.asks import DICTIONARY, Shape
from bench.dummy import MODELS
from bench.engines import settings
from bench.front import PROMPT, FakeParams, FakeRequest, about
from bench.timing import spread
from saesteer.config.assets import Assets
from saesteer.config.config import SaesteerConfig
from saesteer.engine.engine import Engine
from saesteer.language.spec import from_json
from saesteer.plugin.door.admission import Door
from saesteer.plugin.results import reads, sending
from saesteer.plugin.worker.steering import Steering

PARTS = ("admit", "worker", "anew", "scheduler", "front end", "end", "all")
OTHERS = 8  # steps from one whose requests are others to the next
REQUESTS = 64
STEPS = 64  # of which the first is not counted

T = TypeVar("T")


Spec = Callable[[Shape, int], dict[str, Any]]  # of a model's shape and the number of a request


def _activations(layers: int, place: str) -> Spec:
    def spec(shape: Shape, _: int) -> dict[str, Any]:
        sites = range(shape.layers // 2, shape.layers // 2 + 1) if layers == 1 else range(shape.layers)
        one = {"scope": {"generated": True}, "as": place}
        return {"return": {"activations": [{**one, "site": f"resid_post.{site}"} for site in sites]}}

    return spec


def _feature(_: Shape, number: int) -> dict[str, Any]:
    read = {"dictionary": DICTIONARY, "features": [97 * number], "scope": {"generated": True}}
    return {"return": {"features": [read]}}


# By what each request reads of the tokens that it generates.
CASES: dict[str, Spec] = {
    "one layer, by handle": _activations(1, "handle"),
    "all layers, by handle": _activations(0, "handle"),
    "one layer, inline": _activations(1, "inline"),
    "a feature of its own": _feature,
    "hidden states": lambda *_: {"return": {"hidden": {"scope": {"generated": True}}}},
}


class Host:
    """An engine of a model's shape on a CPU, with everything that stands between its rows and answers.

    Args:
        model: in ``bench.dummy.MODELS``.
        folder: for its files.
        streams: whether answers come token by token.
    """

    def __init__(self, model: str, folder: Path, *, streams: bool = False) -> None:
        self.streams = streams
        self.shape = shape = Shape.of(model)
        wishes = settings(model, folder) | {"reads": [f"resid_post.{layer}" for layer in range(shape.layers)]}
        self.config = SaesteerConfig.from_json(wishes | {"max_results_mib": 1 << 14})
        self.engine = Engine(
            Assets.open(self.config),
            width=shape.width,
            layers=shape.layers,
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
            max_rows=REQUESTS,
            max_tokens=PROMPT,
        )
        self.steering = Steering(self.engine)
        served = SimpleNamespace(dtype=torch.bfloat16, max_model_len=8 * PROMPT)
        self.door = Door("fingerprint", self.config, vllm_config=SimpleNamespace(model_config=served))
        self.times: defaultdict[str, list[float]] = defaultdict(list)  # by part, µs
        self._positions = np.zeros(REQUESTS, dtype=np.int32)
        starts, hidden = np.arange(REQUESTS + 1, dtype=np.int32), torch.zeros(REQUESTS, shape.width).bfloat16()
        self.steering.step = lambda: (starts, self._positions, hidden)

    def timed(self, part: str, work: Callable[[], T], each: int = 1) -> T:
        """Do something, and note the processor time that this thread takes for it."""
        begin = time.thread_time_ns()
        done = work()
        self.times[part].append((time.thread_time_ns() - begin) / 1e3 / each)
        return done

    def run(self, case: str, turn: int) -> dict[str, list[float]]:
        """The times of a batch that begins and ends together, by part; the first step of it is left out."""
        self.times.clear()
        names = [f"{case} {turn} {number}" for number in range(REQUESTS)]
        states, requests = {}, {}
        for number, name in enumerate(names):
            params: Any = FakeParams({}, output_kind=None if self.streams else RequestOutputKind.FINAL_ONLY)
            params.max_tokens, params.n = STEPS + 1, 1
            request = FakeRequest(params, name)
            spec = from_json(CASES[case](self.shape, number))
            self.timed("admit", partial(self.door.admit, spec, self.engine.catalog, request))
            states[name] = params.saesteer_report.of_choice()
            requests[name] = SimpleNamespace(sampling_params=params)
            self.steering.add(request)
        self.steering.look(names, REQUESTS)
        scheduler = SimpleNamespace(requests=requests, has_unfinished_requests=lambda: False)
        for step in range(STEPS):
            self._positions[:] = PROMPT + step
            begin = time.process_time_ns()
            if step % OTHERS == OTHERS - 1:
                names = [*names[1:], names[0]]
                brought = self.timed("anew", lambda: self._look(names))  # noqa: B023
            else:
                brought = self.timed("worker", lambda: self._look(names))  # noqa: B023
            outputs = [
                SimpleNamespace(
                    request_id=name, kv_transfer_params=None, finish_reason="length" if step == STEPS - 1 else None
                )
                for name in names
            ]
            batch = {0: SimpleNamespace(outputs=outputs)}
            self.timed("scheduler", lambda: _send(scheduler, batch, brought))  # noqa: B023
            self.timed("front end", lambda: self._receive(states, outputs))  # noqa: B023
            self.times["all"].append((time.process_time_ns() - begin) / 1e3)
        for name in names:
            self.timed("end", partial(states[name].read.tell, PROMPT, STEPS + 1, final=True))
            self.steering.forget(name)
            for entries in states[name].fields.values():
                for entry in entries:
                    assert len(entry.get("positions") or entry["rows"]) == STEPS, "an answer lacks rows"
                    if "handle" in entry:
                        self.door.results.delete(entry["handle"])
        for part in ("worker", "scheduler", "front end", "all"):
            del self.times[part][0]
        return dict(self.times)

    def _look(self, names: list[str]) -> Any:
        self.steering.look(names, REQUESTS)
        return self.steering.read()

    def _receive(self, states: dict[str, Any], outputs: list[Any]) -> None:
        for one in outputs:
            for _, blobs in sending.carried(one):
                states[one.request_id].add(blobs)


def _send(scheduler: Any, outputs: Any, brought: Any) -> None:
    """As the scheduler does in each step; in the last one, it waits for files."""
    reads.hold(scheduler, outputs, reads.send(scheduler, outputs, brought, frozenset(), {}))


def main() -> int:
    """Measure, print a table and JSON lines, write those to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="gemma-3-4b")
    parser.add_argument("--turns", type=int, default=5, help="batches of each case, the cases in turn")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--streams", action="store_true", help="answers come token by token, not whole")
    parser.add_argument("--out", type=Path, help="folder of the JSON lines; nothing is written without it")
    parser.add_argument("--commit", default="", help="that is measured, where git cannot tell")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        host = Host(options.model, Path(folder), streams=options.streams)
    found: dict[str, dict[str, list[float]]] = {case: defaultdict(list) for case in options.cases}
    for turn in range(1 + options.turns):
        for case in options.cases:
            for part, times in host.run(case, turn).items():
                if turn:  # the first warms up
                    found[case][part].append(statistics.median(times))
    print(f"{'µs':24}" + "".join(f"{part:>12}" for part in PARTS))
    wire = []
    for case, parts in found.items():
        print(f"{case:24}" + "".join(f"{statistics.median(parts[part]):12.1f}" for part in PARTS))
        row = {"case": case, "requests": REQUESTS, "steps": STEPS, "turns": options.turns, "streams": options.streams}
        for part in PARTS:
            us, low, high = (round(value, 1) for value in spread(parts[part]))
            row[part] = {"us": us, "p20": low, "p80": high}
        wire.append(json.dumps({**about(options.commit), "model": options.model, **row}))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "reading.jsonl").write_text("".join(line + "\n" for line in wire))
    print(*wire, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
