"""Between vLLM's outputs and the consumers: what is read goes out, and results come into answers. Knows no consumer.

front end  a request's state has a Feed, which gets what has come with each output (report.py)
           when an answer ends, it waits for the consumers that its request names: over HTTP in AsyncLLM.generate, which
           blocks nobody else, offline in LLM. What the operator captures is waited for by nobody
"""

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, NoReturn

from saesteer.config.config import KEY
from saesteer.consumers.consumer import ConsumerError, DiskError
from saesteer.consumers.feed import Feed, ticket
from saesteer.consumers.known import Consumers
from saesteer.consumers.runner import ANSWER_SECONDS
from saesteer.errors import SpecError
from saesteer.language.fields import step
from saesteer.language.returns import Consumer
from saesteer.language.spec import Spec
from saesteer.planning.answers import Rows
from saesteer.planning.plan import END
from saesteer.plugin.wrap import Original, around

# Codes of errors.
FAILED = "consumer"  # a consumer failed for this request
SPACE = "no_space"  # what was read could not be written to the disk, by a consumer or for a handle
_AT = f"{KEY}.return.consumers"
_PAUSES = 0.005, 0.25  # seconds between two looks at a consumer, the first and the longest


class Wanted(NamedTuple):
    """What consumers get of a request, for each of its answers."""

    consumers: Consumers
    named: Sequence[tuple[str, Any]]  # by the request, with what each has made of its parameters

    @classmethod
    def of(cls, consumers: Consumers, named: Sequence[Consumer]) -> "Wanted":
        """Asked of consumers before vLLM knows the request: one may refuse now what it took when it was planned.

        Raises:
            SpecError: a consumer refuses its parameters.
        """
        own = ((one.name, consumers.named[one.name].check(one.parameters, step(_AT, one.name))) for one in named)
        return cls(consumers, [*own])

    def feed(self, state: Any, rows: Rows) -> Feed:
        """The feed of one answer.

        Args:
            state: vLLM's RequestState.
            rows: what the answer reads.
        """
        place = request_of(state), int(state.request_index or 0)
        own = [
            (self.consumers.named[name], ticket(*place, parameters, state.prompt_len))
            for name, parameters in self.named
        ]
        capturing = [
            (runner, ticket(*place, None, state.prompt_len, captured=True)) for runner in self.consumers.capturing
        ]
        return Feed(rows, own, capturing)


def request_of(state: Any) -> str:
    """The id that outputs have of a request, of which a state may be one choice."""
    return str((state if state.parent_req is None else state.parent_req).external_req_id)


def give(state: Any, feed: Feed, border: int = END) -> None:
    """Hands over what is known to be inputs, before vLLM takes the next output; LLM's loop may wait for consumers."""
    end = state.prompt_len + max(0, state.detokenizer.num_output_tokens() - 1)
    feed.give(partial(_tokens, state), end, border=border, wait=state.queue is None)


def finish(state: Any, feed: Feed, reason: Any, border: int = END) -> None:
    """Ends a feed with its answer.

    Args:
        state: vLLM's RequestState.
        feed: its feed.
        reason: vLLM's FinishReason.
        border: between the parts of the answer.
    """
    if str(reason) in ("abort", "error"):
        feed.abandon()
        return
    length = state.prompt_len + state.detokenizer.num_output_tokens()
    end, wait = max(state.prompt_len, length - 1), state.queue is None
    feed.finish(partial(_tokens, state), end, length, str(reason), border=border, wait=wait)


def _tokens(state: Any, lo: int, hi: int) -> list[int]:
    """The ids of a request's tokens by position."""
    prompt = state.prompt_len
    ids = list(state.prompt_token_ids[lo:hi])
    if hi > prompt:
        ids += state.detokenizer.output_token_ids[max(0, lo - prompt) : hi - prompt]
    return ids


@around
def _leaving(original: Original, self: Any, request_ids: Any, *args: Any, **kwargs: Any) -> Any:
    """Tells consumers of requests that are aborted, and deletes what their other choices have kept."""
    states = dict(self.request_states)
    gone = original(self, request_ids, *args, **kwargs)
    for name in gone:
        answer = getattr(states.get(name), KEY, None)
        if answer is not None:
            answer.forget()
            if answer.feed is not None:
                answer.feed.abandon()
    return gone


def are_named(params: Any) -> bool:
    """Whether a request may name consumers, without parsing all of its spec."""
    wire = (getattr(params, "extra_args", None) or {}).get(KEY)
    if isinstance(wire, Spec):
        return bool(wire.returns.consumers)
    if isinstance(wire, str):
        return '"consumers"' in wire or "\\u" in wire  # JSON may escape the letters of a key
    wanted = wire.get("return") if isinstance(wire, Mapping) else None
    return isinstance(wanted, Mapping) and bool(wanted.get("consumers"))


async def room(consumers: Consumers, params: Any) -> None:
    """Waits at the door for consumers that are behind, as long as their policies say.

    What runs goes on: only new requests are slowed down.
    """
    waited = (*consumers.capturing, *(consumers.named.values() if are_named(params) else ()))
    start, (pause, longest) = time.monotonic(), _PAUSES
    for runner in waited:
        while runner.behind and (left := start + runner.policy.wait - time.monotonic()) > 0:
            await asyncio.sleep(min(pause, left))
            pause = min(1.5 * pause, longest)  # hundreds may wait, while the consumer needs the processor


async def settled(output: Any) -> None:
    """Waits for the consumers of the answers that end with this output, and puts their results into them.

    Raises:
        SpecError: a consumer failed.
    """
    for fields, name, result in _results(output):
        try:
            fields[name] = await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(result)), ANSWER_SECONDS)
        except (ConsumerError, TimeoutError) as exc:
            _fail(output, name, exc)


def settle(output: Any, late: set[str]) -> None:
    """The same in a call to LLM, which waits.

    Args:
        output: one of its prompts'.
        late: consumers that did not answer in time for another one; a call waits for each of them once.

    Raises:
        SpecError: a consumer failed.
    """
    for fields, name, result in _results(output):
        try:
            fields[name] = result.result(0 if name in late else ANSWER_SECONDS)
        except (ConsumerError, TimeoutError) as exc:
            if isinstance(exc, TimeoutError):
                late.add(name)
            _fail(output, name, exc)


def _results(output: Any) -> Iterator[tuple[dict[str, Any], str, "Future[Any]"]]:
    """For each consumer of each answer that has ended: where its result goes, its name, and the result."""
    for choice in getattr(output, "outputs", ()):
        feed: Feed | None = getattr(choice, "saesteer_feed", None)
        if feed is not None and feed.own and choice.finish_reason not in (None, "abort", "error"):
            fields = choice.saesteer.setdefault("consumers", {})
            yield from ((fields, name, result) for name, result in feed.results.items())


def _fail(output: Any, name: str, exc: Exception) -> NoReturn:
    """Raises the request's error, after deleting the results of answers that nobody gets."""
    for choice in output.outputs:
        if (forget := getattr(choice, "saesteer_forget", None)) is not None:
            forget()
    late = f"consumer {name!r} did not answer within {ANSWER_SECONDS:.0f} seconds"
    message = str(exc) if isinstance(exc, ConsumerError) else late
    code = SPACE if isinstance(exc, DiskError) else FAILED
    raise SpecError(message, field=step(_AT, name), code=code) from None
