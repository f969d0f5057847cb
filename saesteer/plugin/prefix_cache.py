"""Keys of the prefix cache's blocks: what is edited within a block is part of its key. Knows runs, and no spec.

vLLM hashes a block with the hash of the block before it, its tokens, and extra keys such as a LoRA adapter's name. Here
the edits of the block's positions join these keys, so two requests share a block exactly where their tokens and their
edits agree, up to there. A block without an edit has stock's own key: whoever edits only what it generates shares its
prompt with requests that edit nothing.

A key/value entry depends on the tokens up to its own position, hence on edits up to there. Images are the exception:
some models let the tokens of one image attend to each other both ways, so a block that meets an image is keyed by the
edits up to the image's end.

Wraps, in the process that schedules:
    generate_block_hash_extra_keys   also where it was imported by name before
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from saesteer.config.config import KEY
from saesteer.planning.runs import Run, meeting

RUNS = f"{KEY}_runs"  # beside the spec in extra_args, from the front end to the scheduler (admission.keyed)


def runs_of(request: Any) -> Sequence[Run]:
    """The runs of a request in the scheduler; none where it edits nothing."""
    extra = getattr(request.sampling_params, "extra_args", None)
    found: Sequence[Run] = extra.get(RUNS, ()) if extra else ()
    return found


def key_of(request: Any, start: int, end: int) -> str | None:
    """What the edits of a block add to its key; None where it has none.

    Args:
        request: vLLM's, in the scheduler.
        start: first position of the block.
        end: the one behind its last.
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
    """Ids of the blocks of a request that its edits have changed: from the first edited one on.

    Args:
        manager: vLLM's KVCacheManager.
        request: vLLM's, which it holds blocks for.
    """
    found = runs_of(request)
    if not found:
        return set()
    first = found[0][0]
    for feature in request.mm_features or ():
        image = feature.mm_position
        if image.offset < first < image.offset + image.length:
            first = image.offset
    return {
        block.block_id
        for group in manager.coordinator.single_type_managers
        for block in (group.req_to_blocks.get(request.request_id) or ())[first // group.block_size :]
        if not block.is_null
    }


def _keying(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def generate_block_hash_extra_keys(
        request: Any, start_token_idx: int, end_token_idx: int, start_mm_idx: int
    ) -> tuple[tuple[Any, ...] | None, int]:
        keys, next_mm_idx = original(request, start_token_idx, end_token_idx, start_mm_idx)
        own = key_of(request, start_token_idx, end_token_idx)
        return (keys if own is None else (*(keys or ()), (KEY, own))), next_mm_idx

    return generate_block_hash_extra_keys
