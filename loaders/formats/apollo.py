"""Apollo's end-to-end SAEs: a checkpoint ``*.pt`` whose keys begin with a hook's name; it knows no run's config.

    f = relu(x @ encoder.0.weight.T + encoder.0.bias)        y = f @ (decoder.weight / |column|).T + decoder.bias

The decoder is divided by its columns' lengths when it is used; what is stored is not of length 1. A checkpoint with the
SAEs of several hooks is refused, since a place cannot choose among them.
"""

from __future__ import annotations

from pathlib import Path

from saesteer.loaders import aliases
from saesteer.loaders.arrays import open_torch
from saesteer.loaders.draft import Draft
from saesteer.loaders.files import wrong

FILES: tuple[str, ...] = ()  # they are on no hub
_KEYS = {"w_enc": "encoder.0.weight", "w_dec": "decoder.weight", "b_enc": "encoder.0.bias", "b_dec": "decoder.bias"}


def draft(place: Path) -> Draft | None:
    """The draft of such a file; None for others. Raises LoadError."""
    weights = open_torch(place)
    end = f".{_KEYS['w_enc']}"
    hooks = [key.removesuffix(end) for key in weights.index if key.endswith(end)] if weights else []
    if weights is None or not hooks:
        return None
    if len(hooks) > 1:
        raise wrong(place, ", ".join(hooks), f"{len(hooks)} dictionaries in one file", "one")
    site = aliases.from_transformer_lens(hooks[0].replace("-", "."))
    return Draft(
        weights,
        {role: f"{hooks[0]}.{key}" for role, key in _KEYS.items()},
        "relu",
        transposed={"w_dec"},
        decoder_norm="dropped",
        sites=(site, site),
    )
