"""What a request that fails leaves in the prefix cache when it has left before anybody hears of it.

vLLM's own schedulers and cache; the worker is made up, and says in a step's output which requests have failed in it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from saesteer.config.config import KEY
from saesteer.planning.plan import END
from saesteer.plugin.configured import configure
from saesteer.plugin.prefix_cache import RUNS
from saesteer.plugin.results import sending
from saesteer.plugin.results.forms import FAILED, Table

BLOCK, PROMPT = 16, 100
WORD = "broken: OutOfMemoryError: no room"


class Engine:
    """A scheduler, and steps that are under way."""

    def __init__(self, config: Any, kind: type[Scheduler], blocks: int) -> None:
        cache = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=64, dtype=torch.float32)
        config.cache_config.num_gpu_blocks = blocks
        self.scheduler = kind(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], cache)]),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            log_stats=False,
        )
        self._hasher = get_request_block_hasher(BLOCK, sha256)

    def ask(self, name: str, first: int = 0, length: int = PROMPT) -> None:
        """A request with tokens that count from ``first``; all have the same edits."""
        params = SamplingParams(max_tokens=200, ignore_eos=True, extra_args={KEY: {RUNS: [[0, END, "edits"]]}})
        ids = [*range(first, first + length)]
        self.scheduler.add_request(Request(name, ids, params, None, block_hasher=self._hasher))

    def schedule(self, *names: str) -> Any:
        """A step with these requests."""
        step = self.scheduler.schedule()
        assert set(step.num_scheduled_tokens) == set(names)
        return step

    def take(self, step: Any, failed: Sequence[str] = ()) -> dict[str, Any]:
        """The output of a step; returns the word for each request that ends with it."""
        names = [*step.num_scheduled_tokens]
        sampled = [[] if self._in_prompt(name) else [7] for name in names]
        made = ModelRunnerOutput(names, {name: at for at, name in enumerate(names)}, sampled_token_ids=sampled)
        if not names:
            made = EMPTY_MODEL_RUNNER_OUTPUT
        elif failed:
            made.saesteer = Table([], np.zeros((0, 1), np.int32), dict.fromkeys(failed, WORD), frozenset())
        outputs = self.scheduler.update_from_output(step, made)
        ended = (one for each in outputs.values() for one in each.outputs if one.finish_reason is not None)
        return {one.request_id: dict(sending.carried(one))[FAILED] for one in ended}

    def _in_prompt(self, name: str) -> bool:
        request = self.scheduler.requests.get(name)
        return request is not None and request.num_computed_tokens < request.num_prompt_tokens

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def preempt(self, name: str) -> None:
        """As ``schedule`` does where there are too few blocks."""
        request = self.scheduler.requests[name]
        self.scheduler.running.remove(request)
        self.scheduler._preempt_request(request, 0.0)

    def cached(self, step: Any, name: str) -> int:
        """Tokens that a new request has found in the cache."""
        [found] = [one.num_computed_tokens for one in step.scheduled_new_reqs if one.req_id == name]
        return int(found)

    def settle(self) -> None:
        """Nothing stays once all have ended."""
        self.scheduler.finish_requests([*self.scheduler.requests], RequestStatus.FINISHED_ABORTED)
        assert self.scheduler.has_requests()
        self.take(self.schedule())
        assert not vars(self.scheduler).get("saesteer_left")


@pytest.fixture(params=[Scheduler, AsyncScheduler])
def make(model_dir: str, request: pytest.FixtureRequest) -> Callable[..., Engine]:
    configure()
    init_none_hash(sha256)
    kind = request.param

    def made(blocks: int = 64, tokens: int = 512) -> Engine:
        config = EngineArgs(
            model_dir,
            max_model_len=512,
            max_num_seqs=4,
            max_num_batched_tokens=tokens,
            block_size=BLOCK,
            enable_prefix_caching=True,
            async_scheduling=kind is AsyncScheduler,
        ).create_engine_config()
        return Engine(config, kind, blocks)

    return made


LEAVES: dict[str, Callable[[Engine, str], None]] = {
    "stays": lambda engine, name: None,
    "is aborted": Engine.abort,
    "is preempted": Engine.preempt,
}


@pytest.mark.parametrize("how", LEAVES)
@pytest.mark.parametrize("fails", [0, 1], ids=["at once", "later"])
def test_nobody_takes_what_a_failed_request_left(make: Callable[..., Engine], how: str, fails: int) -> None:
    """Later: in the second part of its prompt, which ends a block that the first part has begun."""
    engine = make(tokens=40)
    engine.ask("fails")
    for number in range(fails + 1):
        step = engine.schedule("fails")
        if number < fails:
            engine.take(step)
    LEAVES[how](engine, "fails")
    told = engine.take(step, ["fails"])
    assert told == ({} if how == "is aborted" else {"fails": WORD})
    engine.ask("next")
    step = engine.schedule("next")
    assert engine.cached(step, "next") == 0
    engine.take(step)
    engine.settle()


def test_what_a_sound_request_left_stays(make: Callable[..., Engine]) -> None:
    engine = make()
    engine.ask("sound")
    engine.ask("fails", 1000)
    step = engine.schedule("sound", "fails")
    engine.abort("sound")
    engine.abort("fails")
    engine.take(step, ["fails"])
    engine.ask("next")
    engine.ask("another", 1000)
    step = engine.schedule("next", "another")
    assert (engine.cached(step, "next"), engine.cached(step, "another")) == (96, 0)
    engine.take(step)
    engine.settle()


@pytest.mark.parametrize("how", ["is aborted", "is preempted"])
@pytest.mark.parametrize("then", LEAVES)
def test_whoever_has_taken_it_meanwhile_ends_too(make: Callable[..., Engine], how: str, then: str) -> None:
    """With asynchronous scheduling and in pipelines, a step is scheduled before the one before it is known."""
    engine = make()
    engine.ask("fails")
    step = engine.schedule("fails")
    LEAVES[how](engine, "fails")
    engine.ask("next", length=150)
    behind = engine.scheduler.schedule()
    assert engine.cached(behind, "next") == 96
    LEAVES[then](engine, "next")
    told = engine.take(step, ["fails"])
    assert told.pop("fails", WORD) == WORD and told == ({} if then == "is aborted" else {"next": "shared"})
    engine.take(behind, ["fails"])
    for name, length, cached in (("sound", PROMPT, 0), ("last", 150, 96)):
        engine.ask(name, length=length)
        step = engine.scheduler.schedule()
        assert engine.cached(step, name) == cached
        engine.take(step)
    engine.settle()
