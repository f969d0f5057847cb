"""When a stream to a steered request begins, with vLLM's serving class made up; no engine is asked for tokens."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from saesteer.plugin.http import streams

STEERED: dict[str, Any] = {"model_extra": {"saesteer": {"edits": []}}, "vllm_xargs": None}
WRONG = 'data: {"error":{"message":"no","type":"Bad","code":400,"param":"saesteer"}}\n\n'


class Serving:
    """As vLLM's classes: `create` returns a stream that admits its prompts when somebody looks at it."""

    def __init__(self, action: str = "clamp") -> None:
        config = SimpleNamespace(max_dose_action=action, fail_fast=action == "fail fast")
        self.engine_client = SimpleNamespace(
            input_processor=SimpleNamespace(saesteer_door=SimpleNamespace(config=config))
        )
        self.token = asyncio.Event()  # the first one is there
        self.admit = asyncio.Event()
        self.admit.set()
        self.wrong = False
        self.freed = False

    def create_error_response(self, **told: Any) -> dict[str, Any]:
        return told

    async def create(self, request: Any) -> AsyncGenerator[Any, None]:
        return self.stream(request)

    async def stream(self, request: Any) -> AsyncGenerator[Any, None]:
        try:
            async with asyncio.TaskGroup() as prompts:  # vLLM looks at several prompts in tasks of their own
                for number in range(len(request.prompt) if isinstance(request.prompt[0], list) else 1):
                    prompts.create_task(self.add(number))
            if self.wrong:
                yield WRONG
                return
            await self.token.wait()
            for number in range(3):
                yield f"data: {number}\n\n"
        finally:
            self.freed = True

    async def add(self, number: int) -> None:
        if number:
            await self.admit.wait()
        if not self.wrong:
            streams.admitted()


create: Callable[..., Coroutine[Any, Any, Any]] = streams._looking(Serving.create)


def asked(prompt: Any = (1, 2), **fields: Any) -> Any:
    return SimpleNamespace(**(STEERED | {"prompt": list(prompt)} | fields))


def test_what_stands_in_an_error_of_each_form() -> None:
    told = streams._refusal(WRONG)
    assert told == {"message": "no", "err_type": "Bad", "status_code": 400, "param": "saesteer"}
    error = 'event: error\ndata: {"type":"error","error":{"type":"%s","message":"no"}}\n\n'  # as 0.33 has /v1/messages
    assert streams._refusal(error % "invalid_request_error") == {"message": "no"}
    assert streams._refusal(error % "api_error") is None
    assert streams._refusal("event: message_start\ndata: {}\n\n") is None
    assert streams._refusal(SimpleNamespace(type="error", message="no", param="x")) == {"message": "no", "param": "x"}


@pytest.mark.parametrize("action", ["refuse", "fail fast"])
def test_where_the_prompt_may_fail_the_first_token_is_waited_for(action: str) -> None:
    async def run() -> None:
        serving = Serving(action)
        made = asyncio.create_task(create(serving, asked()))
        await asyncio.sleep(0.02)
        assert not made.done()
        serving.token.set()
        assert len([one async for one in await asyncio.wait_for(made, 5)]) == 3

    asyncio.run(run())


@pytest.mark.parametrize("begun", [False, True], ids=["before it begins", "before its first token"])
def test_a_client_that_goes_away_frees_its_request(begun: bool) -> None:
    async def run() -> None:
        serving = Serving("clamp" if begun else "refuse")

        async def read() -> None:
            async for _ in await create(serving, asked()):
                pass

        reading = asyncio.create_task(read())
        await asyncio.sleep(0.02)
        assert not serving.freed
        reading.cancel()
        await asyncio.wait({reading})
        assert reading.cancelled() and serving.freed

    asyncio.run(run())
