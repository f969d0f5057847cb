"""A random model of each family, small enough to be made for one test. Knows Transformers, and no engine.

A family has one row; one whose checkpoints come in several forms has a row for each, named after it.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from saesteer.models.families import FAMILIES, Family

WIDTH, LAYERS, VOCABULARY = 64, 3, 72  # all different, so that nothing fits by chance
_TEXT: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 96,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEADS = {"head_dim": 32}
_WIDE = {**_HEADS, "num_attention_heads": 4}  # z is wider than the stream
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SHARED = {**_EXPERTS, "shared_expert_intermediate_size": 32}
_LINEAR = {  # of layers that keep a state instead of keys and values
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 128,  # vLLM has no kernel for 32 on a CPU
    "linear_value_head_dim": 128,
}
_FULL = {**_LINEAR, "layer_types": ["full_attention"] * LAYERS}
_ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_LATENT = _ROUTED | {
    "num_key_value_heads": 2,
    "q_lora_rank": 32,
    "kv_lora_rank": 512,  # with the 64 below, all that vLLM's kernel for CPUs takes
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
}
_GEMMA_4 = _HEADS | {
    "global_head_dim": 64,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCABULARY,
    "num_kv_shared_layers": 0,
}
_TOP = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
_MROPE = {"rope_type": "default", "type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
_QWEN_TOKENS = {"image_token_id": 50, "video_token_id": 51, "vision_start_token_id": 52, "vision_end_token_id": 53}


@dataclass(frozen=True)
class Tiny:
    """How a row is made."""

    model: str  # class
    config: str  # class
    text: dict[str, Any] = field(default_factory=dict)  # what differs from _TEXT, or with None is left out
    vision: dict[str, Any] | None = None  # of a checkpoint that sees, of which the text part is served
    whole: dict[str, Any] = field(default_factory=dict)  # of its whole
    loose: int = 1  # by how many times more than others vLLM may differ from Transformers
    dtype: str = "float32"  # vLLM's linear attention has only bfloat16 on a CPU

    @property
    def torchvision(self) -> bool:
        """Whether vLLM's file of this model imports torchvision, which set-up keeps in a folder of its own."""
        return self.vision is not None or self.model.startswith("Qwen3_5")


ROWS = {
    "Llama": Tiny("LlamaForCausalLM", "LlamaConfig", _WIDE),
    "Mistral": Tiny("MistralForCausalLM", "MistralConfig"),
    "Mixtral": Tiny("MixtralForCausalLM", "MixtralConfig", {"num_local_experts": 4}),
    "Phi-3": Tiny("Phi3ForCausalLM", "Phi3Config"),
    "Qwen2": Tiny("Qwen2ForCausalLM", "Qwen2Config"),
    "Qwen2-MoE": Tiny("Qwen2MoeForCausalLM", "Qwen2MoeConfig", _SHARED),
    "Qwen2-VL": Tiny(
        "Qwen2VLForConditionalGeneration",
        "Qwen2VLConfig",
        {"rope_parameters": _MROPE},
        {"depth": 2, "embed_dim": 32, "hidden_size": WIDTH, "num_heads": 2, "mlp_ratio": 2},
        _QWEN_TOKENS,
    ),
    "Qwen3": Tiny("Qwen3ForCausalLM", "Qwen3Config", _WIDE),
    "Qwen3-MoE": Tiny("Qwen3MoeForCausalLM", "Qwen3MoeConfig", _HEADS | _EXPERTS),
    "Qwen3-VL": Tiny(
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLConfig",
        _HEADS | {"rope_parameters": _MROPE},
        {
            "depth": 2,
            "hidden_size": 32,
            "out_hidden_size": WIDTH,
            "num_heads": 2,
            "intermediate_size": 48,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0, 1],
        },
        _QWEN_TOKENS,
    ),
    "Qwen3-Next": Tiny(  # with all experts at work: which are chosen turns over with the last bit of a bfloat16
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        _HEADS | _SHARED | _LINEAR | {"num_experts_per_tok": 4},
        dtype="bfloat16",
    ),
    "Qwen3-Next, full attention": Tiny("Qwen3NextForCausalLM", "Qwen3NextConfig", _HEADS | _SHARED | _FULL),
    "Qwen3.5": Tiny("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", _HEADS | _LINEAR, dtype="bfloat16"),
    "Qwen3.5, full attention": Tiny("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", _HEADS | _FULL),
    "Gemma": Tiny("GemmaForCausalLM", "GemmaConfig", _HEADS),
    "Gemma 2": Tiny("Gemma2ForCausalLM", "Gemma2Config", _WIDE),
    "Gemma 3": Tiny("Gemma3ForCausalLM", "Gemma3TextConfig", _HEADS),
    "Gemma 3, multimodal": Tiny(
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        _HEADS,
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 48,
            "image_size": 56,
            "patch_size": 14,
        },
        {"mm_tokens_per_image": 4, "image_token_index": 50, "boi_token_index": 51, "eoi_token_index": 52},
    ),
    "Gemma 4": Tiny("Gemma4ForCausalLM", "Gemma4TextConfig", _GEMMA_4),
    "Gemma 4, experts": Tiny("Gemma4ForCausalLM", "Gemma4TextConfig", _GEMMA_4 | {"enable_moe_block": True, **_TOP}),
    "DeepSeek-V2": Tiny("DeepseekV2ForCausalLM", "DeepseekV2Config", _LATENT),
    "DeepSeek-V3": Tiny(
        "DeepseekV3ForCausalLM", "DeepseekV3Config", _LATENT | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    ),
    "GLM-4": Tiny("Glm4ForCausalLM", "Glm4Config", _WIDE),
    "GLM-4-MoE": Tiny("Glm4MoeForCausalLM", "Glm4MoeConfig", _WIDE | _ROUTED),
    "Granite": Tiny("GraniteForCausalLM", "GraniteConfig", {"residual_multiplier": 0.6, "attention_multiplier": 0.2}),
    "Apertus": Tiny("ApertusForCausalLM", "ApertusConfig", loose=5),  # vLLM computes its activation otherwise
    "SmolLM3": Tiny("SmolLM3ForCausalLM", "SmolLM3Config"),
    "GPT-OSS": Tiny("GptOssForCausalLM", "GptOssConfig", _WIDE | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "OLMo": Tiny("OlmoForCausalLM", "OlmoConfig"),
    "OLMoE": Tiny("OlmoeForCausalLM", "OlmoeConfig", {"num_experts": 4, "num_experts_per_tok": 2}),
    "OLMo 2": Tiny("Olmo2ForCausalLM", "Olmo2Config"),
    "OLMo 3": Tiny("Olmo3ForCausalLM", "Olmo3Config"),
    "GPT-2": Tiny("GPT2LMHeadModel", "GPT2Config", {"num_key_value_heads": None, "n_inner": 96}),
    "GPT-NeoX": Tiny("GPTNeoXForCausalLM", "GPTNeoXConfig", {"num_key_value_heads": None}),
}


def family_of(row: str) -> Family:
    """The family of a row."""
    return next(family for family in FAMILIES if family.name == row.partition(",")[0])


def width_at(row: str, site: str) -> int:
    """The width of the tensor at a site of a row's model."""
    sizes = _TEXT | ROWS[row].text
    return int(sizes["num_attention_heads"] * sizes.get("head_dim", 32)) if site.startswith("z.") else WIDTH


def made(row: str) -> Any:
    """The model of a row, with norms that are not all ones, and logits that differ.

    It computes in float32; in a row of another dtype its weights are numbers of that dtype.
    """
    return built(ROWS[row])


def built(tiny: Tiny) -> Any:
    """The same of a row that is not among ROWS."""
    import transformers

    sizes = {key: value for key, value in (_TEXT | tiny.text).items() if value is not None}
    if tiny.vision is not None:
        sizes = {"text_config": sizes, "vision_config": tiny.vision, **tiny.whole}
    torch.manual_seed(1)
    model = getattr(transformers, tiny.model)(getattr(transformers, tiny.config)(**sizes))
    for key, weight in model.named_parameters():
        if "norm" in key or "ln_" in key:
            nn.init.normal_(weight, mean=0.5, std=0.3)
        elif weight.dim() > 1:
            # A token's own logit stands out where the embedding is the output layer, too.
            vocabulary = 0.05 if model.config.tie_word_embeddings else 0.1
            nn.init.normal_(weight, std=vocabulary if weight.shape[0] == VOCABULARY else 0.5 / weight.shape[-1] ** 0.5)
        if key.endswith("kv_a_proj_with_mqa.weight"):  # on a CPU, vLLM turns what this gives by other angles
            weight.data[-tiny.text["qk_rope_head_dim"] :] = 0
        weight.data = weight.data.to(getattr(torch, tiny.dtype)).float()
    return model.eval()
