"""Keeps vectors out of vLLM's logs, which show only how many edits of each op a spec has. Knows vLLM's loggers.

``--enable-log-requests`` prints the parameters of every request, and an engine that fails prints its batch's; both use
the text of SamplingParams. What travels to the engine does not change.

A refused spec is the client's mistake and is not logged; vLLM would log it with a traceback if it ends a stream.
"""

import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from copy import copy
from typing import Any

from saesteer.config.config import KEY
from saesteer.language.alike import parts_of
from saesteer.language.fields import show
from saesteer.language.spec import OPS, RULES, Spec
from saesteer.plugin.http.exchange import exchange
from saesteer.plugin.results.errors import SpecRefused
from saesteer.plugin.wrap import Original, around

_KNOWN = OPS.keys() | RULES.keys()
_HANDLE = re.compile(r"(?<=/results/[0-9a-f]{8})[0-9a-f]{24}")
_OF_STREAMS = (
    "vllm.entrypoints.openai.chat_completion.serving",
    "vllm.entrypoints.openai.completion.serving",
    "vllm.entrypoints.anthropic.serving",
)


def filter_streams() -> None:
    """Keep refusals and bodies with a spec out of what vLLM's serving classes log; safe to call again.

    The log of accesses gets handles cut: who has one may fetch what it stands for.
    """
    for name in _OF_STREAMS:
        logging.getLogger(name).addFilter(_is_fit)
    logging.getLogger("uvicorn.access").addFilter(_cut)


def summary(wire: Any) -> str:
    """A spec, right or wrong, or what has taken its place, in a few words that hold only numbers and names of ops."""
    if isinstance(wire, Mapping) and isinstance(wire.get("plan"), bytes):  # admitted: no JSON has bytes
        return str(wire["said"])
    if isinstance(wire, Spec):
        own = [(part.first.op, part.size) for part in parts_of(wire.edits)]
        return _counted([("use", 1), *own] if wire.model else own)
    edits = wire.get("edits") if isinstance(wire, Mapping) else None
    if not isinstance(edits, list | tuple):
        return f"a text of {len(wire)} characters" if isinstance(wire, str) else show(wire)
    ops = [one.get("op") if isinstance(one, Mapping) else None for one in edits]
    return _counted((op if isinstance(op, str) and op in _KNOWN else "unknown", 1) for op in ops)


def _counted(ops: Iterable[tuple[str, int]]) -> str:
    found = Counter[str]()
    for op, count in ops:
        found[op] += count
    return ", ".join(f"{count} {op}" for op, count in found.items()) or "no edits"


@around
def _of_params(original: Original, self: Any) -> str:
    extra = self.extra_args
    if not extra or KEY not in extra:
        return original(self)
    shown = copy(self)  # a copy, since another thread may be sending the parameters
    shown.extra_args = {**extra, KEY: summary(extra[KEY])}
    return original(shown)


@around
def _of_body(original: Original, self: Any, request: Any) -> None:
    """Newer versions of vLLM print whole bodies when they log at DEBUG."""
    short: dict[str, Any] = {}
    if KEY in (getattr(request, "model_extra", None) or ()):
        short[KEY] = summary(request.model_extra[KEY])
    arguments = getattr(request, "vllm_xargs", None) or {}
    if KEY in arguments:
        short["vllm_xargs"] = {**arguments, KEY: summary(arguments[KEY])}
    original(self, request.model_copy(update=short) if short else request)


def _is_fit(record: logging.LogRecord) -> bool:
    """False for a log record of a refusal, or of a body with a spec."""
    error, of = record.exc_info and record.exc_info[1], exchange()
    # A refusal that ends a stream of /v1/messages is wrapped by 0.33, and taken for a broken chunk up to 0.32.
    if isinstance(error, SpecRefused) or (error and of and of.refused):
        return False
    return not any(isinstance(one, str) and f'"{KEY}"' in one for one in record.args or ())


def _cut(record: logging.LogRecord) -> bool:
    if isinstance(record.args, tuple):
        record.args = tuple(_HANDLE.sub("...", one) if isinstance(one, str) else one for one in record.args)
    return True
