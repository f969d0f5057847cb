"""EleutherAI's sparsify: ``cfg.json`` + ``sae.safetensors`` in a folder named after a module; it knows no training.

    xs = x - b_dec (x in a transcoder)        p = relu(xs @ encoder.weight.T + encoder.bias)
    f = the k largest p, or the largest p of each of k groups        y = f @ W_dec + b_dec

signed, in old files: no relu, the k largest of |p|. A transcoder from before February 2025 has no transcode in its
config and did subtract b_dec, as today's library still does with such a file; then its place's name says what it is.

An SAE reads and writes the output of the module, a transcoder reads its input and writes its output. Whether mlp_out is
the output of the module mlp depends on the model: its name is looked for in ../config.json and in the run's name.
"""

import re
from pathlib import Path

from saesteer.dictionaries.coder import Activation
from saesteer.loaders import aliases
from saesteer.loaders.draft import Axis, Draft, Sites
from saesteer.loaders.files import both, flag, read_json, text, whole_number, wrong
from saesteer.loaders.opening import open_arrays

FILES = ("cfg.json", "sae.safetensors")
_KEYS = {"w_enc": "encoder.weight", "w_dec": "W_dec", "b_enc": "encoder.bias", "b_dec": "b_dec"}
_ACTIVATIONS: dict[str, Activation] = {"topk": "topk", "groupmax": "groupmax"}


def draft(place: Path) -> Draft | None:
    """The draft of a folder with both files, or of one of the two; None for other places. Raises LoadError."""
    if (found := both(place, FILES)) is None:
        return None
    config, file = found
    folder = file.parent
    cfg = read_json(config)
    name = text(config, cfg, "activation") or "topk"
    if name not in _ACTIVATIONS:
        raise wrong(config, "activation", repr(name), f"one of {', '.join(_ACTIVATIONS)}")
    transcode = flag(config, cfg, "transcode", default=False)
    width = Axis("d_in", whole_number(config, cfg, "d_in"))
    features = whole_number(config, cfg, "num_latents", at_least=0) if cfg.get("num_latents") else 0
    features = features or width.size * whole_number(config, cfg, "expansion_factor")
    module = folder.parent if re.fullmatch(r"seed\d+", folder.name) else folder  # runs of several seeds: layers.3/seed1
    old = "transcode" not in cfg and "transcoder" in _run(module)
    run = module.parent / "config.json"
    model = text(run, read_json(run), "model") if run.is_file() else None
    return Draft(
        open_arrays(file),
        _KEYS | ({} if transcode else {"b_in": "b_dec"}),
        "abstopk" if flag(config, cfg, "signed", default=False) else _ACTIVATIONS[name],
        optional={"skip": "W_skip"},
        configs=(config, run) if run.is_file() else (config,),
        sizes=(Axis("num_latents", features), width, width),
        k=whole_number(config, cfg, "k"),
        sites=_sites(module, model, transcode or old),
        model=model,
    )


def _run(module: Path) -> str:
    """The name of the module's run, and of its repository in the hub's cache. Folders above may have any name."""
    above = module.absolute().parts[:-1]
    begins = [number for number, part in enumerate(above) if part.startswith("models--")]
    return "/".join(above[begins[-1] if begins else -1 :])


def _sites(folder: Path, model: str | None, transcoder: bool) -> Sites:
    written = aliases.from_module_output(folder.name, model or _run(folder))
    if not transcoder or written is None:
        return written, written
    kind, _, layer = written.partition(".")
    return f"mlp_in.{layer}" if kind.startswith("mlp_out") else None, written
