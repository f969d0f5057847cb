"""Of vLLM's scheduler and front end as much as a failing request meets, and requests for them. Starts nothing."""

from types import SimpleNamespace
from typing import Any

from vllm.v1.engine import EngineCoreOutput, FinishReason

from saesteer.config.config import KEY
from saesteer.plugin import prefix_cache
from saesteer.plugin.results import forms, sending


class Blocks:
    """Of the scheduler's cache manager, as much as is called: two groups of layers, with blocks of 4 and 8 tokens."""

    TABLES = (
        (4, {"a": [1, 2, 3], "c": [1, 9], "d": [1, 2, 11], "e": [1, 12]}),
        (8, {"a": [7, 0], "d": [7, 0, 13], "e": [14]}),
    )

    def __init__(self) -> None:
        self.evicted: set[int] = set()
        groups = []
        for size, tables in self.TABLES:
            blocks = {
                name: [SimpleNamespace(block_id=one, is_null=one == 0) for one in ids] for name, ids in tables.items()
            }
            groups.append(SimpleNamespace(block_size=size, req_to_blocks=blocks))
        self.coordinator = SimpleNamespace(single_type_managers=groups)

    def evict_blocks(self, blocks: set[int]) -> None:
        self.evicted |= blocks


class Scheduler:
    """Of vLLM's scheduler, as much as is called."""

    def __init__(self, *requests: Any) -> None:
        self.requests = {one.request_id: one for one in requests}
        self.finished_req_ids: set[str] = set()
        self.kv_cache_manager = Blocks()

    def finish_requests(self, names: list[str], status: Any) -> None:
        assert "ERROR" in status.name
        for name in names:
            self.requests.pop(name).done = True
            self.finished_req_ids.add(name)


def running(name: str, client: int = 0, done: bool = False, edited: int | None = None) -> Any:
    """Of vLLM's Request; edited from a position on."""
    events: list[Any] = []
    made = SimpleNamespace(request_id=name, client_index=client, done=done, trace_headers=None)
    made.take_events, made.is_finished = lambda: events, lambda: made.done
    extra = None if edited is None else {KEY: {prefix_cache.RUNS: [[edited, 99, "digest"]]}}
    made.sampling_params, made.mm_features = SimpleNamespace(stop=[], extra_args=extra), []
    return made


def failing(name: str, word: str = "gone", counters: Any = None) -> EngineCoreOutput:
    """What an engine says of a request that has failed."""
    output = EngineCoreOutput(name, [], finish_reason=FinishReason.ERROR)
    sending.carry(output, forms.FAILED, word)
    if counters is not None:
        sending.carry(output, forms.COUNTED, counters)
    return output
