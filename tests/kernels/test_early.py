"""A kernel in front that lets the next one begin early, and stores its part late: the edit kernel waits for that part.

On a GPU from Hopper on, as torch.compile's kernels do with TORCHINDUCTOR_ENABLE_PDL=1.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="no Triton on this platform")

import triton
import triton.language as tl
from triton.language.extra import cuda

from saesteer.kernels import layout
from saesteer.kernels.bound import bind
from saesteer.kernels.layout import NORMED
from tests.kernels.calls import COUNTS, EDIT, MUTATED, SLOTS, STREAM, clone, edit_args
from tests.kernels.tables import Entry, make_table

NANOSECONDS = 50_000  # far longer than a launch takes
GROUPS = {
    "one": [[Entry(3, scale=0.0, shift=2.0)]],
    "one that is read": [[Entry(3, scale=0.5, shift=2.0, gates=1, flags=layout.READ)]],
    "one by what was read": [[Entry(3, scale=0.5, shift=2.0, flags=layout.HELD, size=1)]],
    "several": [[Entry(at % SLOTS, shift=0.01 * at) for at in range(9)]],
}


@triton.jit
def late_kernel(stream, came, registers, read, elements, numbers, LATE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """stream <- came and registers <- read, LATE nanoseconds behind the permission to begin."""
    cuda.gdc_wait()
    cuda.gdc_launch_dependents()
    begin = cuda.globaltimer()
    while cuda.globaltimer() - begin < LATE:
        pass
    at = tl.arange(0, BLOCK)
    tl.store(stream + at, tl.load(came + at, mask=at < elements), mask=at < elements)
    tl.store(registers + at, tl.load(read + at, mask=at < numbers), mask=at < numbers)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="needs a Hopper GPU"
)
@pytest.mark.parametrize("name", GROUPS)
def test_the_stream_may_come_late(name: str) -> None:
    device = torch.device("cuda")
    args, bound = edit_args(device, NORMED)
    bound = replace(bound, table=make_table([[GROUPS[name]]], 1, device), dense_size=0)
    bind(bound)
    came, read = args[STREAM].clone(), torch.rand_like(bound.registers)
    start = clone(args)
    bound.registers.copy_(read)
    want = clone(args)
    EDIT(*want)
    wanted = bound.registers.clone()
    assert want[COUNTS].any() or not torch.equal(wanted, read), "it does something"

    def step() -> Any:
        sizes = came.numel(), read.numel()
        late_kernel[(1,)](args[STREAM], came, bound.registers, read, *sizes, NANOSECONDS, 1024, launch_pdl=True)
        EDIT(*args)

    step()  # compile
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        step()
    for _ in range(3):
        for at in MUTATED:
            args[at].copy_(start[at])
        args[STREAM].zero_()
        bound.registers.zero_()
        graph.replay()
        for at in MUTATED:
            assert torch.equal(args[at], want[at])
        assert torch.equal(bound.registers, wanted)
