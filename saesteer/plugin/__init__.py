"""The only room that knows vLLM. Its entry point registers saesteer in every process; nothing else happens here.

Until settings ask for saesteer, vLLM stays as it is, except that a request that asks for steering is refused.
``SAESTEER_DISABLE=1`` keeps it so whatever the settings are.
"""

import logging
import os
from multiprocessing import parent_process

_registered = False
_LOGGERS = "vllm.saesteer", "vllm.saesteer.consumers"


def _mark(record: logging.LogRecord) -> bool:
    """Tell our files from vLLM's in its log, of which some have the same names."""
    record.filename = f"saesteer/{record.filename}"
    return True


def register() -> None:
    """Guard this process, and install saesteer if settings have asked for it; called by vLLM in each of its processes.

    A vLLM that lacks a function of the guard starts with a warning that names it. Safe to call again.

    Raises:
        UnsupportedError: settings ask for saesteer, and this vLLM lacks a hook that it needs; the message names both.
    """
    global _registered
    if _registered:
        return
    _registered = True
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_mark)
    from saesteer.plugin import configured, contract

    problems = contract.guard()
    if configured.disabled():
        problems.insert(0, "saesteer is disabled by SAESTEER_DISABLE=1: steering is refused")
    elif problems:
        problems.insert(0, "vLLM starts without saesteer, and fails to start where settings ask for it")
    if problems and parent_process() is None:
        logging.getLogger("vllm.saesteer").warning("; ".join(problems))
    if configured.ENV in os.environ and not configured.disabled():
        configured.configure()


def require() -> None:
    """Make vLLM load its plugins, and refuse if saesteer is not among them.

    Raises:
        UnsupportedError: nothing in this process would steer; the message says why.
    """
    from vllm.plugins import load_general_plugins

    from saesteer.errors import UnsupportedError

    load_general_plugins()
    if _registered:
        return
    chosen = os.environ.get("VLLM_PLUGINS")
    if chosen is not None:
        found = f"VLLM_PLUGINS is {chosen!r}, which leaves saesteer out, so nothing would be steered"
        raise UnsupportedError(f"{found}; expected it unset, or saesteer among its names")
    found = "vLLM did not load saesteer's plugin, so nothing would be steered"
    raise UnsupportedError(f"{found}; expected saesteer to be installed (pip install saesteer), not only on the path")
