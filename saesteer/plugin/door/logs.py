"""What vLLM's logs say of a spec: how many edits of which op, since a spec holds vectors. Knows vLLM's loggers.

``--enable-log-requests`` prints the parameters of every request, and an engine that fails prints those of its batch;
the text of SamplingParams is the one place that both come through. What travels to the engine stays as it is.

A refused spec is the client's mistake, and prints nothing: vLLM logs whatever ends a stream with its traceback.
"""

import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping
from copy import copy
from functools import wraps
from typing import Any

from saesteer.config.config import KEY
from saesteer.language.fields import show
from saesteer.language.spec import OPS
from saesteer.plugin.results.failures import SpecRefused

_OF_STREAMS = (
    "vllm.entrypoints.openai.chat_completion.serving",
    "vllm.entrypoints.openai.completion.serving",
    "vllm.entrypoints.anthropic.serving",
)


def filter_streams() -> None:
    """Keep refusals and bodies with a spec out of what vLLM's serving classes log; safe to call again."""
    for name in _OF_STREAMS:
        logging.getLogger(name).addFilter(_is_fit)


def summary(wire: Any) -> str:
    """A spec in a few words, whatever it is; it holds nothing but numbers and the names of ops."""
    edits = wire.get("edits") if isinstance(wire, Mapping) else None
    if not isinstance(edits, list | tuple):
        return f"a text of {len(wire)} characters" if isinstance(wire, str) else show(wire)
    ops = [one.get("op") if isinstance(one, Mapping) else None for one in edits]
    counts = Counter(op if isinstance(op, str) and op in OPS else "unknown" for op in ops)
    return ", ".join(f"{count} {op}" for op, count in counts.items()) or "no edits"


def _of_params(original: Callable[..., str]) -> Callable[..., str]:
    @wraps(original)
    def __repr__(self: Any) -> str:
        extra = self.extra_args
        if not extra or KEY not in extra:
            return original(self)
        shown = copy(self)  # another thread may be sending the parameters themselves
        shown.extra_args = {**extra, KEY: summary(extra[KEY])}
        return original(shown)

    return __repr__


def _of_body(original: Callable[..., None]) -> Callable[..., None]:
    """Newer versions of vLLM print whole bodies when they log at DEBUG."""

    @wraps(original)
    def log_request_body(self: Any, request: Any) -> None:
        short: dict[str, Any] = {}
        if KEY in (getattr(request, "model_extra", None) or ()):
            short[KEY] = summary(request.model_extra[KEY])
        arguments = getattr(request, "vllm_xargs", None) or {}
        if KEY in arguments:
            short["vllm_xargs"] = {**arguments, KEY: summary(arguments[KEY])}
        original(self, request.model_copy(update=short) if short else request)

    return log_request_body


def _is_fit(record: logging.LogRecord) -> bool:
    """Whether a record of a serving class may be logged: it tells no refusal, and prints no body with a spec."""
    error = record.exc_info[1] if record.exc_info else None
    about = getattr(getattr(error, "error_info", None), "param", None)  # 0.33 wraps what ends a stream of /v1/messages
    if isinstance(error, SpecRefused) or (isinstance(about, str) and re.match(rf"{KEY}\b", about)):
        return False
    return not any(isinstance(one, str) and f'"{KEY}"' in one for one in record.args or ())
