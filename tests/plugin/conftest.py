"""Real engines on the real small model, shared by a test session. On CPU eager, on a GPU compiled with full graphs."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from saesteer import hf
from saesteer.commands.embedded import DEMO_SAE, ensure_model
from saesteer.dictionaries.coder import RANKED, CoderInfo, SparseCoder
from saesteer.loaders.formats import own
from tests.plugin.lora import write_adapter
from tests.plugin.padded import padded, ranks_of_tests
from tests.plugin.serving import CUDA as CUDA
from tests.plugin.serving import served
from tests.shared import Shared

if CUDA:
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # other tests of the session may have used it
WIDTH = 576  # of the embedded model
SECOND = "smollm2-135m-instruct/15-second-res-96"  # the address of this dictionary, say its files

BRIDGE = {"op": "clamp", "dictionary": "demo", "feature": 3497, "value": 2.0, "unit": "max_act"}
OCEAN = {"op": "clamp", "dictionary": "demo", "feature": 6511, "value": 1.0, "unit": "max_act"}

_DRAW = np.random.default_rng(3)
VECTORS: dict[str, dict[int | None, Any]] = {
    "any": {None: _DRAW.normal(size=WIDTH).astype(np.float32)},
    "each": {layer: _DRAW.normal(size=WIDTH).astype(np.float32) for layer in (7, 15, 20)},
    "probe": {15: _DRAW.normal(size=WIDTH).astype(np.float32)},
}
MODULES = {
    "bridge": {"edits": [BRIDGE, {"op": "add", "vector": "each", "site": "resid_post", "scale": 0.5}]},
    "outer": {"edits": [{"op": "use", "module": "bridge", "scale": 0.5}, OCEAN]},
}

ADMIN_KEY = "a-key-of-the-tests"
ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}  # headers

PROMPTS = [
    "Who are you?",
    "The capital of France is",
    "In the morning I like to",
    "Water is made of",
]
LONG_PROMPT = "The old town lies between the hills and the sea, and every road in it leads down to the harbour. " * 12


@dataclass(frozen=True)
class Dictionaries:
    """Paths of the dictionaries that the test engines load: the real one, and one of each other form of site."""

    folder: Path

    @property
    def arguments(self) -> dict[str, str]:
        return {
            "demo": str(DEMO_SAE),
            "second": f"{self.folder}/second.safetensors@resid_post.15",
            "topk": f"{self.folder}/topk.safetensors@resid_post.20",
            "mid": f"{self.folder}/mid.safetensors@resid_mid.7",
            "embed": f"{self.folder}/embed.safetensors@resid_pre.0",
            "last": f"{self.folder}/last.safetensors@resid_post.29",
            "norm": f"{self.folder}/norm.safetensors@resid_post.20",
            "group": f"{self.folder}/group.safetensors@resid_mid.7",
            "mlp": f"{self.folder}/mlp.safetensors@mlp_out.12",
            "attn": f"{self.folder}/attn.safetensors@attn_out.9",
            "cross": f"{self.folder}/cross.safetensors@mlp_in.18:mlp_out.18",
            "skip": f"{self.folder}/skip.safetensors@mlp_in_pregain.24:mlp_out.24",
            "deep": f"{self.folder}/deep@resid_post",
            "stored": f"rows:{self.folder}/mid.safetensors@resid_mid.7",
        }

    @property
    def vectors(self) -> dict[str, Any]:
        """One for any site, one with a row for each of three layers, and a probe."""
        files = {name: str(self.folder / f"{name}.safetensors") for name in ("any", "each", "probe")}
        return {**files, "probe": {"path": files["probe"], "bias": 1.5}}

    @property
    def options(self) -> dict[str, Any]:
        """All that an engine or the oracle is given."""
        sites = ["mlp_out.24"]  # where a transcoder replaces what the MLP adds
        return {"dictionaries": self.arguments, "vectors": self.vectors, "modules": MODULES, "sites": sites}


@pytest.fixture(scope="session")
def model_dir() -> str:
    return str(ensure_model())


@pytest.fixture(scope="session")
def served_dir(model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What engines load: the model, or an equal one whose heads the ranks of SAESTEER_TEST_ENGINE can share."""
    ranks = ranks_of_tests()
    return model_dir if ranks == 1 else str(padded(Path(model_dir), tmp_path_factory.mktemp("padded"), ranks))


@pytest.fixture(scope="session")
def dictionaries(tmp_path_factory: pytest.TempPathFactory) -> Dictionaries:
    return write_dictionaries(tmp_path_factory.mktemp("dictionaries"))


def write_dictionaries(folder: Path) -> Dictionaries:
    """Their files, in a folder."""
    for seed, (name, activation) in enumerate(
        [("second", "jumprelu"), ("topk", "topk"), ("mid", "relu"), ("embed", "relu"), ("last", "jumprelu")]
    ):
        coder = random_coder(activation, seed)
        known = (SECOND,) if name == "second" else ()
        own.write(folder / f"{name}.safetensors", replace(coder, info=replace(coder.info, addresses=known)))
    own.write(folder / "norm.safetensors", random_coder("abstopk", 5, in_norm="layer_norm"))
    own.write(folder / "group.safetensors", random_coder("groupmax", 6))
    for seed, (name, activation) in enumerate([("mlp", "jumprelu"), ("attn", "relu"), ("cross", "topk")], 7):
        own.write(folder / f"{name}.safetensors", random_coder(activation, seed))
    own.write(folder / "skip.safetensors", random_coder("topk", 10, skip=True))
    (folder / "deep").mkdir()  # a set
    for layer in (15, 20):
        own.write(folder / "deep" / f"layer_{layer}.safetensors", random_coder("jumprelu", layer))
    for name, rows in VECTORS.items():
        named = {"any" if layer is None else f"layer.{layer}": row for layer, row in rows.items()}
        save_file(named, folder / f"{name}.safetensors")
    return Dictionaries(folder)


def random_coder(
    activation: Any, seed: int, features: int = 96, in_norm: Any = "none", width: int = WIDTH, skip: bool = False
) -> SparseCoder:
    """A random dictionary of a model's width, with unit decoder rows and asymmetric values."""
    draw = torch.Generator().manual_seed(seed)
    w_dec = torch.randn(features, width, generator=draw)
    w_dec /= w_dec.norm(dim=1, keepdim=True)
    info = CoderInfo(
        format="saesteer",
        d_in=width,
        d_out=width,
        features=features,
        activation=activation,
        k=8 if activation in RANKED else None,
        in_norm=in_norm,
        site_in=None,
        site_out=None,
        feature_unit="raw",
        has_max_act=True,
        skip_first=1,
        source="test",
        fingerprint="",
        skip=skip,
    )
    return SparseCoder(
        w_enc=torch.randn(features, width, generator=draw) / width**0.5,
        b_enc=torch.randn(features, generator=draw) * 0.1,
        w_dec=w_dec.contiguous(),
        b_dec=torch.randn(width, generator=draw) * 0.1,
        info=info,
        threshold=torch.rand(features, generator=draw) * 0.2 if activation == "jumprelu" else None,
        max_act=torch.rand(features, generator=draw) + 1.0,
        w_skip=torch.randn(width, width, generator=draw) / width if skip else None,
    )


def engine_options(dtype: str = "bfloat16", **more: Any) -> dict[str, Any]:
    """Options of a small engine for this machine. On a CPU a block of the cache has 32 tokens, as few as vLLM takes.

    SAESTEER_TEST_ENGINE adds to them, as JSON: ``{"pipeline_parallel_size": 2}`` runs the tests on two stages, and
    ``{"tensor_parallel_size": 2}`` on two ranks.
    """
    options: dict[str, Any] = {"dtype": dtype, "max_model_len": 1024, "seed": 0}
    if CUDA:
        options |= {"kv_cache_memory_bytes": 2 << 30, "gpu_memory_utilization": 0.1}
        options |= {"max_num_seqs": 16, "cudagraph_capture_sizes": [1, 2, 4, 8, 16]}
    else:
        options |= {"enforce_eager": True, "kv_cache_memory_bytes": 400 << 20}
        options |= {"max_num_seqs": 64, "block_size": 32}
    return options | json.loads(os.environ.get("SAESTEER_TEST_ENGINE", "{}")) | more


Answer = list[tuple[int, float]]  # token, logprob


def generate(llm: Any, prompts: list[Any], steer: Any = None, *, tokens: int = 16, **sampling: Any) -> list[Answer]:
    """Greedy answers with the logprob of each token."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=tokens, logprobs=0, ignore_eos=True, **sampling)
    outputs = llm.generate(prompts, params, steer=steer, use_tqdm=False)
    return [answer(output.outputs[0]) for output in outputs]


def answer(completion: Any) -> Answer:
    """Tokens and logprobs of one completion."""
    return [(t, step[t].logprob) for t, step in zip(completion.token_ids, completion.logprobs, strict=True)]


def preemptions(llm: Any) -> int:
    """So far, of an engine that logs its statistics. ``LLM.get_metrics`` has those of the engine that was made last."""
    loggers = llm.llm_engine.logger_manager.stat_loggers
    counters = next(one.counter_num_preempted_reqs for one in loggers if hasattr(one, "counter_num_preempted_reqs"))
    samples = [sample for own in counters.values() for metric in own.collect() for sample in metric.samples]
    return int(sum(sample.value for sample in samples if sample.name.endswith("_total")))


@pytest.fixture
def make_engine(served_dir: str, dictionaries: Dictionaries, shared: Shared) -> Callable[..., Any]:
    """Engines by their options, one for all tests that ask for the same; they find in it what others left in its cache.

    Another set of options costs half a minute.
    """

    @contextmanager
    def started(options: dict[str, Any]) -> Iterator[Any]:
        from saesteer import LLM

        llm = LLM(served_dir, **dictionaries.options, inline_rows=2, **options)
        try:
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown(timeout=1)  # on a CPU it would wait for 5 s, in vain

    def make(**changes: Any) -> Any:
        options = engine_options(**changes)
        return shared.get(f"engine {json.dumps(options, sort_keys=True)}", lambda: started(options))

    return make


@pytest.fixture(scope="session")
def oracle(model_dir: str, dictionaries: Dictionaries) -> hf.Model:
    return hf.Model(model_dir, **dictionaries.options, dtype=torch.float32)


@pytest.fixture(scope="session")
def adapter(oracle: hf.Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(tmp_path_factory.mktemp("adapter"), oracle.model)


@pytest.fixture(scope="session")
def server_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What any_server says."""
    return tmp_path_factory.mktemp("server") / "log"


@pytest.fixture(scope="session")
def server_flags(model_dir: str, dictionaries: Dictionaries, server_log: Path) -> list[str]:
    """Of any_server, the dtype and adapters left out."""
    return flags_of(model_dir, dictionaries, server_log.parent)


def flags_of(model_dir: str, dictionaries: Dictionaries, folder: Path) -> list[str]:
    """The same, with the settings file in a folder."""
    config = folder / "saesteer.yaml"
    config.write_text(json.dumps({**dictionaries.options, "inline_rows": 2}))  # JSON is YAML
    flags = [model_dir, "--saesteer-config", str(config), "--max-model-len", "1024", "--max-num-seqs", "16"]
    flags += ["--served-model-name", "base", "--kv-cache-memory-bytes", str(400 << 20)]
    flags += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    flags += ["--dictionaries-of", SECOND.partition("/")[0]]
    return [*flags, "--enable-log-requests", "--saesteer-admin-key", ADMIN_KEY]


@pytest.fixture(scope="session")
def lora_flags(adapter: Path) -> list[str]:
    """An adapter by the name of `tiny`."""
    return ["--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"tiny={adapter}"]


@pytest.fixture
def any_server(server_flags: list[str], lora_flags: list[str], server_log: Path, shared: Shared) -> httpx.Client:
    """A server of everything at once, in float32: the model as `base`, with a LoRA adapter as `tiny`, and tools.

    It logs every request, and has an admin key. vLLM's kernels for adapters take 16 bits alone: on a GPU it has none.
    """
    flags = [*server_flags, "--dtype", "float32", *([] if CUDA else lora_flags)]
    found: httpx.Client = shared.get("any_server", lambda: served(flags, server_log))
    return found


@pytest.fixture
def lora_server(
    any_server: httpx.Client, server_flags: list[str], lora_flags: list[str], tmp_path: Path
) -> Iterator[httpx.Client]:
    """The same where it has the adapter; on a GPU another one, in bfloat16."""
    if not CUDA:
        yield any_server
        return
    with served([*server_flags, "--dtype", "bfloat16", *lora_flags], tmp_path / "log") as client:
        yield client
