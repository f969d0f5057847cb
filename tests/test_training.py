"""tools/train_dictionary.py on a tiny random model: the loss falls, the figures are right, the file loads."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from saesteer.hf import Model
from saesteer.loaders import describe, load
from tests.tiny import VOCABULARY, WIDTH, made
from tools.own_texts import filled, kept
from tools.train_dictionary import Measured, Recipe, make

LAYER, END = 1, 2
RECIPE = Recipe(features=160, k=6, steps=60, batch=256, rate=3e-3, warm_up=5, dead_after=2048, aux_k=8)


class Words:
    """As much of a tokenizer as training asks for."""

    eos_token_id = END

    def decode(self, ids: list[int]) -> str:
        return " ".join(f"word{token}" for token in ids)

    def batch_decode(self, rows: list[list[int]]) -> list[str]:
        return [self.decode(row) for row in rows]


def texts(count: int = 60, length: int = 40) -> Tensor:
    chance = np.random.default_rng(0)
    drawn = [chance.integers(3, VOCABULARY, chance.integers(8, length + 1)).tolist() for _ in range(count)]
    return torch.from_numpy(filled(drawn, length, END).astype(np.int64))


@pytest.fixture(scope="module", params=["transcoder", "sae"])
def trained(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Measured, list[str]]:
    """A kind, its file, what was measured, and the lines on the progress."""
    out, said = tmp_path_factory.mktemp("trained") / f"{request.param}.safetensors", list[str]()
    found = make(made("Llama"), Words(), texts(), request.param, LAYER, RECIPE, out, name="tiny", say=said.append)
    return request.param, out, found, said


def test_file_says_its_sites_and_figures(trained: tuple[str, Path, Measured, list[str]]) -> None:
    kind, out, found, _ = trained
    info, coder = describe(out), load(out)
    sites = {"transcoder": ("mlp_in.1", "mlp_out.1", "skip transcoder"), "sae": ("resid_post.1", "resid_post.1", "SAE")}
    assert (info.site_in, info.site_out, info.kind) == sites[kind]
    assert (info.features, info.d_in, info.d_out, info.model) == (RECIPE.features, WIDTH, WIDTH, "tiny")
    assert (info.activation, info.stored_dtype, info.has_max_act) == ("jumprelu", "bfloat16", True)
    assert coder.max_act is not None and torch.equal(coder.max_act, found.max_act)
    with safe_open(out, "pt") as file:
        about = json.loads(file.metadata()["measured"])
        assert file.get_tensor("threshold").shape == (1,)
    assert about["dead"] == found.dead and about["fvu"] == pytest.approx(found.fvu, abs=1e-4)
    assert about["recipe"]["k"] == RECIPE.k and about["recipe"]["skip"] == (kind == "transcoder")


def test_training_helps(trained: tuple[str, Path, Measured, list[str]]) -> None:
    """The loss falls, and about k features are active on texts held out."""
    _, _, found, said = trained
    losses = [float(line.split("FVU ")[1].split(",")[0]) for line in said if line.startswith("step")]
    assert len(losses) == 60 and np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5])
    assert 0.6 * RECIPE.k < found.l0 < 1.5 * RECIPE.k
    assert found.fvu < 1


def test_model_reads_what_it_was_trained_on(trained: tuple[str, Path, Measured, list[str]]) -> None:
    """The sites are the engine's: its figures on the whole text are those that training measured."""
    kind, out, found, _ = trained
    model = Model(made("Llama"), dictionaries={kind: str(out)})
    largest = torch.zeros(RECIPE.features)
    for row, mask in zip(texts(), kept(texts(), END), strict=True):
        ids = row[: int(mask.nonzero().max()) + 1].tolist()
        largest = torch.maximum(largest, model.activations(ids, kind)[1:].amax(0))
    # float32 weights from the bf16 file: only the order of sums differs, which can move a token over the threshold.
    close = torch.isclose(largest, found.max_act, rtol=1e-3, atol=1e-4)
    assert close.float().mean() > 0.97
