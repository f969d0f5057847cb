"""What is read of rows of a site's tensor without a dictionary: probes' scores and reductions. Knows no request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

_PARTS = 3  # of a direction on a GPU with a bf16 stream: numbers of 8 bits that add up to the 24 of fp32


@dataclass(frozen=True, slots=True, eq=False)
class Probes:
    """Probes at several sites that are read together; ``of`` makes it."""

    # Of sites that have equally many probes: their numbers, None for all; directions [sites, m, d] fp32, or in parts
    # [sites, 3 m, d] bf16.
    groups: Sequence[tuple[Tensor | None, Tensor]]
    columns: Tensor | None  # where each probe's product is among those of the groups; None: they are in order
    bias: Tensor  # [k] fp32

    @classmethod
    def of(
        cls, directions: Tensor, bias: Sequence[float], at: Sequence[int], device: torch.device, dtype: torch.dtype
    ) -> Probes:
        """Put probes on a device.

        Args:
            directions: [k, d] fp32, on the host.
            bias: of each.
            at: the number of each one's site; every number up to the largest has one.
            device: where rows will be.
            dtype: of the rows.
        """
        own: list[list[int]] = [[] for _ in range(max(at) + 1)]
        for number, site in enumerate(at):
            own[site].append(number)
        groups: list[tuple[Tensor | None, Tensor]] = []
        order: list[int] = []
        for size in sorted({*map(len, own)}):
            sites = [site for site, members in enumerate(own) if len(members) == size]
            order += [number for site in sites for number in own[site]]
            v = directions[torch.tensor([own[site] for site in sites])]
            if device.type == "cuda" and dtype == torch.bfloat16:
                v = _in_parts(v)
            which = None if len(sites) == len(own) else torch.tensor(sites).to(device)
            groups.append((which, v.to(device)))
        columns = None if order == sorted(order) else torch.tensor(order).argsort().to(device)
        return cls(groups, columns, torch.tensor(bias, dtype=torch.float32).to(device))

    @classmethod
    def joined(cls, several: Sequence[Probes]) -> Probes:
        """Probes of one site each, all of the same, one behind the other."""
        first, *_ = [one.groups[0][1] for one in several]
        parts = 1 if first.dtype == torch.float32 else _PARTS
        own = [one.groups[0][1].view(1, parts, len(one.bias), -1) for one in several]
        v = torch.cat(own, dim=2).flatten(1, 2)
        return cls([(None, v)], None, torch.cat([one.bias for one in several]))


def _in_parts(v: Tensor) -> Tensor:
    """[sites, m, d] fp32 as _PARTS numbers that add up to each, [sites, _PARTS · m, d] bf16."""
    parts = []
    for _ in range(_PARTS):
        parts.append(v.bfloat16())
        v = v - parts[-1].float()
    return torch.cat(parts, dim=1)


def read_probes(x: Tensor, probes: Probes) -> Tensor:
    """x · v + bias for each row and probe, in fp32: products of bf16 are exact there.

    Args:
        x: [n, sites, d], any float dtype.
        probes: k of them, at these sites.

    Returns:
        [n, k] fp32.
    """
    found = []
    for sites, v in probes.groups:
        rows = (x if sites is None else x[:, sites]).transpose(0, 1)
        if v.dtype == torch.bfloat16:
            products = torch.bmm(rows, v.transpose(1, 2), out_dtype=torch.float32)
            products = products.view(*products.shape[:2], _PARTS, v.shape[1] // _PARTS).sum(2)
        else:
            products = torch.bmm(rows.float(), v.transpose(1, 2))
        found.append(products.transpose(0, 1).flatten(1))
    scores = found[0] if len(found) == 1 else torch.cat(found, dim=1)
    return (scores if probes.columns is None else scores[:, probes.columns]) + probes.bias


def reduce_rows(x: Tensor, how: Literal["sum", "max", "last"]) -> Tensor:
    """What one part of the rows adds to their reduction, [d] fp32.

    It is their sum, the largest of each column, or the last row; ``saesteer.planning.reductions`` joins the parts.

    Args:
        x: [n, d], any float dtype, at least one row.
        how: what is made of the rows.
    """
    if how == "sum":
        return x.sum(0, dtype=torch.float32)
    return (x.amax(0) if how == "max" else x[-1]).float()
