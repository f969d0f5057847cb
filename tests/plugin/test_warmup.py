"""No kernel is compiled inside a served request: warm-up has made every variant, whatever is asked for and how much.

The engine runs in a process of its own, with its worker inside, where Triton tells of every kernel that it makes; this
file is both the test and that process. It knows no kernel by name.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from saesteer.loaders.formats import own
from tests.apart import hear, tell
from tests.plugin.conftest import BRIDGE, OCEAN, WIDTH, Dictionaries, engine_options, random_coder

pytestmark = [pytest.mark.slow, pytest.mark.gpu]

BATCHES = (1, 3, 16, 40)
PROMPTS = (5, 100, 700)  # tokens
CAPTURED = [1, 2, 4, 8, 16, 32, 64]
MODULE = {"edits": [BRIDGE, OCEAN]}


def _vector(edit: dict[str, Any]) -> dict[str, Any]:
    return {"vector": [((7 * n) % 11 - 5) / 5 for n in range(WIDTH)], "site": "resid_post.15", **edit}


def _clamps(dictionary: str, many: int, **more: Any) -> list[dict[str, Any]]:
    return [{"op": "clamp", "dictionary": dictionary, "feature": n, "value": 1.0, **more} for n in range(many)]


# Every kind of edit, and enough of a kind to be split over programs or taken as tiles.
KINDS: dict[str, dict[str, Any]] = {
    "clamp": {"edits": [BRIDGE]},
    "modes": {"edits": [{**OCEAN, "mode": mode, "value": 2.0, "unit": "raw"} for mode in ("min", "max")]},
    "add and scale": {
        "edits": [
            {**BRIDGE, "mode": "add", "value": 2.0, "unit": "raw"},
            {**OCEAN, "mode": "scale", "value": 2.0, "unit": "raw", "only_if_active": True},
        ]
    },
    "many clamps": {"edits": _clamps("demo", 40)},
    "two groups": {"edits": [OCEAN, *_clamps("second", 1), BRIDGE]},
    "topk": {"edits": _clamps("topk", 3)},
    "input norm": {"edits": _clamps("normed", 3)},
    "before a norm": {"edits": _clamps("mid", 2)},
    "embedding": {"edits": _clamps("embed", 2)},
    "last layer": {"edits": _clamps("last", 2)},
    "add": {"edits": [_vector({"op": "add", "scale": 2.0})]},
    "add, norm match": {"edits": [_vector({"op": "add", "scale": 0.1, "norm": "match"})]},
    "cap": {"edits": [_vector({"op": "cap", "max": 0.5})]},
    "ablate": {"edits": [_vector({"op": "ablate"})]},
    "gated": {"edits": [{**BRIDGE, "when": [{"dictionary": "demo", "feature": 6511, "above": 0.5}]}]},
    "reconstruct": {"edits": [{"op": "reconstruct", "dictionary": "second", "error": "drop"}]},
    "reconstruct, keep": {
        "edits": [*_clamps("second", 2), {"op": "reconstruct", "dictionary": "second", "error": "keep"}]
    },
    "module": {"edits": [{"op": "use", "module": "places"}]},
    "windows": {
        "edits": [{**BRIDGE, "scope": {"positions": [[2, 4], [90, 95]]}}, {**OCEAN, "scope": {"prompt": True}}]
    },
}


def test_nothing_is_compiled_while_serving(model_dir: str, dictionaries: Dictionaries, tmp_path: Path) -> None:
    normed = random_coder("jumprelu", 9)
    own.write(tmp_path / "normed.safetensors", replace(normed, info=replace(normed.info, in_norm="layer_norm")))
    job = {
        "model": model_dir,
        "dictionaries": {**dictionaries.arguments, "normed": f"{tmp_path}/normed.safetensors@resid_post.10"},
    }
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    made = hear("-m", "tests.plugin.test_warmup", json.dumps(job), environment=environment)
    assert made["canary"] == 1, "Triton does not tell of kernels that it makes"
    assert made["warm-up"], "no kernel was made before serving"
    assert made["serving"] == []


@contextmanager
def kernels_made() -> Iterator[list[str]]:
    """Module, name and specialisation of every kernel that Triton makes, or loads from its cache, in this process."""
    from triton import knobs

    found: list[str] = []
    before = knobs.runtime.jit_post_compile_hook

    def hook(**event: Any) -> Any:
        found.append(f"{event['fn'].module}: {event.get('repr', event['fn'].name)}")
        return before(**event) if before is not None else None

    knobs.runtime.jit_post_compile_hook = hook
    try:
        yield found
    finally:
        knobs.runtime.jit_post_compile_hook = before


def ours(kernels: list[str]) -> list[str]:
    """Those of saesteer; vLLM's own are its own affair."""
    return [kernel for kernel in kernels if kernel.startswith("saesteer.")]


def canary() -> int:
    """How many kernels are seen when one is made."""
    import torch
    import triton

    @triton.jit
    def nothing(x):  # type: ignore[no-untyped-def]
        pass

    with kernels_made() as found:
        nothing[(1,)](torch.zeros(1, device="cuda"))
    return len(found)


def serve(llm: Any) -> Iterator[str]:
    """Batches of every size, of every kind alone and of all kinds together; says which one has been served."""
    from vllm import SamplingParams

    names = list(KINDS)

    def run(requests: int, length: int, kinds: list[str]) -> str:
        # Prompts of their own, lest the prefix cache makes them short.
        prompts = [
            {"prompt_token_ids": [1 + (31 * n + at * (n + 1)) % 4000 for at in range(length)]} for n in range(requests)
        ]
        specs = [KINDS[kinds[n % len(kinds)]] for n in range(requests)]
        params = [SamplingParams(temperature=0, max_tokens=4, ignore_eos=True) for _ in range(requests)]
        llm.reset_prefix_cache()
        llm.generate(prompts, params, steer=specs, use_tqdm=False)
        return f"{requests} requests of {length} tokens: {', '.join(kinds)}"

    for length in PROMPTS:
        for name in names:
            for requests in (1, 3):
                yield run(requests, length, [name])
        for requests in BATCHES:
            yield run(requests, length, names[requests % len(names) :] + names[: requests % len(names)])


def main() -> None:
    """Serve, and tell which kernels were made when."""
    from saesteer import LLM

    job = json.loads(sys.argv[1])
    made: dict[str, Any] = {"canary": canary(), "serving": []}
    with kernels_made() as early:
        llm = LLM(
            job["model"],
            dictionaries=job["dictionaries"],
            modules={"places": MODULE},
            **engine_options(max_num_seqs=64, cudagraph_capture_sizes=CAPTURED),
        )
        made["warm-up"] = ours(early)
    with kernels_made() as late:
        for served in serve(llm):
            made["serving"] += [f"{served}: {kernel}" for kernel in ours(late)]
            late.clear()
    tell(made)


if __name__ == "__main__":
    main()
