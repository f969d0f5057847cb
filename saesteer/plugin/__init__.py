"""The only room that knows vLLM. Its entry point registers saesteer in every process; nothing else happens here.

``SAESTEER_DISABLE=1`` leaves the engine alone: then the front door refuses every request that asks for steering.
"""

import logging
import os

_registered = False
_failed: Exception | None = None


def register() -> None:
    """Install saesteer's wraps into this process; called by vLLM in each of its processes, safe to call again.

    Raises:
        UnsupportedError: this vLLM lacks a hook that saesteer needs; the message names both. A second call raises it
            again, since half-installed wraps would steer nothing.
    """
    global _registered, _failed
    if _registered:
        return
    if _failed is not None:
        raise _failed
    try:
        _install()
    except Exception as exc:
        _failed = exc
        raise
    _registered = True


def require() -> None:
    """Make vLLM load its plugins, and refuse if saesteer is not among them or could not register.

    Raises:
        UnsupportedError: nothing in this process would steer; the message says why.
    """
    from vllm.plugins import load_general_plugins

    from saesteer.errors import UnsupportedError

    load_general_plugins()
    if _registered:
        return
    if _failed is not None:
        raise UnsupportedError(f"saesteer could not register with vLLM, so nothing would be steered: {_failed}")
    chosen = os.environ.get("VLLM_PLUGINS")
    if chosen is not None:
        found = f"VLLM_PLUGINS is {chosen!r}, which leaves saesteer out, so nothing would be steered"
        raise UnsupportedError(f"{found}; expected it unset, or saesteer among its names")
    found = "vLLM did not load saesteer's plugin, so nothing would be steered"
    raise UnsupportedError(f"{found}; expected saesteer to be installed (pip install saesteer), not only on the path")


def _install() -> None:
    from saesteer.plugin import contract
    from saesteer.plugin.names import board

    contract.install("every")
    board.announce()
    if os.environ.get("SAESTEER_DISABLE") == "1":
        logging.getLogger("vllm.saesteer").warning("saesteer is disabled by SAESTEER_DISABLE=1: steering is refused")
