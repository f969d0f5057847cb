"""Host time that saesteer adds to a step of the engine, in microseconds: its own Python, copies and launches.

    python -m bench.host                  a dummy Gemma 3 4B in vLLM, 64 requests, none to all of them steered
    python -m bench.host --fake           the worker's hooks alone on a batch that nobody computes; needs no GPU

Without a GPU the fake leaves out the launch of the map kernel, and its figures compare with each other only.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench.dummy import MODELS, dictionary_file, model_folder
from bench.probe import Probe, Step

LIMIT_US = 15.0  # of a step in which 64 steered requests decode
REQUESTS = 64
STEERED = (0, 1, 16, 64)
TOKENS = 96  # decoded by each request
FEATURES = 16384

Row = dict[str, Any]


def clamp(number: int) -> dict[str, Any]:
    """The spec of one request."""
    return {"edits": [{"op": "clamp", "dictionary": "random", "feature": 37 * number % 256, "value": 30.0}]}


def summary(mode: str, steered: int, steps: Sequence[Step]) -> Row:
    """One line of the results; negative noise of the clocks counts as nothing."""
    times = sorted(max(step.hooks_ns, 0) / 1e3 for step in steps)
    assert times, f"{mode}, {steered} steered: the run had no such step"
    last = len(times) - 1
    us = statistics.median(times)
    judged = mode.endswith("decode") and steered == REQUESTS
    return {
        "mode": mode,
        "requests": REQUESTS,
        "steered": steered,
        "steps": len(times),
        "us": round(us, 2),
        "p20": round(times[round(0.2 * last)], 2),
        "p80": round(times[round(0.8 * last)], 2),
        "max": round(times[-1], 2),
        "ops_us": round(statistics.median(step.ops_ns / 1e3 for step in steps), 2),
        "admitted": round(statistics.mean(step.admitted for step in steps), 2),
        "limit_us": LIMIT_US if judged else None,
        "reached": us < LIMIT_US if judged else None,
    }


def summaries(mode: str, steered: int, steps: Sequence[Step]) -> list[Row]:
    """Steps that only decode, those that admit beside it, and those of prompts alone; as far as there are any."""
    kinds = {
        "decode": [s for s in steps if not s.admitted and s.tokens == s.requests == REQUESTS],
        "admission": [s for s in steps if s.admitted and s.admitted < s.requests],
        "prompts": [s for s in steps if s.admitted and s.admitted == s.requests],
    }
    return [summary(f"{mode} {kind}", steered, found) for kind, found in kinds.items() if found]


def whole(model: str) -> list[Row]:
    """Steps of a real engine, whose scheduler and worker live in this process."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import SamplingParams

    from saesteer import LLM

    width, layers = (int(str(MODELS[model][key])) for key in ("hidden_size", "num_hidden_layers"))
    with tempfile.TemporaryDirectory() as folder:
        place = f"{dictionary_file(width, FEATURES, Path(folder))}@resid_post.{layers // 2}"
        llm: Any = LLM(
            str(model_folder(model, Path(folder))),
            dictionaries={"random": place},
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=1024,
            max_num_seqs=REQUESTS,
            enable_prefix_caching=False,
            gpu_memory_utilization=0.3,
            kv_cache_memory_bytes=(8 << 30) if model != "tiny" else (256 << 20),
            cudagraph_capture_sizes=[1, 2, 4, 8, 16, 32, 64],
            enforce_eager=model == "tiny",
        )
    probe = Probe()

    def attach(worker: Any) -> str:
        worker = getattr(worker, "worker", worker)  # out of vLLM's own wrapper
        runner = worker.model_runner
        probe.attach(*(owner for owner in (worker, runner, getattr(runner, "model_state", None)) if owner))
        probe.on_steps(runner)
        return str(runner.device)

    [device] = llm.collective_rpc(attach)
    probe.attach(type(llm.llm_engine.engine_core.engine_core.scheduler))
    if device.startswith("cuda"):
        probe.on_ops()
    print(f"clocks around {', '.join(probe.names)}")

    def run(requests: int, steered: int, spread: int) -> list[Step]:
        params = [
            SamplingParams(temperature=0, max_tokens=TOKENS - spread * (n % 64), ignore_eos=True, detokenize=False)
            for n in range(requests)
        ]
        prompts: Any = [{"prompt_token_ids": [2, *range(7 + n, 30 + n)]} for n in range(requests)]
        specs = [clamp(n) if n < steered else None for n in range(requests)]
        probe.steps.clear()
        llm.generate(prompts, params, steer=specs if steered else None, use_tqdm=False)
        return list(probe.steps)

    rows = []
    run(REQUESTS, REQUESTS, 0)  # warm-up
    for steered in STEERED:
        rows += summaries("engine", steered, run(REQUESTS, steered, 0))
    # Requests that end one after the other, so that new ones come while the others decode.
    everyone = run(4 * REQUESTS, 4 * REQUESTS, 1)
    return rows + [row for row in summaries("turnover", REQUESTS, everyone) if "decode" not in row["mode"]]


class _State:
    """A model state of the V2 runner that does nothing."""

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        """Nothing."""

    def remove_request(self, req_id: str) -> None:
        """Nothing."""

    def prepare_inputs(self, input_batch: Any, req_states: Any) -> dict[str, Any]:
        """Nothing."""
        return {}


def fake(steps: int = 2000) -> list[Row]:
    """The V2 worker's hooks, called as the runner calls them."""
    import torch

    from saesteer.config.assets import Assets
    from saesteer.config.config import SaesteerConfig
    from saesteer.engine.engine import Engine
    from saesteer.kernels import ops
    from saesteer.language.spec import from_json
    from saesteer.plugin.door.admission import Door
    from saesteer.plugin.worker import worker
    from saesteer.plugin.worker.steering import Steering

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        setattr(ops, "map_", lambda *_: None)  # noqa: B010  (a GPU's work, not a host's)
    with tempfile.TemporaryDirectory() as folder:
        place = f"{dictionary_file(64, 256, Path(folder))}"
        raw = {"dictionaries": {"random": {"path": place, "site": "resid_post.1"}}}
        engine = Engine(
            Assets.open(SaesteerConfig.from_json(raw)),
            width=64,
            layers=4,
            dtype=torch.float32,
            device=device,
            max_rows=REQUESTS,
            max_tokens=8192,
        )
    state: Any = _State()
    worker._wrap_v2(SimpleNamespace(), state, Steering(engine))  # of the runner, only reads ask for the step
    probe, door = Probe(), Door()
    probe.attach(state)
    ids = [f"request-{n}" for n in range(REQUESTS)]

    def admit(slot: int, number: int, steered: bool) -> None:
        params = SimpleNamespace(extra_args={"saesteer": clamp(number)} if steered else None, stop=[], max_tokens=None)
        data = SimpleNamespace(
            req_id=ids[slot], prompt_token_ids=[2] * 24, sampling_params=params, num_computed_tokens=0
        )
        if steered:  # the front end's part is not measured here
            door.admit(from_json(clamp(number)), engine.catalog, data)
        state.add_request(slot, data)

    batch = SimpleNamespace(
        num_reqs=REQUESTS,
        num_tokens=REQUESTS,
        idx_mapping=torch.arange(REQUESTS, dtype=torch.int32, device=device),
        query_start_loc=torch.arange(REQUESTS + 1, dtype=torch.int32, device=device),
        input_ids=torch.zeros(REQUESTS, dtype=torch.int32, device=device),
    )

    def step(new: int, steered: int) -> None:
        probe.begin(new, REQUESTS, REQUESTS)
        for slot in range(new):
            state.remove_request(ids[slot])
            ids[slot] = f"request-{slot}-{len(probe.steps)}"
            admit(slot, slot + len(probe.steps), slot < steered)
        batch.req_ids = list(ids)  # the runner makes the list anew
        state.prepare_inputs(batch, None)

    rows = []
    for steered in STEERED:
        step(REQUESTS, steered)
        for _ in range(50):
            step(0, steered)
        probe.steps.clear()
        for number in range(steps):
            step(1 if number % 8 == 0 else 0, steered)
        if device.type == "cuda":
            torch.cuda.synchronize()
        rows += summaries("fake", steered, probe.steps)
    return rows


def main() -> int:
    """Measure, print a table, write JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fake", action="store_true", help="the hooks alone, without a model")
    parser.add_argument("--model", choices=MODELS, default="gemma-3-4b")
    parser.add_argument("--out", type=Path, help="folder of the JSON lines; nothing is written without it")
    parser.add_argument("--commit", default="", help="that is measured, where git cannot tell")
    options = parser.parse_args()
    rows = fake() if options.fake else whole(options.model)
    print(
        f"{'mode':20}{'steered':>8}{'steps':>7}{'new':>6}"
        f"{'us':>8}{'p20':>8}{'p80':>8}{'max':>9}{'ops':>8}  under the limit"
    )
    for r in rows:
        reached = {None: "", True: f"yes, {LIMIT_US:.0f}", False: f"MISSED, {LIMIT_US:.0f}"}[r["reached"]]
        print(
            f"{r['mode']:20}{r['steered']:8}{r['steps']:7}{r['admitted']:6.1f}{r['us']:8.1f}{r['p20']:8.1f}"
            f"{r['p80']:8.1f}{r['max']:9.1f}{r['ops_us']:8.1f}  {reached}".rstrip()
        )
    if options.out is not None:
        from bench.timing import machine

        about = machine(options.commit) | {"model": "none" if options.fake else options.model}
        options.out.mkdir(parents=True, exist_ok=True)
        with (options.out / "host.jsonl").open("w") as file:
            file.writelines(json.dumps({**about, **r}) + "\n" for r in rows)
    return 0 if all(r["reached"] is not False for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
