"""What must come out of the sites of the small world, by tests/formulas.py. Knows no engine."""

from typing import Any

import numpy as np
import torch

from tests.formulas import Dict, Token, World
from tests.kernels.truth import dosed
from tests.small_world import BIASES, CODERS, DOWN, KINDS, MODULES, SITES, STEP, UP, VECTORS


def world() -> World:
    """The small world as the formulas take it."""

    def of(name: str) -> Dict:
        one = CODERS[name]
        arrays: dict[str, Any] = {
            key: getattr(one, key) for key in ("w_enc", "b_enc", "w_dec", "b_dec", "threshold", "max_act", "w_skip")
        }
        reads, _, site = KINDS[name][3].rpartition(":")
        arrays_of: Any = {key: None if value is None else value.double().numpy() for key, value in arrays.items()}
        return Dict(
            site=site,
            reads=(reads or site).replace("mlp_in_pregain", "resid_mid"),
            activation=one.info.activation,
            k=one.info.k or 0,
            in_norm="l2_sqrt_d" if "pregain" in reads else one.info.in_norm,
            skip_first=one.info.skip_first,
            **arrays_of,
        )

    wide = {name: {layer: row.astype(np.float64) for layer, row in rows.items()} for name, rows in VECTORS.items()}
    return World(SITES, {name: of(name) for name in KINDS}, wide, BIASES, MODULES)


def expected(
    spec: Any, prompt_len: int, x: torch.Tensor, limit: float = 0.0, here: World | None = None
) -> tuple[Any, Any, Any]:
    """x after all sites, which tokens have been near no bound, and the doses at each site, NaN of tokens not edited."""
    here, step, up, down = here or world(), *(one.double().numpy() for one in (STEP, UP, DOWN))
    out, sure, doses = [], [], np.full((len(x), len(SITES)), np.nan)
    for t, row in enumerate(x.double().numpy()):
        token = Token(here, t, prompt_len)
        part = None
        for at, site in enumerate(SITES):
            was = row + np.tanh(row @ step) if part is None else row + part
            here_in = was
            added = "attn_out" if site.startswith("resid_mid") else "mlp_out"
            if site.startswith(("mlp_in", "z")):
                was = here_in = row @ up if site.startswith("z") else row / 2 + 0.1
            elif site.startswith("mlp_out"):
                was = here_in = part
            elif part is not None and f"{added}.{site[-1]}" not in SITES:  # this op adds what edits there add
                here_in = row + token.visit(f"{added}.{site[-1]}", spec["edits"], part)
            y = token.visit(site, spec["edits"], here_in)
            if (y != was).any():
                (y,), (doses[t, at],) = dosed(was[None], y[None], limit)
            if site.startswith("mlp_in"):
                part = np.tanh(y @ step)
            elif site.startswith("z"):
                part = np.tanh(y @ down)
            elif site.startswith("mlp_out"):
                part = y
            else:
                row, part = y, None
        out.append(row)
        sure.append(token.sure)
    return np.array(out), np.array(sure), doses
