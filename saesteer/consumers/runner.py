"""Runs a consumer in a thread behind a queue of bounded size. Knows no consumer by name, and no request's form.

Whoever puts something into the queue never waits, unless it asks to. What does not fit is dropped and counted. An
exception in the consumer, even that of sys.exit, ends what it does for that request, and nothing else.
"""

import json
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from threading import Condition, Thread
from typing import Any, NamedTuple

from saesteer.consumers.consumer import Consumer, ConsumerError, DiskError, Request, Rows
from saesteer.errors import ConfigError, SpecError
from saesteer.language.fields import Fields, Json, fail, flag, integer, show

logger = logging.getLogger("vllm.saesteer.consumers")

MAX_RESULT = 2**16  # characters of JSON
ANSWER_SECONDS = 60.0  # that an answer waits for its consumers at most
CLOSE_SECONDS = 30.0
_ID = 40  # bytes that a token's id takes in a list

Count = Callable[[str, str, int], None]  # what: rows, dropped or failures; the consumer's name; how many


class Policy(NamedTuple):
    """The options that every consumer has."""

    queue_bytes: int = 64 << 20  # of rows that wait for it
    wait: float = 0.0  # seconds that others wait for room in a full queue, before rows are dropped
    all: bool = False  # it gets what --capture reads

    @classmethod
    def taken(cls, options: Fields, at: str) -> tuple["Policy", Json]:
        """The policy, and the other options.

        Raises:
            ConfigError: an option is wrong.
        """
        rest = dict(options)
        try:
            return cls(
                integer(1, 65536)(rest.pop("queue_mib", 64), f"{at}.queue_mib") << 20,
                integer(0, 60_000)(rest.pop("wait_ms", 0), f"{at}.wait_ms") / 1000,
                flag(rest.pop("all", False), f"{at}.all"),
            ), rest
        except SpecError as exc:
            raise ConfigError(str(exc)) from exc


@dataclass(slots=True, eq=False)
class Ticket:
    """One request at one consumer."""

    request: Request
    dropped: int = 0  # rows for which there was no room
    failed: BaseException | None = None
    result: "Future[Any]" = field(default_factory=Future)


class Runner:
    """A consumer, its queue and its thread, which starts with the first rows.

    Args:
        name: its name in requests.
        consumer: made with the operator's options.
        policy: what happens when the queue is full.
        count: told of rows that were taken, rows that were dropped, and failures.
    """

    def __init__(
        self, name: str, consumer: Consumer, policy: Policy | None = None, count: Count = lambda *_: None
    ) -> None:
        self.name, self.consumer, self.policy, self._count = name, consumer, policy or Policy(), count
        self._queue: deque[tuple[Ticket, Rows | str, int]] = deque()  # with the bytes of each
        self._held = self._ids = 0  # bytes of rows in it, and of token ids; each may be as many as the policy says
        self._changed = Condition()
        self._thread: Thread | None = None
        self._closing = False

    def check(self, parameters: Fields, at: str) -> Any:
        """What the consumer makes of a request's parameters.

        Raises:
            SpecError: they are wrong.
        """
        try:
            return self.consumer.check(parameters, at)
        except SpecError:
            raise
        except (Exception, SystemExit) as exc:  # noqa: BLE001  # the consumer's code, of which we know nothing
            fail(at, "out_of_range", f"was refused by the consumer ({_words(exc)})")

    @property
    def behind(self) -> bool:
        """Whether more than half of the queue is full."""
        return 2 * self._held > self.policy.queue_bytes

    def put(self, ticket: Ticket, rows: Rows, *, wait: bool = False) -> None:
        """Hand over rows, or drop them if there is no room.

        Args:
            ticket: of their request.
            rows: shared with other consumers.
            wait: wait for room, as long as the policy says.
        """
        with self._changed:
            if wait and self.policy.wait:
                self._changed.wait_for(lambda: self._fits(self._held, rows.nbytes), self.policy.wait)
            if not self._fits(self._held, rows.nbytes):
                ticket.dropped += len(rows)
                self._count("dropped", self.name, len(rows))
                return
            self._held += rows.nbytes
            self._add(ticket, rows, rows.nbytes)

    def end(self, ticket: Ticket) -> None:
        """The request's answer has ended; the ticket's result follows, an error where its token ids find no room."""
        size = _ID * len(ticket.request.tokens)
        with self._changed:
            if self._fits(self._ids, size):
                self._ids += size
                self._add(ticket, "end", size)
                return
            ticket.request.tokens = ()
            ticket.failed = ConsumerError("it is behind, and its queue is full")
            self._count("failures", self.name, 1)
            self._add(ticket, "end")

    def drop(self, ticket: Ticket) -> None:
        """The request was abandoned."""
        with self._changed:
            self._add(ticket, "drop")

    def close(self) -> None:
        """Let the consumer finish what waits, and stop; safe to call again."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is None:
            self._guarded("close", self.consumer.close)
        else:
            self._thread.join(CLOSE_SECONDS)

    def _fits(self, held: int, nbytes: int) -> bool:
        return not held or held + nbytes <= self.policy.queue_bytes

    def _add(self, ticket: Ticket, what: Rows | str, nbytes: int = 0) -> None:
        self._queue.append((ticket, what, nbytes))
        if self._thread is None:
            self._thread = Thread(target=self._run, name=f"saesteer {self.name}", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    break
                ticket, what, nbytes = self._queue.popleft()
            self._serve(ticket, what)
            with self._changed:
                if isinstance(what, Rows):
                    self._held -= nbytes
                else:
                    self._ids -= nbytes
                self._changed.notify_all()
        self._guarded("close", self.consumer.close)

    def _serve(self, ticket: Ticket, what: Rows | str) -> None:
        request = ticket.request
        drop = partial(self._guarded, "drop", partial(self.consumer.drop, request))
        lost = ticket.failed is not None or (ticket.dropped and not request.captured)
        if isinstance(what, Rows):
            if ticket.failed is not None:
                self._count("dropped", self.name, len(what))
            elif not lost:
                self._try(ticket, lambda: self.consumer.take(request, what))
                self._count("rows", self.name, len(what) if ticket.failed is None else 0)
        elif what == "drop" or lost:
            drop()
            if what == "end":
                self._tell(ticket, {"dropped": ticket.dropped})
        else:
            found = self._try(ticket, lambda: _json(self.consumer.end(request)))
            self._tell(ticket, found)
            if ticket.failed is not None:
                drop()

    def _try(self, ticket: Ticket, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except BaseException as exc:  # noqa: BLE001  # sys.exit would end the thread, and all later requests with it
            ticket.failed = exc
            self._note(exc)
            about = self.name, show(ticket.request.id), type(exc).__name__, _words(exc)
            logger.error("consumer %s failed for request %s: %s: %s", *about)
            return None

    def _tell(self, ticket: Ticket, found: Any) -> None:
        if ticket.failed is None:
            ticket.result.set_result(found)
        else:
            about = f"{type(ticket.failed).__name__}: {_words(ticket.failed)}"[:500]
            failed = DiskError if isinstance(ticket.failed, DiskError) else ConsumerError
            ticket.result.set_exception(failed(f"consumer {self.name!r} failed for this request ({about})"))

    def _note(self, exc: BaseException) -> None:
        self._count("failures", self.name, 1)
        if isinstance(exc, DiskError) and exc.rows:
            self._count("dropped", self.name, exc.rows)

    def _guarded(self, what: str, call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as exc:  # as above
            self._note(exc)
            logger.exception("consumer %s failed in %s", self.name, what)


def _words(exc: BaseException) -> str:
    """Those of an exception, which is the consumer's code as well."""
    try:
        return str(exc)
    except Exception:  # noqa: BLE001
        return "an error without words"


def _json(found: Any) -> Any:
    text = json.dumps(found, allow_nan=False)
    if len(text) > MAX_RESULT:
        raise ValueError(f"its result has {len(text)} characters of JSON, expected at most {MAX_RESULT}")
    return json.loads(text)
