"""OpenAI's autoencoders of GPT-2 small: ``{location}[_v..]/autoencoders/{layer}.pt``; it knows no other model.

    xn = (x - mean(x)) / (std(x) + 1e-5) for TopK, else x
    f = act((xn - pre_bias) @ encoder.weight.T + latent_bias)        y = f @ decoder.weight.T + pre_bias, un-normed

act is topk (its k stands in the file, too) or relu. Location and layer stand in the path alone.
"""

import json
import re
from pathlib import Path

from saesteer.loaders.draft import Draft
from saesteer.loaders.files import Document, only, whole_number, wrong
from saesteer.loaders.opening import open_torch

FILES: tuple[str, ...] = ()  # they are on no hub
_KEYS = {"w_enc": "encoder.weight", "w_dec": "decoder.weight", "b_enc": "latent_bias", "b_dec": "pre_bias"}
_STATISTICS = {"stats_last_nonzero", "latents_activation_frequency", "latents_mean_square"}
_SITES = {
    "mlp_post_act": "mlp_hidden",
    "resid_delta_attn": "attn_out",
    "resid_post_attn": "resid_mid",
    "resid_delta_mlp": "mlp_out",
    "resid_post_mlp": "resid_post",
}
_PLACE = re.compile(rf"(?:.*/)?({'|'.join(_SITES)})(?:_v\w+)?/autoencoders/(\d+)\.pt")


def draft(place: Path) -> Draft | None:
    """The draft of such a file; None for others. Raises LoadError."""
    weights = open_torch(place)
    if weights is None or not {"pre_bias", "latent_bias"} <= weights.index.keys():
        return None
    activation = weights.metadata.get("activation", "ReLU")
    if activation not in ("ReLU", "TopK"):
        raise wrong(place, "activation", repr(activation), "ReLU or TopK")
    state = _state(place, weights.metadata.get("activation_state_dict", "{}"))
    only(place, state, {"postact_fn": "ReLU"})
    top_k, found = activation == "TopK", _PLACE.fullmatch(place.absolute().as_posix())
    site = f"{_SITES[found[1]]}.{int(found[2])}" if found else None
    return Draft(
        weights,
        _KEYS | {"b_in": "pre_bias"},
        "topk" if top_k else "relu",
        ignored=_STATISTICS,
        transposed={"w_dec"},
        k=whole_number(place, state, "k") if top_k else None,
        in_norm="layer_norm" if top_k else "none",
        sites=(site, site),
        feature_unit="normalised" if top_k else "raw",
        model="openai-community/gpt2",
    )


def _state(file: Path, said: str) -> Document:
    try:
        state = json.loads(said)
    except (ValueError, RecursionError):
        state = None
    if not isinstance(state, dict):
        raise wrong(file, "activation_state_dict", f"{said!r:.80}", "a flat dict with k and postact_fn")
    return state
