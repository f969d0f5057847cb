"""The steering kernels of a published fork of vLLM, from a checkout, next to ours at the same shapes.

    git clone --branch feat/sae-steering https://github.com/RhizoNymph/vllm CHECKOUT
    python -m bench.fork CHECKOUT --out DIR

Clamps of an SAE's features are in that branch only. Three files are enough, below the paths that they have there: the
two that CASES names, and intervention_kernel_common.py; --fork-commit says then which commit they are from.

Its files of kernels are loaded by their paths, over the vLLM that is installed: the fork itself need not be built. Its
kernels write a tensor of their own, ours edit in place; neither computes a norm here. Its clamp knows a fixed list of
features for all requests, ours those of each request, from memory as in a model. Arguments are given by name, since the
fork's commits differ in them; one that has an argument which is not known here is said, and not timed.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.cases import WIDTHS

LAYERS = Path("vllm/model_executor/layers")
ADD = ("steering_kernel.py", "apply_steering_triton")
CLAMP = ("sae_steering_kernel.py", "apply_sae_delta_indexed_triton")
# Which function with how many features, 0 for a vector; and the case of bench/cases.py that it stands beside, with what
# that does before the tokens are named.
CASES = (
    (ADD, 0, "idle 16"),
    (ADD, 0, "16 x add"),
    (ADD, 0, "8192 x add"),
    (CLAMP, 1, "16 x 1"),
    (CLAMP, 1, "256 x 1"),
    (CLAMP, 1, "8192 x 1"),
    (CLAMP, 32, "16 x 32"),
    (CLAMP, 32, "8192 x 32"),
)
ROWS = 16  # of its table of vectors, and of clamps
RELU = 0
Row = dict[str, Any]


def load(checkout: Path, file: str, function: str) -> Callable[..., Tensor]:
    """A function of a file of the checkout.

    Raises:
        OSError: there is no such file.
        ImportError: it imports what the installed vLLM does not have.
        AttributeError: it has no such function.
    """
    path = checkout / LAYERS / file
    if path.is_file():  # what these files import of the fork is looked for behind what is installed
        layers = importlib.import_module(".".join(LAYERS.parts))
        if str(path.parent) not in layers.__path__:
            layers.__path__.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(f"fork_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Callable[..., Tensor] = getattr(module, function)
    return found


def arguments(tokens: int, width: int, features: int, *, active: bool, device: str, dtype: torch.dtype) -> Row:
    """Everything that one of its functions may ask for, by name: every token steered, by the row of its place."""
    floats: Row = {"dtype": torch.float32, "device": device}
    rows = torch.arange(tokens, device=device) % ROWS
    some: Row = {"dtype": dtype, "device": device}
    off = torch.zeros(ROWS, dtype=torch.bool, device=device)
    return {
        "hidden_states": torch.randn(tokens, width, **some),
        "any_active": torch.tensor([active], device=device),
        "steering_table": torch.randn(ROWS, width, **some),
        "steering_index": rows,
        "steering_scales": torch.ones(ROWS, **floats),
        "steering_dynamic_vec": torch.zeros(width, **floats),
        "steering_token_scales": torch.zeros(tokens, **floats),
        "steering_row_gate": torch.ones(tokens, **floats),
        "steering_decode_mask": torch.zeros(tokens, **floats),
        "steering_monitor_probe": torch.zeros(width, **floats),
        "steering_monitor_params": torch.zeros(4, **floats),
        "steering_monitor_active": off,
        "steering_monitor_probe_table": torch.zeros(ROWS, width, **floats),
        "steering_monitor_row_params": torch.zeros(ROWS, 4, **floats),
        "steering_monitor_row_active": off,
        "encoder_weight": torch.randn(features, width, **some),
        "encoder_bias": torch.zeros(features, **some),
        "threshold": torch.zeros(features, **floats),
        "decoder_weight": torch.randn(features, width, **some),
        "clamp_kind_table": torch.ones(ROWS, features, dtype=torch.int8, device=device),
        "clamp_value_table": torch.ones(ROWS, features, **floats),
        "clamp_only_if_active_table": torch.zeros(ROWS, features, dtype=torch.bool, device=device),
        "clamp_row_gated_table": torch.zeros(ROWS, **floats),
        "sae_index": rows,
        "activation_code": RELU,
        "activation_param": 0.0,
    }


def bound(function: Callable[..., Tensor], given: Row) -> partial[Tensor]:
    """The function with its arguments.

    Raises:
        TypeError: it asks for one that is not known here.
    """
    names = list(inspect.signature(function).parameters)
    if unknown := [name for name in names if name not in given]:
        raise TypeError(f"{function.__name__} has an argument {unknown[0]!r}, which this benchmark does not know")
    return partial(function, **{name: given[name] for name in names})


def expected(given: Row, features: int) -> Tensor:
    """What the fork's function has to return, in float32."""
    x: Tensor = given["hidden_states"].float()
    added: Tensor
    if not features:
        added = given["steering_table"].float()[given["steering_index"]]
    else:
        found = torch.relu(x @ given["encoder_weight"].float().T)
        added = (given["clamp_value_table"][given["sae_index"]] - found) @ given["decoder_weight"].float()
    return x + added if bool(given["any_active"]) else x


def wrong(function: partial[Tensor], given: Row, features: int) -> str | None:
    """Why its answer is not the one that this benchmark expects; None if it is."""
    found, truth = function().float(), expected(given, features)
    error = float((found - truth).norm() / truth.norm())
    return f"its answer is {error:.3f} of its length away from what is expected" if error > 0.02 else None


def measure(checkout: Path, widths: Sequence[int]) -> Iterator[Row]:
    """Lines of the results: the fork's time and ours; or why one is not timed."""
    from bench.batch import Batches
    from bench.cases import CASES as OURS
    from bench.kernels import compile_errors, launches
    from bench.timing import DEVICE, DTYPE, in_graph

    untimed: tuple[type[Exception], ...] = (OSError, ImportError, AttributeError, TypeError, *compile_errors())
    by_name = {case.name: case for case in OURS}
    for width in widths:
        batches = Batches(width)
        for (file, name), features, beside in CASES:
            case = by_name[beside]
            row: Row = {"contender": "RhizoNymph/vllm kernel", "case": beside, "width": width, "function": name}
            some: Row = {"active": bool(case.steered), "device": DEVICE, "dtype": DTYPE}
            given = arguments(case.tokens, width, max(features, 1), **some)
            try:
                function = bound(load(checkout, file, name), given)
                why = wrong(function, given, features)
            except untimed as error:
                why = f"{type(error).__name__}: {error}"
            if why is not None:
                yield row | {"not_run": why}
                continue
            theirs = in_graph([function] * (64 if case.tokens <= 256 else 4))
            cache = "cold" if case.steered else "warm"
            ours = in_graph(launches(case, batches.calls(case, "bare", cache)))
            for who, timing in (("", theirs), ("saesteer_", ours)):
                row |= {f"{who}{key}": round(value, 3) for key, value in timing._asdict().items()}
            yield row


def commit_of(checkout: Path) -> str:
    """What is checked out there; empty if it is no checkout, even if it lies in one of another repository."""
    if not (checkout / ".git").exists():
        return ""
    ask = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    return subprocess.run(ask, capture_output=True, text=True, check=False).stdout.strip()


def table(rows: Sequence[Row]) -> str:
    """For people: µs of the fork's kernel and of ours."""
    lines = [f"{'case':14}{'width':>6}{'fork us':>10}{'ours us':>10}"]
    for row in rows:
        figures = row.get("not_run") or f"{row['median']:9.2f} {row['saesteer_median']:9.2f}"
        lines.append(f"{row['case']:14}{row['width']:6} {figures}")
    return "\n".join(lines)


def main() -> int:
    """Measure, print a table, and add JSON lines to rivals.jsonl."""
    from bench.timing import machine

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--widths", type=int, nargs="+", default=list(WIDTHS))
    parser.add_argument("--out", type=Path, help="folder of rivals.jsonl, which grows; nothing is written without it")
    parser.add_argument("--commit", default="", help="that is measured, where git cannot tell")
    parser.add_argument("--fork-commit", default="", help="of the checkout, where it has no .git")
    given = parser.parse_args()
    head = given.fork_commit or commit_of(given.checkout)
    rows = list(measure(given.checkout, given.widths))
    print(f"\nthe fork's kernels at {head or 'an unknown commit'}, without a norm\n{table(rows)}")
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        with (given.out / "rivals.jsonl").open("a") as file:
            file.writelines(
                json.dumps({**row, "version": head or None, **machine(given.commit)}) + "\n" for row in rows
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
