"""Turns a server's responses into answers, pieces of a stream, and errors. Knows no connection and no request."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, NoReturn

from saesteer.errors import RequestRefused, ServerError
from saesteer.language.fields import Fields, Json, fail

Route = Literal["chat/completions", "completions", "responses"]

Entries = tuple[Fields, ...] | None

_CODE = re.compile(r"\[([a-z_]+)\]$")  # at the end of a message, if the error has no field for the code


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a server reports about an answer, or about a choice in the piece that ends it; None: nothing."""

    applied: Entries = None  # what was done, for each edit
    dose: Entries = None  # how strong that was, for each site
    features: Entries = None  # what was read, for each read-out; since the last piece
    probes: Entries = None
    activations: Entries = None  # their numbers: ``numbers``
    hidden: Entries = None
    messages: Entries = None  # where the chat's messages stand
    consumers: Fields | None = None  # what consumers made of what was read, by name
    flags: Entries = None  # rules that have fired


@dataclass(frozen=True, slots=True)
class Answer(Report):
    """A whole answer."""

    text: str
    finish_reason: str | None
    usage: Fields
    raw: Fields  # the response's JSON


@dataclass(frozen=True, slots=True)
class Piece(Report):
    """A piece of a streamed answer, of the choice ``index``."""

    text: str
    finish_reason: str | None  # only in the last piece
    raw: Fields  # the event's JSON
    index: int = 0


_REPORTS = {one.name for one in fields(Report)} - {"consumers"}


def read_of(told: Answer | Iterable[Piece]) -> dict[str, list[Fields]]:
    """What an answer has read of activations, or all pieces of a choice, and where the chat's messages stand.

    Raises:
        SpecError: the pieces are of several choices.
    """
    parts = [told] if isinstance(told, Answer) else [*told]
    choices = sorted({part.index for part in parts if isinstance(part, Piece) and part.raw.get("choices", True)})
    if len(choices) > 1:
        got = ", ".join(map(str, choices))
        fail("told", "conflict", f"got pieces of the choices {got}, expected those of one index")
    return {word: [one for part in parts for one in getattr(part, word) or ()] for word in ("activations", "messages")}


def document_of(status: int, content: bytes) -> Any:
    """The JSON of a response.

    Raises:
        RequestRefused: the status is 400 to 499.
        ServerError: the status is another one except 200, or the content is not JSON.
    """
    try:
        document = json.loads(content)
    except ValueError as exc:
        if status != 200:
            _refuse(status, None, content.decode("utf-8", "replace"))
        raise ServerError("the server answered with something that is not JSON", status=200) from exc
    if status != 200:
        _refuse(status, document, content.decode("utf-8", "replace"))
    return document


def _refuse(status: int, document: Any, text: str) -> NoReturn:
    error = document.get("error", document) if isinstance(document, Mapping) else None
    details = error if isinstance(error, Mapping) else {}
    message = str(details.get("message") or details.get("detail") or text[:500] or "no message")
    if not 400 <= status < 500:
        raise ServerError(f"the server answered with {status}: {message}", status=status)
    field, code = details.get("param"), details.get("code")
    if not isinstance(code, str):
        found = _CODE.search(message)
        code = found[1] if found else None
    raise RequestRefused(message, status=status, field=field if isinstance(field, str) else None, code=code)


def _silent(url: str) -> ServerError:
    why = "answered without saying what was applied: it runs without saesteer, so nothing was steered"
    return ServerError(f"the server at {url} {why}", status=200)


def answer_of(kind: Route, document: Any, steered: str | None = None) -> Answer:
    """The answer in a response's JSON.

    Args:
        kind: the route.
        document: the JSON.
        steered: the URL that a request with a spec was sent to, whose answer must say what was applied; None without
            a spec.

    Raises:
        ServerError: the JSON holds no answer, or does not say what was applied.
    """
    try:
        if kind == "responses":
            parts = [part for item in document["output"] if item.get("type") == "message" for part in item["content"]]
            text, reason = "".join(str(part.get("text", "")) for part in parts), document.get("status")
        else:
            choice = document["choices"][0]
            text, reason = _choice_text(kind, choice, "message"), choice.get("finish_reason")
        answer = Answer(text, reason, document.get("usage") or {}, document, **_reports(document))
    except (KeyError, IndexError, TypeError, AttributeError) as exc:
        raise ServerError(f"the server's answer has no {kind} in it", status=200) from exc
    made = kind != "responses" or reason in ("completed", "incomplete")  # others have no answer yet, or never will
    if steered is not None and answer.applied is None and made:
        raise _silent(steered)
    return answer


def _choice_text(kind: Route, choice: Fields, message: str) -> str:
    return str((choice["text"] if kind == "completions" else choice[message].get("content")) or "")


class Events:
    """A stream of events, split at line feeds only: httpx's lines also end at U+2028, which texts may contain."""

    def __init__(self, kind: Route, steered: str | None = None) -> None:
        """Arguments as ``answer_of``."""
        self._kind = kind
        self._steered = steered  # None also after the stream has said what was applied
        self._ended = False  # whether the stream has said that it is whole
        self._rest: list[bytes] = []  # the beginning of an incomplete line, in pieces as they came

    def feed(self, data: bytes) -> Iterator[Piece]:
        """The pieces that these bytes complete.

        Raises:
            RequestRefused, ServerError: the stream reports an error, or holds something unexpected.
        """
        first, *others = data.split(b"\n")
        self._rest.append(first)
        if not others:
            return
        lines = [b"".join(self._rest), *others[:-1]]
        self._rest = others[-1:]
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            if (event := line[5:].strip()) == b"[DONE]":
                self._ended = True
                continue
            for piece in _pieces(self._kind, event.decode("utf-8", "replace")):
                self._steered = self._steered if piece.applied is None else None
                yield piece

    def end(self) -> None:
        """Check, where the stream ends, that it is whole, and that a piece reports what was applied.

        Raises:
            ServerError: the last event was not ``[DONE]``, or the request had a spec, and no piece reports it.
        """
        if not self._ended:
            raise ServerError("the stream broke off, expected [DONE] at its end: the answer is not whole", status=200)
        if self._steered is not None:
            raise _silent(self._steered)


def _pieces(kind: Route, data: str) -> Iterator[Piece]:
    """The pieces of one event."""
    try:
        event = json.loads(data)
        if "error" in event:
            code = event["error"].get("code") if isinstance(event["error"], Mapping) else None
            _refuse(code if isinstance(code, int) else 500, event, data)
        choices = event["choices"]
        for choice in choices:
            text, reason = _choice_text(kind, choice, "delta"), choice.get("finish_reason")
            yield Piece(text, reason, event, choice.get("index", 0), **_reports(event))
        if not choices and any((reports := _reports(event)).values()):
            yield Piece("", None, event, **reports)
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise ServerError(f"the server's stream has no {kind} in it: {data[:200]}", status=200) from exc


def _reports(document: Fields) -> Json:
    """What was applied, the doses and what was read, as far as the server reports them, by the field of an answer."""
    report = document.get("saesteer")
    found = report if isinstance(report, Mapping) else {}
    return {key: tuple(found[key]) for key in _REPORTS if key in found} | {"consumers": found.get("consumers")}


def model_names(document: Any) -> list[str]:
    """The names in a list of at least one model.

    Raises:
        ServerError: the JSON is not such a list.
    """
    try:
        names = [str(model["id"]) for model in document["data"]]
    except (KeyError, TypeError) as exc:
        raise ServerError("the server's list of models is not one", status=200) from exc
    if not names:
        raise ServerError("the server serves no model", status=200)
    return names
