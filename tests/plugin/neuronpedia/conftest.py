"""vLLM's app with Neuronpedia's routes, and what stands in for its engine."""

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from fastapi.testclient import TestClient

from saesteer.commands.embedded import DEMO_SAE
from saesteer.config.assets import Assets
from saesteer.config.config import SaesteerConfig
from saesteer.plugin.door.rows import Fetching
from tests.plugin.apps import app_of_vllm
from tests.plugin.neuronpedia.asking import KEY
from tests.plugin.neuronpedia.stand_in import StandIn


@pytest.fixture(scope="module")
def engine(model_dir: str) -> StandIn:
    from transformers import AutoTokenizer
    from vllm.tokenizers.hf import get_cached_tokenizer

    mlp = str(next(DEMO_SAE.parent.glob("*l12*.safetensors")))
    places = {"demo": str(DEMO_SAE), "mlp": mlp, "stored": f"rows:{DEMO_SAE}"}
    config = {"dictionaries": places, "inline_rows": 2, "sites": ["resid_post.3"], "reads": ["resid_post.3"]}
    assets = Assets.open(SaesteerConfig.from_json(config))
    held = assets.catalog(width=576, layers=30)
    addresses = {"np:smollm2/15-demo-res": "demo", "np:smollm2/12-demo-mlp": "mlp"}
    catalog = replace(held, addresses=addresses, origin=lambda _: None)
    tokenizer = get_cached_tokenizer(AutoTokenizer.from_pretrained(model_dir))  # as vLLM has it
    return StandIn(catalog, tokenizer, Fetching(assets.rows, torch.float32))


@pytest.fixture(scope="module")
def client(engine: StandIn) -> Iterator[TestClient]:
    with pytest.MonkeyPatch.context() as patch:
        app: Any = app_of_vllm(patch, "--api-key", "usual", additional={"saesteer": {"neuronpedia": True}})
        app.state.saesteer_admin = Namespace(names=Namespace(catalog=engine.catalog), engine=engine)
        yield TestClient(app, headers=KEY)
