"""Which graphs a step replays: never one that lacks an op that it needs.

vLLM's own loop captures them, with stand-ins for CUDA; a real engine on a GPU is in test_graph_bits.py.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

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
from saesteer.engine.graph_sets import Sites, enough, sets_of, smallest
from saesteer.kernels import ops
from saesteer.language.spec import from_json
from saesteer.loaders.formats import own
from saesteer.plugin.door.admission import Door
from saesteer.plugin.worker import graphs
from saesteer.plugin.worker.steering import Steering
from saesteer.plugin.worker.worker import _wrap_v2
from tests.plugin.conftest import random_coder

SITES = [f"resid_post.{layer}" for layer in range(6)]
FULL, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE
some = st.frozensets(st.sampled_from(SITES))


needs = st.builds(Sites, some, some)


@given(some, some, some, st.integers(1, 4), needs)
def test_the_choice_has_what_is_needed_and_nothing_captured_with_fewer_ops_has(
    sites: frozenset[str], dictionaries: frozenset[str], readable: frozenset[str], most: int, needed: Sites
) -> None:
    sets = sets_of(sites, dictionaries, readable, most)
    assert len(sets) <= most and sets[-1] == Sites(sites)
    assert len(set(sets)) == len(sets)
    assert [one.ops for one in sets] == sorted(one.ops for one in sets)
    if sites and most > 1:
        assert sets[0] == Sites()
    if most > 2:
        assert any(one.edits == sites & dictionaries for one in sets)
    if most > 3:
        assert any(sites & readable <= one.reads for one in sets) or not sites & readable
    here = Sites(needed.edits & sites, needed.reads & sites)
    at = smallest(enough(sets, here), range(len(sets)))
    assert here.edits <= sets[at].edits and here.reads <= sets[at].edits | sets[at].reads
    assert not any(one.holds(here) for one in sets[:at])
    assert smallest(enough(sets, Sites(here.edits | {"mlp_out.9"}, here.reads)), range(len(sets))) == len(sets) - 1


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    """Ops at six layers, a dictionary at one of them."""
    place = tmp_path / "a.safetensors"
    own.write(place, random_coder("relu", 0, width=32))
    raw = {"dictionaries": {"a": {"path": str(place), "site": "resid_post.3"}}, "sites": SITES}
    raw |= {"reads": ["resid_post.1"]}
    shape: Any = {"width": 32, "layers": 6, "dtype": torch.float32, "device": torch.device("cpu")}
    return Engine(Assets.open(SaesteerConfig.from_json(raw)), **shape, max_rows=5, max_tokens=64)


def test_the_engines_sets_are_those_of_its_dictionaries(engine: Engine) -> None:
    dictionary, read = frozenset({"resid_post.3"}), frozenset({"resid_post.1", "resid_post.3"})
    sets = (Sites(), Sites(dictionary), Sites(reads=read), Sites(frozenset(SITES)))
    assert engine.graph_sets == sets


class Graph:
    """A graph that remembers which ops ran while it was captured; `capturing` does what torch.cuda.graph does."""

    def __init__(self) -> None:
        self.ops: set[int] = set()
        self.copying: set[int] = set()  # sites that were only captured, by address
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1

    @staticmethod
    @contextmanager
    def capturing(graph: "Graph", *_: Any, **__: Any) -> Iterator[None]:
        before, graph.copying = dict(ops.hits), {*ops._copying}
        yield
        graph.ops = {address for address, times in ops.hits.items() if times > before.get(address, 0)}


class Captured:
    """vLLM's own loop over shapes, with a model that has nothing but ops, attached to an engine.

    Args:
        engine: whose ops run.
        free: bytes of GPU memory at each time that somebody asks, the last one for ever.
    """

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch, free: Sequence[int] = (64 << 30,)) -> None:
        self.engine, self.ran = engine, Counter[str]()
        self.choice = graphs.Choice(engine.graph_sets)
        self.manager: Any = object.__new__(CudaGraphManager)
        shapes = [BatchExecutionDescriptor(FULL, tokens, tokens) for tokens in (8, 1)]
        stream = BatchExecutionDescriptor(PIECEWISE, 8, None)
        self.wanted = {PIECEWISE: [stream], FULL: shapes}
        vars(self.manager).update(
            {"device": None, "pool": None, "graphs": {}, "use_breakable_cg": False, "_capture_descs": self.wanted},
            ubatch_runner=None,
            _max_full_descs_to_capture=None,
            _capture_mem_samples=None,
            vllm_config=None,
            _capture_stream=lambda _: None,
        )
        left = list(free)
        for owner, name, value in (
            (cudagraph_utils, "graph_capture", lambda **_: nullcontext()),
            (cudagraph_utils, "capture_pool", lambda *_: nullcontext()),
            (cudagraph_utils, "is_global_first_rank", lambda: False),
            (torch.cuda, "CUDAGraph", Graph),
            (torch.cuda, "graph", Graph.capturing),
            (graphs, "_free", lambda: left.pop(0) if len(left) > 1 else left[0]),
            (graphs, "_everywhere", lambda here: here),
        ):
            monkeypatch.setattr(owner, name, value, raising=False)
        worker = SimpleNamespace(model_runner=SimpleNamespace(cudagraph_manager=self.manager))
        for _ in range(2):  # a second time changes nothing
            graphs.attach(worker, engine, self.choice)

    def capture(self) -> None:
        self.manager.capture(self._forward_of)

    def _forward_of(self, desc: Any, warmup: bool) -> Any:
        def forward(mode: CUDAGraphMode) -> None:
            self.ran[desc.cg_mode.name] += not warmup
            for site in self.engine.sites.values():
                self.engine.edit(site, torch.zeros(1, 32))
            ops.publish_(self.engine.counts, site.index, self.engine.steps, self.engine.published)

        return forward

    def held(self, graph: Graph) -> tuple[set[str], bool]:
        """The sites of its ops, and whether it publishes."""
        sites = {name for name, site in self.engine.sites.items() if site.index.data_ptr() in graph.ops}
        return sites, self.engine.published.data_ptr() in graph.ops


def test_every_full_graph_is_captured_once_for_each_set(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    world = Captured(engine, monkeypatch)
    for _ in range(2):  # vLLM may release its graphs, and capture them anew
        world.manager.graphs.clear()
        world.capture()
        assert world.manager._capture_descs is world.wanted
        assert list(world.manager.graphs) == world.wanted[FULL]
        for shape in world.manager.graphs.values():
            ordered = sorted(shape.graphs.items())
            assert [world.held(graph) for _, graph in ordered] == [
                (set(), False),
                ({"resid_post.3"}, True),
                ({"resid_post.1", "resid_post.3"}, False),
                (set(SITES), True),
            ]
            for at, graph in ordered:
                sites = engine.graph_sets[at]
                assert graph.copying == {engine.sites[name].index.data_ptr() for name in sites.reads}
    assert not ops._silent and not ops._copying


def test_a_set_for_which_there_is_no_room_is_replaced_by_the_next_larger(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gib = 1 << 30
    # Before and behind vLLM's own capture, before each set, and behind it.
    for free, held in (
        ([9 * gib, 8 * gib, 8 * gib], {0, 1, 2, 3}),
        ([4 * gib, 3 * gib, 3 * gib, 2 * gib, 2 * gib], {0, 3}),
        ([3 * gib, 2 * gib, 2 * gib], {3}),
    ):
        with monkeypatch.context() as patch, caplog.at_level("WARNING", "vllm.saesteer"):
            world = Captured(engine, patch, free)
            world.capture()
        shape = world.manager.graphs[world.wanted[FULL][0]]
        assert shape.graphs.keys() == held
        world.choice.look([])
        shape.replay()
        assert shape.graphs[min(held)].replays == 1
    assert caplog.text.count("too little GPU memory") == 2


CLAMP = {"edits": [{"op": "clamp", "dictionary": "a", "feature": 1, "value": 50.0}]}
ADD = {"edits": [{"op": "add", "vector": [1.0] * 32, "site": "resid_post.1"}]}


class World:
    """The V2 runner's calls of our hooks."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.state, self.steering = engine, Mock(), Steering(engine)
        self.slots: dict[str, int] = {}
        _wrap_v2(Mock(), self.state, self.steering)

    def arrive(self, name: str, slot: int, spec: Any = None) -> None:
        params = SimpleNamespace(extra_args=None, stop=[], max_tokens=None)
        request = SimpleNamespace(req_id=name, prompt_token_ids=[1] * 4, sampling_params=params, num_computed_tokens=0)
        if spec is not None:
            Door().admit(from_json(spec), self.engine.catalog, request)
        self.state.add_request(slot, request)
        self.slots[name] = slot

    def step(self, *names: str) -> int:
        """The set that the step of these requests would replay."""
        starts = torch.arange(len(names) + 1, dtype=torch.int32)
        slots = torch.tensor([self.slots.get(name, 0) for name in names], dtype=torch.int32)
        batch = SimpleNamespace(req_ids=[*names], num_reqs=len(names), num_tokens=len(names), input_ids=starts)
        self.state.prepare_inputs(SimpleNamespace(**vars(batch), idx_mapping=slots, query_start_loc=starts), None)
        return self.steering.choice.at


def test_the_set_follows_the_requests_of_each_step(engine: Engine) -> None:
    world = World(engine)
    assert world.step("warm-up") == 0
    world.arrive("plain", 0)
    assert world.step("plain") == 0
    world.arrive("clamp", 1, CLAMP)
    assert [world.step("plain", "clamp") for _ in range(2)] == [1, 1]
    world.arrive("add", 2, ADD)
    assert world.step("plain", "clamp", "add") == 3
    assert world.step("plain", "clamp") == 1, "whoever is not in the step does not count"
    world.state.remove_request("clamp")
    assert world.step("plain", "add") == 3
    world.state.remove_request("add")
    assert world.step("plain") == 0
    world.arrive("nothing", 1, {"edits": []})
    assert world.step("plain", "nothing") == 0
    world.arrive("reads", 3, READS)
    assert world.step("plain", "reads") == 2, "tokens are only captured"
    world.arrive("clamp", 1, CLAMP)
    assert world.step("reads", "clamp") == 3, "none of the smaller sets has both"
    world.arrive("reads", 3, {"return": {"activations": [{"site": "resid_post.3", "at": "after"}]}})
    assert world.step("plain", "reads") == 1
    assert world.step("reads", "clamp") == 1, "the dictionary's op captures, too"
    world.arrive("both", 2, {**CLAMP, "return": {"activations": [{"site": "resid_post.3"}]}})
    assert world.step("both") == 1
    world.arrive("measured", 2, {**CLAMP, "return": {"dose": True}})
    assert world.step("measured") == 1


READS = {"return": {"hidden": True, "activations": [{"site": "resid_post.1"}]}}
