"""The least kernels of bench.limits against plain arithmetic, in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Runs in a process of its own: Triton decides at its import whether it interprets.
SCRIPT = """
import sys
import torch
from bench import least

least.gdc_wait = lambda: None  # the interpreter has no launches that overlap

kind, hops = sys.argv[1], int(sys.argv[2])
torch.manual_seed(1)
width, rows, tokens, entries = 96, 64, 8 if kind in ("turns", "shared") else 2, 4
x, second = torch.randn(tokens, width), torch.empty(tokens, width)
w_enc, w_dec = torch.randn(rows, width) / 10, torch.randn(rows, width)
norm, eps, gain = torch.rand(width), 1e-6, 0.5
successors = torch.randperm(rows).int()
place = torch.arange(tokens) if kind == "few" else torch.arange(tokens) + 3
for _ in range(hops):
    place = successors[place].long()
stream = x.clone()
if kind == "few":
    ids = torch.randint(0, rows, (rows, entries), dtype=torch.int32)
    ids_at = ids[place].long()
    words = torch.zeros(tokens, 1, entries, dtype=torch.int64)
    squares, counts = torch.zeros(tokens, 1, dtype=torch.int64), torch.zeros(tokens, dtype=torch.int64)
    least.few_kernel[(tokens, 1)](
        stream, second, norm, successors, ids, w_enc, w_dec, words, squares, counts, gain, eps,
        WIDTH=width, COLS=width, BLOCK=128, SHARES=1, ENTRIES=entries, HOPS=hops, MEETS=0)
    delta = gain * (3.0 - torch.einsum("tew,tw->te", w_enc[ids_at], x).clamp_min(0))
    want = x + torch.einsum("tew,te->tw", w_dec[ids_at], delta)
elif kind == "shared":  # the last turn has one token
    ids, tokens = torch.randint(0, rows, (entries,), dtype=torch.int32), 5
    x, stream, second = x[:tokens], stream[:tokens].clone(), second[:tokens].clone()
    words = torch.zeros(2, 1, 4, entries, dtype=torch.int64)
    squares, counts = torch.zeros(2, 1, 4, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    least.turn_kernel[(2, 1)](
        stream, second, norm, ids, w_enc, w_dec, words, squares, counts, gain, eps, tokens,
        WIDTH=width, COLS=128, BLOCK=64, SHARES=1, TOKENS=4, ENTRIES=entries, MEETS=hops)
    place = ids.long()
    want = x + (gain * (3.0 - (x @ w_enc[place].T).clamp_min(0))) @ w_dec[place]
elif kind == "turns":
    ids = torch.randint(0, rows, (1, entries), dtype=torch.int32)
    least.passes_kernel[(tokens // entries,)](
        stream, second, norm, ids, w_enc, w_dec, gain, eps, tokens // entries,
        WIDTH=width, TOKENS=entries, BLOCK=64, STAGES=2, BLOCK_Z=32, AHEAD_Z=2)
    place = ids[0].long().repeat(tokens // entries)
    want = x + (gain * (3.0 - (w_enc[place] * x).sum(1).clamp_min(0)))[:, None] * w_dec[place]
else:
    least.one_kernel[(tokens,)](
        stream, second, norm, successors, w_enc, w_dec, 3, gain, eps,
        WIDTH=width, BLOCK=256, HOPS=hops, ENCODES=kind == "clamp", ABSENT=False)
    dot = (w_enc[place] * x).sum(1).clamp_min(0) if kind == "clamp" else torch.zeros(tokens)
    want = x + (gain * (3.0 - dot))[:, None] * w_dec[place]
torch.testing.assert_close(stream, want, rtol=1e-4, atol=1e-4)
scale = torch.rsqrt(want.square().mean(1, keepdim=True) + eps)
torch.testing.assert_close(second, want * scale * (1 + norm), rtol=1e-4, atol=1e-4)
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A Python of its own in which kernels are interpreted."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *arguments], env=env, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize(("kind", "hops"), [("clamp", 3), ("add", 1), ("few", 2), ("turns", 0), ("shared", 2)])
def test_a_least_kernel_gives_what_plain_arithmetic_does(kind: str, hops: int) -> None:
    done = run("-c", SCRIPT, kind, str(hops))
    assert done.returncode == 0, done.stderr[-2000:]
