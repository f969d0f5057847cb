"""Of vLLM's scheduler and front end as much as a failing request meets, and requests for them. Starts nothing."""

from types import SimpleNamespace
from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest

from saesteer.plugin import prefix_cache
from saesteer.plugin.results import forms, report, sending

APPLIED = [{"positions": [[1, None]]}]


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
    extra = None if edited is None else {prefix_cache.RUNS: [[edited, 99, "digest"]]}
    made.sampling_params, made.mm_features = SimpleNamespace(stop=[], extra_args=extra), []
    return made


class Front:
    """vLLM's OutputProcessor as the front end runs it, with requests of no text."""

    def __init__(self) -> None:
        self.processor = OutputProcessor(None, log_stats=False)
        self._process = report._receiving(OutputProcessor.process_outputs)
        self._add = report._expecting(OutputProcessor.add_request)

    def add(
        self, name: str, n: int = 1, *, queue: bool = True, limit: float | None = None, kind: str = "DELTA"
    ) -> RequestOutputCollector | None:
        output = RequestOutputKind[kind]
        params = SamplingParams(n=n, detokenize=False, max_tokens=9, output_kind=output)
        params.saesteer_report = report.Report(APPLIED, ("resid_post.15", "resid_post.20"), limit)
        asked = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=[1, 2],
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            external_req_id=f"{name}-external",
        )
        made = RequestOutputCollector(output, name) if queue else None
        if n == 1:
            self._add(self.processor, asked, None, None, 0, made)
            return made
        parent = ParentRequest(asked)
        for index in range(n):
            asked.request_id, asked.sampling_params = parent.get_child_info(index)
            self._add(self.processor, asked, None, parent, index, made)
        return made

    def process(self, *outputs: EngineCoreOutput) -> Any:
        return self._process(self.processor, list(outputs))

    def check_empty(self) -> None:
        """Nothing is left behind."""
        processor = self.processor
        assert not (processor.request_states or processor.parent_requests or processor.external_req_ids)


def failing(name: str, word: str = "gone", counters: Any = None) -> EngineCoreOutput:
    """What an engine says of a request that has failed."""
    output = EngineCoreOutput(name, [], finish_reason=FinishReason.ERROR)
    sending.carry(output, forms.FAILED, word)
    if counters is not None:
        sending.carry(output, forms.COUNTED, counters)
    return output
