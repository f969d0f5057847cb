"""Whether the op's answer to a case is right: nothing that is wrong is timed. Knows the reference, and no clocks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bench.batch import EPS, FORMS, Batches
from bench.cases import THRESHOLD, Case
from saesteer.kernels.reference import edit_ref_
from tests.kernels.tables import copied, make_positions, make_work, relative_error

Call = Callable[..., object]  # takes the arguments of batch.edit

_TOLERANCE = 1e-3  # both sides round once to bf16, and fall on different sides of a tie now and then
_NEAR = 1e-4  # a feature so near to its threshold may be active on one side alone


class Gate:
    """One case in one form, and what the reference makes of some of its tokens.

    Args:
        batches: of the width.
        case: to be checked.
        form: of FORMS.
    """

    def __init__(self, batches: Batches, case: Case, form: str) -> None:
        self.batches, self.case, self.form = batches, case, form
        self.batch = batches.batch(case, 1, 1.0)
        self.stream = batches.stream(case)
        self.tokens, rows, positions = self._sample()
        self.want, self.counts = self._reference(rows, positions)

    def wrong(self, call: Call) -> str | None:
        """What is wrong with what `call` does to the case; None when nothing is."""
        stream = (self.stream[0].clone(), self.stream[1].clone())
        batch = self.batch
        batch.counts.zero_()
        work, listed = batch.bound[0].work, self._items()
        if int(work[0, 0]) != listed:
            return f"{int(work[0, 0])} items are listed, expected {listed}"
        call(*self.batches.call(batch.counts, batch.bound[0], self.form, stream))
        idle = torch.ones(self.case.tokens, dtype=torch.bool)
        idle[torch.tensor([t for t, _, _ in _tokens(self.case)], dtype=torch.int64)] = False
        for name, ours, want, was in zip(("stream", "second"), stream, self.want, self.stream, strict=True):
            if not torch.equal(ours[idle], was[idle]):
                return f"{name}: tokens without an edit have changed"
            if not bool(torch.isfinite(ours).all()):
                return f"{name}: not all of it is finite"
            error = relative_error(ours[self.tokens], want)
            if not error < _TOLERANCE:
                return f"{name}: relative error {error:.1e} to the reference"
        if self.counts is not None and not torch.equal(batch.counts.cpu(), self.counts):
            return "the counters are not the reference's"
        return None

    def _items(self) -> int:
        span = int(self.batch.bound[0].work[0, 2])
        return sum(-(-self.case.lengths[request] // span) for request in self.case.steered)

    def _sample(self) -> tuple[Tensor, list[int], list[int]]:
        """Some steered tokens, with row and position: few where the reference ranks a dictionary for each entry."""
        every = _tokens(self.case)
        most = max(1, 64 // self.case.edits) if self.case.kind == "topk" else 64
        chosen = torch.randperm(len(every))[:most].tolist()
        tokens = torch.tensor([every[at][0] for at in chosen], dtype=torch.int64)
        return tokens, [every[at][1] for at in chosen], [every[at][2] for at in chosen]

    def _reference(self, rows: list[int], positions: list[int]) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
        """Stream and second tensor of the sampled tokens; the counters, where all steered tokens are among them."""
        batches, batch = self.batches, self.batch
        stream, second = (tensor[self.tokens].cpu() for tensor in self.stream)
        if self.case.kind == "reconstruct":
            pre = stream.float() @ batches.exact_enc.T
            # Those near a threshold are left out: there both answers are right.
            kept = ~((pre - THRESHOLD).abs() < _NEAR).any(1)
            rows = [row for row, keep in zip(rows, kept.tolist(), strict=True) if keep]
            positions = [position for position, keep in zip(positions, kept.tolist(), strict=True) if keep]
            self.tokens, stream, second = self.tokens[kept], stream[kept], second[kept]
        items = [(at, row, positions[at]) for at, row in enumerate(rows)]
        counts = torch.zeros_like(batch.counts, device="cpu")
        bound = copied(
            batch.bound[0],
            "cpu",
            work=make_work(items, len(rows)),
            positions=make_positions(items, len(rows)),
            w_enc=batches.exact_enc,
            w_dec=batches.exact_dec,
        )
        bare = self.form == "bare"
        edit_ref_(
            stream,
            None if bare else second,
            None if bare else batches.norm_weight.cpu(),
            counts,
            bound,
            FORMS[self.form],
            EPS,
            1.0,
        )
        return (stream, second), counts if len(rows) == self.case.steered_tokens else None


def _tokens(case: Case) -> list[tuple[int, int, int]]:
    """Token, row and position of every steered token."""
    found, first, steered = [], 0, set(case.steered)
    for request, length in enumerate(case.lengths):
        if request in steered:
            found += [(first + at, 1 + request, 1 + at) for at in range(length)]
        first += length
    return found
