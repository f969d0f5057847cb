"""What an earlier stage of a pipeline returns in a step, once its device has run the step. Knows no counts.

The last stage waits for its tokens, and all that the device made before them is in host memory then. An earlier stage
waits for nothing: vLLM launches its part and goes on. So what it returns has to wait itself, before it is read.
"""

from typing import Any

import torch
from vllm.v1.outputs import AsyncModelRunnerOutput


class Told(AsyncModelRunnerOutput):
    """What vLLM asks for the output when it is about to send it, in a thread of its own with asynchronous scheduling.

    Args:
        snapshot: of the step.
        ran: the device's event behind the step.
    """

    def __init__(self, snapshot: Any, ran: Any) -> None:
        self._snapshot, self._ran = snapshot, ran

    def get_output(self) -> Any:
        """The snapshot, whose counters have come."""
        self._ran.synchronize()
        return self._snapshot


def mark(device: torch.device) -> Any:
    """An event behind all that was launched so far; None on a CPU, where everything has run.

    vLLM's sampling there is behind it: it receives the tokens of the last stage, which nobody here waits for.
    """
    if device.type != "cuda":
        return None
    ran = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    ran.record()
    return ran
