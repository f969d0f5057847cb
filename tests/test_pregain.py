"""Dictionaries of an RMS norm's result before its gain are served where MLPs read such a norm, and nowhere else."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from saesteer import hf
from saesteer.config.assets import Assets
from saesteer.config.config import SaesteerConfig
from saesteer.errors import ConfigError, SpecError
from saesteer.language.spec import from_json
from saesteer.loaders.formats import own
from saesteer.models.families import has_pregain
from saesteer.planning.plan import Catalog
from saesteer.planning.planner import plan
from saesteer.plugin.door import frontend
from tests import tiny
from tests.plugin.conftest import random_coder

IDS = [3, 1, 4, 1, 5, 9, 2, 6]
PLACE = "mlp_in_pregain.1:mlp_out.1"
WHY = "reads mlp_in_pregain.1, an RMS norm's result before its gain, and this model's MLPs read no such norm"
WITHOUT = ("GPT-2", "GPT-NeoX", "OLMo", "OLMo 2", "OLMo 3")


def dictionary(folder: Path) -> Path:
    coder, (reads, writes) = random_coder("relu", 1, width=tiny.WIDTH), PLACE.split(":")
    own.write(folder / "d.safetensors", replace(coder, info=replace(coder.info, site_in=reads, site_out=writes)))
    return folder / "d.safetensors"


@pytest.mark.parametrize("row", [row for row in tiny.ROWS if "resid_mid" in tiny.family_of(row).sites])
def test_what_mlps_read_is_the_normed_stream_times_a_gain(row: str) -> None:
    model = tiny.made(row)
    block = model.get_decoder().layers[1] if hasattr(model.get_decoder(), "layers") else model.get_decoder().h[1]
    read: list[Tensor] = []
    with block.mlp.register_forward_pre_hook(lambda _, args: read.append(args[0].reshape(-1, tiny.WIDTH))):
        x = torch.as_tensor(hf.Model(model, sites=["resid_mid.1"]).streams(IDS)["resid_mid.1"])
    gain = read[0] * x.norm(dim=1, keepdim=True) / x
    spread = (gain - gain.mean(0)).abs().amax() / gain.abs().amax()
    assert has_pregain(model.config.get_text_config()) == bool(spread < 1e-3) == (row not in WITHOUT)


def test_they_are_refused_elsewhere(tmp_path: Path) -> None:
    place = str(dictionary(tmp_path))
    hf.Model(tiny.made("Llama"), dictionaries={"d": place})
    for row in WITHOUT:
        with pytest.raises(ConfigError, match=f"dictionary 'd' {WHY}"):
            hf.Model(tiny.made(row), dictionaries={"d": place})


def catalog(options: dict[str, Any], **config: Any) -> Catalog:
    """What requests may name on a server whose model has this config."""
    text = SimpleNamespace(**{"num_hidden_layers": 4, "hidden_size": tiny.WIDTH, "model_type": "gpt2"} | config)
    model = SimpleNamespace(model="m", hf_text_config=text, get_hidden_size=lambda: tiny.WIDTH)
    alone, outputs = SimpleNamespace(pipeline_parallel_size=1), SimpleNamespace(reasoning_parser="")
    served = SimpleNamespace(model_config=model, parallel_config=alone, structured_outputs_config=outputs)
    return frontend._names(Assets.open(SaesteerConfig.from_json(options)), served).catalog


def test_a_server_refuses_them_at_start_or_when_a_folder_has_one(tmp_path: Path) -> None:
    dictionary(tmp_path)
    llama = {"rms_norm_eps": 1e-6, "model_type": "llama"}
    loaded: dict[str, Any] = {"dictionaries": {"d": f"{tmp_path}/d.safetensors"}}
    folder: dict[str, Any] = {"dictionary_folder": str(tmp_path), "sites": ["resid_mid.1", "mlp_out.1"]}
    clamp = {"op": "clamp", "feature": 3, "value": 1.0, "unit": "raw"}
    named, found = (from_json({"edits": [{**clamp, "dictionary": name}]}) for name in ("d", "d.safetensors"))
    assert plan(named, catalog(loaded, **llama), 8) and plan(found, catalog(folder, **llama), 8)
    with pytest.raises(ConfigError, match=WHY):
        catalog(loaded)
    with pytest.raises(
        SpecError, match=rf"saesteer\.edits\[0\]\.dictionary: dictionary 'd\.safetensors' {WHY}"
    ) as caught:
        plan(found, catalog(folder), 8)
    assert caught.value.code == "not_served"
