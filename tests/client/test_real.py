"""The clients against a real `saesteer serve demo`."""

import asyncio
from typing import Any
from uuid import uuid4

import httpx
import pytest

import saesteer
from saesteer.client.client import AsyncClient, Client
from saesteer.errors import RequestRefused
from tests.plugin.conftest import BRIDGE

pytestmark = pytest.mark.slow

TURN = "Who are you?"


def test_every_way_to_ask(demo_server: httpx.Client) -> None:
    bridge = saesteer.clamp("demo", 3497, 2.0, unit="max_act")
    with Client(str(demo_server.base_url), timeout=120) as client:
        assert client.models() == ["demo"]
        plain = client.chat(TURN, temperature=0, max_tokens=24)
        for steer in (bridge, [bridge], BRIDGE, {"edits": [BRIDGE]}):
            steered = client.chat(TURN, steer=steer, temperature=0, max_tokens=24)
            assert "ridge" in steered.text
            assert "ridge" not in plain.text
            assert steered.usage["completion_tokens"] == 24 == plain.usage["completion_tokens"]
        pieces = list(client.stream(TURN, steer=bridge, temperature=0, max_tokens=24))
        assert "".join(piece.text for piece in pieces) == steered.text
        assert "ridge" in client.respond(TURN, steer=bridge, temperature=0, max_output_tokens=24).text
        whole = client.complete(TURN, steer=bridge, temperature=0, max_tokens=12)
        parts = list(client.stream_complete(TURN, steer=bridge, temperature=0, max_tokens=12))
        assert "".join(piece.text for piece in parts) == whole.text
        assert [piece.finish_reason for piece in parts if piece.finish_reason] == ["length"]


def test_who_asks_is_told_the_dose(demo_server: httpx.Client) -> None:
    steer = {"edits": [saesteer.clamp("demo", 3497, 2.0, unit="max_act")], "return": {"dose": True}}
    with Client(str(demo_server.base_url), timeout=120) as client:
        asked: dict[str, Any] = {"steer": steer, "temperature": 0, "max_tokens": 24, "cache_salt": uuid4().hex}
        answer = client.chat(TURN, **asked)
        assert answer.applied is not None and answer.dose is not None
        [one] = answer.dose
        assert one["tokens"] == answer.applied[0]["tokens_edited"] == answer.usage["prompt_tokens"] - 1 + 23
        assert 0.3 < one["mean"] < one["max"] < 0.7
        pieces = list(client.stream(TURN, **{**asked, "cache_salt": uuid4().hex}))
        assert [piece.dose for piece in pieces if piece.dose is not None] == [answer.dose]
        assert client.chat(TURN, **{**asked, "steer": BRIDGE}).dose is None


def test_a_refusal_is_typed_in_both(demo_server: httpx.Client) -> None:
    wrong = {**BRIDGE, "feature": 9216}

    async def ask() -> None:
        async with AsyncClient(str(demo_server.base_url)) as client:
            with pytest.raises(RequestRefused) as caught:
                async for _ in client.stream(TURN, steer=wrong):
                    pass
            assert caught.value.code == "out_of_range"
            assert "ridge" in (await client.chat(TURN, steer=BRIDGE, temperature=0, max_tokens=24)).text

    with Client(str(demo_server.base_url)) as client, pytest.raises(RequestRefused) as caught:
        client.chat(TURN, steer=wrong)
    error = caught.value
    assert (error.status, error.field, error.code) == (400, "saesteer.edits[0].feature", "out_of_range")
    asyncio.run(ask())
