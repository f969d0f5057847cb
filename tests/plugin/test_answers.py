"""What the middleware makes of answers in vLLM's forms, with stand-ins for vLLM's routes. Starts no engine."""

import asyncio
import json
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from starlette.responses import JSONResponse, Response, StreamingResponse

from saesteer.errors import SpecError
from saesteer.plugin.http.answers import Answers
from saesteer.plugin.http.exchange import STATUS, Exchange, exchange
from saesteer.plugin.results.errors import SpecRefused

CHAT, COMPLETIONS, RESPONSES, MESSAGES = (
    f"/v1/{one}" for one in ("chat/completions", "completions", "responses", "messages")
)
APPLIED = {"applied": [{"op": "clamp", "tokens_edited": 3}]}
Route = Callable[[Exchange], Awaitable[Response]]
DONE = "data: [DONE]\n\n"


def output(report: Any = None, *, index: int = 0, ended: bool = False) -> Any:
    """An output of the engine with one choice."""
    more = {} if report is None else {"saesteer": report}
    choice = SimpleNamespace(index=index, finish_reason="stop" if ended else None, text="x", token_ids=[1], **more)
    return SimpleNamespace(outputs=[choice])


async def outputs(*found: Any) -> AsyncGenerator[Any, None]:
    for one in found:
        yield one


async def taken(found: Exchange, *prompts: Any, choices: int = 1) -> None:
    """Let the outputs of each prompt pass."""
    for several in prompts:
        async for _ in found.watch(outputs(*several), choices):
            pass


def chunk(index: int = 0, end: str | None = None, text: str = "x") -> str:
    choice = {"index": index, "text": text, "finish_reason": end}
    return f"data: {json.dumps({'id': 'a', 'choices': [choice]}, separators=(',', ':'))}\n\n"


def event(kind: str, **fields: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n"


def said(text: str) -> Any:
    """The field of an event or a body."""
    return json.loads(text.partition("data: ")[2] or text).get("saesteer")


class Sent:
    """The messages of an answer."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    async def __call__(self, message: Any) -> None:
        self.messages.append(message)

    @property
    def status(self) -> int | None:
        return self.messages[0]["status"] if self.messages else None

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.messages[0]["headers"])

    @property
    def texts(self) -> list[str]:
        return [one["body"].decode() for one in self.messages[1:] if one.get("body")]


async def answer(path: str, route: Route, sent: Sent) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        found = exchange()
        assert found is not None
        await (await route(found))(scope, receive, send)

    async def receive() -> Any:
        await asyncio.Event().wait()

    scope = {"type": "http", "path": path, "method": "POST", "headers": [], "asgi": {"spec_version": "2.4"}}
    await Answers(app)(scope, receive, sent)


def asked(path: str, route: Route) -> Sent:
    sent = Sent()
    asyncio.run(answer(path, route, sent))
    return sent


def streaming(*texts: Any, asks: bool = False) -> Route:
    """Texts of a stream; a function is called in its place, and a coroutine is awaited."""

    async def route(found: Exchange) -> Response:
        async def stream() -> AsyncIterator[str]:
            for one in texts:
                if isinstance(one, str):
                    yield one
                elif (made := one(found)) is not None:
                    await made

        found.asked += asks
        return StreamingResponse(stream(), media_type="text/event-stream")

    return route


def refuse(code: str = "dose") -> Callable[[Any], None]:
    """Refuse as the door does, and let vLLM make what it likes of that."""

    def refused(_: Any) -> None:
        SpecRefused(SpecError("too much", field="saesteer.edits", code=code))

    return refused


def fails(found: Exchange) -> None:
    refuse()(found)
    assert found.refused is not None
    raise found.refused


def takes(report: dict[str, Any], *features: int, ended: bool = False) -> Callable[[Exchange], Any]:
    """Let the next output of the one prompt pass, which has read more."""

    def take(found: Exchange) -> Any:
        state = vars(found)

        async def fed() -> AsyncGenerator[Any, None]:
            while True:
                yield output(report, ended=state["ends"])

        if "watched" not in state:
            state["watched"] = found.watch(fed(), 1)
        state["ends"] = ended
        report["features"] += features
        return anext(state["watched"])

    return take


def wrong(message: str = "saesteer.edits: too much [dose]", code: int = 400) -> str:
    error = {"message": message, "type": "BadRequestError", "param": None, "code": code}
    return f"data: {json.dumps({'error': error})}\n\n"


def test_a_chunk_keeps_its_letters_and_has_what_is_new() -> None:
    """What was read since the last one; at the end of its choice all else that it reports."""
    report: dict[str, Any] = {**APPLIED, "features": [1]}
    texts = (chunk(text='"finish_reason":"no"'), chunk(), chunk(1), chunk(), chunk(end="stop"), DONE)
    end = takes(report, 4, ended=True)
    route = streaming(takes(report), *texts[:2], takes(report, 2, 3), *texts[2:4], end, *texts[4:])
    sent = asked(COMPLETIONS, route)
    found = sent.texts
    assert [one.partition(',"saesteer":')[0] for one in found[:-1]] == [
        one.removesuffix("}\n\n") if said(other) else one for one, other in zip(texts[:-1], found, strict=False)
    ]
    assert [said(one) for one in found[:-1]] == [
        {"features": [1]}, None, None, {"features": [2, 3]}, {**APPLIED, "features": [4]},
    ]  # fmt: skip
    assert found[-1] == DONE and sent.status == 200


def test_prompts_and_choices_are_numbered_as_vllm_numbers_them() -> None:
    reports = [{"applied": [n]} for n in range(4)]
    prompts = [[output(reports[2 * p + c], index=c, ended=True) for c in (0, 1)] for p in (0, 1)]

    async def route(found: Exchange) -> Response:
        await taken(found, *prompts, choices=2)
        return JSONResponse({"id": "é", "choices": [{"index": n} for n in range(4)]})

    sent = asked(COMPLETIONS, route)
    [body] = sent.texts
    assert json.loads(body)["choices"] == [{"index": n, "saesteer": one} for n, one in enumerate(reports)]
    assert said(body) == reports[0] and sent.headers[b"content-length"] == str(len(body.encode())).encode()
    events = streaming(lambda found: taken(found, *prompts, choices=2), chunk(3, "stop"), chunk(0, "stop"))
    assert [said(one) for one in asked(COMPLETIONS, events).texts] == [reports[3], reports[0]]


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_a_body_has_it_at_its_end(path: str) -> None:
    nan, inf = math.nan, math.inf
    report = {**APPLIED, "probes": [{"scores": [nan, 1.5]}], "dose": [{"max": -inf}]}

    async def route(found: Exchange) -> Response:
        found.mark = "1; digest=x"
        await taken(found, [output(report, ended=True)])
        return JSONResponse({"text": "é", "content": []})

    sent = asked(path, route)
    [body] = sent.texts
    assert body.startswith('{"text":"é","content":[],"saesteer":{')
    assert said(body) == {**APPLIED, "probes": [{"scores": [None, 1.5]}], "dose": [{"max": None}]}, "JSON knows no NaN"
    assert math.isnan(report["probes"][0]["scores"][0]), "in Python it stays what it is"  # type: ignore[index]
    assert sent.headers[b"x-saesteer-applied"] == b"1; digest=x"


def test_other_forms_of_streams() -> None:
    """Deltas have what is new; the last event has the rest in place of all."""
    report: dict[str, Any] = {**APPLIED, "features": [1]}
    head = [event("message_start"), event("content_block_start")]
    end = event("message_delta", delta={"stop_reason": "end_turn"})
    route = streaming(*head, takes(report), event("content_block_delta"), takes(report, 4, ended=True), end)
    assert [said(one) for one in asked(MESSAGES, route).texts] == [
        None,
        None,
        {"features": [1]},
        {**APPLIED, "features": [4]},
    ]
    report = {**APPLIED, "features": [1]}
    whole = event("response.completed", response={"id": "r", "saesteer": {"features": [1, 4]}}, sequence_number=3)
    delta = event("response.output_text.delta", delta="x", sequence_number=2)
    created = event("response.created", sequence_number=0)
    route = streaming(created, takes(report), delta, takes(report, 4, ended=True), whole)
    *found, last = asked(RESPONSES, route).texts
    assert [said(one) for one in found] == [None, {"features": [1]}]
    assert json.loads(last.partition("data: ")[2])["response"] == {"id": "r", "saesteer": {**APPLIED, "features": [4]}}


@pytest.mark.parametrize("code", ["dose", "too_large", "no_space"])
@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_a_stream_that_is_refused_before_it_begins_is_a_refusal(path: str, code: str) -> None:
    """vLLM sends 200 first, and then an event that says what is wrong, or none."""
    kinds = {
        CHAT: [refuse(code), wrong(), DONE],
        RESPONSES: [event("response.created"), refuse(code), event("error", message="no", param="x")],
        MESSAGES: [refuse(code), event("error", error={"type": "invalid_request_error", "message": "no"})],
    }
    sent = asked(path, streaming(*kinds[path], asks=True))
    status = STATUS.get(code, 400)
    error = json.loads("".join(sent.texts))["error"]
    assert sent.status == status and sent.headers[b"content-type"] == b"application/json"
    assert error["message"] == f"saesteer.edits: too much [{code}]"
    assert error.get("code", status) == status and error.get("param", "saesteer.edits") == "saesteer.edits"
    if status >= 500:
        assert error["type"] == ("api_error" if path == MESSAGES else "InternalServerError")


def test_a_stream_that_has_begun_ends_with_the_error() -> None:
    created, delta = (
        event("response.created", sequence_number=0),
        event("response.output_text.delta", sequence_number=1),
    )
    *_, last = asked(RESPONSES, streaming(created, delta, fails)).texts
    assert json.loads(last.partition("data: ")[2]) == {
        "type": "error", "code": "dose", "message": "saesteer.edits: too much [dose]", "param": "saesteer.edits",
        "sequence_number": 2,
    }  # fmt: skip
    vllms = event("error", error={"type": "internal_error", "message": "1 validation error"})
    *_, last = asked(MESSAGES, streaming(event("message_start"), refuse("no_space"), vllms)).texts
    assert json.loads(last.partition("data: ")[2]) == {
        "type": "error", "error": {"type": "api_error", "message": "saesteer.edits: too much [no_space]"}
    }  # fmt: skip
    with pytest.raises(SpecRefused):
        asked(CHAT, lambda found: fails(found))  # type: ignore[arg-type,return-value]  # vLLM's handlers answer it


BODIES: list[tuple[str, Any, int]] = [
    ("too_large", {"error": {"message": "no", "type": "BadRequestError", "param": "x", "code": 400}}, 413),
    ("consumer", {"type": "error", "error": {"type": "invalid_request_error", "message": "no"}}, 500),
    ("not_served", {"error": {"message": "no", "type": "BadRequestError", "code": 400}}, 400),
]


@pytest.mark.parametrize(("code", "body", "status"), BODIES)
def test_a_refusal_has_the_status_of_its_code(code: str, body: Any, status: int) -> None:
    async def route(found: Exchange) -> Response:
        refuse(code)(found)
        return JSONResponse(body, 400)

    sent = asked(CHAT, route)
    error = json.loads(sent.texts[0])["error"]
    assert sent.status == status and error["message"] == f"saesteer.edits: too much [{code}]"
    assert error.get("code", status) == status


@pytest.mark.parametrize("message", ["Unknown role: [consumer]", "saesteer.return: may read 9 bytes [too_large]"])
def test_words_of_a_client_are_no_code_and_what_is_not_ours_passes_to_the_byte(message: str) -> None:
    body = {"error": {"message": message, "type": "BadRequestError", "param": None, "code": 400}}

    async def route(_: Exchange) -> Response:
        return JSONResponse(body, 400)

    sent = asked(CHAT, route)
    assert sent.status == 400 and sent.texts == [bytes(JSONResponse(body, 400).body).decode()]
    texts = [chunk(), chunk(end="stop"), wrong(message), DONE]
    assert asked(CHAT, streaming(*texts)).texts == texts


@pytest.mark.parametrize("at_once", [True, False], ids=["it is admitted", "its prompt may end it"])
def test_a_stream_begins_once_its_prompts_are_admitted(at_once: bool) -> None:
    async def run() -> None:
        admit, token, sent = asyncio.Event(), asyncio.Event(), Sent()

        async def admitted(found: Exchange) -> None:
            found.asked += 1  # of two prompts
            found.admit(at_once=at_once)
            await admit.wait()
            found.mark = "2; digest=x"
            found.admit(at_once=at_once)
            await token.wait()

        work = asyncio.create_task(answer(CHAT, streaming(admitted, chunk(), asks=True), sent))
        await asyncio.sleep(0.02)
        assert not sent.messages
        admit.set()
        await asyncio.sleep(0.02)
        assert (sent.status == 200) is at_once
        token.set()
        await work
        assert sent.status == 200 and sent.texts == [chunk()]
        assert sent.headers[b"x-saesteer-applied"] == b"2; digest=x"

    asyncio.run(run())


def test_a_client_that_goes_away_frees_its_request() -> None:
    async def run() -> None:
        freed = []

        async def waits(found: Exchange) -> None:
            async def endless() -> AsyncGenerator[Any, None]:
                try:
                    await asyncio.Event().wait()
                    yield None
                finally:
                    freed.append(True)

            async for _ in found.watch(endless(), 1):
                pass

        work = asyncio.create_task(answer(CHAT, streaming(waits, asks=True), Sent()))
        await asyncio.sleep(0.02)
        work.cancel()
        await asyncio.wait({work})
        assert freed

    asyncio.run(run())
