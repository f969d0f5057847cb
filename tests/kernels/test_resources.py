"""Every launch fits the shared memory of an H100 or H200, in 16 bit and in fp32, and a kernel that is set up while the
one in front of it ends waits before it reads, and keeps what it reads in each step: compiled for them, no GPU needed.

This file is the test and the process that compiles, since the other tests here run the kernels in Triton's interpreter.
It knows no results.
"""

import os
import re
from collections.abc import Iterator
from typing import Any

import pytest

from saesteer.kernels import layout
from saesteer.kernels.edit.configs import EXACT_ENCODE, block, configs
from tests.apart import hear, tell

MOST = 227 * 1024  # bytes of shared memory that a program may have there
WIDTHS = (576, 6144)
BEHIND = "edit_kernel behind the encoder"


def launches(width: int, exact: bool) -> Iterator[tuple[str, str, int, dict[str, Any]]]:
    """Module, kernel, warps and constants of each launch that asks for much."""
    tuned = configs(width)
    for encode in [EXACT_ENCODE] if exact else [one for _, one in tuned.encode]:
        blocks_of = {"BLOCK_M": encode.block_m, "BLOCK_N": encode.block_n, "BLOCK_K": encode.block_k}
        more = {"STAGES": encode.stages, "HAS_NORMS": True, "ROUNDS": True, "EXACT": exact}
        yield "edit.encode", "encode_kernel", encode.num_warps, {**blocks_of, **more}
    many = tuned.many
    turns = {"TOKENS": many.tokens, "SHARES": layout.TILE // many.tokens, "ENTRIES": many.entries}
    tiles = {"BLOCK_K": many.block_k, "BLOCK_N": many.block_n, "BLOCK_Z": many.block_z, "STAGES": many.stages}
    tiles |= {"AHEAD_Z": many.ahead_z}
    yield "edit.many", "many_kernel", many.num_warps, {**turns, **tiles, "EXACT": exact, "HAS_WEIGHT": True}
    lone = tuned.lone
    turns = {"LEAST": max(lone.at_once, 4), "AT_ONCE": lone.at_once, "STAGES": lone.stages}
    yield "edit.lone", "lone_kernel", lone.num_warps, {"BLOCK": block(lone.num_warps), "HAS_WEIGHT": True, **turns}
    full = tuned.full
    ahead = {"LISTED": full.listed, "DECODED": full.decoded, "AHEAD": full.ahead, "ROUNDS": True}
    yield "edit.full", "full_kernel", full.num_warps, {"BLOCK": block(full.num_warps), "HAS_WEIGHT": True, **ahead}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pytest.importorskip("triton", reason="no Triton on this platform")
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    told: dict[str, Any] = hear("-m", "tests.kernels.test_resources", environment=env)
    return told


@pytest.mark.slow
def test_every_launch_fits_the_shared_memory(found: dict[str, Any]) -> None:
    shared = found["shared"]
    assert len(shared) == len(WIDTHS) * (3 + 2 * 3 + 1) + 1
    assert {name: used for name, used in shared.items() if used > MOST} == {}


@pytest.mark.slow
def test_an_early_kernel_waits_before_it_reads(found: dict[str, Any]) -> None:
    for name, instructions in found["early"].items():
        if name != BEHIND:
            assert instructions.count("wait") == 1, f"{name}: whatever the work, the kernel behind it relies on that"
            assert instructions[0] == "wait" and "read" in instructions, name


@pytest.mark.slow
def test_behind_the_encoder_a_kernel_begins_early_and_ends_after_it(found: dict[str, Any]) -> None:
    instructions = found["early"][BEHIND]
    assert "read" in instructions[: instructions.index("wait")]
    assert instructions[-1] == "wait", "the kernel behind both relies on that"


@pytest.mark.slow
def test_what_every_step_reads_again_is_to_stay_in_the_cache(found: dict[str, Any]) -> None:
    head = ["kept"] * 6  # of the list: items, parts, span; the first item's token and row; the site
    assert found["early"]["edit_kernel"][1:7] == found["early"][BEHIND][:6] == head
    assert found["early"][BEHIND].count("kept") > 40, "spans and entries, too"


def compiled(kernel: Any, floats: str, warps: int, constants: dict[str, Any]) -> Any:
    """The kernel for streams and weights of one dtype."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    same = ("stream", "second", "norm_weight", "w_enc", "w_dec", "kept_rows", "before", "after", "x", "v")
    integers = ("table", "site", "work", "counts", "cells")
    signature, attributes = {}, {}
    for at, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        kinds = {**dict.fromkeys(same, f"*{floats}"), **dict.fromkeys(integers, "*i32"), "positions": "*i64"}
        kinds |= dict.fromkeys(("b_enc", "b_dec", "threshold", "registers", "scratch", "activations"), "*fp32")
        kinds |= dict.fromkeys(("eps", "weight_offset"), "fp32")
        signature[name] = kinds.get(name, "i32")
        if signature[name].startswith("*") and not kernel.params[at].do_not_specialize:
            attributes[at,] = [["tt.divisibility", 16]]
    named = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, constexprs=named, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})


def order(made: Any) -> list[str]:
    """In which order a kernel waits and reads."""
    words = {"griddepcontrol.wait": "wait", "ld.global.L1::evict_last.L2::cache_hint": "kept", "ld.global": "read"}
    return [words[one] for one in re.findall("|".join(words), made.asm["ptx"])]


def main() -> None:
    """Tell what every launch asks for, and in which order it waits and reads."""
    from importlib import import_module

    shared, early = {}, {}
    for width in WIDTHS:
        for floats, exact in (("bf16", False), ("fp32", True)):
            for at, (module, name, warps, constants) in enumerate(launches(width, exact)):
                kernel = getattr(import_module(f"saesteer.kernels.{module}"), name)
                made = compiled(
                    kernel, floats, warps, {**constants, "WIDTH": width, "FORM": layout.NORMED, "PDL": True}
                )
                shared[f"{name} {at} {floats} {width}"] = made.metadata.shared
                early[f"{name} {at} {floats} {width}"] = order(made)
    sizes = {"WIDTH": 64, "BLOCK": 256, "CHUNK": 4, "GATHER": 4, "LISTED": 64, "DECODED": 4, "AHEAD": 3}
    given: dict[str, Any] = {"FORM": layout.NORMED, "HAS_WEIGHT": True, "HAS_NORMS": True, "HAS_KEPT": True}
    given |= {"HAS_CAPTURES": True, "ROUNDS": True, "PDL": True}
    edit = import_module("saesteer.kernels.edit.edit").edit_kernel
    for name, dense in (("edit_kernel", False), (BEHIND, True)):
        early[name] = order(compiled(edit, "bf16", 1, {**sizes, **given, "HAS_DENSE": dense}))
    _, wide = configs(WIDTHS[-1]).edit[-1]  # in long steps, decoder rows that are loaded ahead wait in shared memory
    sizes = {"WIDTH": WIDTHS[-1], "BLOCK": block(wide.num_warps), "CHUNK": wide.chunk, "GATHER": wide.gather}
    sizes |= {"LISTED": wide.listed, "DECODED": wide.decoded, "AHEAD": wide.ahead, "HAS_DENSE": True}
    shared["edit_kernel"] = compiled(edit, "fp32", wide.num_warps, {**sizes, **given}).metadata.shared
    tell({"shared": shared, "early": early})


if __name__ == "__main__":
    main()
