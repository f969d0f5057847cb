"""vLLM's app, and one with our admin routes alone, both without an engine; and requests to them. Knows no test."""

import asyncio
from argparse import Namespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from saesteer.config.config import SaesteerConfig
from saesteer.planning.plan import Catalog
from saesteer.plugin import register
from saesteer.plugin.door.admission import Door
from saesteer.plugin.http.admin import EndpointPlugin
from saesteer.plugin.names.versions import Names
from tests.plugin.names import Workers


def parser_of_vllm() -> Any:
    """The parser of `vllm serve`."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ImportError:  # before 0.32
        from vllm.entrypoints.openai.cli_args import make_arg_parser
    return make_arg_parser(FlexibleArgumentParser())


def app_of_vllm(monkeypatch: pytest.MonkeyPatch, *flags: str, additional: Any = None, key: str = "") -> Any:
    """vLLM's own, with the routes of every task and of developers."""
    try:
        from vllm.entrypoints.launchers.app import build_app
    except ImportError:  # before 0.32
        from vllm.entrypoints.openai.api_server import build_app

    register()
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    monkeypatch.setenv("SAESTEER_ADMIN_KEY", key)
    args = parser_of_vllm().parse_args(["--model", "x", *flags])
    args.additional_config = {"saesteer": {}} if additional is None else additional
    args.enable_fault_tolerance = args.enable_scale_out = True
    tasks = ("generate", "render", "transcription", "realtime", "embed", "classify")
    model = Namespace(get_pooling_task=lambda _: "embed", hf_config=Namespace(num_labels=1))
    return build_app(args, tasks, model)


class Engine:
    """Of AsyncLLM what the plugin looks at."""

    def __init__(self) -> None:
        catalog = Catalog(dictionaries={}, sites=frozenset({"resid_post.3"}), max_entries=64, width=3)
        self.input_processor = Namespace(
            saesteer_names=Names(catalog, pool_rows=2, layers=6), saesteer_door=Door(config=SaesteerConfig())
        )
        self.engine_core = Workers()


def admin_app(api_key: Any = None, additional: Any = None) -> Any:
    """With the admin routes alone, if these are on."""
    made = FastAPI()
    wire = {"saesteer": {}} if additional is None else additional
    place: dict[str, Any] = {
        "host": "0.0.0.0",
        "port": 1,
        "root_path": "",
        "uds": None,
        "ssl_certfile": None,
        "middleware": [],
    }
    made.state.args = Namespace(api_key=api_key, additional_config=wire, **place)
    plugin = EndpointPlugin()
    plugin.attach_router(made)
    asyncio.run(plugin.init_state(Engine(), made.state, made.state.args))
    return made


def ask(app: Any, path: str, **sent: Any) -> httpx.Response:
    """What the app answers to a POST."""
    return _ask(app, "POST", path, sent)


def ask_admin(app: Any, method: str, path: str, **sent: Any) -> httpx.Response:
    """What an admin route answers."""
    return _ask(app, method, f"/v1/saesteer/{path}", sent)


def _ask(app: Any, method: str, path: str, sent: dict[str, Any]) -> httpx.Response:
    async def wait() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://host") as client:
            return await client.request(method, path, **sent)

    return asyncio.run(wait())
