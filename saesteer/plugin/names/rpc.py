"""Asks the workers of all engines, and answers a change of names in a worker. Knows no names and no catalog.

vLLM's own RPC reaches all engines, but returns only the answers of the first engine's workers.
"""

import asyncio
import json
from base64 import b64decode
from functools import partial
from typing import Any

import numpy as np

from saesteer.errors import RegistryError


async def ask_workers(engine: Any, method: str, *args: Any) -> list[Any]:
    """Call a method of every worker in all data parallel engines that this process sends requests to.

    Args:
        engine: the AsyncLLM.
        method: name of a method of the worker.
        args: the method's arguments, as JSON values.

    Returns:
        Each worker's answer, engine by engine; no worker has anything left to do then.
    """
    client = engine.engine_core
    call = partial(client._call_utility_async, "collective_rpc", method, None, args, None)
    several = await asyncio.gather(*(call(engine=one) for one in client.core_engines))
    return [answer for answers in several for answer in answers]


def change_pins(self: Any, wire: str) -> dict[str, Any]:
    """Pin and unpin vectors on this worker; called by name over collective_rpc.

    Args:
        self: the worker.
        wire: JSON with ``pin``: a digest, its sites and its float32 numbers for each vector; and ``unpin``: a site
            and a digest for each pin.

    Returns:
        ``error``: what went wrong, or empty text, since a raised error would leave the other workers' answers unread;
        ``full``: whether the cause is lack of room; ``usage``: the usage of the pools.
    """
    error, full, engine = "", False, self.saesteer.engine
    try:
        told = json.loads(wire)
        pins = {
            (site, bytes.fromhex(digest)): np.frombuffer(b64decode(row), "<f4")
            for digest, sites, row in told["pin"]
            for site in sites
        }
        engine.pin(pins, [(site, bytes.fromhex(digest)) for site, digest in told["unpin"]])
    except RegistryError as exc:
        error, full = str(exc), True
    except Exception as exc:  # noqa: BLE001  # it is returned, see above
        error = f"{type(exc).__name__}: {exc}"
    return {"error": error, "full": full, "usage": engine.registry.usage()}
