"""Doses of a request: how much its edits changed the stream at each site, relative to the stream's own length.

The device measures them in words after a row's counts (kernels/layout.py); this file adds the words up and puts them
into JSON. Knows plans and numbers, no device and no server.

A token's dose at a site is |y - x| / |x|, where x is the tensor as it arrives there and y is what all edits of the
request leave there. A token that no edit changed has no dose. Where a server has a limit, the report gives the dose
that the edits asked for.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from saesteer.kernels import layout
from saesteer.language.sites import order
from saesteer.planning.plan import Catalog, Plan


def sites_of(plan: Plan, catalog: Catalog) -> tuple[str, ...]:
    """The sites whose ops make the plan's changes, in the order of a forward pass and of the counts' words.

    A site where the plan only reads is left out.
    """
    return tuple(sorted({catalog.op_site(group.site) for group in plan.groups}, key=order))


def merge(kept: NDArray[np.int32], fresh: NDArray[np.int32], edits: int) -> NDArray[np.int32]:
    """The words of two rows that one request has had, one after the other, merged into one row; a new array.

    Args:
        kept: int32 [counters], the counts of the edits, then DOSE_WORDS words for each site; zeros may follow.
        fresh: the same for the other row.
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
    """What an answer reports: for each site a JSON object ``{"site", "max", "mean", "tokens"}``, numbers to 4 digits.

    Args:
        counters: int32 [counters] as in ``merge``.
        edits: how many edits are counted.
        sites: the result of ``sites_of``.
        limited: whether the server has a limit; if so, each object also reports how many tokens were above it.
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


def _doses(counters: NDArray[np.int32], edits: int) -> NDArray[np.int32]:
    """The words of the doses, a view [sites, DOSE_WORDS]; what follows the last whole site is left out."""
    whole = (len(counters) - edits) // layout.DOSE_WORDS * layout.DOSE_WORDS
    return counters[edits : edits + whole].reshape(-1, layout.DOSE_WORDS)


def _rounded(dose: Any) -> float:
    return float(f"{float(dose):.4g}")
