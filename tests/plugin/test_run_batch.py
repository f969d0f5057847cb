"""`vllm run-batch` answers a file without an app, so no guard stands in front: what it does with specs for audio."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from saesteer.plugin import register
from saesteer.plugin.configured import configure
from saesteer.plugin.http import models

SPEC = '{"edits": []}'
AUDIO = "data:audio/wav;base64,AAAA"


def answer(url: str, **body: Any) -> Any:
    """What the file of answers has for one line, from a handler that asks for parameters as vLLM's does."""
    try:
        from vllm.entrypoints.launchers import run_batch
    except ImportError:  # older releases
        from vllm.entrypoints.openai import run_batch

    async def handler(_: bytes, request: Any) -> Any:
        made = request.to_beam_search_params if request.use_beam_search else request.to_sampling_params
        return SimpleNamespace(params=made(8, {}))

    register()
    configure()
    line = {"custom_id": "1", "method": "POST", "url": url, "body": {"file_url": AUDIO, **body}}
    request: Any = run_batch.BatchRequestInput.model_validate(line)
    wrap: Any = run_batch.make_transcription_wrapper(url.endswith("translations"))
    return asyncio.run(wrap(handler)(request.body))


@pytest.mark.parametrize("beams", [False, True])
@pytest.mark.parametrize("url", ["/v1/audio/transcriptions", "/v1/audio/translations"])
def test_a_spec_for_audio_is_refused(url: str, beams: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "serving", [SimpleNamespace(catalog=SimpleNamespace(default=None))])
    words = "saesteer: beam search cannot be steered" if beams else "saesteer: is not served on routes of audio"
    asked: Any
    flat = {"saesteer[edits][][op]": "clamp"}, {"vllm_xargs[saesteer]": SPEC}  # as OpenAI's client flattens forms
    for asked in ({"saesteer": {"edits": []}}, {"vllm_xargs": {"saesteer": SPEC}}, *flat):
        error = answer(url, use_beam_search=beams, **asked).error
        assert error.code == 400 and words in error.message and error.message.endswith("[not_served]"), asked
    error = answer(url, use_beam_search=beams, extra_body={"saesteer": {}}).error
    assert error.code == 400 and "stands in extra_body" in error.message
    assert answer(url, use_beam_search=beams, vllm_xargs={"other": 1}).params


def test_beam_search_for_audio_is_refused_under_a_default_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "serving", [SimpleNamespace(catalog=SimpleNamespace(default="calm"))])
    for url in ("/v1/audio/transcriptions", "/v1/audio/translations"):
        assert "beam search cannot be steered" in answer(url, use_beam_search=True).error.message
        assert answer(url).params, "the default module steers it"
