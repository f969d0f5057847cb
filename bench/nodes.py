"""What a captured CUDA graph holds: how often each kernel. Asks CUDA's driver; knows no engine."""

from __future__ import annotations

import ctypes
import re
from collections import Counter
from functools import cache
from typing import Any

import torch

_OTHERS = {1: "memcpy", 2: "memset", 3: "host", 4: "graph", 5: "empty", 6: "wait", 7: "record", 10: "alloc", 11: "free"}


class _Kernel(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("arguments", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


def keep_graphs() -> None:
    """From now on every CUDA graph of this process can be asked for its nodes; it is made as before."""
    usual: Any = torch.cuda.CUDAGraph

    class Kept(usual):  # type: ignore[misc]
        def __new__(cls) -> Any:
            return usual.__new__(cls, keep_graph=True)

        def __init__(self) -> None:
            super().__init__(keep_graph=True)

        def capture_end(self) -> None:
            super().capture_end()
            self.instantiate()  # at once, as a graph that is not kept

    setattr(torch.cuda, "CUDAGraph", Kept)  # noqa: B010  (a constant for mypy)


def kernels(graph: Any) -> Counter[str]:
    """How often each kernel runs in a replay; copies, memsets and the like count as kernels of these names.

    Args:
        graph: a torch.cuda.CUDAGraph that was made after ``keep_graphs``.
    """
    at, count = ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t()
    _call("cuGraphGetNodes", at, None, ctypes.byref(count))
    nodes = (ctypes.c_void_p * count.value)()
    _call("cuGraphGetNodes", at, nodes, ctypes.byref(count))
    return Counter(_name(ctypes.c_void_p(node)) for node in nodes)


def plain(found: Counter[str]) -> Counter[str]:
    """The same by names that say only what a kernel computes.

    Inductor numbers the kernels of a module, and names each after the ops that its inputs have gone through. So the
    name of a stock kernel may hold ``edit_``, though that op is a launch of its own.
    """
    merged: Counter[str] = Counter()
    for name, times in found.items():
        if name.startswith("triton_"):
            name = re.sub(r"_\d+$", "", name).replace("_edit_", "", 1)
        merged[name] += times
    return merged


def _name(node: ctypes.c_void_p) -> str:
    kind, found, name = ctypes.c_int(), _Kernel(), ctypes.c_char_p()
    _call("cuGraphNodeGetType", node, ctypes.byref(kind))
    if kind.value:
        return _OTHERS.get(kind.value, f"node of type {kind.value}")
    _call("cuGraphKernelNodeGetParams_v2", node, ctypes.byref(found))
    if found.kernel:
        _call("cuKernelGetName", ctypes.byref(name), ctypes.c_void_p(found.kernel))
    else:
        _call("cuFuncGetName", ctypes.byref(name), ctypes.c_void_p(found.function))
    return (name.value or b"").decode()


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(function: str, *arguments: Any) -> None:
    failed = getattr(_driver(), function)(*arguments)
    if failed:
        raise RuntimeError(f"{function} failed with CUDA error {failed}")
