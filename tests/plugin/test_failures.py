"""A request that fails on a worker, on its way to whoever waits, in vLLM's own OutputProcessor. Starts nothing."""

import asyncio
import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.v1.engine import EngineCoreOutput, FinishReason

from saesteer.errors import PromptsFailed
from saesteer.kernels import layout
from saesteer.plugin.http import bodies
from saesteer.plugin.results import counts, errors, failures, forms, metrics, sending
from saesteer.plugin.results.errors import SpecRefused
from tests.plugin.fronts import Front, Scheduler, failing, running


def test_the_scheduler_ends_it_before_the_step_is_looked_at() -> None:
    from vllm.v1.engine import EngineCoreOutputs

    more = running("d", edited=5), running("e", edited=5), running("over", done=True)
    scheduler = Scheduler(running("a", edited=5), running("b", client=3), running("c"), *more)
    requests = dict(scheduler.requests)

    def update_from_output(self: Any, *_: Any) -> Any:
        assert set(self.requests) == {"c", "e", "over"}
        assert all(requests[name].done for name in "abd")
        return {0: EngineCoreOutputs(outputs=[EngineCoreOutput("c", [5])])}

    table = np.array([[0, 4], [2, 9]], dtype=np.int32)
    failed = {"b": "gone", "a": "dose", "over": "dose", "unknown": "gone"}
    step = SimpleNamespace(saesteer=forms.Table(["a", "c"], table, failed, frozenset()))
    outputs = counts._sending(update_from_output)(scheduler, None, step)
    told = {client: {one.request_id: one for one in batch.outputs} for client, batch in outputs.items()}
    assert {client: set(found) for client, found in told.items()} == {0: {"a", "c", "d"}, 3: {"b"}}
    assert told[0]["c"].new_token_ids == [5] and told[0]["c"].kv_transfer_params is None
    a, b = told[0]["a"], told[3]["b"]
    assert sending.carried(a) == [(forms.FAILED, "dose"), (forms.COUNTED, table[0].tobytes())]
    assert sending.carried(b) == [(forms.FAILED, "gone")]
    assert (a.new_token_ids, a.finish_reason, b.finish_reason) == ([], FinishReason.ERROR, FinishReason.ERROR)
    assert sending.carried(told[0]["d"]) == [(forms.FAILED, "shared")], "it has taken an edited block of a's"
    assert scheduler.kv_cache_manager.evicted == {2, 3, 7, 11, 13}, "nobody may find what was edited, or not"


@pytest.mark.parametrize(("offset", "length", "gone"), [(2, 4, {1, 2, 3, 7}), (2, 3, {2, 3, 7}), (5, 4, {2, 3, 7})])
def test_blocks_of_an_image_that_is_edited_are_evicted_from_its_start(offset: int, length: int, gone: set[int]) -> None:
    """Its tokens may look ahead, to an edit at position 5; what is before the block of both is not changed by that."""
    failed = running("a", edited=5)
    failed.mm_features = [SimpleNamespace(mm_position=SimpleNamespace(offset=offset, length=length))]
    scheduler = Scheduler(failed)
    failures.end(scheduler, {"a": "gone"})
    assert scheduler.kv_cache_manager.evicted == gone


def test_the_other_choices_of_a_request_end_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[str] = []
    monkeypatch.setattr(metrics, "refused", refused.append)
    front = Front()
    queue, other = front.add("a", 4), front.add("b", 2)
    assert queue is not None and other is not None
    made = front.process(failing("2_a"), EngineCoreOutput("0_b", [6]), EngineCoreOutput("1_a", [5]), failing("3_a"))
    assert set(made.reqs_to_abort) == {"0_a", "1_a"}
    with pytest.raises(SpecRefused):
        asyncio.run(queue.get())
    assert queue.get_nowait() is None and other.get_nowait() is not None
    assert refused == ["gone"], "one request"
    assert set(front.processor.request_states) == {"0_b", "1_b"}
    front.process(*(EngineCoreOutput(f"{n}_b", [6], finish_reason=FinishReason.LENGTH) for n in range(2)))
    front.check_empty()


def counters(*doses: tuple[float, int]) -> bytes:
    """Of one edit at each of some sites: the largest dose, and tokens above the limit."""
    found = np.zeros(2 + layout.DOSE_WORDS * len(doses), dtype=np.int32)
    blocks = found[2:].reshape(-1, layout.DOSE_WORDS)
    for block, (largest, above) in zip(blocks, doses, strict=True):
        block.view(np.float32)[[layout.DOSE_MAX, layout.DOSE_SUM]] = largest
        block[[layout.DOSE_TOKENS, layout.DOSE_LIMITED]] = 1, above
    return found.tobytes()


def test_a_dose_above_the_limit_is_told_with_its_site() -> None:
    front = Front()
    queue = front.add("a", limit=0.5)
    assert queue is not None
    front.process(failing("a", "dose", counters((0.25, 0), (0.75, 1))))
    with pytest.raises(SpecRefused) as told:
        queue.get_nowait()
    assert (told.value.field, told.value.code) == ("saesteer.edits", "dose")
    assert all(words in str(told.value) for words in ("at resid_post.20", "0.75", "0.5 at most", "--max-dose"))


def test_offline_a_call_raises_with_the_answers_of_the_others() -> None:
    front = Front()
    engine = SimpleNamespace(output_processor=front.processor)
    aborted: list[str] = []

    def _run_engine(self: Any, output_type: Any) -> list[Any]:
        steps = [
            [EngineCoreOutput("0_b", [3]), EngineCoreOutput("c", [5])],
            [failing("0_a"), EngineCoreOutput("c", [6], finish_reason=FinishReason.LENGTH), failing("e", "shared")],
            [EngineCoreOutput(f"{n}_b", [4], finish_reason=FinishReason.LENGTH) for n in (1, 0)],
            [failing("d")],
        ]
        made = [front.process(*step) for step in steps]
        aborted.extend(name for one in made for name in one.reqs_to_abort)
        return [output for one in made for output in one.request_outputs if output.finished]

    run = errors._raising(_run_engine)
    for name, n in (("a", 3), ("b", 2), ("c", 1), ("d", 1), ("e", 1)):
        front.add(name, n, queue=False, kind="FINAL_ONLY")
    with pytest.raises(PromptsFailed) as told:
        run(SimpleNamespace(llm_engine=engine), None)
    assert sorted(aborted) == ["1_a", "2_a"], "the other choices of the one that failed"
    front.check_empty()
    for error in (told.value, pickle.loads(pickle.dumps(told.value))):
        first, second, third = (str(error.errors[index]) for index in (0, 3, 4))
        assert first == second and "[gone]" in first and "[shared]" in third
        assert str(error).startswith("3 of 5 prompts failed, ")
        assert str(error).endswith(f": prompts[0], prompts[3]: {first}; prompts[4]: {third}")
        assert (error.field, error.code) == ("saesteer", "gone")
        assert [output and output.request_id for output in error.outputs] == [
            None,
            "b-external",
            "c-external",
            None,
            None,
        ]
        b, c = error.outputs[1:3]
        assert [sorted(choice.token_ids) for choice in (*b.outputs, *c.outputs)] == [[3, 4], [4], [5, 6]]
    well = [SimpleNamespace(request_id="f")]
    assert errors._raising(lambda *_: well)(SimpleNamespace(llm_engine=engine), None) is well
    assert "saesteer_refused" not in vars(front.processor)


def test_a_stream_of_responses_ends_with_an_event() -> None:
    """Without a spec as well: --fail-fast and a default module end such requests, too."""

    async def events(self: Any, request: Any, params: Any, generator: Any, context: Any, error: Exception) -> Any:
        yield SimpleNamespace(type="response.created", sequence_number=4)
        raise error

    async def ask(found: list[Any], error: Exception, **extra: Any) -> None:
        request = SimpleNamespace(model_extra=extra, vllm_xargs=None)
        async for event in bodies._response_stream(events)(None, request, None, None, SimpleNamespace(), error):
            found.append(event)  # noqa: PERF401  (an error may come behind it)

    stock: list[Any] = []
    with pytest.raises(RuntimeError, match="vLLM's own"):
        asyncio.run(ask(stock, RuntimeError("vLLM's own")))
    assert len(stock) == 1
    fields: list[dict[str, Any]] = [{"saesteer": {}}, {}]
    for extra in fields:
        found: list[Any] = []
        asyncio.run(ask(found, SpecRefused(errors.reason("collapsed: 7", (), None)), **extra))
        _, last = found
        assert (last.type, last.code, last.param, last.sequence_number) == ("error", "collapsed", "saesteer", 5)
        assert last.message.endswith("[collapsed]")
