"""The list of options is what every entry point takes, and what they name is opened once in each process."""

import inspect
import json
from collections import Counter
from dataclasses import MISSING, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import typer

pytest.importorskip("vllm", reason="vLLM is not installed")

from saesteer import __version__, hf
from saesteer.commands import serve
from saesteer.commands.cli import app
from saesteer.config import assets, modules
from saesteer.config.config import OPTIONS, SaesteerConfig
from saesteer.config.retired import RETIRED
from saesteer.engine import weights
from saesteer.engine.engine import Engine
from saesteer.loaders.formats import own
from saesteer.plugin.door import frontend
from saesteer.plugin.llm import LLM
from tests.plugin import conftest

WIDTH, LAYERS = conftest.WIDTH, 4


def test_the_fields_of_a_configuration_are_the_options() -> None:
    assert [one.name for one in fields(SaesteerConfig)] == [*OPTIONS]


@pytest.mark.parametrize("entry", [LLM, hf.Model], ids=["LLM", "hf"])
def test_python_takes_the_options_under_the_same_names_and_defaults(entry: Any, request: pytest.FixtureRequest) -> None:
    served = {name for name, option in OPTIONS.items() if request.node.callspec.id in option.python}
    found = inspect.signature(entry.__init__).parameters
    ours = {name: one for name, one in found.items() if name in OPTIONS}
    assert ours.keys() == served
    usual = {one.name: one.default for one in fields(SaesteerConfig) if one.default is not MISSING}
    for name, one in ours.items():
        assert one.kind is inspect.Parameter.KEYWORD_ONLY
        assert one.default == (None if name == "max_dose_action" else usual.get(name)), name
        assert f"        {name}: " in str(inspect.getdoc(entry)).replace("\n    ", "\n        "), (
            f"{name} is undocumented"
        )


def test_the_flags_of_serve_are_the_options() -> None:
    command: Any = typer.main.get_command(app)
    params = {param.opts[0]: param for param in command.commands["serve"].params if param.param_type_name == "option"}
    for option in OPTIONS.values():
        on, _, off = option.flag.partition("/")
        param = params.pop(on)
        assert (param.help, param.secondary_opts) == (option.help, [off] if off else [])
    assert params.keys() == {"--saesteer-config", "--saesteer-admin-key"}


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each of the files was given to its reader."""
    found: Counter[str] = Counter()

    def count(module: Any, name: str) -> None:
        stock = getattr(module, name)

        def counting(place: Any, **options: Any) -> Any:
            found[f"{name} {Path(place).name}"] += 1
            return stock(place, **options)

        monkeypatch.setattr(module, name, counting)

    for module, name in ((assets, "describe"), (assets, "read_vectors"), (modules, "_text"), (weights, "load")):
        count(module, name)
    return found


@pytest.fixture
def wire(tmp_path: Path) -> dict[str, Any]:
    """A configuration with a file of each kind, beside a model's config."""
    own.write(tmp_path / "d.safetensors", conftest.random_coder("relu", 0))
    np.save(tmp_path / "happy.npy", np.ones(WIDTH, np.float32))
    edit = {"op": "add", "vector": "happy", "site": "resid_post.1"}
    (tmp_path / "calm.json").write_text(json.dumps({"edits": [edit]}))
    shape = {"model_type": "llama", "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    return {
        "dictionaries": {"d": f"{tmp_path}/d.safetensors@resid_post.1"},
        "vectors": {"happy": str(tmp_path / "happy.npy")},
        "modules": {"calm": str(tmp_path / "calm.json")},
        "sites": ["resid_post.all"],
    }


ONCE = {"describe d.safetensors": 1, "read_vectors happy.npy": 1, "_text calm.json": 1}
WEIGHTS = {"load d.safetensors": 1}


def test_serve_opens_each_file_once(wire: dict[str, Any], tmp_path: Path, read: Counter[str]) -> None:
    serve.check(str(tmp_path), SaesteerConfig.from_json(wire))
    assert read == ONCE


def test_front_end_and_worker_of_a_process_open_each_file_once(wire: dict[str, Any], read: Counter[str]) -> None:
    """The compile cache's key, the catalog, the engine and the handshake, with a stand-in for a VllmConfig."""
    shape = SimpleNamespace(model_type="llama", num_hidden_layers=LAYERS)
    model = SimpleNamespace(model="m", hf_text_config=shape, get_hidden_size=lambda: WIDTH)
    outputs = SimpleNamespace(reasoning_parser="")
    config = SimpleNamespace(additional_config={"saesteer": wire}, model_config=model)
    config.structured_outputs_config, config.parallel_config = outputs, SimpleNamespace(pipeline_parallel_size=1)
    frontend.opened.cache_clear()
    keys = {frontend._salting_compile_cache(lambda self: "0123456789")(config) for _ in range(3)}
    known, again = frontend.assets_of(config), frontend.assets_of(config)
    assert known is not None and again is not None and len(keys) == 1
    assert frontend._names(known, config).catalog.vectors.keys() == {"happy"}
    size: dict[str, Any] = {"width": WIDTH, "layers": LAYERS, "max_rows": 2, "max_tokens": 8}
    engine = Engine(again, dtype=torch.float32, device=torch.device("cpu"), **size)
    frontend._agree(known, [{"version": __version__, "fingerprint": frontend.fingerprint(again)}])
    assert list(engine.sites) == [f"resid_post.{layer}" for layer in range(LAYERS)]
    assert read == ONCE | WEIGHTS


def test_hf_opens_each_file_once(wire: dict[str, Any], read: Counter[str]) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 2, "intermediate_size": 8}
    made = hf.Model(LlamaForCausalLM(LlamaConfig(vocab_size=16, max_position_embeddings=32, **shape)), **wire)
    assert made.logits([1, 2, 3], steer={"edits": [{"op": "use", "module": "calm"}]}).shape == (3, 16)
    assert read == ONCE | WEIGHTS


def test_python_drops_settings_that_are_no_options_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr("vllm.LLM.__init__", lambda self, **options: given.update(options))
    monkeypatch.setattr(LLM, "llm_engine", SimpleNamespace(saesteer_agreed=True), raising=False)
    retired: Any = dict.fromkeys(RETIRED, 8)
    LLM("a", max_edits=8, **retired)
    assert given == {"model": "a", "additional_config": {"saesteer": SaesteerConfig(max_edits=8).to_json()}}
