"""An engine in the small world, and requests through all of its sites. Knows no truth."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from saesteer.config.assets import Assets
from saesteer.config.config import SaesteerConfig
from saesteer.engine.engine import Engine, Row
from saesteer.loaders.formats import own
from tests.rows import row_of
from tests.small_world import BIASES, CODERS, DOWN, HEADS, KINDS, MODULES, SITES, STEP, TOKENS, UP, VECTORS, WIDTH


def make_engine(folder: Path, *, stages: tuple[int, ...] = (), stage: int = 0, **changes: Any) -> Engine:
    """One on the CPU, with its files in a folder; changes are of its settings."""
    from safetensors.numpy import save_file

    for name, one in CODERS.items():
        own.write(folder / f"{name}.safetensors", one)
    for name, rows in VECTORS.items():
        if None in rows:
            np.save(folder / f"{name}.npy", rows[None])
        else:
            save_file({f"layer.{layer}": row for layer, row in rows.items()}, folder / f"{name}.vec.safetensors")
    places = {
        name: f"{folder}/{name}" + (".npy" if None in rows else ".vec.safetensors") for name, rows in VECTORS.items()
    }
    config = SaesteerConfig.from_json(
        {
            "dictionaries": {name: f"{folder}/{name}.safetensors@{kind[3]}" for name, kind in KINDS.items()},
            "vectors": {name: {"path": place, "bias": BIASES[name]} for name, place in places.items()},
            "modules": MODULES,
            "sites": SITES,
            "inline_rows": 2,
        }
        | changes
    )
    size: dict[str, Any] = {"width": WIDTH, "other_widths": {"z": HEADS}, "layers": 4, "max_rows": 4, "max_tokens": 64}
    size |= {"stages": stages, "stage": stage}
    return Engine(Assets.open(config), dtype=torch.float32, device=torch.device("cpu"), **size)


def forward(
    engine: Engine,
    specs: list[Any],
    prompt_len: int,
    x: torch.Tensor,
    row_of: Callable[..., Row | None] = row_of,
    later: Sequence[Engine] = (),
) -> torch.Tensor:
    """Requests of TOKENS tokens each through all sites, with a layer of a model in between.

    The sites may be those of an engine and of ``later`` stages.
    """
    here: dict[str, Callable[[torch.Tensor], None]] = {}
    for one in (engine, *later):
        kinds = np.zeros(len(one.places.sites), dtype=np.int32)
        for row, spec in enumerate(specs, 1):
            content = None if spec is None else row_of(one, spec, prompt_len)
            if content is not None:
                kinds |= content.kinds
            one.fill(row, content)
        starts = torch.arange(len(specs) + 1, dtype=torch.int32) * TOKENS
        positions = torch.arange(TOKENS).repeat(len(specs))
        one.positions[: len(positions)] = positions
        one.schedule(torch.arange(len(specs)), 1, starts, len(specs), len(positions), kinds)
        here |= {name: partial(one.edit, site) for name, site in one.sites.items()}
    part = None
    for site in SITES:
        if site.startswith("mlp_in"):
            part = x / 2 + 0.1
            here[site](part)
            part = torch.tanh(part @ STEP)
            continue
        if site.startswith("z"):
            part = x @ UP
            here[site](part)
            part = torch.tanh(part @ DOWN)
            continue
        if site.startswith("mlp_out"):
            assert part is not None
            here[site](part)
            continue
        x = x + (torch.tanh(x @ STEP) if part is None else part)
        part = None
        here[site](x)
    return x
