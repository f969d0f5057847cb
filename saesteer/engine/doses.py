"""Doses of a request: how much its edits changed the stream at each site, relative to the stream's own length.

They are measured on the device, in words behind a row's counts (kernels/layout.py); here those words are added up and
put into JSON. Knows plans and numbers, no device and no server.

A token's dose at a site is |y - x| / |x|, x the tensor as it comes there and y as all edits of the request leave it
there. A token that no edit changed has none. Where a server has a limit, what is told is what the edits asked for.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from saesteer.kernels import layout
from saesteer.language.sites import order
from saesteer.planning.plan import Plan


def sites_of(plan: Plan) -> tuple[str, ...]:
    """The sites that the plan changes, canonical names in the order of a forward pass, as their words stand in counts.

    A site with conditions alone changes nothing and is none of them.
    """
    return tuple(sorted({group.site for group in plan.groups}, key=order))


def merge(kept: NDArray[np.int32], fresh: NDArray[np.int32], edits: int) -> NDArray[np.int32]:
    """The words of two rows that one request has had, one after the other, as of a single row; a new array.

    Args:
        kept: int32 [counters], the counts of the edits and behind them DOSE_WORDS for each site; zeros may follow.
        fresh: the same of the other row.
        edits: how many edits are counted, the same in both.
    """
    assert kept.shape == fresh.shape
    found: NDArray[np.int32] = kept + fresh
    here, one, two = (_doses(words, edits).view(np.float32) for words in (found, kept, fresh))
    here[:, layout.DOSE_MAX] = np.maximum(one[:, layout.DOSE_MAX], two[:, layout.DOSE_MAX])
    here[:, layout.DOSE_SUM] = one[:, layout.DOSE_SUM] + two[:, layout.DOSE_SUM]
    return found


def report(
    counters: NDArray[np.int32], edits: int, sites: Sequence[str], *, limited: bool = False
) -> list[dict[str, Any]]:
    """What an answer says, a JSON object for each site: ``{"site", "max", "mean", "tokens"}``, numbers to 4 digits.

    Args:
        counters: int32 [counters] as in ``merge``.
        edits: how many edits are counted.
        sites: those of ``sites_of``.
        limited: whether the server has a limit; then each object says how many tokens were above it, too.
    """
    words = _doses(counters, edits)
    assert len(words) >= len(sites)
    found = []
    for site, block, doses in zip(sites, words, words.view(np.float32), strict=False):  # zeros may follow
        tokens = int(block[layout.DOSE_TOKENS])
        entry: dict[str, Any] = {"site": site, "max": None, "mean": None, "tokens": tokens}
        if tokens:
            entry["max"] = _rounded(doses[layout.DOSE_MAX])
            entry["mean"] = _rounded(float(doses[layout.DOSE_SUM]) / tokens)
        if limited:
            entry["tokens_limited"] = int(block[layout.DOSE_LIMITED])
        found.append(entry)
    return found


def over(counters: NDArray[np.int32], edits: int) -> int:
    """Tokens whose dose was above the server's limit, those of all sites added up.

    Args:
        counters: int32 [counters] as in ``merge``.
        edits: how many edits are counted.
    """
    return int(_doses(counters, edits)[:, layout.DOSE_LIMITED].sum())


def _doses(counters: NDArray[np.int32], edits: int) -> NDArray[np.int32]:
    """The words of the doses, a view [sites, DOSE_WORDS]; what follows the last whole site is left out."""
    whole = (len(counters) - edits) // layout.DOSE_WORDS * layout.DOSE_WORDS
    return counters[edits : edits + whole].reshape(-1, layout.DOSE_WORDS)


def _rounded(dose: Any) -> float:
    return float(f"{float(dose):.4g}")
