"""Small random checkpoints as quantisers write them, each beside the model that its numbers stand for. Knows no engine.

All scales are numbers of bfloat16, so that an engine which computes in it finds the same weights as Transformers, where
the model has them in float32. What is left between the two is what the engine rounds while it computes.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests import tiny

GROUP = 128  # inputs that share a scale in 4 bits; also the fewest that Marlin's kernels take
WIDTH, LAYERS = 128, 2
_SIZES = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "intermediate_size": 256, "head_dim": 64}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 128}  # all, or rounding chooses others
LLAMA = tiny.Tiny("LlamaForCausalLM", "LlamaConfig", _SIZES, dtype="bfloat16")
MOE = tiny.Tiny("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**_SIZES, **_EXPERTS}, dtype="bfloat16")
Z_WIDTH = 128  # two heads

# Weights [outputs, inputs] → the tensors of a checkpoint by the ends of their names, and the weights they stand for.
Quantise = Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]


def _rounded(scale: Tensor) -> Tensor:
    return scale.clamp_min(1e-4).bfloat16().float()


def fp8(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """A scale for each matrix. vLLM gives those that it joins one scale: between powers of two that rounds nothing."""
    scale = torch.exp2((weight.abs().max() / 448).log2().ceil())
    stored = (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": stored, "weight_scale": scale}, stored.float() * scale


def int8(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """A scale for each output."""
    scale = _rounded(weight.abs().amax(1, keepdim=True) / 127)
    stored = (weight / scale).round().clamp(-127, 127).to(torch.int8)
    return {"weight": stored, "weight_scale": scale}, stored.float() * scale


def gptq(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """4 bits around 8, eight inputs of an output in a word."""
    levels, scale, zero = _four_bits(weight, symmetric=True)
    words = _packed(levels, range(8)).T.contiguous()  # [inputs / 8, outputs]
    inputs, outputs = weight.shape[1], weight.shape[0]
    stored = {
        "qweight": words,
        "qzeros": torch.full((inputs // GROUP, outputs // 8), 0x77777777, dtype=torch.int32),  # one less than 8
        "scales": scale.T.contiguous().half(),
        "g_idx": torch.arange(inputs, dtype=torch.int32) // GROUP,
    }
    return stored, _unpacked(levels, scale, zero)


def awq(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """4 bits above a zero point, eight outputs of an input in a word, in AWQ's order."""
    levels, scale, zero = _four_bits(weight, symmetric=False)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    stored = {
        "qweight": _packed(levels.T.contiguous(), order),  # [inputs, outputs / 8]
        "qzeros": _packed(zero.T.contiguous(), order),
        "scales": scale.T.contiguous().half(),
    }
    return stored, _unpacked(levels, scale, zero)


def _four_bits(weight: Tensor, *, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Levels [outputs, inputs], and scales and zero points [outputs, groups]."""
    groups = weight.reshape(weight.shape[0], -1, GROUP)
    low, high = groups.amin(-1), groups.amax(-1)
    scale = _rounded(torch.maximum(-low, high) / 7 if symmetric else (high - low) / 15)
    zero = torch.full_like(scale, 8) if symmetric else (-low / scale).round().clamp(0, 15)
    levels = (groups / scale[..., None] + zero[..., None]).round().clamp(0, 15)
    return levels.reshape(weight.shape).int(), scale, zero.int()


def _unpacked(levels: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    groups = levels.reshape(levels.shape[0], -1, GROUP) - zero[..., None]
    return (groups * scale[..., None]).reshape(levels.shape)


def _packed(levels: Tensor, order: Any) -> Tensor:
    """Eight neighbours of the last dimension in an int32; its n-th 4 bits are those at the n-th place of the order."""
    eights = levels.reshape(*levels.shape[:-1], -1, 8).long()
    words = sum(eights[..., at] << 4 * n for n, at in enumerate(order))
    assert isinstance(words, Tensor)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


_PER_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
_PER_OUTPUT = {**_PER_TOKEN, "strategy": "channel", "dynamic": False}
CONFIGS: dict[str, tuple[Quantise, dict[str, Any]]] = {
    "fp8": (fp8, {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    "int8": (
        int8,
        {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "config_groups": {
                "group_0": {"targets": ["Linear"], "weights": _PER_OUTPUT, "input_activations": _PER_TOKEN}
            },
            "ignore": ["lm_head"],
        },
    ),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}),
}


def write(folder: Path, kind: str | None, row: tiny.Tiny = LLAMA) -> Any:
    """A checkpoint in a folder; the model that it stands for, in float32.

    Args:
        folder: made if it is not there.
        kind: of CONFIGS; None for bfloat16.
        row: the model. Only the linear layers of its decoder layers are quantised.
    """
    model = tiny.built(row)
    quantise, config = CONFIGS[kind] if kind else (None, None)
    tensors = {}
    linear = {name for name, one in model.named_modules() if isinstance(one, nn.Linear) and ".layers." in name}
    for name, weight in model.state_dict().items():
        module = name.removesuffix(".weight")
        if quantise is None or module not in linear:
            tensors[name] = weight.bfloat16()
            continue
        stored, weight.data[:] = quantise(weight.data)
        tensors |= {f"{module}.{end}": one.contiguous() for end, one in stored.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    wire = {**model.config.to_dict(), "architectures": [row.model], "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(wire if config is None else wire | {"quantization_config": config}))
    return model
