"""Time per output token of a whole engine: stock, idle (dictionary loaded, nobody steered), one clamp in each request.

Two engines live on one GPU, each in a process of its own, and take turns, so that all modes are measured in one run
under one load. Usage, on a machine with a GPU:

    python -m bench.engine --model gemma-2-2b --out bench/results/engine.jsonl
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PROMPT, TOKENS, SITE_OF_LAYERS = 256, 128, 2  # prompt length, tokens timed, the site is at layers / 2


def child(job: dict[str, Any]) -> None:
    """Serve timings: each line on stdin {"requests", "steer"} is answered by seconds per token."""
    from vllm import LLM, SamplingParams

    llm = LLM(**job["engine"])

    def run(requests: int, steer: bool, tokens: int) -> float:
        extra = {"saesteer": {"edits": [job["clamp"]]}} if steer else None
        params = [
            SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, extra_args=extra) for _ in range(requests)
        ]
        prompts: Any = [{"prompt_token_ids": [2, *range(7 + n, 6 + n + PROMPT)]} for n in range(requests)]
        begin = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - begin

    print("\nready", flush=True)
    for line in sys.stdin:
        ask = json.loads(line)
        short = run(ask["requests"], ask["steer"], 1)
        whole = run(ask["requests"], ask["steer"], 1 + TOKENS)
        print(f"\nanswer {(whole - short) / TOKENS}", flush=True)


class Child:
    """An engine in a process of its own."""

    def __init__(self, job: dict[str, Any], stock: bool) -> None:
        environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"} | (
            {"VLLM_PLUGINS": ""} if stock else {}
        )
        command = [sys.executable, "-m", "bench.engine", "--child", json.dumps(job)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)

    def read(self, word: str) -> str:
        """The rest of the next line that begins with ``word``."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(word):
                return line[len(word) :].strip()
        raise SystemExit(f"an engine died with exit code {self.process.wait()}")

    def ask(self, requests: int, steer: bool) -> float:
        """Seconds per token."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"requests": requests, "steer": steer}) + "\n")
        self.process.stdin.flush()
        return float(self.read("answer"))


def measure(model: str, rounds: int, sizes: list[int], folder: Path) -> list[dict[str, Any]]:
    """One row for each mode and number of requests."""
    from bench.dummy import MODELS, dictionary_file, model_folder

    shape = MODELS[model]
    layer = int(str(shape["num_hidden_layers"])) // SITE_OF_LAYERS
    engine: dict[str, Any] = {
        "model": str(model_folder(model, folder)),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": 1024,
        "max_num_seqs": 64,
        "enable_prefix_caching": False,
        "gpu_memory_utilization": 0.3,
        "kv_cache_memory_bytes": 8 << 30,  # given, so that two engines may start on one GPU
        "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64],
    }
    place = f"{dictionary_file(int(str(shape['hidden_size'])), 16384, folder)}@resid_post.{layer}"
    clamp = {"op": "clamp", "dictionary": "random", "feature": 9001, "value": 30.0}
    steering = {"additional_config": {"saesteer": {"dictionaries": {"random": place}}}}
    stock = Child({"engine": engine, "clamp": clamp}, stock=True)
    ours = Child({"engine": engine | steering, "clamp": clamp}, stock=False)
    stock.read("ready")
    ours.read("ready")
    modes = {"stock": (stock, False), "idle": (ours, False), "one clamp": (ours, True)}
    rows = []
    for requests in sizes:
        times: dict[str, list[float]] = {mode: [] for mode in modes}
        for turn in range(rounds + 1):
            order = list(modes) if turn % 2 else list(reversed(modes))
            for mode in order:
                one, steer = modes[mode]
                seconds = one.ask(requests, steer)
                if turn:  # the first is a warm-up
                    times[mode].append(seconds * 1e3)
        base = statistics.median(times["stock"])
        for mode, taken in times.items():
            paired = [100 * (a / b - 1) for a, b in zip(taken, times["stock"], strict=True)]
            rows.append(
                {
                    "model": model,
                    "mode": mode,
                    "requests": requests,
                    "ms_per_token": round(statistics.median(taken), 4),
                    "min": round(min(taken), 4),
                    "max": round(max(taken), 4),
                    "over_stock_percent": round(100 * (statistics.median(taken) / base - 1), 2),
                    "paired_percent": round(statistics.median(paired), 2),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    for one in (stock, ours):
        one.process.terminate()
    return rows


def main() -> None:
    """Measure, print a table, and append JSON lines to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="gemma-2-2b")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--commit", default="", help="commit that is measured, for the results")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child")
    options = parser.parse_args()
    if options.child:
        child(json.loads(options.child))
        return
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(options.model, options.rounds, options.requests, Path(folder))
    import torch
    import vllm

    facts = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "vllm": vllm.__version__}
    for row in rows:
        print(
            f"{row['requests']:>4} requests  {row['mode']:<10}"
            f" {row['ms_per_token']:.3f} ms  {row['paired_percent']:+.2f} %"
        )
    if options.out:
        with options.out.open("a") as out:
            for row in rows:
                out.write(json.dumps(row | facts | {"commit": options.commit}) + "\n")


if __name__ == "__main__":
    main()
