"""A browser for tests of the playground, what a visitor does in it, and a stand-in of the server. Knows no test.

Every text of the stand-in is markup. Screenshots are left in build/screenshots, or where SAESTEER_SCREENSHOTS says.
"""

import json
import math
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from saesteer.plugin.http.playground import add_playground

MARKUP = "<img src=x onerror=\"document.title='run'\"><b id=made>&amp;</b>"
KEY = "a-key-of-the-tests"
BROKEN_KEY = "a-key-with-which-all-is-broken"
FIRST_ANSWER = 1.0  # seconds after which a stored one stands on the page
# Notes when a token of a steered answer is first there.
_WATCH = """new MutationObserver((_, watch) => {
    if (!document.querySelector(".steered [role=option]")) return;
    window.answered = performance.now();
    watch.disconnect();
}).observe(document, { childList: true, subtree: true });"""
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PATIENCE = 60_000  # milliseconds that a visitor waits, on a machine that may be busy
PROMPT = 7  # tokens, of every request


@contextmanager
def browser(**context: Any) -> Iterator[Any]:
    """A page in a browser of this machine, and a test that is skipped where it has none.

    Args:
        **context: options of Playwright's new_context.
    """
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    if BROWSER is None:
        pytest.skip("no Chromium on this machine; on Debian, apt-get install chromium")
    playwright.expect.set_options(timeout=PATIENCE)
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        try:
            found = running.new_context(permissions=["clipboard-read", "clipboard-write"], **context)
            found.set_default_timeout(PATIENCE)
            found.add_init_script(_WATCH)
            yield found.new_page()
        finally:
            running.close()


def keep(page: Any, name: str) -> None:
    """Leave a screenshot, to be looked at."""
    folder = Path(os.environ.get("SAESTEER_SCREENSHOTS", "build/screenshots"))
    folder.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=folder / f"{name}.png", full_page=True)


def first_answer(page: Any) -> float:
    """Seconds from the visit of the page to the first token of a steered answer."""
    page.locator(".steered [role=option]").first.wait_for()
    return float(page.evaluate("window.answered")) / 1000


def ended(page: Any, exchange: Any) -> None:
    """Wait until both answers of an exchange are complete, and the next message may be sent."""
    exchange.locator("section[aria-busy=false]").nth(1).wait_for()
    page.locator("button.main:enabled").wait_for()


def text_of(exchange: Any, side: str) -> str:
    """The words of an answer."""
    return str(exchange.locator(f".{side} [role=listbox]").text_content())


def copied(page: Any, language: str) -> str:
    """The code of the last exchange's request, out of the clipboard."""
    from playwright.sync_api import expect

    page.get_by_role("button", name=f"Copy as {language}").first.click()
    page.get_by_text("Copied; it takes the key").wait_for()
    # What an earlier button copied may still stand there.
    expect(page.locator(".code textarea")).to_have_value(re.compile({"Python": "^import", "curl": "^curl"}[language]))
    return str(page.evaluate("navigator.clipboard.readText()"))


def _label(feature: int) -> dict[str, Any]:
    example = {"value": 9.5, "before": MARKUP, "token": MARKUP, "after": MARKUP}
    known = {"feature": feature, "label": MARKUP, "label_by": "rule", "max_act": 12.5, "density": 0.001}
    return {**known, "promotes": [MARKUP], "suppresses": [], "examples": [example], "score": 1.0}


# One that the page shows before it has asked anything.
CASE: dict[str, Any] = {
    "name": MARKUP,
    "dictionary": MARKUP,
    "feature": 3,
    "label": MARKUP,
    "max_act": 12.5,
    "value": 1.5,
    "question": MARKUP,
    "plain": f"plain {MARKUP}",
    "steered": [[MARKUP, 2.9], [" less", -1.5]],
    "dose": [{"site": MARKUP, "max": 0.9, "mean": 0.75, "tokens": 12}],
    "applied": [{"edit": "saesteer.edits[0]", "site": MARKUP, "tokens_edited": 12, "tokens_cached": 0}],
}
UNTOUCHED = "untouched"  # the message for whose answer no edit has changed a token


def _answer(body: dict[str, Any]) -> Iterator[str]:
    """A stream as the server's, of which every token is the markup or a part of an emoji."""
    spec, wanted = body["saesteer"], body["saesteer"]["return"].get("features", [])
    texts = ["", MARKUP, " two", "", "🌉", " three four"]
    tokens = [[], [MARKUP], [" two"], ["�"], ["🌉"], [" three", " four"]]
    done = 0
    for number, (text, parts) in enumerate(zip(texts, tokens, strict=True)):
        rows = [
            {
                "position": PROMPT + done + n,
                "top": [[3, 1.5 * (done + n)], [5, 0.25]],
                "features": {"3": 1.5 * (done + n)},
            }
            for n in range(len(parts))
        ]
        ids = [done + n for n in range(len(parts))]
        done += len(parts)
        logprobs = {"content": [{"token": token, "logprob": -1.0} for token in parts]}
        event: dict[str, Any] = {
            "prompt_token_ids": None if number else [0] * PROMPT,
            "choices": [{"index": 0, "delta": {"content": text}, "logprobs": logprobs, "token_ids": ids}],
            "usage": {"prompt_tokens": PROMPT, "completion_tokens": done},
        }
        if rows and wanted:
            event["saesteer"] = {"features": [{**_where(one), "rows": rows} for one in wanted]}
        if number == len(texts) - 1:
            report = {"applied": [_applied(n) for n in range(len(spec.get("edits", [])))]}
            dose: list[dict[str, Any]] = [{"site": MARKUP, "max": 0.5571, "mean": 0.4735, "tokens": 12}]
            if body["messages"][-1]["content"] == UNTOUCHED:
                dose = [{"site": MARKUP, "max": None, "mean": None, "tokens": 0}]
            event["saesteer"] = (
                event.get("saesteer", {}) | report | ({"dose": dose} if spec["return"].get("dose") else {})
            )
        yield f"data: {json.dumps(event)}\n\n"
    yield "data: [DONE]\n\n"


def _where(read: dict[str, Any]) -> dict[str, Any]:
    named: dict[str, Any] = {word: read[word] for word in ("dictionary", "layer") if word in read}
    return {**named, "site": "resid_post.15", "at": read["at"]}


def _applied(edit: int) -> dict[str, Any]:
    counts = {"tokens_edited": 12, "tokens_cached": 0}
    return {"edit": f"saesteer.edits[{edit}]", "op": "clamp", "site": MARKUP, **counts}


def stand_in(asked: list[dict[str, Any]], cases: Sequence[Any] = (), key: bool = True) -> FastAPI:
    """An app that looks like the server to the page; it wants a key, and keeps the bodies of chats in a list."""
    app = FastAPI()
    add_playground(app, key, cases)

    @app.middleware("http")
    async def guard(request: Request, call_next: Any) -> Any:
        if request.headers.get("Authorization") == f"Bearer {BROKEN_KEY}":
            return JSONResponse({"error": {"message": MARKUP, "param": None, "code": 403}}, 403)
        if key and request.url.path.startswith("/v1") and request.headers.get("Authorization") != f"Bearer {KEY}":
            return JSONResponse({"error": "Unauthorized"}, 401)
        return await call_next(request)

    @app.get("/v1/models")
    def models() -> Any:
        return {"data": [{"id": MARKUP}, {"id": "other"}]}

    @app.get("/v1/saesteer/dictionaries")
    def dictionaries() -> Any:
        listed = [{"dictionary": MARKUP, "layers": None, "site": "resid_post.15", "readable": True}]
        stored = {"dictionary": "set", "layers": [9, 17], "site": "resid_post.9", "readable": False}
        gain = {"dictionary": "gain", "layers": None, "site": "mlp_in_pregain.24", "readable": True}
        return {"dictionaries": [*listed, stored, gain], "more": False}

    @app.get("/v1/saesteer/features")
    def features(q: str = "", feature: int = -1) -> Any:
        if feature > 9:
            return JSONResponse({"error": {"message": MARKUP, "param": "query.feature", "code": "out_of_range"}}, 400)
        return {"features": [_label(feature)] if feature >= 0 else [_label(3), _label(4)] if q else []}

    @app.post("/v1/completions")
    async def without_edits(request: Request) -> Any:
        """The tokens of the answer are each ten times less likely than the one before."""
        body = await request.json()
        assert body["prompt_logprobs"] == 0 and body["saesteer"] == {"defaults": False}
        tokens = [{str(one): {"logprob": -1 - math.log(10) * one}} for one in body["prompt"]]
        return {"choices": [{"prompt_logprobs": [None, *tokens[1:]]}]}

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Any:
        body = await request.json()
        asked.append(body)
        for number, edit in enumerate(body["saesteer"].get("edits", [])):
            if edit["value"] is None:
                path = f"saesteer.edits[{number}].value"
                error = {"message": f"{path}: {MARKUP}", "type": "BadRequestError", "param": path, "code": 400}
                return JSONResponse({"error": error}, 400)
        if "unreadable" in body["messages"][-1]["content"]:
            error = {"message": MARKUP, "type": "BadRequestError", "param": "saesteer.return.features[0]", "code": 400}
            return JSONResponse({"error": error}, 400)
        if "break" in body["messages"][-1]["content"]:
            broken = json.dumps({"error": {"message": MARKUP, "param": None, "code": 500}})
            return StreamingResponse(iter([f"data: {broken}\n\n"]), media_type="text/event-stream")
        return StreamingResponse(_answer(body), media_type="text/event-stream")

    return app


@contextmanager
def listening(app: FastAPI) -> Iterator[str]:
    """The app's address on this machine, while it is served."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning", ws="none"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()
