"""llamascopium's own files (OpenMOSS, Llama Scope 2): ``config.json`` with sae_type + ``sae_weights.safetensors``.

    xn = x, x * sqrt(d) / |x| (token-wise) or x * sqrt(d) / dataset_average_activation_norm (dataset-wise)
    pre = xn @ W_E + b_E        f = act(pre * n) / n, n = |W_D_i| with sparsity_include_decoder_norm, else 1
    yn = f @ W_D + b_D          y = yn, taken back out of its own norm

A jumprelu's gate is pre * n > exp(log_jumprelu_threshold), and f = pre. Top-k values are f * n: their ranking is about
unit decoder rows. Dataset-wise values become raw. A transcoder is an SAE with two hooks; Lorsa, crosscoders and gated
linear units are refused, and batch-wise top-k depends on the batch.

A cross-layer transcoder has lists of hooks, W_E [layers, d, F], and W_D.{m} [m + 1, F, d] with the rows that layers 0
to m write at layer m. n is the length of all rows of a feature together. There is a draft for each layer.
"""

from pathlib import Path
from typing import Literal

from saesteer.dictionaries.coder import Activation
from saesteer.loaders import aliases, sizes
from saesteer.loaders.draft import Draft
from saesteer.loaders.files import Document, both, flag, one_of, only, read_json, text, whole_number, wrong
from saesteer.loaders.opening import open_arrays

FILES = ("config.json", "sae_weights.safetensors")
_ACTIVATIONS = "relu", "jumprelu", "topk"
_AVERAGE = "dataset_average_activation_norm"
_OTHERS = "W_E[", "b_E[", "W_D.", "b_D.", "activation_function.log_jumprelu_threshold[", _AVERAGE  # of other layers
_NORMS = ("inference", "token-wise", "dataset-wise")
_BY_NORM: dict[Activation, Literal["gates", "values"]] = {"jumprelu": "gates", "topk": "values"}
_REFUSED = {
    "crosscoder": "it reads several places at once",
    "lorsa": "its features attend over earlier positions",
    "molt": "it is a bank of transforms",
}


def draft(place: Path) -> Draft | list[Draft] | None:
    """The draft of a folder with both files, or of one of the two, or those of its layers; None for other places.

    Raises LoadError.
    """
    if (found := both(place, FILES)) is None:
        return None
    config, file = found
    cfg = read_json(config)
    if "sae_type" not in cfg:
        return None
    if (kind := text(config, cfg, "sae_type")) not in ("sae", "clt"):
        raise wrong(config, "sae_type", f"{kind!r} ({_REFUSED.get(str(kind), 'unknown')})", "'sae' or 'clt'")
    only(config, cfg, {"use_glu_encoder": False})
    if kind == "clt":
        return _across(file, config, cfg)
    activation = one_of(config, cfg, "act_fn", _ACTIVATIONS)
    norm = one_of(config, cfg, "norm_activation", _NORMS)
    hooks = text(config, cfg, "hook_point_in"), text(config, cfg, "hook_point_out")
    if norm == "token-wise" and hooks[0] != hooks[1]:
        raise wrong(config, "norm_activation", "token-wise in a transcoder", "a norm that the files hold")
    keys = {"w_enc": "W_E", "w_dec": "W_D", "b_enc": "b_E"}
    if flag(config, cfg, "use_decoder_bias", default=True):
        keys["b_dec"] = "b_D"
    if activation == "jumprelu":
        keys["log_threshold"] = "activation_function.log_jumprelu_threshold"
    if norm == "dataset-wise":
        keys |= {"length_in": f"{_AVERAGE}.{hooks[0]}", "length_out": f"{_AVERAGE}.{hooks[1]}"}
    by_norm = flag(config, cfg, "sparsity_include_decoder_norm", default=True)
    weights = open_arrays(file)
    return Draft(
        weights,
        keys,
        activation,
        # Always there: without a fixed scale, they are whatever was in memory when the file was saved.
        ignored={key for key in weights.index if key.startswith(_AVERAGE)},
        transposed={"w_enc"},
        configs=(config,),
        sizes=sizes.expanded(config, cfg),
        decoder_norm=_BY_NORM.get(activation, "kept") if by_norm else "kept",
        k=whole_number(config, cfg, "top_k") if activation == "topk" else None,
        in_norm="l2_sqrt_d" if norm == "token-wise" else "none",
        feature_unit="normalised" if norm == "token-wise" else "raw",
        sites=aliases.pair(*hooks),
    )


def _across(file: Path, config: Path, cfg: Document) -> list[Draft]:
    """The layers of a cross-layer transcoder."""
    activation = one_of(config, cfg, "act_fn", ("relu", "jumprelu"))
    norm = one_of(config, cfg, "norm_activation", ("inference", "dataset-wise"))
    reads, writes = (_hooks(config, cfg, f"hook_points_{side}") for side in ("in", "out"))
    sites = [aliases.pair(*pair) for pair in zip(reads, writes, strict=False)]
    count, (kind, _, first) = len(sites), str(sites[0][1]).partition(".")
    onward = [f"{kind}.{int(first or 0) + at}" for at in range(count)]
    if len(reads) != len(writes) or [out for _, out in sites] != onward:
        raise wrong(config, "hook_points_out", str(writes), "one for each that is read, layer after layer")
    weights, by_norm = open_arrays(file), flag(config, cfg, "sparsity_include_decoder_norm", default=True)
    names = {"w_enc": "W_E", "b_enc": "b_E"}
    if activation == "jumprelu":
        names["log_threshold"] = "activation_function.log_jumprelu_threshold"
    stacked = [(key, 3 if role == "w_enc" else 2, count) for role, key in names.items()]
    for key, rank, parts in [*stacked, *((f"W_D.{m}", 3, m + 1) for m in range(count))]:
        if weights.shape(key, rank)[0] != parts:
            raise wrong(file, key, f"shape {list(weights.index[key].shape)}", f"{parts} layers in its first axis")
        weights = weights.split(key, rank, {at: f"{key}[{at}]" for at in range(parts)})
    drafts = []
    for layer in range(count):
        keys = {role: f"{key}[{layer}]" for role, key in names.items()} | {"b_dec": f"b_D.{layer}"}
        written = []
        for m in range(layer, count):
            length = {"length_out": f"{_AVERAGE}.{writes[m]}"} if norm == "dataset-wise" else {}
            written.append({"w_dec": f"W_D.{m}[{layer}]"} | length)
        if norm == "dataset-wise":
            keys["length_in"] = f"{_AVERAGE}.{reads[layer]}"
        drafts.append(
            Draft(
                weights,
                keys | written[0],
                activation,
                ignored={key for key in weights.index if key.startswith(_OTHERS)},
                transposed={"w_enc"},
                configs=(config,),
                sizes=sizes.expanded(config, cfg),
                decoder_norm="gates" if by_norm and activation == "jumprelu" else "kept",
                later=tuple(written[1:]),
                sites=sites[layer],
                can_reconstruct=False,
            )
        )
    return drafts


def _hooks(file: Path, cfg: Document, key: str) -> list[str]:
    found = cfg.get(key)
    if not isinstance(found, list) or not found or not all(isinstance(one, str) for one in found):
        raise wrong(file, key, repr(found), "a list of hooks, one for each layer")
    return found
