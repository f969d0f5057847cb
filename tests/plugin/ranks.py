"""Engines of the tiny Llama (asked.py) with one rank or stage or several, and what they say to all that it is asked."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from tests.plugin.asked import CLAMP, FEATURES, KINDS, PROMPTS, READS, ROWS, RULE, WIDTH, tiny_llama
from tests.plugin.conftest import CUDA
from tests.plugin.said import plain
from tests.plugin.tiny_engine import params_of

WAYS: dict[str, dict[str, Any]] = {
    "one": {},
    "tensor": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},  # between layers 1 and 2, resid_post.1 behind it
}
if find_spec("ray"):
    WAYS["ray"] = {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}
APART = {"read at z"}  # needs on the second stage what the first has read


def told(output: Any) -> tuple[list[int], list[float], list[int]]:
    """Tokens, logprobs, and the counts of each edit."""
    made = output.outputs[0]
    logprobs = [step[token].logprob for token, step in zip(made.token_ids, made.logprobs, strict=True)]
    applied = getattr(made, "saesteer", {}).get("applied", ())
    return list(made.token_ids), logprobs, [one["tokens_edited"] for one in applied]


def ask(llm: Any, spec: Any, prompts: Any = PROMPTS[:1], tokens: int = 8) -> Any:
    """What is told of the answers to a spec."""
    outputs = llm.generate(
        [{"prompt_token_ids": one} for one in prompts], params_of(spec, max_tokens=tokens), use_tqdm=False
    )
    return [told(output) for output in outputs]


def _read(output: Any) -> dict[str, Any]:
    """What an answer has read; of a consumer the rows in its files, not their names."""
    found = dict(output.outputs[0].saesteer)
    if "consumers" in found:
        found["consumers"] = {"rows": found["consumers"]["filesystem"]["rows"]}
    return plain(found)


def reads_of(llm: Any) -> dict[str, Any]:
    """What all prompts' answers have read, by the name of what they return."""
    found = {}
    for name, wanted in READS.items():
        params = params_of({"edits": [CLAMP, {**CLAMP, "dictionary": "heads"}], "return": wanted}, max_tokens=8)
        outputs = llm.generate([{"prompt_token_ids": one} for one in PROMPTS], params, use_tqdm=False)
        found[name] = [_read(output) for output in outputs]
    return found


def rules_of(llm: Any, op: str) -> list[Any]:
    """The tokens and the flags of each answer."""
    params = params_of({"edits": [{"op": op, **RULE}]}, max_tokens=16)
    outputs = llm.generate([{"prompt_token_ids": one} for one in PROMPTS], params, use_tqdm=False)
    return [[list(one.outputs[0].token_ids), one.outputs[0].saesteer["flags"]] for one in outputs]


def answers_to(llm: Any, spec: Any) -> Any:
    """To all prompts, or why not."""
    from saesteer import SpecError

    try:
        return ask(llm, spec, PROMPTS)
    except SpecError as error:
        return str(error)


def start(folder: Path, way: str, **changes: Any) -> Any:
    """An engine with its ranks or stages."""
    from bench.dummy import dictionary_file
    from saesteer import LLM

    np.save(folder / "probe.npy", np.array(ROWS[1], dtype=np.float32))
    narrow, wide = (f"{dictionary_file(width, FEATURES, folder)}@" for width in (WIDTH, 2 * WIDTH))
    options: dict[str, Any] = {"gpu_memory_utilization": 0.1} if CUDA else {}
    options |= {"dtype": "float32", "enforce_eager": True, **WAYS[way], **changes}
    return LLM(
        tiny_llama(folder),
        dictionaries={"random": f"{narrow}resid_post.1", "heads": f"{wide}z.1"}
        | {f"mlp{n}": f"{narrow}mlp_in.{n}:mlp_out.{n}" for n in (1, 2)},
        vectors={"probe": str(folder / "probe.npy")},
        sites=["resid_post.all", "resid_mid.1", "z.2", *KINDS],
        reads=["resid_post.2", "resid_post.1", "z.1", *KINDS],
        consumers={"filesystem": {"folder": str(folder / f"asked {way}")}},
        capture=["z.1", "resid_post.1"],
        capture_folder=str(folder / f"rows {way}" / "captured"),
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=256,
        max_num_seqs=4,
        kv_cache_memory_bytes=64 << 20,
        seed=0,
        **options,
    )
