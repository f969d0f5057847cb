"""A request that fails on a worker, on its way to whoever waits, in vLLM's own OutputProcessor. Starts nothing."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.v1.engine import EngineCoreOutput, FinishReason

from saesteer.kernels import layout
from saesteer.plugin.results import counts, failures, forms, sending
from tests.plugin.fronts import Scheduler, running


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


def counters(*doses: tuple[float, int]) -> bytes:
    """Of one edit at each of some sites: the largest dose, and tokens above the limit."""
    found = np.zeros(2 + layout.DOSE_WORDS * len(doses), dtype=np.int32)
    blocks = found[2:].reshape(-1, layout.DOSE_WORDS)
    for block, (largest, above) in zip(blocks, doses, strict=True):
        block.view(np.float32)[[layout.DOSE_MAX, layout.DOSE_SUM]] = largest
        block[[layout.DOSE_TOKENS, layout.DOSE_LIMITED]] = 1, above
    return found.tobytes()
