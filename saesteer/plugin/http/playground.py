"""The playground's route for each of its files, and the headers under which a browser runs them. Knows no spec.

The page is files of saesteer/playground, read once. It calls the same routes as every client, with the key that its
user types, so it needs no key itself; what it may load and run is only what this server sends.
"""

import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from saesteer.config.config import SaesteerConfig
from saesteer.config.sources import DictionarySource
from saesteer.plugin.http.access import listens_at

_log = logging.getLogger("vllm.saesteer")

GALLERY = Path(__file__).parents[2] / "data" / "gallery.json"
FOLDER = Path(__file__).parents[2] / "playground"
PREFIX = "/saesteer/"

# Every file that is served, with its type. The page itself is served under "".
_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".js": "text/javascript; charset=utf-8",
}
FILES = {
    path.relative_to(FOLDER).as_posix().removesuffix("index.html"): (path, _KINDS[path.suffix])
    for path in FOLDER.rglob("*.*")
}

# Nothing from elsewhere, no script or style inside the page, and text becomes HTML only in lit-html's own templates.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types lit-html"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # a newer saesteer has other files under the same names
}


def add_routes(app: FastAPI, config: SaesteerConfig) -> None:
    """Add the page to a server."""
    args = app.state.args
    add_playground(app, bool(app.state.saesteer_access[0]), cases_of(args.model, config.dictionaries))
    _log.info("The playground is at %s%s", listens_at(args), PREFIX)


def cases_of(model: str, dictionaries: Mapping[str, DictionarySource]) -> list[Any]:
    """The stored cases whose model and dictionary a server has, as `tools/gallery.py` has made them."""
    stored = json.loads(GALLERY.read_text())
    same = {name for name, one in dictionaries.items() if Path(one.path).name == stored["file"]}
    return [one for one in stored["cases"] if Path(model).name == stored["model"] and one["dictionary"] in same]


def add_playground(app: FastAPI, key: bool, cases: Sequence[Any]) -> None:
    """Add a route for each file; a path that a client makes up reaches none of them, and no folder.

    Args:
        app: the server's.
        key: whether the server has keys, so that the page has a field for one.
        cases: what the page shows before the model has answered.
    """
    start = json.dumps({"key": key, "gallery": cases}).encode()
    app.add_route(f"{PREFIX}start.json", _serving(start, "application/json"), include_in_schema=False)
    for name, (file, kind) in FILES.items():
        app.add_route(PREFIX + name, _serving(file.read_bytes(), kind), include_in_schema=False)
    # By its last part, since a proxy may have put something in front of the path.
    name = PREFIX.strip("/")
    app.add_route(f"/{name}", lambda _: RedirectResponse(f"{name}/"), include_in_schema=False)


def _serving(content: bytes, kind: str) -> Callable[[Request], Awaitable[Response]]:
    async def serve(_: Request) -> Response:
        return Response(content, headers=HEADERS, media_type=kind)

    return serve
