"""The least kernels' launches and checks for each case that bench.limits times. Knows no clocks and no graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.batch import EPS, TINY
from bench.cases import ACTIVE, FEATURES, MIXED
from bench.timing import DEVICE, DTYPE, Launch
from saesteer.kernels.edit.configs import block, configs

_TOLERANCE = 4e-3  # both sides round once to bf16, where a sum may fall on the other side of a tie
ENTRIES = 32
EARLY = {"launch_pdl": True}


@dataclass(frozen=True, slots=True)
class Limit:
    """A kernel to be timed: `launches` in one graph, cold. `check` says what is wrong with its answer, if anything."""

    case: str
    width: int
    how: str
    launches: Callable[[], Sequence[Launch]]
    check: Callable[[], str | None] = field(default=lambda: None)


class Weights:
    """The dictionary, and a stream with its norm."""

    def __init__(self, width: int, features: int = FEATURES) -> None:
        torch.manual_seed(width)
        self.width, self.features = width, features
        w = torch.randn(features, width, device=DEVICE)
        self.w_enc = (w / w.norm(dim=1, keepdim=True)).to(DTYPE)
        self.w_dec = self.w_enc.flip(0).contiguous()
        self.norm_weight = torch.rand(width, device=DEVICE).to(DTYPE)
        self.list = torch.arange(features, dtype=torch.int32, device=DEVICE)
        # In random order: the line of a neighbour would be in the L1 already.
        self.chain = torch.randperm(features).int().to(DEVICE)

    def streams(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Stream and its norm."""
        both = torch.randn(2, tokens, self.width, device=DEVICE).to(DTYPE)
        return both[0], both[1]

    def ids(self, many: int, requests: int, entries: int) -> list[Tensor]:
        """[requests, entries] for each of `many` launches: no row twice before the dictionary is through."""
        rounds = -(-many * requests * entries // self.features)
        order = torch.cat([torch.randperm(self.features) for _ in range(rounds)])[: many * requests * entries]
        return list(order.int().view(many, requests, entries).to(DEVICE).unbind())

    def wrong(self, x: Tensor, rows: Tensor, got: tuple[Tensor, Tensor], encodes: bool = True) -> str | None:
        """What is wrong with an answer; rows are each token's, [T, entries]."""
        x = x.float()
        enc, dec = self.w_enc[rows.long()].float(), self.w_dec[rows.long()].float()
        delta = (
            3.0 - torch.einsum("tw,tew->te", x, enc).clamp_min(0.0) if encodes else torch.full_like(enc[..., 0], 3.0)
        )
        y = (x + torch.einsum("te,tew->tw", delta, dec)).to(DTYPE)
        z = y.float()
        z = z * torch.rsqrt(z.square().mean(1, keepdim=True) + EPS) * (1.0 + self.norm_weight.float())
        for name, ours, want in (("stream", got[0], y.float()), ("second", got[1], z)):
            error = float(torch.linalg.vector_norm(ours.float() - want) / torch.linalg.vector_norm(want))
            if not error < _TOLERANCE:
                return f"{name} is off by {error:.1e}"
        return None


def ones(own: Weights) -> Iterator[Limit]:
    """16 tokens with one edit: chains of 0 to 3 loads in front of the rows; a vector; and nothing found."""
    from bench.least import one_kernel

    warps = 4 if own.width <= 3072 else 8
    x, second = own.streams(16)

    def launch(first: int, gain: float, stream: Tensor, out: Tensor, at: int = warps, **kind: Any) -> object:
        return one_kernel[(16,)](
            *(stream, out, own.norm_weight, own.chain, own.w_enc, own.w_dec, first, gain, EPS),
            **{"WIDTH": own.width, "BLOCK": block(at), "num_warps": at, "ABSENT": False, **kind, **EARLY},
        )

    def check(**kind: Any) -> str | None:
        stream, out = x.clone(), torch.empty_like(x)
        launch(32, 1.0, stream, out, **kind)
        rows = torch.arange(32, 48, device=DEVICE)
        for _ in range(kind["HOPS"]):
            rows = own.chain[rows].long()
        return own.wrong(x, rows[:, None], (stream, out), kind["ENCODES"])

    def all_of(**kind: Any) -> list[Launch]:
        return [partial(launch, 16 * at, TINY, x, second, **kind) for at in range(own.features // 16)]

    for encodes, case in ((True, "16 x 1"), (False, "16 x add")):
        for hops in (0, 1, 3):
            kind = {"HOPS": hops, "ENCODES": encodes}
            yield Limit(case, own.width, f"{hops} hops", partial(all_of, **kind), partial(check, **kind))
    for at in {4, 8, 16} - {warps}:
        kind = {"HOPS": 3, "ENCODES": True, "at": at}
        yield Limit("16 x 1", own.width, f"3 hops, {at} warps", partial(all_of, **kind), partial(check, **kind))
    for hops in (0, 1, 3):
        kind = {"HOPS": hops, "ENCODES": False, "ABSENT": True}
        yield Limit("16 x 1", own.width, f"part: nothing behind {hops} hops", partial(all_of, **kind))


_FEW = {
    2304: ((256, 256, 4), (288, 512, 4), (512, 512, 8), (144, 256, 4)),
    5376: ((256, 256, 4), (512, 512, 8), (672, 1024, 8), (384, 512, 8)),
}


def fews(own: Weights) -> Iterator[Limit]:
    """16 tokens with 32 edits: each program has some columns of a token, and dots and squares meet."""
    from bench.least import few_kernel

    x, second = own.streams(16)
    ids = own.ids(own.features // (16 * ENTRIES), 16, ENTRIES)
    for cols, wide, warps in _FEW[own.width]:
        shares = -(-own.width // cols)
        words = torch.zeros(16, shares, ENTRIES, dtype=torch.int64, device=DEVICE)
        squares = torch.zeros(16, shares, dtype=torch.int64, device=DEVICE)
        counts = torch.zeros(16, dtype=torch.int64, device=DEVICE)

        def launch(
            rows: Tensor,
            gain: float,
            stream: Tensor,
            out: Tensor,
            met: tuple[Tensor, ...] = (words, squares, counts),
            shape: tuple[int, ...] = (cols, wide, shares, warps),
            **kind: Any,
        ) -> object:
            constants = {"WIDTH": own.width, "COLS": shape[0], "BLOCK": shape[1], "SHARES": shape[2]}
            return few_kernel[(16, shape[2])](
                *(stream, out, own.norm_weight, own.list, rows, own.w_enc, own.w_dec, *met, gain, EPS),
                **{**constants, "ENTRIES": ENTRIES, "num_warps": shape[3], **kind, **EARLY},
            )

        def check(run: Any = launch, **kind: Any) -> str | None:
            wrong = None
            for rows in ids[:4]:
                stream, out = x.clone(), torch.empty_like(x)
                run(rows, 1.0, stream, out, **kind)
                wrong = wrong or own.wrong(x, rows, (stream, out))
            return wrong

        def all_of(run: Any = launch, **kind: Any) -> list[Launch]:
            return [partial(run, rows, TINY, x, second, **kind) for rows in ids * 2]

        for meets, name in ((2, "dots and squares meet"), (1, "part: dots meet"), (0, "part: nobody waits")):
            if meets < 2 and cols != 256:
                continue
            kind = {"MEETS": meets, "HOPS": 2}
            how = f"{shares} x {cols} columns, {warps} warps, {name}"
            yield Limit(
                "16 x 32",
                own.width,
                how,
                partial(all_of, **kind),
                partial(check, **kind) if meets == 2 else lambda: None,
            )


def turns(own: Weights) -> Iterator[Limit]:
    """8192 tokens with 32 edits: what passes through memory in three passes over turns of tokens, launched as ours."""
    from bench.least import passes_kernel

    tuned = configs(own.width).many
    requests, tokens = 16, 8192
    x, second = own.streams(tokens)
    ids = own.ids(own.features // (requests * ENTRIES), requests, ENTRIES)

    def launch(rows: Tensor, num_warps: int) -> object:
        each = tokens // requests // ENTRIES
        constants = {"WIDTH": own.width, "TOKENS": ENTRIES, "BLOCK": tuned.block_n, "STAGES": tuned.stages}
        return passes_kernel[(tokens // ENTRIES,)](
            *(x, second, own.norm_weight, rows, own.w_enc, own.w_dec, TINY, EPS, each),
            **{**constants, "BLOCK_Z": tuned.block_z, "AHEAD_Z": tuned.ahead_z, "num_warps": num_warps, **EARLY},
        )

    for warps in (tuned.num_warps, 2 * tuned.num_warps):
        how = f"part: three passes and no product, {warps} warps"
        yield Limit("8192 x 32", own.width, how, lambda at=warps: [partial(launch, one, at) for one in ids])


# Tokens of a turn, columns of a share, those at once, warps.
_SHARED = {
    2304: ((16, 768, 256, 8), (16, 768, 256, 4), (16, 512, 256, 4), (16, 1152, 128, 8), (32, 512, 256, 8)),
    5376: ((16, 1792, 256, 8), (16, 1344, 64, 8), (32, 1024, 256, 8)),
}


def shared(own: Weights) -> Iterator[Limit]:
    """504 tokens of one request with 32 edits: turns whose columns are dealt out, in which dots and squares meet."""
    from bench.least import turn_kernel

    tokens = MIXED[-1]
    x, second = own.streams(tokens)
    ids = [one[0] for one in own.ids(own.features // ENTRIES, 1, ENTRIES)]
    for each, cols, wide, warps in _SHARED[own.width]:
        many, shares = -(-tokens // each), -(-own.width // cols)
        words = torch.zeros(many, shares, each, ENTRIES, dtype=torch.int64, device=DEVICE)
        squares = torch.zeros(many, shares, each, dtype=torch.int64, device=DEVICE)
        counts = torch.zeros(many, dtype=torch.int64, device=DEVICE)

        def launch(
            rows: Tensor,
            gain: float,
            stream: Tensor,
            out: Tensor,
            meets: int,
            met: tuple[Tensor, ...] = (words, squares, counts),
            shape: tuple[int, ...] = (many, each, cols, wide, shares, warps),
        ) -> object:
            constants = dict(zip(("TOKENS", "COLS", "BLOCK", "SHARES", "num_warps"), shape[1:], strict=True))
            return turn_kernel[(shape[0], shape[4])](
                *(stream, out, own.norm_weight, rows, own.w_enc, own.w_dec, *met, gain, EPS, tokens),
                **{"WIDTH": own.width, "ENTRIES": ENTRIES, "MEETS": meets, **constants, **EARLY},
            )

        def check(run: Any = launch) -> str | None:
            stream, out = x.clone(), torch.empty_like(x)
            run(ids[0], 1.0, stream, out, 2)
            return own.wrong(x, ids[0].expand(tokens, -1), (stream, out))

        def all_of(meets: int, run: Any = launch) -> list[Launch]:
            return [partial(run, rows, TINY, x, second, meets) for rows in ids]

        for meets, name in ((2, "dots and squares meet"), (0, "part: nobody waits")):
            how = f"the 504 alone, {many} x {shares} programs of {each} x {cols}, {warps} warps, {name}"
            checked = check if meets == 2 else lambda: None
            yield Limit("8 + 504 x 32", own.width, how, partial(all_of, meets), checked)


def reconstructs(own: Weights) -> Iterator[Limit]:
    """16 tokens: torch's product with the whole encoder, and behind it a decode of active features, listed already."""
    from bench.yardsticks import DECODES, decode_launch

    x, out = own.streams(16)
    held = torch.empty(16, own.features, device=DEVICE, dtype=DTYPE)
    values = torch.full((16, ACTIVE), TINY, device=DEVICE)
    counts = torch.full((16,), ACTIVE, dtype=torch.int32, device=DEVICE)
    lists = own.ids(own.features // (16 * ACTIVE), 16, ACTIVE)

    def encode() -> None:
        torch.mm(x, own.w_enc.T, out=held)

    def both(decode: Launch) -> None:
        encode()
        decode()

    yield Limit("16 x reconstruct", own.width, "part: torch.mm with the encoder", partial(list, [encode] * 64))
    for wide, chunk, warps in DECODES:
        decodes = [decode_launch(out, values, ids, counts, own.w_dec, wide, chunk, warps) for ids in lists] * 5
        how = f"a decode of {chunk} rows of {wide} columns at once, {warps} warps, and no norm"
        yield Limit("16 x reconstruct", own.width, f"part: {how}", partial(list, decodes))
        behind = [partial(both, decode) for decode in decodes]
        yield Limit("16 x reconstruct", own.width, f"part: torch.mm, then {how}", partial(list, behind))
