"""Two ranks or two stages say what one says, count once, and change names together or not at all.

Each engine runs in a process of its own, since vLLM makes process groups for life; this file is both the tests and that
process.
"""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.apart import hear, tell
from tests.plugin.admin import Client
from tests.plugin.asked import NOISE, PROMPTS, READS, ROWS, SPECS, add
from tests.plugin.conftest import CUDA
from tests.plugin.ranks import APART, WAYS, answers_to, ask, reads_of, rules_of, start, told
from tests.plugin.said import same
from tests.plugin.stored import captured
from tests.plugin.tiny_engine import params_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.device_count() == 1, reason="two ranks need two GPUs, or none"),
]

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
        return hear("-m", "tests.plugin.test_ranks", folders[way], way, environment=environment | here, fork=True)

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


@pytest.mark.parametrize(("way", "told"), [("tensor", "EngineDeadError"), ("pipeline", "PromptsFailed")])
def test_no_rank_goes_on_alone(runs: dict[str, Any], way: str, told: str) -> None:
    """Of a stage's only rank the scheduler hears; one of several that cannot edit a request ends the engine."""
    assert runs[way]["broken"] == told


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


def shatter(worker: Any) -> None:
    """Rank 1 cannot fill a row."""
    stock = worker.saesteer.engine.fill

    def fill(row: int, content: Any, *more: Any) -> None:
        if content is not None:
            raise MemoryError("none left on rank 1")
        stock(row, content, *more)

    if worker.rank == 1:
        worker.saesteer.engine.fill = fill


def _broken(llm: Any) -> str:
    """What becomes of a request that one rank cannot edit."""
    from vllm.v1.engine.exceptions import EngineDeadError

    from saesteer import SpecError

    try:
        ask(llm, SPECS["clamp"])
    except (EngineDeadError, SpecError) as error:
        return type(error).__name__
    return "answered"


def lose(worker: Any) -> None:
    """Rank 1 is one without saesteer."""
    if worker.rank == 1:
        del worker.worker.saesteer


def _captured(llm: Any, folder: Path) -> dict[str, Any]:
    """The rows of the first requests at two sites: position, token, numbers."""

    found = {}
    for site in ("z.1", "resid_post.1"):
        requests = captured(llm, folder, site)
        first = sorted(requests, key=lambda one: int(one[0].partition("-")[0]))[: len(PROMPTS)]
        rows = (one for name in first for one in requests[name].items())
        found[site] = [[at, token, np.frombuffer(row, "<f4").tolist()] for at, (token, row) in rows]
    return found


def _names(llm: Any, *, alone: bool) -> dict[str, Any]:
    """Register, replace while one runs, and delete; with two ranks, fail on one between."""
    from saesteer import SpecError

    client, named = Client(llm), {"edits": [add("v")]}
    found: dict[str, Any] = {"inline": [ask(llm, {"edits": [add(row)]}) for row in ROWS]}
    (found["long"],) = ask(llm, {"edits": [add(ROWS[0])]}, tokens=40)
    client.put(ROWS[0])
    found["first"] = ask(llm, named)
    if not alone:
        llm.collective_rpc(fail)
        try:
            client.put(ROWS[1])
        except RuntimeError as error:
            found["failed"] = str(error)
        llm.collective_rpc(mend)
        found["after the failure"] = ask(llm, named)
    engine = llm.llm_engine
    engine.add_request("runs", {"prompt_token_ids": PROMPTS[0]}, params_of(named, max_tokens=40))
    for _ in range(5):
        engine.step()
    client.put(ROWS[1])
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                found["running"] = told(output)
    found["second"] = ask(llm, named)
    client.delete()
    try:
        ask(llm, named)
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


def main(folder: Path, way: str) -> None:
    """Start an engine, ask it everything, and say what it said."""
    from saesteer.errors import ConfigError

    if way == "ray" and not CUDA:
        begin_ray()
    llm = start(folder, way)
    found: dict[str, Any] = {"ranks": len(llm.collective_rpc("saesteer_status"))}
    found["answers"] = {name: answers_to(llm, spec) for name, spec in SPECS.items()}
    found["counted"] = llm.collective_rpc(counted)  # rows that nobody has taken since
    found["reads"] = reads_of(llm)
    found["rules"] = {op: rules_of(llm, op) for op in ("stop", "flag")}
    found["captured"] = _captured(llm, folder / f"rows {way}")
    found["names"] = _names(llm, alone=way == "one")
    if way != "one":
        llm.collective_rpc(shatter)
        llm.collective_rpc(lose)
        llm.llm_engine.saesteer_agreed = False
        try:
            llm.llm_engine.get_supported_tasks()
        except ConfigError as error:
            found["handshake"] = str(error)
        llm.llm_engine.saesteer_agreed = True
        if way != "ray":  # here its engine is in this process
            found["broken"] = _broken(llm)
    llm.llm_engine.engine_core.shutdown()  # before Ray's own end, which vLLM would not survive
    tell(found)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
