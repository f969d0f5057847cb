"""The only room that knows vLLM. Its entry point registers saesteer in every process; nothing else happens here.

``SAESTEER_DISABLE=1`` leaves the engine alone: then the front door refuses every request that asks for steering.
"""

import logging
import os

_registered = False


def register() -> None:
    """Install saesteer's wraps into this process; called by vLLM in each of its processes, safe to call again.

    Raises:
        UnsupportedError: this vLLM lacks a hook that saesteer needs; the message names both.
    """
    global _registered
    if _registered:
        return
    _registered = True
    from saesteer.plugin import board, frontend, hooks, logs, worker

    hooks.check_contract(worker=False)
    board.announce()
    logs.install()
    frontend.install()
    if os.environ.get("SAESTEER_DISABLE") == "1":
        logging.getLogger("vllm.saesteer").warning("saesteer is disabled by SAESTEER_DISABLE=1: steering is refused")
        return
    worker.install()
