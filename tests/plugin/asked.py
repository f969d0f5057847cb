"""A tiny Llama with real weights, since dummy ones differ by rank, others of its form, and what they are asked."""

from pathlib import Path
from typing import Any

import torch

from tests.plugin.conftest import CUDA

WIDTH, LAYERS, FEATURES = 64, 4, 128
# Of a logprob, between sums over two halves and over the whole, in float32 or, on a GPU, tf32.
NOISE = 2e-2 if CUDA else 1e-4
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [400, 3, 77], [9] * 40]
ROWS = [[((3 * n + k) % 11 - 5) / 4 for n in range(WIDTH)] for k in range(2)]
HEADS = [((5 * n) % 11 - 5) / 4 for n in range(2 * WIDTH)]  # as wide as z, of which each of two ranks has half
CLAMP = {"op": "clamp", "dictionary": "random", "feature": 17, "value": 6.0}
OVER = {"dictionary": "random", "feature": 3, "above": 0.2}
KINDS = ("resid_pre.1", "attn_in.1", "z.2", "attn_out.1", "resid_mid.1", "mlp_in.1", "mlp_out.1", "resid_post.2")


def add(vector: Any, site: str = "resid_post.2") -> dict[str, Any]:
    return {"op": "add", "vector": vector, "site": site, "scale": 1.5}


SPECS: dict[str, Any] = {
    "plain": None,
    "clamp": {"edits": [CLAMP]},
    "add": {"edits": [add(ROWS[0])]},
    "every site": {"edits": [add(ROWS[1], f"resid_post.{layer}") for layer in range(LAYERS)]},
    "before the MLP": {"edits": [add(ROWS[0], "resid_mid.1"), {**CLAMP, "scope": {"generated": True}}]},
    "gated": {"edits": [{**add(ROWS[0], "resid_post.3"), "when": OVER}]},
    "cap": {"edits": [{"op": "cap", "vector": ROWS[1], "site": "resid_post.0", "max": 0.1}]},
    "reconstruct": {"edits": [{"op": "reconstruct", "dictionary": "random", "error": "drop"}]},
    "clamp at z": {"edits": [{**CLAMP, "dictionary": "heads"}]},
    "reconstruct at z": {"edits": [{"op": "reconstruct", "dictionary": "heads"}, add(HEADS, "z.1")]},
    "read at z": {"edits": [{**add(ROWS[0]), "scale": {"dictionary": "heads", "feature": 3, "bias": 1.0}}]},
    **{f"add at {site}": {"edits": [add(HEADS if site == "z.2" else ROWS[1], site)]} for site in KINDS},
    "an MLP without an op": {"edits": [{**CLAMP, "dictionary": "mlp2"}]},
    "an MLP, reconstructed": {"edits": [{**CLAMP, "dictionary": "mlp1"}, {"op": "reconstruct", "dictionary": "mlp1"}]},
    "of two outputs": {
        "edits": [
            {"op": "ablate", "vector": ROWS[1], "site": "attn_out.1", "strength": 2.0},
            {**add(ROWS[0], "mlp_out.1"), "norm": "match"},
        ]
    },
    "cap at z": {"edits": [{"op": "cap", "vector": HEADS, "site": "z.2", "max": 0.1}]},
}
EVERYWHERE = {"positions": [[0, None]]}
PROBE = {"probe": "probe", "site": "resid_post.2"}
RULE = {"when": [{"dictionary": "heads", "feature": 3, "above": 0.0}, {**PROBE, "above": -1.0}], "scope": {}}
READS: dict[str, Any] = {
    "features": {"features": [{"dictionary": name, "top_k": 4, "scope": EVERYWHERE} for name in ("random", "heads")]},
    "probes": {"probes": [{**PROBE, "scope": EVERYWHERE}]},
    "tensors": {"activations": [{"site": site, "scope": EVERYWHERE} for site in KINDS], "dose": True},
    "behind edits": {"activations": [{"site": "z.1", "at": "after"}, {"site": "resid_post.1", "at": "after"}]},
    "reduced": {"activations": [{"site": "z.2", "reduce": "mean"}, {"site": "mlp_out.1", "reduce": "max"}]},
    "handles": {"activations": [{"site": "z.2", "as": "handle"}, {"site": "resid_mid.1", "as": "handle"}]},
    "hidden": {"hidden": True},
    "hidden of all": {"hidden": {"scope": EVERYWHERE}},
    "consumers": {"consumers": {"filesystem": {}}, "activations": [{"site": "attn_out.1"}]},
}


def tiny_llama(folder: Path) -> str:
    """The model's folder, below this one."""
    from transformers import LlamaConfig, LlamaForCausalLM

    if not (folder / "model").exists():
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            intermediate_size=128,
            vocab_size=512,
            max_position_embeddings=512,
            initializer_range=0.2,
        )
        LlamaForCausalLM(config).save_pretrained(folder / "model")
    return str(folder / "model")


def factor(name: str) -> float:
    """By which the other model's weights differ."""
    return 1.25 if "norm" in name else -1.0 if "down_proj" in name else 1.0


def other_llama(folder: Path) -> str:
    """A model of the same form, with other weights."""
    from safetensors.torch import load_file, save_file

    if not (folder / "other").exists():
        source = Path(tiny_llama(folder))
        (folder / "other").mkdir()
        for path in source.iterdir():
            if path.suffix == ".safetensors":
                weights = {name: factor(name) * one for name, one in load_file(path).items()}
                save_file(weights, folder / "other" / path.name, metadata={"format": "pt"})
            else:
                (folder / "other" / path.name).write_bytes(path.read_bytes())
    return str(folder / "other")
