"""A model with more attention heads that computes the same: ranks of tensor parallelism can share its heads evenly.

The added heads have no weights: they attend to values of zero, and no column of the output projection reads them. Knows
no engine.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

_ROWS = ("q_proj", "k_proj", "v_proj")  # one row of weights for each column of a head


def ranks_of_tests() -> int:
    """Ranks of tensor parallelism that SAESTEER_TEST_ENGINE asks for."""
    options: dict[str, Any] = json.loads(os.environ.get("SAESTEER_TEST_ENGINE", "{}"))
    return int(options.get("tensor_parallel_size", 1))


def padded(model: Path, folder: Path, ranks: int) -> Path:
    """Write an equal model whose KV heads, each with the query heads of its group, are as many as ranks can share.

    Args:
        model: a folder of Transformers' Llama format, with one file of weights.
        folder: where to write; made if missing.
        ranks: of tensor parallelism.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((model / "config.json").read_text())
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    wanted = -(-groups // ranks) * ranks
    more = {"num_attention_heads": heads // groups * wanted, "num_key_value_heads": wanted}
    for file in model.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            shutil.copy(file, folder)
    (folder / "config.json").write_text(json.dumps(config | more))
    weights = load_file(model / "model.safetensors")
    size = config["head_dim"]
    for name, old in weights.items():
        part = name.split(".")[-2]
        if part in _ROWS or part == "o_proj":
            columns = size * more["num_attention_heads" if part in ("q_proj", "o_proj") else "num_key_value_heads"]
            weights[name] = _wider(old, columns, dim=0 if part in _ROWS else 1)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _wider(old: Tensor, size: int, dim: int) -> Tensor:
    """With zeros behind it."""
    shape = list(old.shape)
    shape[dim] = size - shape[dim]
    return torch.cat([old, old.new_zeros(shape)], dim)
