"""vLLM's app, and one with our admin routes alone, both without an engine; and requests to them. Knows no test."""

import asyncio
from argparse import Namespace
from typing import Any

import httpx
import pytest

from saesteer.plugin import register


def app_of_vllm(monkeypatch: pytest.MonkeyPatch, *flags: str, additional: Any = None, key: str = "") -> Any:
    """vLLM's own, with the routes of every task and of developers."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        from vllm.entrypoints.launchers.app import build_app
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ImportError:  # before 0.32
        from vllm.entrypoints.openai.api_server import build_app
        from vllm.entrypoints.openai.cli_args import make_arg_parser

    register()
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    monkeypatch.setenv("SAESTEER_ADMIN_KEY", key)
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", "x", *flags])
    args.additional_config = {"saesteer": {}} if additional is None else additional
    args.enable_fault_tolerance = args.enable_scale_out = True
    tasks = ("generate", "render", "transcription", "realtime", "embed", "classify")
    model = Namespace(get_pooling_task=lambda _: "embed", hf_config=Namespace(num_labels=1))
    return build_app(args, tasks, model)


def ask(app: Any, path: str, **sent: Any) -> httpx.Response:
    async def wait() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://host") as client:
            return await client.post(path, **sent)

    return asyncio.run(wait())
