"""Results of an HTTP body with several prompts, of which nobody gets a part, and of requests whose consumer fails."""

import asyncio
import gc
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.v1.engine import FinishReason

from saesteer.config.config import SaesteerConfig
from saesteer.consumers.consumer import ConsumerError
from saesteer.errors import PromptsFailed, SpecError
from saesteer.language.spec import from_json
from saesteer.planning.plan import Catalog
from saesteer.plugin.door.admission import Door
from saesteer.plugin.http import bodies, streams
from saesteer.plugin.results import consuming, failures
from saesteer.plugin.results.kept import Results
from tests.plugin.results import State, files, results, state

SPEC = from_json({"return": {"activations": [{"site": "resid_post.3", "as": "handle"}]}})
CATALOG = Catalog({}, frozenset({"resid_post.3"}), 64, width=3)


class Serving:
    """As vLLM's classes: each prompt of a body is a request, admitted in a task of its own."""

    def __init__(self, found: Results) -> None:
        config = SaesteerConfig.from_json({"max_read_mib": 1})
        model = SimpleNamespace(dtype=torch.float32, max_model_len=64)
        self.door = Door("", config, None, SimpleNamespace(model_config=model))
        self.door.results = found
        self.states: list[State] = []

    async def add(self) -> None:
        params = SimpleNamespace(extra_args=None, max_tokens=4, n=1)
        request = SimpleNamespace(prompt_token_ids=[1, 2], sampling_params=params)
        self.door.admit(SPEC, CATALOG, request)
        self.states.append(state(request.sampling_params.saesteer_report.of_choice()))

    async def create(self, request: Any) -> str:
        async with asyncio.TaskGroup() as prompts:
            for _ in range(2):
                prompts.create_task(self.add())
        return "a body"

    async def batch(self, request: Any, generators: Any) -> Any:
        await self.create(request)
        return SimpleNamespace(choices=[])


async def by_completions(serving: Serving) -> None:
    steered: Any = SimpleNamespace(model_extra={"saesteer": {}}, vllm_xargs=None, prompt=["a", "b"])
    assert await streams._looking(Serving.create)(serving, steered) == "a body"


async def by_batch(serving: Serving) -> None:
    steered: Any = SimpleNamespace(model_extra={"saesteer": {}}, vllm_xargs=None, n=None)
    await bodies._batch(Serving.batch)(serving, steered, [])


@pytest.mark.parametrize("way", [by_completions, by_batch])
def test_what_one_prompt_has_kept_goes_when_another_is_aborted(tmp_path: Path, way: Any) -> None:
    async def two() -> None:
        await asyncio.gather(*(asyncio.create_task(way(one)) for one in (serving, other)))

    found = results(tmp_path, size=1 << 20)
    serving, other = Serving(found), Serving(found)
    asyncio.run(two())
    for one in (serving, other):
        one.states[0].ends(FinishReason.STOP)
    kept = [one.states[0].saesteer.fields["activations"][0]["handle"] for one in (serving, other)]
    consuming._leaving(lambda *_: ["b"])(SimpleNamespace(request_states={"b": serving.states[1]}), ["b"])
    assert kept[0] not in files(found) and kept[1] in files(found), "another body keeps its own"


def ended(found: Results) -> Any:
    """An answer that has kept a result."""
    serving = Serving(found)
    asyncio.run(serving.add())
    [one] = serving.states
    fields = one.ends(FinishReason.STOP)
    return SimpleNamespace(finish_reason="stop", saesteer=fields, saesteer_forget=one.saesteer.forget)


def failed(choice: Any) -> Any:
    """An output whose consumer has failed."""
    result: Future[Any] = Future()
    result.set_exception(ConsumerError("the judge is ill"))
    choice.saesteer_feed = SimpleNamespace(own=[1], results={"judge": result})
    return SimpleNamespace(outputs=[choice])


def test_what_was_kept_goes_when_a_consumer_fails(tmp_path: Path) -> None:
    found = results(tmp_path, size=1 << 20)
    output = failed(ended(found))
    assert len(files(found)) == 1
    with pytest.raises(SpecError, match="the judge is ill"):
        asyncio.run(consuming.settled(output))
    gc.collect()
    assert files(found) == []


def test_offline_the_other_prompts_keep_theirs_when_a_consumer_fails(tmp_path: Path) -> None:
    found = results(tmp_path, size=1 << 20)
    states = {name: SimpleNamespace(parent_req=None, external_req_id=name) for name in "ab"}
    engine = SimpleNamespace(output_processor=SimpleNamespace(request_states=states))

    def run(self: Any) -> list[Any]:
        first, second = failed(ended(found)), SimpleNamespace(outputs=[ended(found)])
        first.request_id, second.request_id = "a", "b"
        return [first, second]

    with pytest.raises(PromptsFailed, match=r"1 of 2 prompts failed, .*prompts\[0\]: .*the judge is ill") as caught:
        failures._raising(run)(SimpleNamespace(llm_engine=engine))
    nothing, kept = caught.value.outputs
    assert nothing is None
    assert files(found) == [kept.outputs[0].saesteer["activations"][0]["handle"]]
