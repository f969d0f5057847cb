"""What requests pay for each other's reads and rules: ms per token of a batch beside the same batch without them.

    python -m bench.neighbours --out bench/results    a dummy Gemma 3 4B through LLM, one dictionary of 16,384 features
    python -m bench.neighbours --memory               what the device holds at start, with all layers readable or none
    python -m bench.neighbours --model tiny --rounds 1    without a GPU

All cases take turns in one engine, in rounds; each case is compared with its own baseline of the same round. Prompts
have 64 tokens that no request had before, answers 64. No rule fires. It knows only public names, so the same file also
measures another commit: copy it there.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.dummy import MODELS, dictionary_file, model_folder

FEATURES, PROMPT, ANSWER, AT_ONCE = 16384, 64, 64, 64
NEVER = 1e9  # no activation is above it

Spec = dict[str, Any] | None


def flags(first: int, number: int) -> Spec:
    """A spec that flags so many features, from one on."""
    watched = ({"dictionary": "random", "feature": first + n, "above": NEVER} for n in range(number))
    return {"edits": [{"op": "flag", "when": when} for when in watched]}


def reads(**what: Any) -> Spec:
    """A spec that reads features of each generated token."""
    return {"return": {"features": [{"dictionary": "random", **what}]}}


# The specs of a batch, and the case that it is compared with; None: it is a baseline.
CASES: dict[str, tuple[list[Spec], str | None]] = {
    "16 plain": ([None] * 16, None),
    "15 plain beside 64 flags of one": ([flags(0, 64), *[None] * 15], "16 plain"),
    "15 plain beside one feature read by one": ([reads(features=[5]), *[None] * 15], "16 plain"),
    "64 plain": ([None] * 64, None),
    "64 read the strongest 8": ([reads(top_k=8)] * 64, "64 plain"),
    "64 read one and the same feature": ([reads(features=[5])] * 64, "64 plain"),
    "64 read a feature of their own": ([reads(features=[n]) for n in range(64)], "64 plain"),
    "64 with 8 flags each": ([flags(8 * n, 8) for n in range(64)], "64 plain"),
}


def started(model: str, folder: Path, readable: Sequence[str]) -> Any:
    """An engine in this process."""
    from vllm import LLM

    shape: Any = MODELS[model]
    file = dictionary_file(shape["hidden_size"], FEATURES if model != "tiny" else 512, folder)
    place = f"{file}@resid_post.{shape['num_hidden_layers'] // 2}"
    return LLM(
        str(model_folder(model, folder)),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=512,
        max_num_seqs=AT_ONCE,
        max_num_batched_tokens=8192,
        kv_cache_memory_bytes=4 << 30 if model != "tiny" else 1 << 26,
        additional_config={"saesteer": {"dictionaries": {"random": place}, "reads": list(readable)}},
    )


def run(llm: Any, specs: Sequence[Spec], vocabulary: int, features: int) -> float:
    """Milliseconds per token of a batch."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": random.choices(range(3, vocabulary), k=PROMPT)} for _ in specs]
    params = []
    for spec in specs:
        text = json.dumps({"saesteer": spec}) if spec else "null"
        extra = json.loads(text)
        for edit in extra["saesteer"].get("edits", ()) if spec else ():
            edit["when"]["feature"] %= features
        params.append(
            SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True, detokenize=False, extra_args=extra)
        )
    begun = time.perf_counter()
    answers = llm.generate(prompts, params, use_tqdm=False)
    took = time.perf_counter() - begun
    assert all(len(one.outputs[0].token_ids) == ANSWER for one in answers), "an answer is not whole"
    return 1e3 * took / ANSWER


def measured(model: str, folder: Path, rounds: int) -> list[dict[str, Any]]:
    """A row for each case."""
    llm, vocabulary = started(model, folder, ()), MODELS[model]["vocab_size"]
    assert isinstance(vocabulary, int)
    features = FEATURES if model != "tiny" else 512
    for specs, _ in CASES.values():
        run(llm, specs, vocabulary, features)  # warm
    times: dict[str, list[float]] = {name: [] for name in CASES}
    for number in range(rounds):
        names = [*CASES] if number % 2 else [*CASES][::-1]
        for name in names:
            times[name].append(run(llm, CASES[name][0], vocabulary, features))
    rows = []
    for name, (_, base) in CASES.items():
        own = times[name]
        row = {"case": name, "model": model, "ms": statistics.median(own), "least": min(own), "most": max(own)}
        if base is not None:
            ratios = [one / other for one, other in zip(own, times[base], strict=True)]
            row |= {"base": base, "ratio": statistics.median(ratios), "low": min(ratios), "high": max(ratios)}
        rows.append({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()})
    return rows


def held(model: str, folder: Path, readable: Sequence[str]) -> float:
    """MiB of the device in use once an engine has started that may read at these sites."""
    import torch

    llm = started(model, folder, readable)
    free, total = torch.cuda.mem_get_info()
    assert llm is not None
    return (total - free) / 2**20


def main() -> int:
    """Measure, and print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="gemma-3-4b")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="folder of neighbours.jsonl")
    parser.add_argument("--memory", choices=["none", "all"], help="only report what the device holds")
    parser.add_argument("--commit", default="", help="that is measured, where git cannot tell")
    given = parser.parse_args()
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        if given.memory:
            mib = held(given.model, Path(folder), ["resid_post.all"] if given.memory == "all" else ())
            print(json.dumps({"readable": given.memory, "MiB": round(mib)}))
            return 0
        rows = measured(given.model, Path(folder), given.rounds)
    for row in rows:
        ratio = f"{row['ratio']:.2f} x {row['base']} ({row['low']:.2f} to {row['high']:.2f})" if "base" in row else ""
        print(f"{row['case']:40} {row['ms']:8.2f} ms a token ({row['least']:.2f} to {row['most']:.2f})  {ratio}")
    if given.out:
        from bench.front import about

        with (given.out / "neighbours.jsonl").open("a") as file:
            for row in rows:
                file.write(json.dumps({**row, "rounds": given.rounds, **about(given.commit)}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
