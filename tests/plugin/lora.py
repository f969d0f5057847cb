"""A small random LoRA adapter of the embedded model: its files, and the same added to a Transformers model."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

RANK = 4
MODULES = ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj")


def write_adapter(folder: Path, model: Any, seed: int = 0) -> Path:
    """The adapter as PEFT writes it, strong enough to change every answer."""
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer, block in enumerate(model.model.layers):
        for name in MODULES:
            rows, columns = block.get_submodule(name).weight.shape
            key = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(RANK, columns, generator=draw) / columns**0.5
            tensors[f"{key}.lora_B.weight"] = torch.randn(rows, RANK, generator=draw) * 0.05
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK, "bias": "none"}
    names = [name.rpartition(".")[2] for name in MODULES]
    (folder / "adapter_config.json").write_text(json.dumps({**config, "target_modules": names}))
    return folder


def merge_adapter(folder: Path, model: Any) -> None:
    """Add the adapter to the weights of a Transformers model, in place; its scale is 1."""
    from safetensors.torch import load_file

    tensors = load_file(folder / "adapter_model.safetensors")
    for layer, block in enumerate(model.model.layers):
        for name in MODULES:
            key = f"base_model.model.model.layers.{layer}.{name}"
            with torch.no_grad():
                block.get_submodule(name).weight += tensors[f"{key}.lora_B.weight"] @ tensors[f"{key}.lora_A.weight"]
