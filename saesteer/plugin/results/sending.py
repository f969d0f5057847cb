"""The outputs of a step, as the scheduler sends them to its front ends, and what goes along. Knows no meaning of it."""

from collections.abc import Iterator, Mapping
from typing import Any

from vllm.v1.engine import EngineCoreOutputs


def of(outputs: Mapping[int, Any]) -> Iterator[Any]:
    """The outputs of all requests.

    Args:
        outputs: by client, as vLLM's update_from_output returns them.
    """
    return (one for batch in outputs.values() for one in batch.outputs)


def ended(outputs: Mapping[int, Any]) -> frozenset[str]:
    """The requests that end with this step; outputs as above."""
    return frozenset([one.request_id for one in of(outputs) if one.finish_reason is not None])


def add(outputs: dict[int, Any], client: int, output: Any) -> None:
    """Adds an output for one of this client's requests."""
    outputs.setdefault(client, EngineCoreOutputs()).outputs.append(output)


def carry(output: Any, word: str, content: Any) -> None:
    """Sends something along, in the one field for anything that vLLM 0.26 to 0.33 all send."""
    output.kv_transfer_params = {**(output.kv_transfer_params or {}), word: content}
