"""Which graphs a step replays: never one that lacks an op that it needs. Graphs are captured by vLLM, here without a GPU.

The tests on a GPU are in test_graphs_on_gpu.py.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager

from saesteer.config.assets import Assets
from saesteer.config.config import SaesteerConfig
from saesteer.engine.engine import Engine
from saesteer.engine.graph_sets import nested, smallest
from saesteer.kernels import layout, ops
from saesteer.loaders.formats import own
from saesteer.plugin.worker import graphs
from saesteer.plugin.worker.worker import Steering, _wrap_v2
from tests.plugin.conftest import random_coder

SITES = [f"resid_post.{layer}" for layer in range(6)]
FULL, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE
some = st.frozensets(st.sampled_from(SITES))


@given(some, some, st.integers(1, 3), some)
def test_the_choice_is_the_smallest_that_is_large_enough(
    sites: frozenset[str], dictionaries: frozenset[str], most: int, needed: frozenset[str]
) -> None:
    sets = nested(sites, dictionaries, most)
    assert len(sets) <= most and sets[-1] == sites
    assert all(one < another for one, another in zip(sets, sets[1:], strict=False))
    if most > 1:
        assert not sets[0]
    if most > 2:
        assert sites & dictionaries in sets
    at = smallest(sets, needed & sites)
    assert needed & sites <= sets[at]
    assert not any(needed & sites <= smaller for smaller in sets[:at])
    assert smallest(sets, needed | {"mlp_out.9"}) == len(sets) - 1


@given(some, st.integers(1, 3), st.lists(some, max_size=8), st.sets(st.sampled_from((0, 1))))
def test_a_batch_replays_a_graph_with_the_ops_of_all_its_requests(
    dictionaries: frozenset[str], most: int, asked: list[frozenset[str]], captured: set[int]
) -> None:
    choice = graphs.Choice(nested(SITES, dictionaries, most))
    sets, last = choice.sets, len(choice.sets) - 1
    for number, needed in enumerate(asked):
        choice._needs[str(number)] = smallest(sets, needed)
    batch = [str(number) for number in range(len(asked))]
    choice.look(["somebody else", *batch])
    replayed: list[int] = []
    held = {at for at in captured if at < last} | {last}
    shape = graphs.chosen(choice, {at: {"shape": _Replayed(at, replayed)} for at in held})["shape"]
    shape.replay()
    needed = frozenset[str]().union(*asked)
    [at] = replayed
    assert needed <= sets[at]
    assert not any(needed <= sets[smaller] for smaller in held if smaller < at)
    for name in batch:
        choice.forget(name)
    choice.look(["somebody else"])
    assert choice.at == 0


class _Replayed:
    def __init__(self, at: int, into: list[int]) -> None:
        self.at, self.into = at, into

    def replay(self) -> None:
        self.into.append(self.at)


@pytest.fixture
def engine(tmp_path: Any) -> Engine:
    own.write(tmp_path / "a.safetensors", random_coder("relu", 0, width=32))
    raw = {"dictionaries": {"a": f"{tmp_path}/a.safetensors@resid_post.3"}, "sites": SITES}
    shape: Any = {"width": 32, "layers": 6, "dtype": torch.float32, "device": torch.device("cpu")}
    sources = {"a": {"path": f"{tmp_path}/a.safetensors", "site": "resid_post.3"}}
    return Engine(Assets.open(SaesteerConfig.from_json(raw | {"dictionaries": sources})), **shape, max_rows=4, max_tokens=64)


def test_the_engines_sets_are_those_of_its_dictionaries(engine: Engine) -> None:
    assert engine.graph_sets == (frozenset(), {"resid_post.3"}, frozenset(SITES))
