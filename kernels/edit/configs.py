"""How each kernel is launched, by width: rows measured with `bench.kernels --sweep`. Nothing is tuned while serving.

Of a step's contents only the number of tokens matters here, so a request gets the same bits in all steps of one size.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from saesteer.kernels import layout


@dataclass(frozen=True, slots=True)
class EditConfig:
    """One way to launch the edit kernel."""

    num_warps: int
    chunk: int  # entries in flight at once; a power of two
    programs: int  # most programs per multiprocessor
    gather: int = 1  # chunks of partial sums in flight at once
    listed: int = 1024  # features that a reconstruction searches at once; a power of two from 32
    decoded: int = 4  # decoder rows of a reconstruction at once; a power of two
    ahead: int = 1  # as many of these in flight
    parts: int = layout.MOST_PARTS  # programs that may share one token


@dataclass(frozen=True, slots=True)
class LoneConfig:
    """One way to launch the kernel for long spans with one entry."""

    num_warps: int
    at_once: int  # tokens; a power of two
    stages: int  # loads in flight
    programs: int  # most programs per multiprocessor


@dataclass(frozen=True, slots=True)
class ManyConfig:
    """One way to launch the kernel for spans with many entries."""

    num_warps: int
    tokens: int  # of a program's turn; a power of two from 16 to layout.TILE
    entries: int  # at once; a power of two from 16
    block_k: int  # columns at once while encoding
    block_n: int  # and while decoding
    stages: int  # loads in flight
    programs: int  # most programs per multiprocessor
    block_z: int = 256  # columns at once of the norm
    ahead_z: int = 5  # as many of these in flight


@dataclass(frozen=True, slots=True)
class FullConfig:
    """One way to launch the kernel for long spans that are reconstructed."""

    num_warps: int
    decoded: int  # decoder rows at once; a power of two
    ahead: int  # as many of these in flight
    programs: int  # most programs per multiprocessor
    listed: int = 16384  # features searched at once; a power of two from 32


@dataclass(frozen=True, slots=True)
class EncodeConfig:
    """One way to launch the dense encoder."""

    num_warps: int
    block_m: int  # tokens
    block_n: int  # features
    block_k: int  # columns
    stages: int  # loads in flight
    programs: int  # most programs per multiprocessor


_ANY = 1 << 30


@dataclass(frozen=True, slots=True)
class Configs:
    """How the kernels are launched for one width."""

    edit: tuple[tuple[int, EditConfig], ...]  # each with the most tokens of a step that it is for, ascending
    lone: LoneConfig
    many: ManyConfig
    full: FullConfig
    encode: tuple[tuple[int, EncodeConfig], ...]  # as edit


MAX_WIDTH = 8192
TILED_ABOVE = 512  # tokens of a step, above which vLLM captures no graph by default, so the host may choose the kernels
MAP_BLOCK = 1024  # batch entries summed, and work items written, at once

# In fp32 the tiles above need more shared memory than there is.
EXACT_ENCODE = EncodeConfig(num_warps=4, block_m=16, block_n=64, block_k=32, stages=3, programs=4)

# The widest row that a line is for; or *, any that has no line of its own. Then the most tokens of a step, or *. Of
# 6144, sixteen tokens of eight parts are one program for each multiprocessor. Times are in bench/LOG.md.
_LAUNCHES = """
256   edit    *  num_warps=1 chunk=4 programs=16
256   lone    *  num_warps=1 at_once=1 stages=3 programs=16
1024  edit    *  num_warps=2 chunk=4 programs=8
1024  lone    *  num_warps=2 at_once=2 stages=3 programs=16
3072  edit   64  num_warps=4 chunk=4 programs=2 gather=2 decoded=8
3072  edit  512  num_warps=4 chunk=4 programs=2 listed=4096
3072  edit    *  num_warps=4 chunk=4 programs=4 listed=16384 ahead=3
3072  lone    *  num_warps=4 at_once=2 stages=3 programs=2
6144  edit   64  num_warps=8 chunk=4 programs=1 gather=2 parts=8
6144  edit  512  num_warps=4 chunk=2 programs=2 listed=4096
6144  edit    *  num_warps=4 chunk=4 programs=4 listed=16384 ahead=3
6144  lone    *  num_warps=4 at_once=1 stages=3 programs=2
6144  full    *  num_warps=2 decoded=2 ahead=3 programs=4
8192  edit    *  num_warps=16 chunk=4 programs=2
8192  lone    *  num_warps=8 at_once=1 stages=3 programs=1
8192  full    *  num_warps=4 decoded=2 ahead=3 programs=3
*     full    *  num_warps=1 decoded=2 ahead=3 programs=8
*     many    *  num_warps=4 tokens=32 entries=32 block_k=128 block_n=128 stages=4 programs=4
*     encode 64  num_warps=4 block_m=16 block_n=64 block_k=128 stages=3 programs=2
*     encode 256 num_warps=4 block_m=64 block_n=64 block_k=128 stages=3 programs=2
*     encode  *  num_warps=8 block_m=128 block_n=256 block_k=64 stages=4 programs=1
"""
_KINDS: dict[str, Any] = {
    "edit": EditConfig,
    "lone": LoneConfig,
    "many": ManyConfig,
    "full": FullConfig,
    "encode": EncodeConfig,
}


def _read(table: str) -> dict[int, Configs]:
    found: dict[str, dict[str, list[tuple[int, Any]]]] = {}
    for width, kind, tokens, *words in map(str.split, table.strip().splitlines()):
        made = _KINDS[kind](**{name: int(value) for name, _, value in (word.partition("=") for word in words)})
        most = _ANY if tokens == "*" else int(tokens)
        found.setdefault(width, {}).setdefault(kind, []).append((most, made))
    any_width, made_of = found.pop("*"), dict[int, Configs]()
    for width, own in found.items():
        rows: dict[str, Any] = {kind: tuple(several) for kind, several in (any_width | own).items()}
        alone = {kind: several[0][1] for kind, several in rows.items() if kind not in ("edit", "encode")}
        made_of[int(width)] = Configs(**rows | alone)
    return made_of


CONFIGS = _read(_LAUNCHES)  # by the widest row that they are for, ascending


@cache
def configs(width: int) -> Configs:
    """The launches for rows of `width` elements.

    Raises:
        ValueError: the width is not within 1..MAX_WIDTH.
    """
    if width >= 1:
        for widest, found in CONFIGS.items():
            if width <= widest:
                return found
    raise ValueError(f"width {width} is not served: expected 1 to {MAX_WIDTH}")


_T = TypeVar("_T")


def for_tokens(table: tuple[tuple[int, _T], ...], tokens: int) -> _T:
    """The row of `table` for a step of this number of tokens."""
    return next(found for most, found in table if tokens <= most)


def at_once(words: int, width: int, dense_size: int, tokens: int) -> int:
    """Tokens of a step that are encoded whole in one round, with so many words of scratch memory.

    Args:
        words: of scratch memory.
        width: of the stream.
        dense_size: features that are encoded; 0: all tokens take one round.
        tokens: of the step.
    """
    if not dense_size:
        return tokens
    most = (words - layout.dense_words(width)) // layout.dense_room(dense_size)
    return min(tokens, most // layout.TILE * layout.TILE)


def parts(tokens: int, most: int) -> int:
    """Programs that may share one token in a step of `tokens` tokens: `most`, as long as scratch has room for each."""
    return max(1, min(most, layout.PARTIALS // max(tokens, 1)))


def block(num_warps: int) -> int:
    """Elements of a row that a program of so many warps holds as one block."""
    # 8 elements per thread: 16 bytes at once in 16 bit. With less, short rows would lie side by side in a warp, and
    # their sums go through its lanes, where a product is fused into one side only, so that lanes disagree that should
    # not (Triton 3.6, triton-lang/triton#7264).
    return num_warps * 256
