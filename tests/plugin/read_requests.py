"""Requests that read from the embedded model: of which engine, with which prompts, and what they return."""

from collections.abc import Sequence
from typing import Any

from saesteer import hf
from tests.plugin.conftest import BRIDGE, CUDA, LONG_PROMPT, OCEAN
from tests.plugin.readings import check_reads

BLOCK = 16 if CUDA else 32
# Prompts are computed in chunks of 64 tokens; a cache for 640 tokens makes a crowd preempt.
CROWDED: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 64}
CROWDED |= {"block_size": BLOCK, "num_gpu_blocks_override": 640 // BLOCK + 1, "disable_log_stats": False}
OPTIONS = {**CROWDED, "reads": ["resid_post.7", "mlp_out.12", "attn_out.9", "resid_post.18"]}
EVERYWHERE = {"positions": [[0, None]]}
STEERED = [BRIDGE, {**OCEAN, "scope": {"generated": True}}, {"op": "add", "vector": "any", "site": "resid_mid.7"}]
READS: dict[str, Any] = {
    "features": {
        "features": [
            {"dictionary": "demo", "top_k": 8, "features": [3497, 99], "scope": EVERYWHERE},
            {"dictionary": "demo", "top_k": 3, "at": "after"},
            {"dictionary": "topk", "scope": {"prompt": True}},
            {"dictionary": "norm", "top_k": 12, "scope": {"positions": [[0, 3], [-2, None]]}},
            {"dictionary": "group", "top_k": 5, "features": [95], "scope": EVERYWHERE},
            {"dictionary": "cross", "features": [3, 4, 95]},
            {"dictionary": "skip", "top_k": 4, "scope": EVERYWHERE},
            {"dictionary": "deep", "layer": 15, "top_k": 96, "at": "after", "scope": {"skip_first": 2}},
        ]
    },
    "probes": {
        "probes": [
            "probe",
            {"probe": "probe", "at": "after", "scope": EVERYWHERE},
            {"probe": "each", "site": "resid_post.20", "scope": {"prompt": True}},
            {"probe": "any", "site": "resid_mid.7", "scope": {"positions": [[1, 4], [-3, -1]]}},
            {"probe": "any", "site": "resid_mid.7", "at": "after", "scope": {"positions": [[1, 4], [-3, -1]]}},
        ]
    },
    "activations": {
        "activations": [
            {"site": "resid_post.20"},
            {"site": "resid_post.15", "at": "after", "reduce": "mean"},
            {"site": "resid_post.15", "scope": {"positions": [[5, 9], [-1, None]]}},
            {"site": "mlp_out.12", "reduce": "max", "scope": {"prompt": True}},
            {"site": "attn_out.9", "reduce": "last"},
            {"site": "resid_post.29", "reduce": "mean", "scope": {"generated": True}},
            {"site": "resid_mid.7", "reduce": "max", "at": "after", "scope": {"positions": [[2, 3], [60, 70]]}},
        ],
        "hidden": True,
    },
    "hidden": {"hidden": {"scope": {"positions": [[0, 2], [-2, None]]}}},
    "generated": {
        "features": [{"dictionary": "demo"}],
        "probes": ["probe"],
        "activations": [{"site": "resid_post.7", "scope": {"generated": True}, "reduce": "max"}],
        "hidden": {"scope": {"generated": True}},
    },
}
READS["all"] = {
    "features": READS["features"]["features"],
    "probes": READS["probes"]["probes"],
    "activations": READS["activations"]["activations"],
    "hidden": True,
}


def text(tag: str, letters: int = 400) -> str:
    """A prompt that no other test has used. Only its first token is one of the few that a model makes a hundred times
    as large as others: how large depends on the last bits of what is edited before."""
    return f"Here is {tag}. {LONG_PROMPT}"[:letters]


def ask(llm: Any, prompts: Any, steer: Any, tokens: int | Sequence[int] = 12, **sampling: Any) -> Any:
    """Outputs, greedy unless said otherwise."""
    from vllm import SamplingParams

    each = [tokens] * len(prompts) if isinstance(tokens, int) else tokens
    sampling = {"temperature": 0, "logprobs": 0, "ignore_eos": True} | sampling
    return llm.generate(prompts, [SamplingParams(max_tokens=n, **sampling) for n in each], steer=steer, use_tqdm=False)


def check(oracle: hf.Model, output: Any, returns: Any, edits: Any = ()) -> None:
    """All choices of an output."""
    for choice in output.outputs:
        check_reads(oracle, output.prompt_token_ids, choice, returns, edits, output.num_cached_tokens)


def add(llm: Any, name: str, prompt: str, returns: Any, tokens: int) -> None:
    """Begin a stream."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    extra = None if returns is None else {"saesteer": {"return": returns}}
    params = SamplingParams(
        temperature=0, max_tokens=tokens, ignore_eos=True, extra_args=extra, output_kind=RequestOutputKind.DELTA
    )
    ids = llm.get_tokenizer()(prompt).input_ids
    llm.llm_engine.add_request(name, {"prompt_token_ids": ids}, params)
