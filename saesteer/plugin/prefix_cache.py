"""Keys of the prefix cache's blocks: a block's edits are part of its key. Knows runs of edited positions, but no spec.

vLLM hashes a block from the previous block's hash, its tokens, and extra keys such as a LoRA adapter's name. The edits
of its positions become extra keys here, so two requests share a block exactly if their tokens and edits agree up to its
end. A block without an edit keeps stock's key: a request that edits only generated tokens shares its prompt's blocks
with requests that edit nothing.

Keys and values depend on the tokens up to their own position, and so on the edits up to there. Images are an exception:
in some models the tokens of an image attend to each other both ways, so a block that overlaps an image is keyed by the
edits up to the image's end.
"""

from collections.abc import Sequence
from typing import Any

from saesteer.config.config import KEY
from saesteer.planning.runs import Run, meeting
from saesteer.plugin.results.sending import sent
from saesteer.plugin.wrap import Original, around

# Sent with a request (sending.py):
FIRST = "first"  # the first position that is read, of those to be recomputed, and of all
RUNS = "runs"  # as of admission.keyed


def runs_of(request: Any) -> Sequence[Run]:
    """The runs of a request in the scheduler; none if it edits nothing."""
    found: Sequence[Run] = sent(request.sampling_params).get(RUNS, ())
    return found


def key_of(request: Any, start: int, end: int) -> str | None:
    """What the edits of a block add to its key; None if it has no edits.

    Args:
        request: vLLM's, in the scheduler.
        start: first position of the block.
        end: the position after its last.
    """
    found = runs_of(request)
    if not found:
        return None
    for feature in request.mm_features or ():
        image = feature.mm_position
        if image.offset < end and start < image.offset + image.length:
            end = max(end, image.offset + image.length)
    inside = meeting(found, start, end)
    return ",".join(f"{lo - start}-{hi - start}:{digest}" for lo, hi, digest in inside) or None


def edited_blocks(manager: Any, request: Any) -> set[int]:
    """The ids of a request's blocks that its edits have changed: the first edited block and all after it.

    Args:
        manager: vLLM's KVCacheManager.
        request: vLLM's, with blocks in it.
    """
    found = runs_of(request)
    if not found:
        return set()
    first = found[0][0]
    for feature in request.mm_features or ():
        image = feature.mm_position
        if image.offset < first < image.offset + image.length:
            first = image.offset
    return blocks_from(manager, request, first)


def blocks_from(manager: Any, request: Any, first: int) -> set[int]:
    """The ids of a request's blocks from the one that has a position; arguments as of ``edited_blocks``."""
    return {
        block.block_id
        for group in manager.coordinator.single_type_managers
        for block in (group.req_to_blocks.get(request.request_id) or ())[first // group.block_size :]
        if not block.is_null
    }


class _Shorter:
    """A request that says it has fewer tokens: vLLM takes no more of it from the cache than all but the last."""

    def __init__(self, request: Any, num_tokens: int) -> None:
        self._request = request
        self.num_tokens = num_tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


def first_read(request: Any) -> int | None:
    """The first position that a request in the scheduler must compute since it reads it; None: there is none.

    One that was preempted computes again all that it reads, so that nothing of a reduction is counted twice.
    """
    first, again = sent(request.sampling_params).get(FIRST, (None, None))
    found: int | None = again if request.num_preemptions else first
    return found


@around
def _limiting(original: Original, self: Any, request: Any, max_cache_hit_length: int | None = None) -> Any:
    # From 0.33 on vLLM may say itself how many tokens may come from the cache, and then asks no request.
    first = first_read(request)
    if max_cache_hit_length is not None:
        return original(self, request, max_cache_hit_length if first is None else min(first, max_cache_hit_length))
    if first is None or first >= request.num_tokens:
        return original(self, request)
    return original(self, _Shorter(request, first + 1))


@around
def _keying(
    original: Original, request: Any, start_token_idx: int, end_token_idx: int, *args: Any, **kwargs: Any
) -> tuple[tuple[Any, ...] | None, int]:
    keys, next_mm_idx = original(request, start_token_idx, end_token_idx, *args, **kwargs)
    own = key_of(request, start_token_idx, end_token_idx)
    return (keys if own is None else (*(keys or ()), (KEY, own))), next_mm_idx
