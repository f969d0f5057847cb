"""Other libraries' names for places in a model, and the sites that they mean. Knows no model and no file."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import NamedTuple

from saesteer.language.sites import KINDS, canonical, parse

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
    # TransformerBridge's names, for places that have one above already
    "hook_in": "resid_pre",
    "ln2.hook_in": "resid_mid",
    "hook_out": "resid_post",
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
# Modules below the model's trunk, whose outputs they are: layers.{L}[.NAME].
_MODULES = {
    None: "resid_post",
    "mlp": "mlp_out_raw",
    "self_attn": "attn_out_raw",
    "attention": "attn_out_raw",
    "attn": "attn_out_raw",
}
# Families that add to the stream what attention and the MLP put out, with no norm between.
_NO_POST_NORM = re.compile(r"llama|smollm|mistral|mixtral|qwen|pythia|gpt-?2|gpt-oss|phi-3|r1-distill", re.IGNORECASE)
_POST_NORM = re.compile(r"gemma|olmo", re.IGNORECASE)  # a path may hold other words, too
# TransformerLens centres what layers write, if told to, in models with LayerNorm; with RMSNorm it leaves it as it is.
# BLOOM has LayerNorm and is in neither list: the norm of its embedding also writes there, and is not centred.
_LAYER_NORM = re.compile(
    r"gpt-?2|gpt-?j|gpt-?neo|pythia|\bopt\b|phi-[12](?!\d)|tiny-?stories|olmo-[17]b|stablelm-(base|tuned)|santacoder",
    re.IGNORECASE,
)
_RMS_NORM = re.compile(
    r"llama|smollm|mi[sx]tral|gemma|qwen|qwq|gpt-oss|deepseek|phi-[34]|olmo-?[23e]|\byi-\d|apertus", re.IGNORECASE
)
# In TransformerLens these are copies of the stream before the norm; elsewhere, the tensor after it.
AMBIGUOUS = ("hook_mlp_in", "hook_attn_in")
_WRITTEN = re.compile(r"(resid_\w+|attn_out|mlp_out)\.\d+")


# layer_20, blocks.8, h.3, W_enc_5, and the L15R of Llama Scope
_LAYER = re.compile(
    r"(?:^|[^a-z])(?:(?:layers?|blocks|h|w_enc|directions?)[._-]?|l(?=\d+(?:r|a|m|tc)(?![a-z\d])))(\d+)", re.IGNORECASE
)


class Place(NamedTuple):
    """What a name says about where something belongs."""

    kind: str | None = None
    layer: int | None = None


def place_in(name: str) -> Place:
    """The place that the name of an array says: a site by any library's name for it, or a layer."""
    site = from_transformer_lens(name) or from_hugging_face(name) or name.replace("_layer_", ".")
    kind, _, layer = site.partition(".")
    if kind in KINDS and layer.isdecimal():
        return Place(*parse(canonical(site)))
    if name in KINDS:
        return Place(name)
    return Place(None, layer_in(PurePath(name.replace(".", "_"))))


def layer_in(path: PurePath) -> int | None:
    """The layer that a path names last, as in ``layer_20``, ``blocks.8`` or ``3.pt``; None if it names none."""
    for part in reversed(path.parts):
        if found := _LAYER.search(part):
            return int(found[1])
    number = path.name.partition(".")[0]
    return int(number) if number.isdecimal() else None


def from_transformer_lens(name: str) -> str | None:
    """``blocks.20.hook_resid_post`` -> ``resid_post.20``; None if the name has no site."""
    return "embed" if name == "hook_embed" else _site(r"blocks\.(\d+)\.(.+)", _TRANSFORMER_LENS, name)


def to_transformer_lens(site: str) -> str | None:
    """The inverse: ``resid_post.20`` -> ``blocks.20.hook_resid_post``; None for a site that has no such name."""
    kind, _, layer = site.partition(".")
    hook = next((name for name, meant in _TRANSFORMER_LENS.items() if meant == kind), None)
    return f"blocks.{layer}.{hook}" if hook and layer else None


def pair(read: str | None, written: str | None) -> tuple[str | None, str | None]:
    """The sites that two TransformerLens names mean; None for a name that is not there, or has no site."""
    site_in, site_out = (from_transformer_lens(name) if name else None for name in (read, written))
    return site_in, site_out


def from_hugging_face(name: str) -> str | None:
    """``model.layers.20.output`` -> ``resid_post.20``; None if the name has no site."""
    return _site(r"(?:.*\.)?layers\.(\d+)\.(.+)", _HUGGING_FACE, name)


def from_module_output(name: str, model: str | None) -> str | None:
    """The site at the output of ``layers.20``, ``transformer.h.3.mlp`` and the like; None for a module without a site.

    Args:
        model: its name, or a path that may hold it.
    """
    match = re.fullmatch(r"(?:.+\.)?(?:layers|h)\.(\d+)(?:\.(\w+))?", name)
    return added(f"{_MODULES[match[2]]}.{int(match[1])}", model) if match and match[2] in _MODULES else None


def added(site: str | None, model: str | None) -> str | None:
    """The site itself; or, where it is a module's output and the model adds just that to the stream, what is added."""
    plain = model is not None and _NO_POST_NORM.search(model) and not _POST_NORM.search(model)
    return site.replace("_raw", "") if site and plain else site


def is_ambiguous(name: str) -> bool:
    """True if libraries disagree about the tensor that this TransformerLens name means."""
    return name.rpartition(".")[2] in AMBIGUOUS


def is_written(site: str) -> bool:
    """Whether what the model's layers write arrives here, and so without its mean if their weights are centred."""
    return _WRITTEN.fullmatch(site) is not None


def is_centred(model: str | None) -> bool | None:
    """Whether TransformerLens, told to centre what layers write, does so for a model; None if its name does not say."""
    by_layer, by_rms = (bool(model and norms.search(model)) for norms in (_LAYER_NORM, _RMS_NORM))
    return None if by_layer == by_rms else by_layer


def _site(pattern: str, table: dict[str, str], name: str) -> str | None:
    match = re.fullmatch(pattern, name)
    return f"{table[match[2]]}.{int(match[1])}" if match and match[2] in table else None
