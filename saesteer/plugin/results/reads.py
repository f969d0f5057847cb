"""What requests read, on its way from the scheduler into answers. Knows processes, and neither rows nor their form.

worker     the snapshot of each step carries what was read of it (engine/readouts.py)
scheduler  a request's next output carries what was read for it since its last one, in kv_transfer_params; positions
           whose rows are in a file come with an output that may be its last, since nothing is told of them before
front end  planning/answers.py puts the rows together
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from saesteer.config.config import KEY
from saesteer.engine.brought import Blob, Brought, Told
from saesteer.planning.answers import WORDS

READ = f"{KEY}_read"  # next to the counts in kv_transfer_params
_WORDS_OF_ANSWERS = frozenset(WORDS.values())


def send(
    scheduler: Any,
    outputs: Mapping[int, Any],
    brought: Brought | None,
    stops: frozenset[str],
    ends: Mapping[str, int] = MappingProxyType({}),
) -> None:
    """Puts what was read of a step into the outputs of its requests, or keeps it for their next ones.

    Args:
        scheduler: the engine's, which keeps what waits.
        outputs: of the step, by client.
        brought: what was read.
        stops: requests of which any output may be the last.
        ends: for each request that had guessed tokens, the first position whose guess does not hold.
    """
    waiting: dict[str, list[Blob]] = scheduler.__dict__.setdefault("saesteer_read", {})
    filed: dict[str, list[Told]] = scheduler.__dict__.setdefault("saesteer_filed", {})
    if brought is None and not waiting and not filed:
        return
    made = {one.request_id: one for batch in outputs.values() for one in batch.outputs}
    ending = stops | {name for name, one in made.items() if one.finish_reason is not None}
    if brought is not None:
        for name, blobs in brought.blobs(ending, ends).items():
            waiting.setdefault(name, []).extend(blobs)
        for name, told in brought.filed(ending).items():
            filed.setdefault(name, []).extend(told)
    for name in filed.keys() & ending:
        waiting.setdefault(name, []).extend(filed.pop(name))
    for name in [*waiting]:
        if name in made:
            blobs = waiting.pop(name)
            made[name].kv_transfer_params = {**(made[name].kv_transfer_params or {}), READ: blobs}
        elif name not in scheduler.requests:  # it has ended, or was aborted
            del waiting[name]
    for name in [name for name in filed if name not in scheduler.requests]:
        del filed[name]


def reads(fields: Mapping[str, Any]) -> bool:
    """Whether an answer's fields have read-outs."""
    return not _WORDS_OF_ANSWERS.isdisjoint(fields)


def new_entries(fields: Mapping[str, Any], sent: dict[str, int]) -> dict[str, list[Any]]:
    """The entries of each read-out that a stream has not had yet.

    Args:
        fields: of the answer so far.
        sent: how many entries the stream has had; changed in place.
    """
    found = {}
    for word in _WORDS_OF_ANSWERS & fields.keys():
        found[word] = fields[word][sent.get(word, 0) :]
        sent[word] = len(fields[word])
    return found


def joined(before: Mapping[str, Any] | None, piece: Mapping[str, Any]) -> dict[str, Any]:
    """What pieces of a stream say together: entries of read-outs behind those before, and everything else anew."""
    found = {**(before or {}), **piece}
    for word in _WORDS_OF_ANSWERS & found.keys():
        found[word] = [*(before or {}).get(word, ()), *piece.get(word, ())]
    return found
