"""Sessions of streaming inputs are served as without saesteer, and not captured, in vLLM's own processors."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import STREAM_FINISHED, OutputProcessor, RequestOutputCollector

from saesteer.config.config import KEY, SaesteerConfig
from saesteer.plugin import register


@pytest.mark.parametrize("waiting", [True, False], ids=["behind its answer", "while its answer is made"])
def test_a_session_ends_where_the_operator_captures(model_dir: str, tmp_path: Path, waiting: bool) -> None:
    """As AsyncLLM does it: what ends the session is made first, as a request like any other, and comes under its id."""
    register()
    wire = SaesteerConfig(capture=("resid_post.3",), capture_folder=str(tmp_path)).to_json()
    config = EngineArgs(model_dir, max_model_len=64, additional_config={KEY: wire}).create_engine_config()
    door, processor = InputProcessor(config), OutputProcessor(None, log_stats=False)
    try:
        params = SamplingParams(max_tokens=1, detokenize=False, output_kind=RequestOutputKind.DELTA)

        def request(name: str, ids: list[int], **more: Any) -> Any:
            return door.process_inputs(name, TokensPrompt(prompt_token_ids=ids), params, ("generate",), **more)

        end = request("session", [0])
        door.assign_request_id(end)
        name = end.request_id
        chunk = request(name, [1, 2, 3], resumable=True)
        chunk.external_req_id = "session"
        queue = RequestOutputCollector(params.output_kind, name)
        processor.add_request(chunk, None, None, 0, queue)
        state = processor.request_states[name]
        answer = EngineCoreOutput(name, [7], finish_reason=FinishReason.LENGTH)
        if waiting:
            processor.process_outputs([answer])
        processor.add_request(end, None, None, 0, queue)
        if not waiting:
            processor.process_outputs([answer])
        assert not processor.request_states and not processor.external_req_ids
        told: Any = queue.get_nowait()
        assert told.outputs[0].token_ids == [7] and not hasattr(state, KEY)
        assert told.finished or queue.get_nowait() is STREAM_FINISHED
    finally:
        door.saesteer_door.consumers.close()
    assert not [*tmp_path.rglob("*.safetensors")]
