"""Kernels that let the next one begin early, and store late: the edit kernel waits for what it needs of them.

On a GPU from Hopper on. The kernel in front does what torch.compile's do with TORCHINDUCTOR_ENABLE_PDL=1; ours is the
encoder.
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
from saesteer.kernels.layout import BARE, NORMED
from tests.kernels.calls import COUNTS, EDIT, MUTATED, SLOTS, STREAM, TOKENS, clone, edit_args
from tests.kernels.tables import Entry, make_table

NANOSECONDS = 50_000  # far longer than a launch takes
GROUPS = {
    "one": [[Entry(3, scale=0.0, shift=2.0)]],
    "one that is read": [[Entry(3, scale=0.5, shift=2.0, gates=1, flags=layout.READ)]],
    "one by what was read": [[Entry(3, scale=0.5, shift=2.0, flags=layout.HELD, size=1)]],
    "several": [[Entry(at % SLOTS, shift=0.01 * at) for at in range(9)]],
    "whole": [[Entry(0, flags=layout.RECONSTRUCT, size=SLOTS, gain=0.5)]],
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


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="needs a Hopper GPU"
    ),
]


@pytest.mark.parametrize("name", GROUPS)
def test_the_stream_may_come_late(name: str) -> None:
    device = torch.device("cuda")
    args, bound = edit_args(device, NORMED)
    dense = (0, SLOTS) if name == "whole" else (0, 0)
    table = make_table([[GROUPS[name]]], 1, device, dense=dense)
    bound = replace(bound, table=table, dense_size=dense[1])
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


def test_a_large_dictionary_is_encoded_first() -> None:
    """A reconstruction, and a clamp of what the encoder decides, of 8,192 features: it takes longer than a launch."""
    device, width, features = torch.device("cuda"), 2304, 8192
    args, bound = edit_args(device, BARE)
    rows = torch.randn(features, width, device=device, dtype=torch.bfloat16) / width**0.5
    weights: dict[str, Any] = {"w_enc": rows, "w_dec": rows, "b_dec": torch.zeros(2, width, device=device)}
    weights |= {name: torch.zeros(features, device=device) for name in ("b_enc", "threshold")}
    scratch = torch.zeros(layout.scratch_words(width, features, layout.TILE), device=device)
    whole = Entry(0, flags=layout.RECONSTRUCT, size=features)
    args[STREAM] = torch.randn(TOKENS, width, device=device).to(torch.bfloat16)
    start = args[STREAM].clone()
    f = torch.relu(start[[1, 3]].float() @ rows.float().T)
    strongest = int(f[0].argmax())
    for group in ([whole], [Entry(strongest, scale=0.0, shift=50.0, counter=1), whole]):
        table = make_table([[[group]]], 1, device, dense=(0, features))
        other = replace(bound, **weights, scratch=scratch, table=table, dense_size=features)
        bind(other)
        truth = start.float()
        if len(group) > 1:
            f[:, strongest] = 50.0
        truth[[1, 3]] = f @ rows.float()
        EDIT(*args)  # compile
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            EDIT(*args)
        for _ in range(3):
            args[STREAM].copy_(start)
            scratch.zero_()
            torch.cuda.synchronize()
            graph.replay()
            torch.testing.assert_close(args[STREAM].float(), truth, rtol=2**-7, atol=0.05)
