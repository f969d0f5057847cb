"""Attention SAEs of Kissane and Krzyzanowski: ``NAME.pt`` with ``NAME_cfg.json`` beside it; it knows no other config.

f = relu((x - b_dec) @ W_enc + b_enc)        y = f @ W_dec + b_dec        x: all heads of z, one after the other

Their z is TransformerLens', which moves the bias of the values, and what the first norm's bias makes of it, into the
output's bias. GPT-2's own z has this constant c, so each feature reads W_enc · c more than it was trained on; c is in
the model's files, and is not taken out here.

Other training code with files of these names has more kinds of SAEs, and says in the config what makes them different:
those are refused.
"""

from pathlib import Path

from saesteer.loaders import aliases, sizes
from saesteer.loaders.draft import KEYS, Draft
from saesteer.loaders.files import only, read_json, text, wrong
from saesteer.loaders.opening import open_arrays

FILES = ("*_cfg.json",)  # and the .pt file, which a place names


def draft(place: Path) -> Draft | None:
    """The draft of such a .pt file; None for other places. Raises LoadError."""
    config = place.parent / f"{place.stem}_cfg.json"
    if place.suffix != ".pt" or not place.is_file() or not config.is_file():
        return None
    cfg = read_json(config)
    if cfg.get("sae_type", "vanilla") not in ("relu", "vanilla"):
        raise wrong(config, "sae_type", repr(cfg["sae_type"]), "relu or vanilla: nothing else is served")
    only(config, cfg, {"top_k": None, "input_unit_norm": False})
    site = text(config, cfg, "act_name")
    return Draft(
        open_arrays(place),
        KEYS | {"b_in": "b_dec"},
        "relu",
        transposed={"w_enc"},
        configs=(config,),
        sizes=sizes.named(config, cfg, "dict_size", "act_size"),
        sites=aliases.pair(site, site),
        model=text(config, cfg, "model_name"),
    )
