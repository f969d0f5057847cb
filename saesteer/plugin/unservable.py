"""What of vLLM cannot be served, each with its reason: one table for the refusals and for the page. Knows no request.

Under each of these options an edit would be lost, land on the wrong token, or be counted or kept wrongly. vLLM is
imported only where a row needs it, since the page's table is made without vLLM.
"""

from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

from saesteer.config.config import SaesteerConfig
from saesteer.errors import UnsupportedError
from saesteer.kernels.layout import PUBLISHED

# Methods of speculative decoding. Models that guess have layers of their own, which no op is attached to.
GUESSES = ("ngram", "draft_model", "eagle", "eagle3")


class Setup(NamedTuple):
    """What an engine is started with."""

    vllm: Any  # its VllmConfig
    ours: SaesteerConfig

    @property
    def guesses(self) -> Any:
        """How it guesses tokens; None: not at all."""
        return self.vllm.speculative_config

    @property
    def stages(self) -> int:
        """Of the pipeline."""
        return int(self.vllm.parallel_config.pipeline_parallel_size)

    @property
    def executor(self) -> str:
        """The name of what runs its workers."""
        return str(self.vllm.parallel_config.distributed_executor_backend)


class Refusal(NamedTuple):
    """An option that cannot be served."""

    option: str  # as a message has it; {}: what was found
    why: str  # a sentence
    found: Callable[[Setup], Any] | None = None  # true, or a word for the option, if an engine has it; None: see attach
    instead: str = "switch it off"

    def error(self, found: object = "", *, where: str = "") -> UnsupportedError:
        """The error.

        Args:
            found: what stands for {} in the option.
            where: what cannot be served with the option.
        """
        what = f"{where}with {self.option.format(found)}"
        return UnsupportedError(f"saesteer cannot serve {what} in this version; {self.instead}. {self.why}")


def _is_set(option: str) -> Callable[[Setup], Any]:
    """Whether an option of a part of vLLM's config is set, which not all of its versions have."""
    part, _, name = option.rpartition(".")
    return lambda setup: getattr(attrgetter(part)(setup.vllm), name, False)


def _connector(setup: Setup) -> Any:
    found = getattr(setup.vllm, "kv_transfer_config", None)
    return None if found is None else str(found.kv_connector)


def _other_runner(setup: Setup) -> str | None:
    kind = str(setup.vllm.model_config.runner_type)
    return None if kind == "generate" else kind


def _is_first_ray(setup: Setup) -> bool:
    import vllm.envs

    # 0.33 has only the second one, and no such variable.
    second: bool = getattr(vllm.envs, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", True)
    return setup.vllm.parallel_config.distributed_executor_backend == "ray" and not second


def _is_rust(_: Setup) -> bool:
    import vllm.envs

    return bool(vllm.envs.VLLM_USE_RUST_FRONTEND)


def _other_scheduler(setup: Setup) -> str | None:
    found = setup.vllm.scheduler_config.scheduler_cls  # None, a path or a class; vLLM gives some models a path itself
    name = f"{found.__module__}.{found.__qualname__}" if isinstance(found, type) else found
    return None if name is None or name.startswith("vllm.") else name


def _other_guesses(setup: Setup) -> str | None:
    return None if setup.guesses is None or setup.guesses.method in GUESSES else str(setup.guesses.method)


REFUSALS = (
    Refusal(
        "a KV connector ({})",
        "Connectors store blocks under keys of their own, mostly of token ids alone, so another request would get "
        "edited blocks. This holds for prefill/decode disaggregation and KV offloading, too.",
        _connector,
    ),
    Refusal("the {} runner", "Only requests that generate text can edit and read.", _other_runner),
    Refusal(
        "an encoder-decoder model",
        "A request's positions count tokens of its prompt and answer; an encoder has positions of its own.",
        _is_set("model_config.is_encoder_decoder"),
    ),
    Refusal(
        "vLLM's first Ray executor (VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0)",
        "It bypasses the worker's method that returns counts and read-outs.",
        _is_first_ray,
        "unset the variable",
    ),
    Refusal(
        "pipeline parallelism and the executor {}",
        "Only vLLM's executor for several processes hands over the counts and read-outs of earlier stages.",
        lambda setup: setup.stages > 1 and setup.executor != "mp" and setup.executor,
        "add --distributed-executor-backend mp, or use tensor parallelism",
    ),
    Refusal(
        "a pipeline of {} stages",
        f"The counters of {PUBLISHED} steps are kept, and so many stages have more of them on their way.",
        lambda setup: setup.stages > PUBLISHED - 2 and setup.stages,
        "use tensor parallelism for some of it",
    ),
    Refusal(
        "pipeline parallelism and speculative decoding",
        "Only the last stage knows which guesses hold, so earlier ones could not drop what wrong guesses have counted.",
        lambda setup: setup.stages > 1 and setup.guesses is not None,
        "switch one of them off",
    ),
    Refusal(
        "prefill context parallelism",
        "Each rank has only a part of a prompt's tokens, and the work list counts all of them.",
        lambda setup: getattr(setup.vllm.parallel_config, "prefill_context_parallel_size", 1) > 1,
    ),
    Refusal(
        "sequence parallelism (pass_config.enable_sp)",
        "Each rank has only a part of the stream's tokens, and the work list counts all of them.",
        _is_set("compilation_config.pass_config.enable_sp"),
    ),
    Refusal(
        "micro-batch overlap (use_ubatching)",
        "The model runs on slices of a step, and the work list counts tokens from the step's beginning.",
        _is_set("parallel_config.use_ubatching"),
    ),
    Refusal(
        "elastic expert parallelism (enable_elastic_ep)",
        "An engine that joins later knows only the names of the start, and nobody has checked what it runs.",
        _is_set("parallel_config.enable_elastic_ep"),
    ),
    Refusal(
        "fault tolerance (enable_fault_tolerance)",
        "vLLM goes on behind a step that has failed. Then the device has run fewer steps than the host has counted, "
        "and no counters can be read.",
        _is_set("parallel_config.enable_fault_tolerance"),
    ),
    Refusal(
        "kv_sharing_fast_prefill",
        "Late layers run on some of a prompt's tokens only, so edits there would land on others.",
        _is_set("cache_config.kv_sharing_fast_prefill"),
    ),
    Refusal(
        "speculative decoding by {}",
        f"Only guesses by {', '.join(GUESSES[:-1])} and {GUESSES[-1]} have been tested.",
        _other_guesses,
        f"use one of the methods {', '.join(GUESSES)}, or switch it off",
    ),
    Refusal(
        "speculative decoding on vLLM's V2 runner",
        "There only the device knows which guesses hold, so what wrong guesses have counted could not be dropped.",
        lambda setup: setup.guesses is not None and getattr(setup.vllm, "use_v2_model_runner", False),
        "set VLLM_USE_V2_MODEL_RUNNER=0, or switch it off",
    ),
    Refusal(
        "speculative decoding and asynchronous scheduling",
        "The next step would be prepared before it is known which guesses hold.",
        lambda setup: setup.guesses is not None and setup.vllm.scheduler_config.async_scheduling,
        "add --no-async-scheduling, or switch it off",
    ),
    Refusal(
        "speculative decoding and --max-dose-action refuse",
        "A wrong guess above the limit would end its request.",
        lambda setup: setup.guesses is not None and setup.ours.max_dose_action == "refuse",
        "clamp doses, or switch it off",
    ),
    Refusal(
        "a scheduler class of one's own (--scheduler-cls {})",
        "Counts, and what ends requests, arrive where vLLM's own scheduler takes a step's output, and nothing makes "
        "another class call it, also if it is derived from vLLM's.",
        _other_scheduler,
        "leave the flag out",
    ),
    Refusal(
        "the Rust front end (VLLM_USE_RUST_FRONTEND)",
        "It answers without Python, so nothing would check specs or put results into answers.",
        _is_rust,
        "unset the variable",
    ),
)
# Found where names are shared.
OWN_ENGINES = Refusal(
    "an admin key and external or hybrid load balancing of data parallel engines",
    "An API server reaches only its own engines there, so the others would miss a change of names.",
    instead="let each API server reach all engines, or set no admin key",
)
# Found in a loaded model.
FOREIGN_LAYERS = Refusal(
    "Transformers' layers (--model-impl transformers)",
    "Their stream is one tensor, where vLLM's own layers of the same name pass two on.",
)
DIVIDED = Refusal(
    "a stream that is divided (float16 in DeepSeek models)",
    "vLLM divides it so that float16 holds it, so all that is added or read would be off by as much.",
    instead="use bfloat16",
)
SHARED_EXPERTS = Refusal(
    "sequence-parallel experts",
    "Each rank has its own part of the stream's tokens, and the work list counts all of them.",
)
# Found in a request, which gets a 400.
BEAMS = Refusal(
    "beam search of a steered request",
    "It sends a new request for each token, whose prompt holds all tokens so far: they would count as prompt.",
)
NO_BEAMS = "beam search cannot be steered; expected sampling, on a server without a default module"

ALL = (*REFUSALS, OWN_ENGINES, FOREIGN_LAYERS, DIVIDED, SHARED_EXPERTS, BEAMS)


def refuse(vllm_config: Any, ours: SaesteerConfig | None = None) -> None:
    """Refuse an engine that has one of the options.

    Raises:
        UnsupportedError: names the option.
    """
    setup = Setup(vllm_config, ours or SaesteerConfig())
    for one in REFUSALS:
        found = one.found and one.found(setup)
        if found:
            raise one.error(found)
