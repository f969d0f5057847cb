"""The logit lens against the model's own norm and output embedding, of families with each kind of norm."""

import pytest
import torch

from saesteer.labels.lens import lens, logits_of
from saesteer.models.families import find_trunk
from tests.tiny import VOCABULARY, WIDTH, made


@pytest.mark.parametrize("name", ["Llama", "Gemma 2", "GPT-2", "Qwen3.5, full attention"])
def test_it_is_what_the_head_makes_of_the_row(name: str) -> None:
    model = made(name).float()
    trunk, family = find_trunk(model, "transformers")
    norm = getattr(trunk, family.norm)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=draw))
    rows = torch.randn(5, WIDTH, generator=draw)
    found = list(lens(rows, model, VOCABULARY))
    head = model.get_output_embeddings().weight
    for row, (likely, unlikely) in zip(rows, found, strict=True):
        with torch.no_grad():  # both norms scale d to length 1; what is left of a LayerNorm's bias cancels out
            logits = head @ (norm(row[None, None])[0, 0] - norm(-row[None, None])[0, 0])
        assert likely == logits.argsort(descending=True).tolist()
        assert unlikely == logits.argsort().tolist()
    short = list(lens(rows, model, 3))
    assert short == [(likely[:3], unlikely[:3]) for likely, unlikely in found]


@pytest.mark.parametrize("name", ["Llama", "Gemma 2", "GPT-2"])
def test_logits_are_the_models_own(name: str) -> None:
    model = made(name).float()
    ids = torch.arange(7)[None]
    with torch.no_grad():
        trunk, _ = find_trunk(model, "transformers")
        hidden, expected = trunk(ids).last_hidden_state[0], model(ids).logits[0]
    torch.testing.assert_close(logits_of(hidden, model), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        logits_of(hidden, model, torch.tensor([3, 1])), expected[:, [3, 1]], atol=1e-5, rtol=1e-5
    )
