"""Settings that are no options any more: they are dropped with one warning. Knows no option that is left."""

import logging
from collections.abc import Mapping, Sequence
from functools import cache
from multiprocessing import parent_process
from typing import Any

_log = logging.getLogger("vllm.saesteer")
# The setting's name → what became of it; its flag was the same name, with a value.
RETIRED = {
    "registers": "is derived from max_edits now and ignored",
    "graph_sets": "is always 4 now and ignored",
    "max_results": "is bounded by max_results_mib now, of which a result takes 64 KiB at least, and ignored",
}


def without_retired(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Drop retired settings of the wire form, with one warning for each."""
    for name in RETIRED.keys() & settings.keys():
        _warn(name)
    return {name: value for name, value in settings.items() if name not in RETIRED}


def without_retired_flags(words: Sequence[str]) -> list[str]:
    """Drop the flags of retired settings and their values, with one warning for each."""
    left, rest = [], iter(words)
    for word in rest:
        flag, equals, _ = word.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if name == flag or name not in RETIRED:
            left.append(word)
            continue
        _warn(name)
        if not equals:
            next(rest, None)
    return left


@cache  # the settings are read several times
def _warn(name: str) -> None:
    if parent_process() is None:  # the processes that a server starts read the same settings
        _log.warning("the setting %s (--%s) %s", name, name.replace("_", "-"), RETIRED[name])
