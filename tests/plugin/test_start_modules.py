"""A module given at start is taken or refused as over HTTP, by `saesteer serve` and by vLLM's front end."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm import SamplingParams

from saesteer.commands import serve
from saesteer.config.assets import Assets
from saesteer.config.config import SaesteerConfig
from saesteer.errors import ConfigError, SpecError
from saesteer.language.spec import from_json
from saesteer.loaders.formats import own
from saesteer.planning.plan import Catalog
from saesteer.plugin.door import frontend
from saesteer.plugin.door.admission import Door
from saesteer.plugin.names.versions import Names
from tests.plugin.conftest import WIDTH, random_coder
from tests.plugin.names import Workers

LAYERS = 4
ADD = {"op": "add", "vector": "happy", "site": "resid_post.2"}
CLAMP = {"op": "clamp", "dictionary": "d", "feature": 3, "value": 1.0}


def at(*positions: Any) -> dict[str, Any]:
    return {"scope": {"positions": list(positions)}}


RIGHT: dict[str, list[Any]] = {
    "nothing": [],
    "a clamp": [CLAMP],
    "a layer of resid_post.all": [{**ADD, "site": "resid_post.3"}],
    "resid_pre of the layer behind": [{**ADD, "site": "resid_pre.3"}],
    "every layer of a vector": [{**ADD, "vector": "layers", "site": "resid_post"}],
    "a vector of its own": [{**ADD, "vector": [1.0] * WIDTH}],
    "more of its own than a request may bring": [
        {**ADD, "vector": [float(n)] * WIDTH} for n in range(1, 4)
    ],
    "the end of the prompt": [{**CLAMP, **at([-5, -2])}],
    "a long prompt alone": [{**CLAMP, **at([2000, -2000])}],
    "a prompt longer than anybody tries": [{**CLAMP, **at([1 << 21, -4])}],
    "once for long prompts": [{**CLAMP, **at([0, 10])}, {**CLAMP, **at([-10, None])}],
    "another module": [{"op": "use", "module": "calm"}],
}  # fmt: skip

WRONG: dict[str, tuple[list[Any], str]] = {
    "a feature": (
        [CLAMP, {**CLAMP, "feature": 96}],
        "edits[1].feature: got 96, expected a feature of dictionary 'd', 0 to 95",
    ),
    "a feature of a gate": (
        [{**ADD, "when": {"dictionary": "d", "feature": 4096, "above": 1}}],
        "edits[0].when.feature",
    ),
    "a site without an op": ([{**ADD, "site": "resid_mid.1"}], "edits[0].site: got resid_mid.1, where this server has"),
    "a layer that is none": ([{**ADD, "site": "resid_post.4"}], "edits[0].site: got resid_post.4, where this server"),
    "a layer without a row": (
        [{**ADD, "vector": "one", "site": "resid_post.2"}],
        "edits[0].site: got resid_post.2, but the vector has no row for layer 2, expected one of its layers: 1",
    ),
    "a width": ([{**ADD, "vector": [1.0]}], f"edits[0].vector: is 1 wide, expected {WIDTH}, the width of this model"),
    "max_act that nobody knows": ([{**CLAMP, "dictionary": "bare", "unit": "max_act"}], "edits[0].unit: got max_act"),
    "nothing to keep": ([{"op": "reconstruct", "dictionary": "d", "error": "keep"}], "edits[0].error: is keep"),
    "too many entries": ([ADD] * 9, "edits: makes more than 8 entries with edits[8], expected at most 8"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = {"model_type": "llama", "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 9}
    (tmp_path / "config.json").write_text(json.dumps(config))
    coder = random_coder("relu", 0)
    own.write(tmp_path / "d.safetensors", coder)
    bare = replace(coder, max_act=None, info=replace(coder.info, has_max_act=False))
    own.write(tmp_path / "bare.safetensors", bare)
    own.write(tmp_path / "top.safetensors", random_coder("topk", 1))
    np.save(tmp_path / "happy.npy", np.ones(WIDTH, np.float32))
    np.save(tmp_path / "layers.npy", np.ones((LAYERS, WIDTH), np.float32))
    save_file({"layer.1": np.ones(WIDTH, np.float32)}, tmp_path / "one.safetensors")
    return tmp_path


def config(folder: Path, default: str | None = None, **modules: list[Any]) -> SaesteerConfig:
    return SaesteerConfig.from_json(
        {
            "dictionaries": {name: f"{folder}/{name}.safetensors@resid_post.1" for name in ("d", "bare", "top")},
            "vectors": {
                "happy": f"{folder}/happy.npy", "layers": f"{folder}/layers.npy", "one": f"{folder}/one.safetensors"
            },
            "modules": {"calm": {"edits": [ADD]}, **{name: {"edits": edits} for name, edits in modules.items()}},
            "default_module": default,
            "sites": ["resid_post.all"],
            "max_edits": 8,
        }
    )  # fmt: skip


def by_serve(folder: Path, edits: list[Any], **more: Any) -> None:
    serve.check(str(folder), config(folder, m=edits, **more))


def in_front_end(folder: Path, edits: list[Any], parser: str = "", **more: Any) -> None:
    text = SimpleNamespace(model_type="llama", num_hidden_layers=LAYERS)
    model = SimpleNamespace(
        model="m", hf_text_config=text, get_hidden_size=lambda: WIDTH, skip_tokenizer_init=False
    )  # all of a VllmConfig that is asked for
    outputs = SimpleNamespace(reasoning_parser=parser)
    alone = SimpleNamespace(pipeline_parallel_size=1)
    served = SimpleNamespace(model_config=model, parallel_config=alone, structured_outputs_config=outputs)
    frontend._names(Assets.open(config(folder, m=edits, **more)), served)


def over_http(folder: Path, edits: list[Any]) -> None:
    known = Assets.open(config(folder)).catalog(width=WIDTH, layers=LAYERS)
    names = Names(known, pool_rows=8, layers=LAYERS)
    asyncio.run(names.put(Workers(), "module", "m", from_json({"edits": edits})))


at_start = pytest.mark.parametrize("start", [by_serve, in_front_end])


@at_start
@pytest.mark.parametrize("edits", RIGHT.values(), ids=RIGHT)
def test_what_http_takes_starts(edits: list[Any], start: Callable[..., None], folder: Path) -> None:
    over_http(folder, edits)
    start(folder, edits)


@at_start
@pytest.mark.parametrize(("edits", "told"), WRONG.values(), ids=WRONG)
def test_what_http_refuses_does_not_start(
    edits: list[Any], told: str, start: Callable[..., None], folder: Path
) -> None:
    with pytest.raises(SpecError) as there:
        over_http(folder, edits)
    assert str(there.value).startswith(f"spec.{told}")
    with pytest.raises(ConfigError) as here:
        start(folder, edits)
    assert str(here.value) == f"module 'm': saesteer.{str(there.value).removeprefix('spec.')}"
    assert "\n" not in str(here.value)


def test_a_default_module_that_names_a_part_of_the_answer_needs_a_parser(folder: Path) -> None:
    edits = [{**CLAMP, "scope": {"part": "answer"}}]
    in_front_end(folder, edits)  # a request that uses it is refused
    in_front_end(folder, edits, parser="deepseek_r1", default="m")
    told = r"^module 'm': saesteer\.edits\[0\]\.scope\.part: names a part .*--reasoning-parser$"
    with pytest.raises(ConfigError, match=told):
        in_front_end(folder, edits, default="m")


def test_a_server_that_requires_its_default_module_refuses_requests_without_it() -> None:
    catalog = Catalog({}, frozenset({"resid_post.3"}), 64, modules={"m": from_json({"edits": []})}, default="m")
    door = Door(config=SaesteerConfig(default_module="m", require=("default",)))

    def request() -> Any:
        return SimpleNamespace(prompt_token_ids=[1, 2], sampling_params=SamplingParams())

    with pytest.raises(SpecError, match="is false, but this server steers every request") as caught:
        door.admit(from_json({"defaults": False}), catalog, request())
    assert (caught.value.field, caught.value.code) == ("saesteer.defaults", "not_served")
    door.admit(from_json({}), catalog, request())
    Door(config=SaesteerConfig(default_module="m")).admit(from_json({"defaults": False}), catalog, request())
