"""Weights that a running engine reads again or gets, on a GPU also in place, and sleep: steering stays right.

Each engine runs in a process of its own; this file is both the tests and that process. The expectation comes from an
engine that was started with the other weights.
"""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from tests.apart import hear, tell
from tests.plugin.asked import (
    CLAMP,
    FEATURES,
    LAYERS,
    NOISE,
    PROMPTS,
    ROWS,
    WIDTH,
    add,
    factor,
    other_llama,
    tiny_llama,
)
from tests.plugin.conftest import CUDA
from tests.plugin.said import plain, same
from tests.plugin.weights import BACKEND, EXTENSION, by_ipc, parts_of

pytestmark = [pytest.mark.slow, pytest.mark.long]  # two engines

SITES = ("resid_mid.1", "z.2", "resid_post.2")
SPECS: dict[str, Any] = {
    "plain": None,
    "clamp": {"edits": [CLAMP], "return": {"features": [{"dictionary": "random"}], "dose": True}},
    "named": {
        "edits": [add("probe"), add(ROWS[0], "resid_mid.1")],
        "return": {"probes": [{"probe": "probe", "site": SITES[2]}]},
    },
    "tensors": {"edits": [CLAMP], "return": {"activations": [{"site": site} for site in SITES], "hidden": True}},
    "reconstruct": {"edits": [{"op": "reconstruct", "dictionary": "random", "error": "drop"}]},
}
# On a CPU vLLM computes with packed copies of the weights, and has no sleep.
CHANGES = ["reloaded", "back", "transferred", "transferred back"]
CHANGES += ["slept", "slept deeply", "in place", "loaded in place"] if CUDA else []


# Graphs hold addresses, which vLLM must give back to what it rebuilds.
@pytest.fixture(scope="module", params=["eager", pytest.param("graphs", marks=pytest.mark.gpu)])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What an engine said with its own weights, and with those that it got; and one that was started with these."""
    folder = tmp_path_factory.mktemp("reload")
    environment = {**os.environ, "VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    if not CUDA:
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    words = ("-m", "tests.plugin.test_reload", str(folder), request.param)
    found = {
        model: hear(*words, model, environment=environment, timeout=500, fork=True) for model in ("model", "other")
    }
    assert {one["graphs"] for one in found.values()} == {request.param == "graphs"}
    return found


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("change", CHANGES)
def test_new_weights_are_steered_as_if_the_engine_had_started_with_them(
    runs: dict[str, Any], change: str, name: str
) -> None:
    expected = runs["other" if change in ("reloaded", "transferred", "in place") else "model"]["begun"][name]
    found = runs["model"][change][name]
    for answer, one in zip(found, expected, strict=True):
        same(answer, one, 10 * NOISE, name)
    if name != "plain":
        assert found != runs["model"][change]["plain"], "it is steered"


def test_the_weights_differ(runs: dict[str, Any]) -> None:
    for name in SPECS:
        assert runs["model"]["begun"][name] != runs["other"]["begun"][name]


def put(worker: Any) -> None:
    """The other weights, from the first ones, where they lie; as a trainer in the same process does."""
    import torch

    with torch.no_grad():
        for name, weight in worker.get_model().named_parameters():
            weight.mul_(factor(name))


def load(worker: Any, model: str) -> None:
    """A checkpoint, where the weights lie; as a trainer does that vLLM knows nothing of."""
    from safetensors.torch import load_file

    worker.get_model().load_weights(load_file(f"{model}/model.safetensors").items())


def _transfer(llm: Any, model: str) -> None:
    """Weights from a trainer, in two parts: on a GPU from memory that two processes share, else from a file."""
    path = f"{model}/model.safetensors"
    parts, kept = by_ipc(path, 2) if CUDA else (parts_of(path, 2), [])
    llm.start_weight_update()
    for part in parts:
        llm.update_weights({"update_info": part})
    llm.finish_weight_update()
    kept.clear()  # vLLM has looked at all of it


def _ask(llm: Any) -> dict[str, Any]:
    from vllm import SamplingParams

    assert llm.reset_prefix_cache()
    found = {}
    for name, spec in SPECS.items():
        extra = {"saesteer": spec} if spec else None
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False, extra_args=extra)
        outputs = llm.generate([{"prompt_token_ids": one} for one in PROMPTS], params, use_tqdm=False)
        made = [one.outputs[0] for one in outputs]
        found[name] = [[list(one.token_ids), plain(getattr(one, "saesteer", {}))] for one in made]
    return found


def main(folder: Path, way: str, model: str) -> None:
    """Start an engine with a model, change its weights if it is the first one, and say what it says each time."""
    from bench.dummy import dictionary_file
    from saesteer import LLM

    models = {"model": tiny_llama(folder), "other": other_llama(folder)}
    np.save(folder / "probe.npy", np.array(ROWS[1], dtype=np.float32))
    options: dict[str, Any] = {"gpu_memory_utilization": 0.1, "enable_sleep_mode": True} if CUDA else {}
    options["weight_transfer_config"] = {"backend": "ipc" if CUDA else BACKEND}
    if way == "graphs":
        options["cudagraph_capture_sizes"] = [1, 2, 4]
    llm = LLM(
        models[model],
        dictionaries={"random": f"{dictionary_file(WIDTH, FEATURES, folder)}@resid_post.1"},
        vectors={"probe": str(folder / "probe.npy")},
        sites=["resid_post.all", *SITES],
        reads=[f"resid_post.{LAYERS - 1}", *SITES],
        dtype="float32",
        enforce_eager=way == "eager",
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_seqs=4,
        worker_extension_cls=EXTENSION,
        seed=0,
        **({"kv_cache_memory_bytes": 64 << 20} | options),
    )
    mode = llm.llm_engine.vllm_config.compilation_config.cudagraph_mode
    found: dict[str, Any] = {"graphs": bool(mode and mode.value), "begun": _ask(llm)}
    if model == "model":
        llm.collective_rpc("reload_weights", kwargs={"weights_path": models["other"]})
        found["reloaded"] = _ask(llm)
        llm.collective_rpc("reload_weights", kwargs={"weights_path": models["model"]})
        found["back"] = _ask(llm)
        llm.init_weight_transfer_engine({"init_info": {}})
        for name, other in (("transferred", "other"), ("transferred back", "model")):
            _transfer(llm, models[other])
            found[name] = _ask(llm)
        if CUDA:
            llm.sleep(level=1)
            llm.wake_up()
            found["slept"] = _ask(llm)
            llm.sleep(level=2)
            llm.wake_up(tags=["weights"])
            llm.collective_rpc("reload_weights")
            llm.wake_up(tags=["kv_cache"])
            found["slept deeply"] = _ask(llm)
            llm.collective_rpc(put)
            found["in place"] = _ask(llm)
            llm.collective_rpc(load, args=(models["model"],))
            found["loaded in place"] = _ask(llm)
    tell(found)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
