"""Where vLLM cuts a model into the stages of a pipeline. Knows layers, no sites."""

from typing import Any


def begins(vllm_config: Any) -> tuple[int, ...]:
    """The layers with which the stages behind the first begin; none without pipeline parallelism."""
    from vllm.distributed.utils import get_pp_indices

    size = vllm_config.parallel_config.pipeline_parallel_size
    layers = vllm_config.model_config.hf_text_config.num_hidden_layers
    return tuple(get_pp_indices(layers, rank, size)[0] for rank in range(1, size))


def number() -> int:
    """The stage of this worker."""
    from vllm.distributed.parallel_state import get_pp_group

    found: int = get_pp_group().rank_in_group
    return found
