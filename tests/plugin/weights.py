"""New weights for a running engine without a trainer: vLLM's weight transfer by CUDA IPC, with files in place of IPC.

vLLM's own transports need GPUs. Each worker imports this module, since --worker-extension-cls names a class of it.
Knows no test.
"""

import pickle
import time
from base64 import b64encode
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.multiprocessing.reductions import reduce_tensor
from vllm.distributed.weight_transfer.base import WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine

from tests.plugin.held import Held

BACKEND = "files"
EXTENSION = f"{__name__}.Slow"


class Slow(Held):
    """Methods of vLLM's worker."""

    execute_model: Any

    def saesteer_slow(self, seconds: float) -> None:
        """Make each step take longer, so that something can happen between two."""
        run = self.execute_model

        def slowly(*args: Any, **kwargs: Any) -> Any:
            time.sleep(seconds)
            return run(*args, **kwargs)

        self.execute_model = slowly


@dataclass
class Part(WeightTransferUpdateInfo):
    """Some tensors of a checkpoint."""

    path: str  # of a file of safetensors
    names: list[str]


class Files(IPCWeightTransferEngine):
    """Begins and ends an update as its base does."""

    update_info_cls = Part

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load a part; on a CPU there is nothing to wait for afterwards."""
        self.receive_weights(Part(**update_info))

    def receive_weights(self, update_info: Any) -> None:
        """Load a part as it came from a trainer."""
        with safe_open(update_info.path, "pt") as file:
            self.model.load_weights([(name, file.get_tensor(name)) for name in update_info.names])


def parts_of(path: str, count: int) -> list[dict[str, Any]]:
    """A checkpoint in so many updates, whose borders are inside of layers."""
    with safe_open(path, "pt") as file:
        names = sorted(file.keys())
    return [{"path": path, "names": names[number::count]} for number in range(count)]


def by_ipc(path: str, count: int) -> tuple[list[dict[str, Any]], list[torch.Tensor]]:
    """The same from this process's memory on the GPU, for vLLM's own engine, and the tensors to keep meanwhile."""
    tensors, gpu = load_file(path, "cuda"), str(torch.cuda.get_device_properties(0).uuid)
    made = []
    for names in (part["names"] for part in parts_of(path, count)):
        several = [tensors[name] for name in names]
        part = {"names": names, "shapes": [[*one.shape] for one in several]}
        part["dtype_names"] = [str(one.dtype).removeprefix("torch.") for one in several]
        handles = [{gpu: reduce_tensor(one)[1]} for one in several]  # type: ignore[no-untyped-call]
        made.append({**part, "ipc_handles_pickled": b64encode(pickle.dumps(handles)).decode()})
    return made, [*tensors.values()]


WeightTransferEngineFactory.register_engine(BACKEND, Files)
