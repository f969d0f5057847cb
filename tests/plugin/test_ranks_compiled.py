"""Two ranks or two stages that replay CUDA graphs, ours captured beside vLLM's, say and read what eager ranks do.

The op at z gathers from all ranks in the midst of a graph. Each engine runs in a process of its own, its ranks in two
more; this file is both the tests and that process.
"""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.apart import hear, tell
from tests.plugin.asked import NOISE, PROMPTS, READS, SPECS
from tests.plugin.ranks import APART, answers_to, reads_of, rules_of, start, told
from tests.plugin.said import same
from tests.plugin.tiny_engine import params_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two ranks or stages need two GPUs"),
]

# Without FlashInfer's fusion of an all-reduce and the norm behind it, which some machines first have to build.
GRAPHS = {
    "enforce_eager": False,
    "cudagraph_capture_sizes": [1, 2, 4],
    "compilation_config": {"pass_config": {"fuse_allreduce_rms": False}},
}
WAYS: dict[str, dict[str, Any]] = {"eager": {}, "graphs": GRAPHS, "bfloat16": {**GRAPHS, "dtype": "bfloat16"}}
WAYS["stages"] = GRAPHS
exact = pytest.mark.parametrize("way", ["graphs", "stages"])  # in float32, as the eager ranks
# The set of graphs of a spec: with the ops of dictionaries, or with all, which stand behind those of reads. No step is
# without ops: the operator captures two sites of all requests, which dictionaries have.
SETS = {"plain": 1, "clamp": 1, "clamp at z": 1, "reconstruct at z": 1, "add at z.2": 3, "every site": 3}
BESIDE = ("clamp at z", "reconstruct at z", "cap at z", "every site")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the engines answered; they run side by side, as they take little of a GPU."""
    # With the scheduler in the same process a batch has the same shape in every run.
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    environment |= {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}

    folders = {way: str(tmp_path_factory.mktemp(way)) for way in WAYS}  # here, since pytest knows no threads

    def run(way: str) -> Any:
        return hear("-m", "tests.plugin.test_ranks_compiled", folders[way], way, environment=environment)

    with ThreadPoolExecutor() as threads:
        return dict(zip(WAYS, threads.map(run, WAYS), strict=True))


@exact
@pytest.mark.parametrize("name", SPECS)
def test_graphs_say_what_eager_ranks_say(runs: dict[str, Any], name: str, way: str) -> None:
    """In float32, where two orders of the same sums are as far apart as those of one rank and two.

    Near a tie they may choose two tokens, whose logprobs are then as close; what comes behind is not compared.
    """
    eager, graphs = (runs[each]["answers"][name] for each in ("eager", way))
    if way == "stages" and name in APART:
        assert "on stage 1 of this server's pipeline" in graphs
        pytest.skip("refused there, as it should be")
    for (tokens, logprobs, counts), (others, found, counted) in zip(eager, graphs, strict=True):
        alike = next((at for at, (one, two) in enumerate(zip(tokens, others, strict=True)) if one != two), len(tokens))
        assert found[: alike + 1] == pytest.approx(logprobs[: alike + 1], abs=NOISE)
        assert alike < len(tokens) or counted == counts
    assert sum(one[0] == two[0] for one, two in zip(eager, graphs, strict=True)) > 1, "most answers are the same"


@exact
@pytest.mark.parametrize("name", READS)
def test_graphs_read_what_eager_ranks_read(runs: dict[str, Any], name: str, way: str) -> None:
    eager, graphs = (runs[each]["reads"][name] for each in ("eager", way))
    assert len(eager) == len(graphs) == len(PROMPTS)
    for found, expected in zip(graphs, eager, strict=True):
        same(found, expected, 10 * NOISE, name)


@exact
@pytest.mark.parametrize("op", ["stop", "flag"])
def test_rules_fire_where_they_fire_on_eager_ranks(runs: dict[str, Any], op: str, way: str) -> None:
    assert runs[way]["rules"][op] == runs["eager"]["rules"][op]


@pytest.mark.parametrize("way", ["graphs", "bfloat16", "stages"])
@pytest.mark.parametrize("name", SETS)
def test_both_replay_the_same_set(runs: dict[str, Any], way: str, name: str) -> None:
    """vLLM's V1 runner has one set for all."""
    one, two = runs[way]["sets"][name]
    assert one == two
    assert one is None or set(one) == {SETS[name]}


@pytest.mark.parametrize("way", ["graphs", "bfloat16", "stages"])
@pytest.mark.parametrize("name", BESIDE)
def test_others_keep_their_bits_beside_edits_at_z(runs: dict[str, Any], way: str, name: str) -> None:
    """What is gathered and given back is what it was; so is what stands in a graph behind it."""
    plain, mixed = runs[way]["beside"]["plain"], runs[way]["beside"][name]
    assert mixed[0] == plain[0] and mixed[2] == plain[2]
    assert mixed[1] != plain[1]


def watch(worker: Any) -> None:
    """Remember from now on which set of graphs each step replays."""
    steering = worker.saesteer
    manager = getattr(worker.model_runner, "cudagraph_manager", None)
    steering.replayed = None if manager is None else []
    for chosen in manager.graphs.values() if manager is not None else ():

        def replay(original: Any = chosen.replay) -> None:
            steering.replayed.append(steering.choice.at)
            original()

        chosen.replay = replay


def replayed(worker: Any) -> Any:
    """Of the steps since the last call; None where vLLM has one set."""
    found = worker.saesteer.replayed
    worker.saesteer.replayed = None if found is None else []
    return found


def beside(llm: Any, spec: Any) -> list[Any]:
    """The answers to all prompts, of which the second is steered."""
    params = [params_of(spec if number == 1 else None, max_tokens=12) for number in range(len(PROMPTS))]
    outputs = llm.generate([{"prompt_token_ids": one} for one in PROMPTS], params, use_tqdm=False)
    return [told(output)[:2] for output in outputs]


def main(folder: Path, way: str) -> None:
    """Start an engine, ask it, and say what it said."""
    llm = start(folder, "pipeline" if way == "stages" else "tensor", **WAYS[way])
    found: dict[str, Any] = {"answers": {}, "sets": {}}
    if way != "eager":
        llm.collective_rpc(watch)
    for name, spec in SPECS.items():
        found["answers"][name] = answers_to(llm, spec)
        if way != "eager":
            found["sets"][name] = llm.collective_rpc(replayed)
    found["reads"] = reads_of(llm)
    found["rules"] = {op: rules_of(llm, op) for op in ("stop", "flag")}
    found["beside"] = {"plain": beside(llm, None)} | {name: beside(llm, SPECS[name]) for name in BESIDE}
    tell(found)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
