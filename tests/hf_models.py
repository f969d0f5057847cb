"""A tiny Llama on Transformers with two dictionaries of the small world and a probe, and what it is given."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from saesteer import hf
from saesteer.loaders.formats import own
from tests import small_world

WIDTH = small_world.WIDTH
IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
SITE = "resid_post.1"
V = torch.randn(WIDTH, generator=torch.Generator().manual_seed(0))
BIAS = -0.25


def made_with(folder: Path, besides: Any = None, **more: Any) -> hf.Model:
    """The model, with its files in a folder, and with other dictionaries besides."""
    from transformers import LlamaConfig, LlamaForCausalLM

    dictionaries = dict(besides or {})
    for name in ("jump", "top"):
        own.write(folder / f"{name}.safetensors", small_world.CODERS[name])
        dictionaries[name] = f"{folder}/{name}.safetensors@{SITE}"
    save_file({"layer.1": V, "bias": torch.tensor([BIAS])}, folder / "probe.safetensors")
    torch.manual_seed(1)
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 64}
    made = LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=48, max_position_embeddings=64))
    vectors = {"probe": str(folder / "probe.safetensors")}
    return hf.Model(made, dictionaries=dictionaries, vectors=vectors, reads=["resid_mid.2"], **more)
