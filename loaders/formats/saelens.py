"""SAELens' own files, ``cfg.json`` + ``sae_weights.safetensors``, in both generations of cfg; knows no registry.

    xn = in_norm(x)        xs = xn - b_dec (if apply_b_dec_to_input)
    pre = xs @ W_enc + b_enc        y = un_norm(act(pre) @ W_dec + b_dec)

standard: relu. jumprelu: relu(pre) where pre > threshold, so a threshold below 0 counts as 0. topk: with
rescale_acts_by_decoder_norm it ranks pre * |W_dec_i| and decodes with rows of length 1. abstopk: the k largest |pre| of
either sign. gated: becomes a jumprelu. A transcoder never subtracts b_dec, and writes where it does not read; one with
a skip transcoder adds x @ W_skip.T. The subtraction and the factors are folded into the weights.
``info.in_norm`` keeps a norm per token; feature values are then normalised.

Some SAEs of GPT-2 were trained on a stream without its mean, as TransformerLens makes it (center_writing_weights): the
encoder then reads x - mean(x). GPT-2 itself does not see the mean. With RMSNorm models TransformerLens ignores this
option, and so it is here. Other options of it are refused at the sites whose tensors they change.

Older files do not say that they read x - mean(x); their repositories' names are known. So is one whose SAEs read
x * sqrt(d) / |x| and do not say so: their author normalised x outside of them.

The loader refuses by name, with the reason: fixed scales that the files do not hold (expected_average_only_in,
covariance_whitening), single heads of z, and architectures other than one matrix and one activation.
"""

from __future__ import annotations

from pathlib import Path

from saesteer.dictionaries.coder import Activation, InNorm
from saesteer.loaders import aliases
from saesteer.loaders.draft import Axis, Draft, Sites
from saesteer.loaders.files import Document, both, flag, read_json, section, text, whole_number, wrong
from saesteer.loaders.neuronpedia import addresses
from saesteer.loaders.opening import open_arrays

FILES = ("cfg.json", "sae_weights.safetensors")
# architecture -> the activation that it becomes, and its arrays besides W_enc, W_dec and b_dec
_ARCHITECTURES: dict[str, tuple[Activation, dict[str, str]]] = {
    "standard": ("relu", {"b_enc": "b_enc"}),
    "jumprelu": ("jumprelu", {"b_enc": "b_enc", "threshold": "threshold"}),
    "topk": ("topk", {"b_enc": "b_enc"}),
    "abstopk": ("abstopk", {"b_enc": "b_enc"}),
    "gated": ("jumprelu", {"b_gate": "b_gate", "b_enc": "b_mag", "r_mag": "r_mag"}),
    "transcoder": ("relu", {"b_enc": "b_enc"}),
    "jumprelu_transcoder": ("jumprelu", {"b_enc": "b_enc", "threshold": "threshold"}),
    "skip_transcoder": ("relu", {"b_enc": "b_enc", "skip": "W_skip"}),
    "jumprelu_skip_transcoder": ("jumprelu", {"b_enc": "b_enc", "threshold": "threshold", "skip": "W_skip"}),
}
_REFUSED = {
    "matching_pursuit": "its encoder is iterative",
    "temporal": "it attends over earlier positions",
    "batchtopk": "the batch decides what is active: save it for inference, as jumprelu",
    "matryoshka_batchtopk": "the batch decides what is active: save it for inference, as jumprelu",
}
_NORMS: dict[str, InNorm] = {"none": "none", "layer_norm": "layer_norm", "constant_norm_rescale": "l2_sqrt_d"}
_NO_NORM = {
    "expected_average_only_in": "its constant is not in the files: save the SAE with the scale folded in",
    "covariance_whitening": "the whitening is not folded in: save the SAE for inference",
}
# What the files of these repositories do not say, by SAELens' registry: centred, or constant_norm_rescale.
_UNSAID = {
    "GPT2-Small-SAEs-Reformatted": "centred",
    "GPT2-Small-Feature-Splitting-Experiment-Layer-8": "centred",
    "Mistral-7B-Residual-Stream-SAEs": "normed",
}
_OPTIONS = "model_from_pretrained_kwargs"
# TransformerLens' options -> the kinds of sites whose tensors they change
_CHANGED = {
    "fold_value_biases": ("z",),
    "refactor_factored_attn_matrices": ("z",),
    "fold_ln": ("attn_in", "mlp_in"),
}
_OLD_NAMES = {
    "hook_point": "hook_name",
    "hook_point_head_index": "hook_head_index",
    "activation_fn_str": "activation_fn",
}


def draft(place: Path) -> Draft | None:
    """The draft of a folder with both files, or of one of the two; None for other places. Raises LoadError."""
    if (found := both(place, FILES)) is None:
        return None
    config, file = found
    cfg, about = _config(config)
    architecture = text(config, cfg, "architecture")
    if architecture not in _ARCHITECTURES:
        why = _REFUSED.get(str(architecture), "an architecture this loader does not know")
        raise wrong(config, "architecture", f"{architecture!r} ({why})", f"one of {', '.join(_ARCHITECTURES)}")
    if cfg.get("activation_fn", "relu") not in ("relu", "topk" if architecture == "topk" else "relu"):
        raise wrong(config, "activation_fn", repr(cfg["activation_fn"]), "relu, or topk with its k")
    features, d_in = whole_number(config, cfg, "d_sae"), whole_number(config, cfg, "d_in")
    k = whole_number(config, cfg, "k") if architecture in ("topk", "abstopk") else None
    unsaid = _unsaid(config)
    in_norm, site = _in_norm(config, cfg, unsaid), _site(config, cfg, about)
    transcoder = architecture.endswith("transcoder")
    written = Axis("d_out", whole_number(config, cfg, "d_out")) if transcoder else Axis("d_in", d_in)
    if transcoder and in_norm != "none":
        raise wrong(config, "normalize_activations", in_norm, "none: a transcoder's output has no input statistics")
    rescaled = flag(config, cfg, "rescale_acts_by_decoder_norm", default=False)
    subtract = flag(config, cfg, "apply_b_dec_to_input", default=True) and not transcoder
    sites = site, _named(config, about, "_out") if transcoder else site
    weights = open_arrays(file)
    activation, more = _ARCHITECTURES[architecture]
    if "threshold" in more and "log_threshold" in weights.index:
        more = {role: key for role, key in more.items() if role != "threshold"} | {"log_threshold": "log_threshold"}
    return Draft(
        weights,
        {"w_enc": "W_enc", "w_dec": "W_dec", "b_dec": "b_dec"} | more | ({"b_in": "b_dec"} if subtract else {}),
        activation,
        optional={"ones": "scaling_factor"},
        transposed={"w_enc"},
        configs=(config,),
        sizes=(Axis("d_sae", features), Axis("d_in", d_in), written),
        decoder_norm="values" if k is not None and rescaled else "kept",
        centred=_is_centred(config, about, sites, in_norm, unsaid),
        below_zero="raised",
        k=k,
        in_norm=in_norm,
        sites=sites,
        feature_unit="raw" if in_norm == "none" else "normalised",
        skip_first=_skipped(config, about),
        exclude_special_tokens=bool(about.get("exclude_special_tokens")),  # true, or a list of ids
        model=text(config, about, "model_name"),
        by_place=unsaid,
        addresses=addresses(about.get("neuronpedia_id")),
    )


def _config(file: Path) -> tuple[Document, Document]:
    """cfg.json with today's keys, and the part of it that says where the SAE comes from."""
    cfg = read_json(file)
    if "metadata" not in cfg:
        cfg = _modern(file, cfg)
        return cfg, cfg
    return cfg, section(file, cfg, "metadata")


def _modern(file: Path, flat: Document) -> Document:
    """A flat cfg from before version 6, with today's keys."""
    cfg = {_OLD_NAMES.get(key, key): value for key, value in flat.items()}
    cfg = {"architecture": "standard"} | cfg
    if cfg["architecture"] in ("standard", "topk") and cfg.get("activation_fn") == "topk" and "k" not in cfg:
        params = cfg.get("activation_fn_kwargs")
        if not isinstance(params, dict):
            raise wrong(file, "activation_fn_kwargs", repr(params), "a JSON object with k")
        cfg |= {"architecture": "topk", "k": params.get("k")}
    if isinstance(cfg.get("normalize_activations"), bool):
        cfg["normalize_activations"] = "expected_average_only_in" if cfg["normalize_activations"] else "none"
    return cfg


def _skipped(file: Path, about: Document) -> int:
    """The first position that it was trained on: ``seqpos_slice`` is what Python's slice takes. An end is no limit."""
    said = about.get("seqpos_slice") or [None]
    start = said[0] if isinstance(said, list) and len(said) > 1 else None  # slice(n) begins at 0
    if not isinstance(said, list) or (start is not None and (type(start) is not int or start < 0)):
        raise wrong(file, "seqpos_slice", repr(said), "[start, end] with a start from 0 on")
    return start or 1


def _unsaid(file: Path) -> str:
    """What a file's repository is known for, where its path names one: a folder of its name, or the hub's cache."""
    names = (part.rpartition("--")[2] if part.startswith("models--") else part for part in file.absolute().parts)
    return next((_UNSAID[name] for name in names if name in _UNSAID), "")


def _in_norm(file: Path, cfg: Document, unsaid: str) -> InNorm:
    name = cfg.get("normalize_activations") or "none"
    if not isinstance(name, str) or name not in _NORMS:
        why = _NO_NORM.get(str(name), "a normalisation this loader does not know")
        raise wrong(file, "normalize_activations", f"{name!r} ({why})", f"one of {', '.join(_NORMS)}")
    return "l2_sqrt_d" if name == "none" and unsaid == "normed" else _NORMS[name]


def _options(file: Path, about: Document, sites: Sites) -> Document:
    """How TransformerLens was told to load the model; refuses what gives these sites other tensors."""
    options = section(file, about, _OPTIONS) if about.get(_OPTIONS) is not None else {}
    for key, kinds in _CHANGED.items():
        for site in sites:
            if str(site).partition(".")[0] in kinds and flag(file, options, key, default=False):
                raise wrong(file, _OPTIONS, f"{key} at {site}", "false there: the served model's own tensor is another")
    return options


def _is_centred(file: Path, about: Document, sites: Sites, in_norm: InNorm, unsaid: str) -> bool:
    """Whether the encoder reads the stream without its mean, which a layer norm takes away by itself."""
    told = flag(file, _options(file, about, sites), "center_writing_weights", default=unsaid == "centred")
    if not told or not aliases.is_written(str(sites[0])) or in_norm == "layer_norm":
        return False
    model = text(file, about, "model_name")
    if (centred := aliases.is_centred(model)) is None:
        expected = "a name that tells the model's norm: center_writing_weights changes only models with LayerNorm"
        raise wrong(file, "model_name", repr(model), expected)
    if centred and in_norm == "l2_sqrt_d":
        raise wrong(file, _OPTIONS, "center_writing_weights, with a norm of the centred input", "one of the two")
    return centred


def _site(file: Path, cfg: Document, about: Document) -> str | None:
    if about.get("hook_head_index") is not None:
        raise wrong(file, "hook_head_index", repr(about["hook_head_index"]), "null: one head alone is not a site")
    site = _named(file, about)
    reshape = cfg.get("reshape_activations") or "none"
    if reshape != "none" and not (reshape == "hook_z" and str(site).startswith("z.")):
        raise wrong(file, "reshape_activations", repr(reshape), "none, or hook_z at a hook_z")
    return site


def _named(file: Path, about: Document, side: str = "") -> str | None:
    """The site that is read, or with the side ``_out`` the one that is written, by both names that it may have."""
    name, hf_name = text(file, about, f"hook_name{side}"), text(file, about, f"hf_hook_name{side}")
    model = text(file, about, "model_name")  # of a class of Transformers, hooks are named by the module
    site = aliases.from_transformer_lens(name) or aliases.from_module_output(name, model) if name else None
    hf_site = aliases.from_hugging_face(hf_name) if hf_name else None
    if site and hf_site and site != hf_site:
        raise wrong(file, f"hf_hook_name{side}", f"{hf_name} is {hf_site}, hook_name {name} is {site}", "one place")
    if name and not hf_site and aliases.is_ambiguous(name):
        raise wrong(file, f"hook_name{side}", f"{name}, on either side of the norm", "an hf_hook_name as well")
    return hf_site or site
