"""Goodfire's SAEs: one .pt or .pth file of two linear layers, whose name ends in ``-SAE-l19``; it knows no config.

    f = relu(x @ encoder_linear.weight.T + encoder_linear.bias)
    y = f @ decoder_linear.weight.T + decoder_linear.bias

Nothing is subtracted or normalised. qresearch's copies of the idea say encoder and decoder without ``_linear``, as many
other files do, so they need the name. A file that says more, such as a k, is something else. The site is the output of
the layer in the name. The keys of the DeepSeek-R1 files were not seen.
"""

import re
from pathlib import Path

from saesteer.loaders.draft import Draft
from saesteer.loaders.files import wrong
from saesteer.loaders.opening import open_torch

FILES: tuple[str, ...] = ()  # a place names the file itself
_KEYS = {"w_enc": "encoder{}.weight", "w_dec": "decoder{}.weight", "b_enc": "encoder{}.bias", "b_dec": "decoder{}.bias"}
_NAME = re.compile(r"(.+)-SAE-l(\d+)")


def draft(place: Path) -> Draft | None:
    """The draft of such a file; None for others. Raises LoadError."""
    weights = open_torch(place)
    if weights is None:
        return None
    suffix = "_linear" if any(key.startswith("encoder_linear.") for key in weights.index) else ""
    keys = {role: key.format(suffix) for role, key in _KEYS.items()}
    found = _NAME.fullmatch(place.stem)
    if not suffix and not (found and set(keys.values()) <= weights.index.keys()):
        return None
    if weights.metadata:
        key, value = next(iter(weights.metadata.items()))
        raise wrong(place, key, value[:40], "two linear layers and no more: what it means is not known")
    site = f"resid_post.{int(found[2])}" if found else None
    return Draft(weights, keys, "relu", transposed={"w_dec"}, sites=(site, site), model=found[1] if found else None)
