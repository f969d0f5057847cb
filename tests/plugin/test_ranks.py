"""Two ranks or two stages say what one says, count once, and change names together or not at all.

Each engine runs in a process of its own, since vLLM makes process groups for life; this file is both the tests and that
process.
"""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.apart import hear, tell
from tests.plugin.admin import Client
from tests.plugin.asked import CLAMP, FEATURES, KINDS, NOISE, PROMPTS, READS, ROWS, RULE, SPECS, WIDTH, add, tiny_llama
from tests.plugin.conftest import CUDA
from tests.plugin.said import plain, same

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.device_count() == 1, reason="two ranks need two GPUs, or none"),
]

WAYS: dict[str, dict[str, Any]] = {
    "one": {},
    "tensor": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},  # between layers 1 and 2, resid_post.1 behind it
}
if find_spec("ray"):
    WAYS["ray"] = {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}
APART = {"read at z"}  # needs on the second stage what the first has read
several = pytest.mark.parametrize("way", [*WAYS][1:])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What an engine of one rank, one of two and one of two stages answered."""
    folders = {way: str(tmp_path_factory.mktemp(way)) for way in WAYS}
    environment = {**os.environ, "VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    if not CUDA:
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}

    def run(way: str) -> Any:
        # Ray is told of devices where there are none in this process, so the engine has to be in it.
        here = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if way == "ray" and not CUDA else {}
        return hear("-m", "tests.plugin.test_ranks", folders[way], way, environment=environment | here)

    with ThreadPoolExecutor(len(WAYS) if CUDA else 1) as threads:  # side by side where they take little of a machine
        found = dict(zip(WAYS, threads.map(run, WAYS), strict=True))
    assert all(one["ranks"] == 1 + (way != "one") for way, one in found.items())
    return found


def answers(runs: dict[str, Any], way: str, name: str) -> tuple[Any, Any]:
    """Those of one rank, and those of this way of having two."""
    one, two = (runs[each]["answers"][name] for each in ("one", way))
    if way == "pipeline" and name in APART:
        assert "on stage 1 of this server's pipeline, by what is read at z.1, on stage 0" in two
        pytest.skip("refused there, as it should be")
    return one, two


@several
@pytest.mark.parametrize("name", SPECS)
def test_two_say_what_one_says(runs: dict[str, Any], name: str, way: str) -> None:
    one, two = answers(runs, way, name)
    for (tokens, logprobs, _), (others, found, _) in zip(one, two, strict=True):
        assert tokens == others
        assert found == pytest.approx(logprobs, abs=NOISE)
    if name != "plain":
        plain = runs[way]["answers"]["plain"]
        far = [one[1] != pytest.approx(other[1], abs=10 * NOISE) for one, other in zip(two, plain, strict=True)]
        assert any(far), "it is steered"


@several
@pytest.mark.parametrize("name", READS)
def test_two_read_what_one_reads(runs: dict[str, Any], name: str, way: str) -> None:
    """The first of two ranks has the whole of each tensor: of z, too, of which it computes a half."""
    one, two = (runs[each]["reads"][name] for each in ("one", way))
    assert len(one) == len(two) == len(PROMPTS)
    for found, expected in zip(two, one, strict=True):
        same(found, expected, 10 * NOISE, name)


@several
@pytest.mark.parametrize("op", ["stop", "flag"])
def test_rules_fire_where_they_fire_on_one_rank(runs: dict[str, Any], op: str, way: str) -> None:
    """Their conditions may be read on two stages: the scheduler has both."""
    one, two = (runs[each]["rules"][op] for each in ("one", way))
    assert one == two and any(flags for _, flags in one)


@several
def test_what_is_captured_is_whole(runs: dict[str, Any], way: str) -> None:
    for site in ("z.1", "resid_post.1"):
        one, two = (runs[each]["captured"][site] for each in ("one", way))
        same(two, one, 10 * NOISE, site)


@several
@pytest.mark.parametrize("name", SPECS)
def test_tokens_are_counted_once(runs: dict[str, Any], name: str, way: str) -> None:
    one, two = ([counts for *_, counts in each] for each in answers(runs, way, name))
    assert one == two
    if name == "clamp":  # all tokens but the first, and the last that was generated
        assert two == [[len(prompt) - 1 + 7] for prompt in PROMPTS]


def test_each_rank_counts_the_same(runs: dict[str, Any]) -> None:
    """Each has the whole stream and edits it itself. Which row of its table a request has is its own affair."""
    first, second = runs["tensor"]["counted"]
    assert sorted(first) == sorted(second) and sum(first) > 0


def test_each_stage_counts_at_its_own_sites(runs: dict[str, Any]) -> None:
    """The last spec edits at z.2, which is on the second."""
    [whole], (first, second) = runs["one"]["counted"], runs["pipeline"]["counted"]
    assert sum(first) == 0 < sum(second) == sum(whole)


@several
def test_names_change_on_all_ranks_or_on_none(runs: dict[str, Any], way: str) -> None:
    for each in ("one", way):
        names = runs[each]["names"]
        assert names["first"] == names["inline"][0] != names["inline"][1]
        assert names["running"] == names["long"], "what runs keeps what it started with"
        assert names["second"] == names["inline"][1]
        assert names["gone"] == "saesteer.edits[0].vector"
    names = runs[way]["names"]
    assert "MemoryError: none left on rank 1" in names["failed"]
    assert names["after the failure"] == names["inline"][0], "both ranks have the old one still"
    assert names["pins"][0] == names["pins"][1]


@several
def test_a_rank_that_disagrees_is_refused(runs: dict[str, Any], way: str) -> None:
    assert "a worker runs another saesteer or other dictionaries" in runs[way]["handshake"]


def counted(worker: Any) -> list[int]:
    """Of each row of a rank."""
    found: list[int] = worker.saesteer.engine.counts.sum(1).tolist()
    return found


def pins(worker: Any) -> list[Any]:
    """Vectors that a rank has for names, their slots, and how many it keeps beside them."""
    registry = worker.saesteer.engine.registry
    found = [(site, digest.hex(), slot) for (site, digest), (slot, _) in registry._pins.items()]
    return [sorted(found), len(registry._kept), len(registry._leaving)]


def fail(worker: Any) -> None:
    """Rank 1 has no memory left for another vector."""

    def pin(*_: Any) -> None:
        raise MemoryError("none left on rank 1")

    if worker.rank == 1:
        worker.saesteer.engine.pin = pin


def mend(worker: Any) -> None:
    """It has again."""
    vars(worker.saesteer.engine).pop("pin", None)


def lose(worker: Any) -> None:
    """Rank 1 is one without saesteer."""
    if worker.rank == 1:
        del worker.worker.saesteer


def _params(spec: Any, tokens: int = 8) -> Any:
    from vllm import SamplingParams

    extra = {"saesteer": spec} if spec else None
    return SamplingParams(
        temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=0, detokenize=False, extra_args=extra
    )


def _told(output: Any) -> tuple[list[int], list[float], list[int]]:
    """Tokens, logprobs, and the counts of each edit."""
    made = output.outputs[0]
    logprobs = [step[token].logprob for token, step in zip(made.token_ids, made.logprobs, strict=True)]
    applied = getattr(made, "saesteer", {}).get("applied", ())
    return list(made.token_ids), logprobs, [one["tokens_edited"] for one in applied]


def _ask(llm: Any, spec: Any, prompts: Any = PROMPTS[:1], tokens: int = 8) -> Any:
    outputs = llm.generate([{"prompt_token_ids": one} for one in prompts], _params(spec, tokens), use_tqdm=False)
    return [_told(output) for output in outputs]


def _said(output: Any) -> dict[str, Any]:
    """What an answer has read; of a consumer the rows in its files, not their names."""
    found = dict(output.outputs[0].saesteer)
    if "consumers" in found:
        found["consumers"] = {"rows": found["consumers"]["filesystem"]["rows"]}
    return plain(found)


def _reads(llm: Any) -> dict[str, Any]:
    found = {}
    for name, wanted in READS.items():
        params = _params({"edits": [CLAMP, {**CLAMP, "dictionary": "heads"}], "return": wanted})
        outputs = llm.generate([{"prompt_token_ids": one} for one in PROMPTS], params, use_tqdm=False)
        found[name] = [_said(output) for output in outputs]
    return found


def _rules(llm: Any, op: str) -> list[Any]:
    """The tokens and the flags of each answer."""
    params = _params({"edits": [{"op": op, **RULE}]}, 16)
    outputs = llm.generate([{"prompt_token_ids": one} for one in PROMPTS], params, use_tqdm=False)
    return [[list(one.outputs[0].token_ids), one.outputs[0].saesteer["flags"]] for one in outputs]


def _captured(llm: Any, folder: Path) -> dict[str, Any]:
    """The rows of the first requests at two sites: position, token, numbers."""
    from tests.plugin.stored import captured

    found = {}
    for site in ("z.1", "resid_post.1"):
        requests = captured(llm, folder, site)
        first = sorted(requests, key=lambda one: int(one[0].partition("-")[0]))[: len(PROMPTS)]
        rows = (one for name in first for one in requests[name].items())
        found[site] = [[at, token, np.frombuffer(row, "<f4").tolist()] for at, (token, row) in rows]
    return found


def _answers(llm: Any, spec: Any) -> Any:
    """To all prompts, or why not."""
    from saesteer import SpecError

    try:
        return _ask(llm, spec, PROMPTS)
    except SpecError as error:
        return str(error)


def _names(llm: Any, *, alone: bool) -> dict[str, Any]:
    """Register, replace while one runs, and delete; with two ranks, fail on one between."""
    from saesteer import SpecError

    client, named = Client(llm), {"edits": [add("v")]}
    found: dict[str, Any] = {"inline": [_ask(llm, {"edits": [add(row)]}) for row in ROWS]}
    (found["long"],) = _ask(llm, {"edits": [add(ROWS[0])]}, tokens=40)
    client.put(ROWS[0])
    found["first"] = _ask(llm, named)
    if not alone:
        llm.collective_rpc(fail)
        try:
            client.put(ROWS[1])
        except RuntimeError as error:
            found["failed"] = str(error)
        llm.collective_rpc(mend)
        found["after the failure"] = _ask(llm, named)
    engine = llm.llm_engine
    engine.add_request("runs", {"prompt_token_ids": PROMPTS[0]}, _params(named, 40))
    for _ in range(5):
        engine.step()
    client.put(ROWS[1])
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                found["running"] = _told(output)
    found["second"] = _ask(llm, named)
    client.delete()
    try:
        _ask(llm, named)
    except SpecError as error:
        found["gone"] = error.field
    found["pins"] = llm.collective_rpc(pins)
    return found


def pretend() -> None:
    """Let vLLM's workers ask Ray for a GPU each: for CPUs vLLM knows no device that Ray could count."""
    from vllm.platforms import current_platform

    type(current_platform).ray_device_key = "GPU"


def begin_ray() -> None:
    """Ray on this machine, with two devices that it believes in."""
    import ray  # type: ignore[import-not-found,unused-ignore]  # nothing here installs it

    pretend()
    hook = {"worker_process_setup_hook": "tests.plugin.test_ranks.pretend"}
    ray.init(num_cpus=2, num_gpus=2, include_dashboard=False, runtime_env=hook)


def start(folder: Path, way: str, **changes: Any) -> Any:
    """An engine with its ranks or stages."""
    from bench.dummy import dictionary_file
    from saesteer import LLM

    np.save(folder / "probe.npy", np.array(ROWS[1], dtype=np.float32))
    narrow, wide = (f"{dictionary_file(width, FEATURES, folder)}@" for width in (WIDTH, 2 * WIDTH))
    options: dict[str, Any] = {"gpu_memory_utilization": 0.1} if CUDA else {}
    options |= {"dtype": "float32", "enforce_eager": True, **WAYS[way], **changes}
    return LLM(
        tiny_llama(folder),
        dictionaries={"random": f"{narrow}resid_post.1", "heads": f"{wide}z.1"}
        | {f"mlp{n}": f"{narrow}mlp_in.{n}:mlp_out.{n}" for n in (1, 2)},
        vectors={"probe": str(folder / "probe.npy")},
        sites=["resid_post.all", "resid_mid.1", "z.2", *KINDS],
        reads=["resid_post.2", "resid_post.1", "z.1", *KINDS],
        consumers={"filesystem": {"folder": str(folder / f"asked {way}")}},
        capture=["z.1", "resid_post.1"],
        capture_folder=str(folder / f"rows {way}" / "captured"),
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=256,
        max_num_seqs=4,
        kv_cache_memory_bytes=64 << 20,
        seed=0,
        **options,
    )


def main(folder: Path, way: str) -> None:
    """Start an engine, ask it everything, and say what it said."""
    from saesteer.errors import ConfigError

    if way == "ray" and not CUDA:
        begin_ray()
    llm = start(folder, way)
    found: dict[str, Any] = {"ranks": len(llm.collective_rpc("saesteer_status"))}
    found["answers"] = {name: _answers(llm, spec) for name, spec in SPECS.items()}
    found["counted"] = llm.collective_rpc(counted)  # rows that nobody has taken since
    found["reads"] = _reads(llm)
    found["rules"] = {op: _rules(llm, op) for op in ("stop", "flag")}
    found["captured"] = _captured(llm, folder / f"rows {way}")
    found["names"] = _names(llm, alone=way == "one")
    if way != "one":
        llm.collective_rpc(lose)
        llm.llm_engine.saesteer_agreed = False
        try:
            llm.llm_engine.get_supported_tasks()
        except ConfigError as error:
            found["handshake"] = str(error)
    llm.llm_engine.engine_core.shutdown()  # before Ray's own end, which vLLM would not survive
    tell(found)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
