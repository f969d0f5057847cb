"""Questions to the workers of all engines. vLLM's own RPC reaches them all, and tells what the first engine's said."""

import asyncio
from typing import Any


async def ask_workers(engine: Any, method: str, *args: Any) -> list[Any]:
    """Call a method of every worker, of all data parallel engines that this process sends requests to.

    Args:
        engine: the AsyncLLM.
        method: of the worker, by name.
        args: of the method, as JSON has them.

    Returns:
        What each worker answered, engine by engine; none has anything left to do then.
    """
    client = engine.engine_core
    calls = [
        client._call_utility_async("collective_rpc", method, None, args, None, engine=one)
        for one in client.core_engines
    ]
    return [answer for answers in await asyncio.gather(*calls) for answer in answers]
