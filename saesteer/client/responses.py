"""What an OpenAI server says, read into answers, pieces of a stream, and errors. Knows no connection and no request."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from saesteer.errors import RequestRefused, ServerError

Route = Literal["chat/completions", "completions", "responses"]

_CODE = re.compile(r"\[([a-z_]+)\]$")  # at the end of a message, where the error has no place for a word


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer; of several choices (``n``) the first, all of them are in ``raw``, each with its ``saesteer``."""

    text: str
    finish_reason: str | None
    usage: Mapping[str, Any]
    raw: Mapping[str, Any]  # the response's JSON
    applied: tuple[Mapping[str, Any], ...] | None = None  # what was done, one for each edit; None: the server is silent
    dose: tuple[Mapping[str, Any], ...] | None = None  # how strong that was, one for each site; None: it was not asked


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a streamed answer; of several choices that of ``index``."""

    text: str
    finish_reason: str | None  # only in the last piece
    raw: Mapping[str, Any]  # the event's JSON
    index: int = 0
    applied: tuple[Mapping[str, Any], ...] | None = None  # in the piece that ends this choice
    dose: tuple[Mapping[str, Any], ...] | None = None  # beside it


def document_of(status: int, content: bytes) -> Any:
    """The JSON of a response.

    Raises:
        RequestRefused: a status from 400 to 499.
        ServerError: another that is not 200, or no JSON.
    """
    try:
        document = json.loads(content)
    except ValueError as exc:
        if status != 200:
            _refuse(status, None, content.decode("utf-8", "replace"))
        raise ServerError("the server answered with something that is no JSON", status=200) from exc
    if status != 200:
        _refuse(status, document, content.decode("utf-8", "replace"))
    return document


def _refuse(status: int, document: Any, text: str) -> NoReturn:
    error = document.get("error", document) if isinstance(document, Mapping) else None
    told = error if isinstance(error, Mapping) else {}
    message = str(told.get("message") or told.get("detail") or text[:500] or "no message")
    if not 400 <= status < 500:
        raise ServerError(f"the server answered with {status}: {message}", status=status)
    field, code = told.get("param"), told.get("code")
    if not isinstance(code, str):
        found = _CODE.search(message)
        code = found[1] if found else None
    raise RequestRefused(message, status=status, field=field if isinstance(field, str) else None, code=code)


def _silent(url: str) -> ServerError:
    told = "answered without saying what was applied: it runs without saesteer, so nothing was steered"
    return ServerError(f"the server at {url} {told}", status=200)


def answer_of(kind: Route, document: Any, steered: str | None = None) -> Answer:
    """The answer in a response's JSON.

    Args:
        kind: of the route.
        document: the JSON.
        steered: where a request with a spec was sent to, whose answer has to say what was applied; None without one.

    Raises:
        ServerError: there is none in it, or it does not say what was applied.
    """
    try:
        if kind == "responses":
            text, reason = _response_text(document), document.get("status")
        else:
            choice = document["choices"][0]
            text, reason = _choice_text(kind, choice, "message"), choice.get("finish_reason")
        answer = Answer(text, reason, document.get("usage") or {}, document, *_told(document))
    except (KeyError, IndexError, TypeError, AttributeError) as exc:
        raise ServerError(f"the server's answer has no {kind} in it", status=200) from exc
    made = kind != "responses" or reason in ("completed", "incomplete")  # others are not there yet, or never will be
    if steered is not None and answer.applied is None and made:
        raise _silent(steered)
    return answer


def _choice_text(kind: Route, choice: Mapping[str, Any], message: str) -> str:
    return str((choice["text"] if kind == "completions" else choice[message].get("content")) or "")


def _response_text(document: Mapping[str, Any]) -> str:
    parts = (part for item in document["output"] if item.get("type") == "message" for part in item["content"])
    return "".join(str(part.get("text", "")) for part in parts)


class Events:
    """A stream of events, cut at line feeds alone: httpx's lines also end at U+2028, which texts may hold."""

    def __init__(self, kind: Route, steered: str | None = None) -> None:
        """Kind and steered as ``answer_of``."""
        self._kind = kind
        self._steered = steered  # None as well once the stream has said what was applied
        self._rest = b""  # the beginning of a line that has not come whole

    def feed(self, data: bytes) -> Iterator[Piece]:
        """The pieces that are whole with these bytes.

        Raises:
            RequestRefused, ServerError: the stream tells an error, or holds something else.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and (event := line[5:].strip()) != b"[DONE]":
                for piece in _pieces(self._kind, event.decode("utf-8", "replace")):
                    self._steered = self._steered if piece.applied is None else None
                    yield piece

    def end(self) -> None:
        """The stream has ended.

        Raises:
            ServerError: the request had a spec, and no piece says what was applied.
        """
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
            yield Piece(text, reason, event, choice.get("index", 0), *_told(event))
        if not choices and any(told := _told(event)):
            yield Piece("", None, event, 0, *told)
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise ServerError(f"the server's stream has no {kind} in it: {data[:200]}", status=200) from exc


def _told(document: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], ...] | None]:
    """What is said to be applied, and the doses."""
    told = document.get("saesteer")
    found = told if isinstance(told, Mapping) else {}
    return [tuple(found[key]) if key in found else None for key in ("applied", "dose")]


def model_names(document: Any) -> list[str]:
    """The names in a list of models; at least one.

    Raises:
        ServerError: it is no such list, or empty.
    """
    try:
        names = [str(model["id"]) for model in document["data"]]
    except (KeyError, TypeError) as exc:
        raise ServerError("the server's list of models is none", status=200) from exc
    if not names:
        raise ServerError("the server serves no model", status=200)
    return names
