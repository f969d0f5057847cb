"""What warm-up launches has every variant of every kernel that a step can launch. In place of kernels, their calls.

A variant that is missed would be compiled while a server serves, which takes seconds.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from saesteer.kernels import layout
from saesteer.kernels.bound import Bound
from saesteer.kernels.edit import launch
from saesteer.kernels.edit.configs import CONFIGS

KERNELS = ("edit_kernel", "encode_kernel", "full_kernel", "lone_kernel", "many_kernel")
Variant = tuple[str, tuple[tuple[str, str], ...]]


class Called:
    """Takes down with what constants a kernel is launched."""

    def __init__(self, name: str, seen: set[Variant]) -> None:
        self.name, self.seen = name, seen

    def __getitem__(self, _: object) -> Any:
        return lambda *_, **constants: self.seen.add(
            (self.name, tuple((key, str(of)) for key, of in constants.items()))
        )


def site(width: int, dense: int, round_: int, max_tokens: int) -> Any:
    """As much of a Bound as a launch looks at; its tensors have no memory."""
    words = layout.scratch_words(width, layout.even(dense), round_)
    names = ("index", "positions", "w_enc", "w_dec", "b_enc", "threshold", "b_dec", "cells", "kept", "before", "after")
    return SimpleNamespace(
        **dict.fromkeys(names, torch.empty(1, dtype=torch.bfloat16, device="meta")),
        width=width,
        dense_size=dense,
        has_norms=False,
        kinds=torch.zeros(1, dtype=torch.int32),
        work=torch.empty(max_tokens + 1, 4, device="meta"),
        table=torch.empty(2, 2, device="meta"),
        registers=torch.empty(1, 1, device="meta"),
        scratch=torch.empty(words, device="meta"),
    )


def launched(bound: Any, tokens: int, kinds: int) -> set[Variant]:
    """By a step outside of graphs."""
    seen: set[Variant] = set()
    with pytest.MonkeyPatch.context() as patch:
        for name in KERNELS:
            patch.setattr(launch, name, Called(name, seen))
        patch.setattr(launch, "capture", lambda *_: None)  # it has one variant for each form
        patch.setattr(launch, "_multiprocessors", lambda _: 132)
        bound.kinds[:] = kinds
        stream = torch.empty(tokens, bound.width, dtype=torch.bfloat16, device="meta")
        launch.edit_triton(stream, None, None, torch.empty(1, 1), bound, layout.BARE, 0.0, 0.0)
    return seen


@settings(deadline=None, max_examples=150)
@given(
    width=st.sampled_from([min(width, 5376) for width in CONFIGS]),
    dense=st.sampled_from([0, 300, 16384, 262144]),
    rounds=st.integers(1, 200),
    max_tokens=st.sampled_from([64, 300, 512, 2048, 8192, 16384]),
    data=st.data(),
)
def test_a_step_launches_nothing_that_warm_up_has_not(
    width: int, dense: int, rounds: int, max_tokens: int, data: st.DataObject
) -> None:
    bound = site(width, dense, rounds * layout.TILE, max_tokens)
    warm = {one for tokens in Bound.launch_sizes(bound, max_tokens) for one in launched(bound, tokens, layout.KERNELS)}
    around = [rounds * layout.TILE + more for more in (-1, 0, 1)]
    sizes = st.integers(1, max_tokens) | st.sampled_from([min(max(1, one), max_tokens) for one in around])
    tokens = data.draw(sizes)
    kinds = data.draw(st.integers(0, layout.KERNELS)) & layout.KERNELS
    capturing = data.draw(st.sampled_from([0, layout.BEFORE, layout.AFTER, layout.BEFORE | layout.AFTER]))
    assert launched(bound, tokens, kinds | capturing) <= warm


@pytest.mark.parametrize("width", [min(width, 5376) for width in CONFIGS])
@pytest.mark.parametrize("tokens", [1, 16, 256, 257, 511, 512, 513])
def test_one_kernel_edits_every_row_of_a_step_that_may_be_captured(tokens: int, width: int) -> None:
    """So it finds the rows of any list that is replayed there; a longer step has others for most rows."""
    bound = site(width, 300, layout.TILE, 1024)
    names = {name for name, _ in launched(bound, tokens, layout.KERNELS)}
    assert names == ({"encode_kernel", "edit_kernel"} if tokens <= 512 else set(KERNELS))
