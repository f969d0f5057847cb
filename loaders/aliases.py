"""Other libraries' names for places in a model, and the sites that they mean. Knows no model and no file."""

from __future__ import annotations

import re

# TransformerLens: blocks.{L}.NAME
_TRANSFORMER_LENS = {
    "hook_resid_pre": "resid_pre",
    "hook_resid_mid": "resid_mid",
    "hook_resid_post": "resid_post",
    "attn.hook_in": "attn_in",
    "attn.hook_z": "z",
    "hook_attn_out": "attn_out",
    "attn.hook_out": "attn_out_raw",
    "ln2.hook_normalized": "mlp_in_pregain",
    "mlp.hook_in": "mlp_in",
    "mlp.hook_post": "mlp_hidden",
    "hook_mlp_out": "mlp_out",
    "mlp.hook_out": "mlp_out_raw",
}
# Hugging Face modules: [model.]layers.{L}.NAME. Without the outputs of post_attention_layernorm and mlp, since
# they are different tensors in Llama and in Gemma.
_HUGGING_FACE = {
    "input": "resid_pre",
    "output": "resid_post",
    "input_layernorm.output": "attn_in",
    "self_attn.o_proj.input": "z",
    "pre_feedforward_layernorm.output": "mlp_in",
    "post_feedforward_layernorm.output": "mlp_out",
    "mlp.down_proj.input": "mlp_hidden",
}
# In TransformerLens these are copies of the stream before the norm; elsewhere, the tensor after it.
AMBIGUOUS = ("hook_mlp_in", "hook_attn_in")


def from_transformer_lens(name: str) -> str | None:
    """``blocks.20.hook_resid_post`` -> ``resid_post.20``; None if the name has no site."""
    return "embed" if name == "hook_embed" else _site(r"blocks\.(\d+)\.(.+)", _TRANSFORMER_LENS, name)


def from_hugging_face(name: str) -> str | None:
    """``model.layers.20.output`` -> ``resid_post.20``; None if the name has no site."""
    return _site(r"(?:.*\.)?layers\.(\d+)\.(.+)", _HUGGING_FACE, name)


def is_ambiguous(name: str) -> bool:
    """True if libraries disagree about the tensor that this TransformerLens name means."""
    return name.rpartition(".")[2] in AMBIGUOUS


def _site(pattern: str, table: dict[str, str], name: str) -> str | None:
    match = re.fullmatch(pattern, name)
    return f"{table[match[2]]}.{int(match[1])}" if match and match[2] in table else None
