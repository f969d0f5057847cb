"""A small dictionary that doctor takes for one that fits, and streams that fit it."""

from typing import Any

import torch

from saesteer.dictionaries.coder import CoderInfo, SparseCoder

WIDTH = 4


def coder(**changes: Any) -> tuple[SparseCoder, CoderInfo]:
    """One that writes what it reads, each number by two features."""
    eye = torch.eye(WIDTH)
    info = CoderInfo(
        format="saesteer",
        d_in=WIDTH,
        d_out=WIDTH,
        features=2 * WIDTH,
        activation="relu",
        k=None,
        in_norm="none",
        site_in="resid_post.3",
        site_out="resid_post.3",
        feature_unit="raw",
        has_max_act=False,
        skip_first=1,
        source="test",
        fingerprint="",
        **{name: value for name, value in changes.items() if name == "l0"},
    )
    both = torch.cat([eye, -eye])
    weights = {"w_enc": both, "b_enc": torch.zeros(2 * WIDTH), "w_dec": both.clone(), "b_dec": torch.zeros(WIDTH)}
    return SparseCoder(**{**weights, **{k: v for k, v in changes.items() if k != "l0"}}, info=info), info


STREAMS = [{"resid_post.3": torch.randn(9, WIDTH, generator=torch.Generator().manual_seed(seed))} for seed in (1, 2)]
