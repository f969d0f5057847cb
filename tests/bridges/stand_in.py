"""In place of a server: answers completions and chats as OpenAI's API does, and keeps the bodies that it got.

It has learned nothing: without a spec it says that the sky is green, with one that it is blue.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

STEERED, PLAIN = " blue", " green"


class StandIn(ThreadingHTTPServer):
    """The server.

    ``ids`` are the tokens of its two words, and ``windows`` what it says that it has edited; None: it knows no specs.
    """

    def __init__(self, ids: dict[str, int]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.windows: list[Any] | None = [[1, None]]
        self.ids, self.bodies = ids, list[dict[str, Any]]()

    @property
    def url(self) -> str:
        """Where its API begins."""
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """What it answers."""
        self.bodies.append(body)
        steered = "saesteer" in body and self.windows is not None
        said = STEERED if steered else PLAIN
        applied = {"applied": [{"edit": "saesteer.edits[0]", "positions": self.windows}]}
        whole = {"id": "1", "object": "list", "created": 0, "model": body["model"]}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        if path.endswith("/chat/completions"):
            message = {"role": "assistant", "content": said}
            choices: list[dict[str, Any]] = [{"index": 0, "message": message, "finish_reason": "stop"}]
            more = {"saesteer": applied} if steered else {}
            return whole | {"object": "chat.completion", "choices": choices, "usage": usage, **more}
        prompts = body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]]
        choices = [{"index": n, "text": said, "finish_reason": "stop"} for n in range(len(prompts))]
        for choice, ids in zip(choices, prompts, strict=True):
            if body.get("echo"):
                scores = [None, *(0.0 if one == self.ids[said] else -5.0 for one in ids[1:]), 0.0]
                choice["logprobs"] = {"token_logprobs": scores, "top_logprobs": [{"a": 0.0}] * len(scores)}
            if steered:
                choice["saesteer"] = applied
        return whole | {"choices": choices, "usage": usage}


def _streamed(whole: dict[str, Any]) -> bytes:
    """A chat as two chunks; the field is on the one that ends the choice."""
    [choice] = whole.pop("choices")
    more: dict[str, Any] = {name: whole.pop(name) for name in ("usage", "saesteer") if name in whole}
    whole["object"] = "chat.completion.chunk"
    chunks: list[dict[str, Any]] = [
        {**whole, "choices": [{"index": 0, "delta": choice["message"]}]},
        {**whole, **more, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]},
    ]
    return "".join(f"data: {one}\n\n" for one in (*map(json.dumps, chunks), "[DONE]")).encode()


class _Handler(BaseHTTPRequestHandler):
    server: StandIn

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = json.dumps(self.server.answer(self.path, body)).encode()
        kind = "application/json"
        if body.get("stream"):
            answer, kind = _streamed(json.loads(answer)), "text/event-stream"
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def do_GET(self) -> None:
        self.send_error(404)

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@contextmanager
def serving(ids: dict[str, int]) -> Iterator[StandIn]:
    """A server in a thread."""
    with StandIn(ids) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()
