"""What travels with vLLM's requests and outputs between the front end and the engine. Knows no meaning of it.

A request carries a mapping from the front end: its plan, and words beside it that the modules name which send them. An
output of the scheduler carries records back. Both have the one key KEY, in place of what a client has sent there.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from vllm.v1.engine import EngineCoreOutputs

from saesteer.config.config import KEY


def sent(params: Any) -> Mapping[str, Any]:
    """What the front end sends with the parameters of a request; empty where nothing is asked of the engine."""
    extra = getattr(params, "extra_args", None)
    found: Mapping[str, Any] = extra.get(KEY, {}) if extra else {}
    return found


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


def carry(output: Any, kind: str, content: Any) -> None:
    """Adds a record to an output, in the one field for anything that vLLM 0.26 to 0.33 all send."""
    params = output.kv_transfer_params or {}
    output.kv_transfer_params = {**params, KEY: [*params.get(KEY, ()), (kind, content)]}


def carried(output: Any) -> list[tuple[str, Any]]:
    """Takes the records from an output; each has its kind and its content."""
    if not (params := output.kv_transfer_params) or KEY not in params:
        return []
    found: list[tuple[str, Any]] = params[KEY]
    output.kv_transfer_params = {name: value for name, value in params.items() if name != KEY} or None
    return found
