"""A model with padded heads says what the model says, and its heads can be shared by as many ranks."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.plugin.padded import padded


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_padded_model_says_what_the_model_says(tmp_path: Path, ranks: int) -> None:
    """Three groups of three heads, as the embedded model has them."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=72,
        num_hidden_layers=2,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=8,
        intermediate_size=32,
        vocab_size=64,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "plain")
    (tmp_path / "plain" / "tokenizer.json").write_text("{}")
    folder = padded(tmp_path / "plain", tmp_path / "padded", ranks)
    found = json.loads((folder / "config.json").read_text())
    assert (found["num_attention_heads"], found["num_key_value_heads"], found["head_dim"]) == (12, 4, 8)
    assert (folder / "tokenizer.json").read_text() == "{}"
    one, two = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("plain", "padded"))
    assert two.model.layers[1].self_attn.o_proj.weight.shape == (72, 96)
    ids = torch.arange(3, 23)[None]
    with torch.inference_mode():
        expected, made = (model(ids).logits for model in (one, two))
    assert torch.allclose(made, expected, atol=1e-5) and expected.std() > 0.1
