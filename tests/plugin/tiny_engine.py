"""What an engine of the tiny Llama (asked.py) is given and has said, in the process that it runs in."""

from typing import Any

from tests.plugin.said import plain

TOKENS = 48  # of an answer
GENERATED = {"generated": True}


def told(output: Any) -> dict[str, Any]:
    """What there is to compare of an answer."""
    made = output.outputs[0]
    return {
        "tokens": list(made.token_ids),
        "end": [made.finish_reason, made.stop_reason],
        "logprobs": [step[token].logprob for token, step in zip(made.token_ids, made.logprobs, strict=True)],
        "cached": output.num_cached_tokens,
        "said": plain(getattr(made, "saesteer", {})),
    }


def ended(output: Any) -> dict[str, Any]:
    """The same, or that a worker has ended it."""
    return {"failed": True} if output.outputs[0].finish_reason == "error" else told(output)


def params_of(spec: Any, **options: Any) -> Any:
    """Greedy, with a spec or without one."""
    from vllm import SamplingParams

    extra = {"saesteer": spec} if spec else None
    options = {"max_tokens": TOKENS, "ignore_eos": True, **options}
    return SamplingParams(temperature=0, logprobs=0, detokenize=False, extra_args=extra, **options)


def metric(llm: Any, name: str) -> int:
    """One of vLLM's own, by its name without the prefix."""
    return sum(one.value for one in llm.get_metrics() if one.name == f"vllm:{name}")


def left(worker: Any) -> list[int]:
    """What a rank still has of requests."""
    steering = worker.saesteer
    return [len(one) for one in (steering.rows, steering._kept, steering._places, steering.engine._held)]
