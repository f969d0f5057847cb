"""Apollo's end-to-end SAEs: a checkpoint ``*.pt`` whose keys begin with a hook's name; it knows no run's config.

    f = relu(x @ encoder.0.weight.T + encoder.0.bias)        y = f @ (decoder.weight / |column|).T + decoder.bias

The decoder is divided by its columns' lengths when it is used; what is stored is not of length 1. Their model is
TransformerLens' GPT-2, whose stream has no mean: the encoder reads x - mean(x). A checkpoint may hold the SAEs of
several hooks: ``FILE.pt@resid_pre.5`` chooses one.
"""

from pathlib import Path

from saesteer.loaders import aliases
from saesteer.loaders.arrays import Arrays
from saesteer.loaders.draft import Draft
from saesteer.loaders.opening import open_torch

FILES: tuple[str, ...] = ()  # they are on no hub
_KEYS = {"w_enc": "encoder.0.weight", "w_dec": "decoder.weight", "b_enc": "encoder.0.bias", "b_dec": "decoder.bias"}


def draft(place: Path) -> list[Draft] | None:
    """The drafts of such a file, one for each hook; None for others. Raises LoadError."""
    weights = open_torch(place)
    end = f".{_KEYS['w_enc']}"
    hooks = [key.removesuffix(end) for key in weights.index if key.endswith(end)] if weights else []
    return [_one(weights, hook, hooks) for hook in hooks] if weights and hooks else None


def _one(weights: Arrays, hook: str, hooks: list[str]) -> Draft:
    others = tuple(f"{one}." for one in hooks if one != hook)
    site = aliases.from_transformer_lens(hook.replace("-", "."))
    return Draft(
        weights,
        {role: f"{hook}.{key}" for role, key in _KEYS.items()},
        "relu",
        ignored={key for key in weights.index if key.startswith(others)},
        transposed={"w_dec"},
        decoder_norm="dropped",
        centred=aliases.is_written(str(site)),
        sites=(site, site),
    )
