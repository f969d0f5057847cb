"""dictionary_learning's own files, ``ae.pt`` + ``config.json``, of all its classes; it knows no training run.

    xs = x - b_dec (not in AutoEncoderNew and JumpReluAutoEncoder)
    f = act(xs @ W_enc + b_enc)        y = f @ W_dec + b_dec

The class stands in the config alone: AutoEncoderTopK and BatchTopKSAE store the same arrays. TopK ranks and does not
use its threshold. BatchTopK and Matryoshka are a jumprelu with one threshold, and a relu while it is -1, never set.
Values are those of the file: the library itself rescales an AutoEncoder to unit decoder rows when it reads it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from saesteer.dictionaries.coder import Activation
from saesteer.loaders import sizes
from saesteer.loaders.draft import Draft
from saesteer.loaders.files import Document, both, read_json, section, text, whole_number, wrong
from saesteer.loaders.opening import open_arrays

FILES = ("ae.pt", "config.json")
_CHECKPOINT = re.compile(r"/checkpoints/ae_\d+\.pt$")  # its config stands with that of the final ae.pt
_LINEAR = {"w_enc": "encoder.weight", "w_dec": "decoder.weight"}
_BIASED = _LINEAR | {"b_enc": "encoder.bias"}
_PLAIN = {"w_enc": "W_enc", "w_dec": "W_dec", "b_enc": "b_enc", "b_dec": "b_dec"}
_TOP_K = _BIASED | {"b_dec": "b_dec", "b_in": "b_dec"}


class _Class(NamedTuple):
    activation: Activation
    keys: dict[str, str]
    ignored: frozenset[str] = frozenset()


_CLASSES = {
    "AutoEncoder": _Class("relu", _BIASED | {"b_dec": "bias", "b_in": "bias"}),
    "AutoEncoderNew": _Class("relu", _BIASED | {"b_dec": "decoder.bias"}),
    "GatedAutoEncoder": _Class(
        "jumprelu",
        _LINEAR
        | {
            "b_enc": "mag_bias",
            "b_gate": "gate_bias",
            "r_mag": "r_mag",
            "b_dec": "decoder_bias",
            "b_in": "decoder_bias",
        },
    ),
    "JumpReluAutoEncoder": _Class("jumprelu", _PLAIN | {"threshold": "threshold"}),
    "AutoEncoderTopK": _Class("topk", _TOP_K, frozenset({"k", "threshold"})),
    "BatchTopKSAE": _Class("jumprelu", _TOP_K | {"one_threshold": "threshold"}, frozenset({"k"})),
    "MatryoshkaBatchTopKSAE": _Class(
        "jumprelu", _PLAIN | {"b_in": "b_dec", "one_threshold": "threshold"}, frozenset({"k", "group_sizes"})
    ),
}


def draft(place: Path) -> Draft | None:
    """The draft of a folder with both files, of one of them or of a checkpoint; None for other places; or LoadError."""
    later = _CHECKPOINT.search(place.as_posix()) and (place, place.parents[1] / FILES[1])
    found = later if later and later[1].is_file() else both(place, FILES)
    if found is None:
        return None
    file, config = found
    cfg = read_json(config)
    trainer = section(config, cfg, "trainer")
    name = text(config, trainer, "dict_class")
    if name not in _CLASSES:
        raise wrong(config, "trainer.dict_class", repr(name), f"one of {', '.join(_CLASSES)}")
    activation, keys, ignored = _CLASSES[name]
    site = _site(config, cfg, trainer)
    return Draft(
        open_arrays(file),
        keys,
        activation,
        ignored=ignored,
        transposed={"w_enc"} if keys["w_enc"] == "W_enc" else {"w_dec"},
        configs=(config,),
        sizes=sizes.named(config, trainer, "dict_size", "activation_dim"),
        below_zero="raised",
        k=whole_number(config, trainer, "k") if activation == "topk" else None,
        sites=(site, site),
        model=text(config, trainer, "lm_name"),
    )


def _site(file: Path, cfg: Document, trainer: Document) -> str | None:
    """resid_post by the name of the submodule or the folder; other names have no fixed meaning."""
    buffer = section(file, cfg, "buffer") if "buffer" in cfg else {}
    if text(file, buffer, "io") not in (None, "out"):
        return None
    names = [text(file, trainer, "submodule_name") or "", *reversed(file.absolute().parts)]
    found = [match for name in names if (match := re.fullmatch(r"resid_post_layer_(\d+)", name))]
    return f"resid_post.{int(found[0][1])}" if found else None
