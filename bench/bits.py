"""At which sites an op changes the last bits of requests that nobody steers: stock vLLM beside saesteer, compiled.

    python -m bench.bits --out DIR [--model gemma-2-2b] [--kinds z,mlp_out]     a dummy model in vLLM, in graphs

Stock generates four prompts. Then an engine for each kind of site, with an op there in every layer, generates them
twice: unsteered, and with a vector added to every second one. A kind keeps the others' bits if tokens and logprobs of
those that nobody steers equal stock's both times. Knows no kernel.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.dummy import MODELS, model_folder
from bench.timing import machine
from saesteer.models.families import SERVED_KINDS
from saesteer.plugin.job import Batch, Completion, run

PROMPTS = [[2, *range(7 + n, 40 + 9 * n)] for n in range(4)]
TOKENS = 24


def width_of(model: str, kind: str) -> int:
    """The width of the tensor at a kind of site."""
    shape: dict[str, Any] = MODELS[model]
    return int(shape["num_attention_heads"] * shape["head_dim"] if kind == "z" else shape["hidden_size"])


def steered(model: str, kind: str) -> list[Any]:
    """The specs of the second batch: a vector at a middle layer for every second prompt."""
    layer = MODELS[model]["num_hidden_layers"] // 2  # type: ignore[operator]
    vector = [((7 * n) % 11 - 5) / 2 for n in range(width_of(model, kind))]
    return [None, {"edits": [{"op": "add", "vector": vector, "site": f"{kind}.{layer}", "scale": 4.0}]}] * 2


def same(stock: Sequence[Completion], ours: Sequence[Completion]) -> list[bool]:
    """Whether tokens and logprobs agree to the bit, for each prompt."""
    return [(a.ids, a.logprobs) == (b.ids, b.logprobs) for a, b in zip(stock, ours, strict=True)]


def difference(stock: Sequence[Completion], ours: Sequence[Completion]) -> float:
    """The largest difference of a logprob up to the first token that differs."""
    largest = 0.0
    for one, other in zip(stock, ours, strict=True):
        for a, b, left, right in zip(one.ids, other.ids, one.logprobs, other.logprobs, strict=True):
            if a != b:
                break
            largest = max(largest, abs(left - right))
    return largest


def measure(model: str, kinds: Sequence[str], options: dict[str, Any]) -> list[dict[str, Any]]:
    """A line for each kind.

    Raises:
        RuntimeError: a steered request answered as stock does, so the op did not run.
    """
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = str(model_folder(model, Path(scratch)))
        plain = Batch(PROMPTS, max_tokens=TOKENS, ignore_eos=True, fresh=True)
        [stock] = run(folder, [plain], dictionaries=None, options=options)
        for kind in kinds:
            mixed = Batch(PROMPTS, steered(model, kind), max_tokens=TOKENS, ignore_eos=True, fresh=True)
            given = options | {"sites": [f"{kind}.all"]}
            idle, mixed_answers = run(folder, [plain, mixed], dictionaries={}, options=given)
            bits = [same(stock, answers) for answers in (idle, mixed_answers)]
            if any(bits[1][1::2]):
                raise RuntimeError(f"{kind}: a steered request has stock's bits")
            off = difference(stock, idle)
            found.append(
                {"model": model, "kind": kind, "idle": all(bits[0]), "beside": all(bits[1][::2]), "difference": off}
            )
            shown = f"unsteered {found[-1]['idle']!s:6} beside steered ones {found[-1]['beside']!s:6}"
            print(f"{kind:12} {shown} largest difference of a logprob {off:.1e}", flush=True)
    return found


def main() -> None:
    """Measure, print, write JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="gemma-2-2b")
    parser.add_argument("--kinds", default=",".join(SERVED_KINDS), help="of sites, separated by commas")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--memory", type=float, help="GiB for the KV cache; default: vLLM's")
    parser.add_argument("--out", type=Path, help="folder of bits.jsonl, which grows; nothing is written without it")
    parser.add_argument("--commit", default="", help="that is measured, where git cannot tell")
    given = parser.parse_args()
    options: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 512, "seed": 0}
    options |= {"dtype": given.dtype, "max_num_seqs": 8}
    if given.memory:
        options["kv_cache_memory_bytes"] = int(given.memory * 2**30)
    rows = measure(given.model, given.kinds.split(","), options)
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        with (given.out / "bits.jsonl").open("a") as file:
            file.writelines(json.dumps({**machine(given.commit), **row}) + "\n" for row in rows)


if __name__ == "__main__":
    main()
