"""What requests read, on its way through the scheduler. Knows processes, and neither rows nor their form.

worker     the snapshot of each step carries what was read of it (engine/readouts.py)
scheduler  a request's next output carries what was read for it since its last one, in kv_transfer_params. Where
           nobody looks at the answer before its end, many pieces go together: each output that carries something
           costs both processes. Positions whose rows are in a file come with an output that may be the last, which
           waits until they are written, while others' steps go on
front end  planning/answers.py puts the rows together
streams    each event says what is new (unsent.py)
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from saesteer.engine.brought import Blob, Brought
from saesteer.engine.filer import Span, join
from saesteer.engine.writer import Owed
from saesteer.plugin.results import sending
from saesteer.plugin.results.forms import READ, WHOLE
from saesteer.plugin.wrap import Original, around

MOST = 128  # pieces of rows that wait for a request's end, so that its last output has no more than others


def send(
    scheduler: Any,
    outputs: Mapping[int, Any],
    brought: Brought | None,
    stops: frozenset[str],
    ends: Mapping[str, int],
) -> dict[str, Owed]:
    """Puts what was read of a step into the outputs of its requests, or keeps it for their next ones.

    Args:
        scheduler: the engine's, which keeps what waits.
        outputs: of the step, by client.
        brought: what was read.
        stops: requests of which any output may be the last.
        ends: for each request that had guessed tokens, the first position whose guess does not hold.

    Returns:
        Requests that have ended here, with what their files still lack; for ``hold``. It waits for the files of those
        in ``stops`` that have not.
    """
    waiting: dict[str, list[Blob]] = scheduler.__dict__.setdefault("saesteer_read", {})
    filed: dict[str, dict[int, list[Span]]] = scheduler.__dict__.setdefault("saesteer_filed", {})
    if brought is None and not waiting and not filed:
        return {}
    ended = sending.ended(outputs)
    ending, owed = stops | ended, {}
    if brought is not None:
        for name, blobs in brought.blobs(ending, ends).items():
            waiting.setdefault(name, []).extend(blobs)
        for name, told in brought.told().items():
            own = filed.setdefault(name, {})
            for number, spans in told:  # of one position in each step: of a long answer there would be thousands
                for span in spans:
                    join(own.setdefault(number, []), span)
        owed = brought.owed(ending)
        for name in owed.keys() - ended:
            late = owed.pop(name)
            if name in scheduler.requests:  # else its last output is held, and has what was written
                waiting.setdefault(name, []).extend(late.told())
    for name in filed.keys() & ending:
        waiting.setdefault(name, []).extend([number, spans] for number, spans in filed.pop(name).items())
    made = {one.request_id: one for one in sending.of(outputs)} if waiting else {}
    for name in [*waiting]:
        if name in made:
            if name not in ended and len(waiting[name]) < MOST and _is_whole(scheduler.requests.get(name)):
                continue
            sending.carry(made[name], READ, waiting.pop(name))
        elif name not in scheduler.requests:  # it has ended, or was aborted
            del waiting[name]
    for name in [name for name in filed if name not in scheduler.requests]:
        del filed[name]
    return owed


def _is_whole(request: Any) -> bool:
    """Whether nobody needs a request's rows before its end."""
    return request is not None and bool(sending.sent(request.sampling_params).get(WHOLE))


class _Held(NamedTuple):
    client: int
    output: Any
    owed: Owed


def hold(scheduler: Any, outputs: dict[int, Any], owed: Mapping[str, Owed]) -> None:
    """Keeps a request's last output out of a step's while its files lack rows; adds kept ones whose files lack none.

    Where nobody else would have a step, it waits for them.

    Args:
        scheduler: the engine's, which keeps what is held.
        outputs: of the step, by client, complete but for this.
        owed: as ``send`` returns it.
    """
    held: dict[str, _Held] = scheduler.__dict__.setdefault("saesteer_held", {})
    for client, batch in outputs.items() if owed else ():
        late = [one for one in batch.outputs if one.request_id in owed]
        held |= {one.request_id: _Held(client, one, owed[one.request_id]) for one in late}
        batch.outputs = [one for one in batch.outputs if one.request_id not in owed]
    goes_on = bool(held) and scheduler.has_unfinished_requests()
    for name, one in [*held.items()]:
        if one.owed.done or not goes_on:
            del held[name]
            sending.carry(one.output, READ, one.owed.told())
            sending.add(outputs, one.client, one.output)


@around
def _having(original: Original, self: Any) -> bool:
    """Who is held has one more step: if others are aborted or paused meanwhile, none would follow."""
    return original(self) or bool(vars(self).get("saesteer_held"))
