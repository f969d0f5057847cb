"""saesteer's own file: one .safetensors a dictionary, already canonical; it knows no other library's names.

    W_enc [F, d_in]  W_dec [F, d_out]  b_enc [F]  b_dec [d_out]  [threshold [1 or F]]  [max_act [F]]
    pre = x @ W_enc.T + b_enc;  f = pre where pre > threshold (relu without one; topk with metadata k)

Everything else stands in the file's metadata, as strings: format (saesteer), activation, k, in_norm, site_in, site_out,
feature_unit, skip_first, model, feature_ids, can_reconstruct. A file without metadata is taken when it has max_act, as
the first ones did, and when F != d tells its orientation from that of other formats with the same key names.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_args

import torch

from saesteer.coder import Activation, CoderInfo, FeatureUnit, InNorm, SparseCoder
from saesteer.errors import LoadError
from saesteer.loaders.arrays import Arrays, open_arrays
from saesteer.loaders.files import bytes_on_disk, fingerprint, wrong
from saesteer.loaders.write import write_arrays

NAME = "saesteer"
FILE = "saesteer.safetensors"
_REQUIRED = {"W_enc", "W_dec", "b_enc", "b_dec"}
_OPTIONAL = {"threshold", "max_act"}
_SITE = re.compile(r"[a-z]+(_[a-z]+)*(\.\d+)?")


def matches(place: Path) -> bool:
    """A .safetensors file of ours, or a folder with ``saesteer.safetensors`` or with one file of ours alone."""
    if place.is_dir():
        return (file := _file(place)) is not None and matches(file)
    if place.suffix != ".safetensors" or not place.is_file():
        return False
    if place.name == FILE:
        return True
    try:
        arrays = open_arrays(place)
    except LoadError:
        return False
    return arrays.metadata.get("format") == NAME or _REQUIRED | {"max_act"} <= arrays.entries.keys()


def describe(place: Path) -> CoderInfo:
    """The header; raises LoadError."""
    return _open(place)[1]


def read(place: Path, dtype: torch.dtype | None) -> SparseCoder:
    """The dictionary with its matrices in dtype (None: as stored); raises LoadError."""
    arrays, info = _open(place)
    dtype = dtype or arrays.dtype("W_enc", "W_dec")
    max_act = arrays.vector("max_act") if info.has_max_act else None
    if max_act is not None and (max_act < 0).any():
        raise wrong(arrays.path, "max_act", f"holds {max_act.min().item()}", "values of 0 or more")
    return SparseCoder(
        w_enc=arrays.matrix("W_enc", (info.features, info.d_in), dtype),
        b_enc=arrays.vector("b_enc"),
        w_dec=arrays.matrix("W_dec", (info.features, info.d_out), dtype),
        b_dec=arrays.vector("b_dec"),
        info=info,
        threshold=arrays.vector("threshold").expand(info.features).clone() if info.activation == "jumprelu" else None,
        max_act=max_act,
    )


def write(path: Path | str, coder: SparseCoder) -> None:
    """Writes a dictionary so that reading it gives the same tensors and meaning; equal dictionaries give equal bytes.

    The file appears whole or not at all. Neither ``info.source`` nor the format it came from is kept. One threshold
    that all features share is stored once.

    Raises:
        LoadError: when the file cannot be written.
    """
    tensors = {"W_enc": coder.w_enc, "W_dec": coder.w_dec, "b_enc": coder.b_enc, "b_dec": coder.b_dec}
    if coder.threshold is not None:
        same = bool((coder.threshold == coder.threshold[0]).all())
        tensors["threshold"] = coder.threshold[:1] if same else coder.threshold
    if coder.max_act is not None:
        tensors["max_act"] = coder.max_act
    write_arrays(Path(path), tensors, _metadata(coder.info))


def _metadata(info: CoderInfo) -> dict[str, str]:
    told = {
        "format": NAME,
        "activation": info.activation,
        "can_reconstruct": json.dumps(info.can_reconstruct),
        "feature_ids": None if info.feature_ids is None else json.dumps(info.feature_ids),
        "feature_unit": info.feature_unit,
        "in_norm": info.in_norm,
        "k": None if info.k is None else str(info.k),
        "model": info.model,
        "site_in": info.site_in,
        "site_out": info.site_out,
        "skip_first": str(info.skip_first),
    }
    return {key: value for key, value in told.items() if value is not None}


def _file(folder: Path) -> Path | None:
    if (folder / FILE).is_file():
        return folder / FILE
    files = list(folder.glob("*.safetensors"))
    return files[0] if len(files) == 1 else None


def _open(place: Path) -> tuple[Arrays, CoderInfo]:
    file = _file(place) if place.is_dir() else place
    if file is None:
        raise LoadError(f"{place}: no single .safetensors file; expected {FILE}")
    arrays = open_arrays(file)
    arrays.expect(_REQUIRED, _OPTIONAL)
    features, d_in = arrays.shape("W_enc", 2)
    d_out = arrays.shape("W_dec", 2)[1]
    arrays.check("b_enc", (features,), "[F] of W_enc [F, d_in]")
    arrays.check("W_dec", (features, d_out), "[F, d_out]")
    arrays.check("b_dec", (d_out,), "[d_out]")
    if "max_act" in arrays.entries:
        arrays.check("max_act", (features,), "[F]")
    if "threshold" in arrays.entries and arrays.shape("threshold", 1) != (1,):
        arrays.check("threshold", (features,), "[F], or [1],")
    return arrays, _info(place, arrays, (features, d_in, d_out))


def _info(place: Path, arrays: Arrays, sizes: tuple[int, int, int]) -> CoderInfo:
    features, d_in, d_out = sizes
    file, said = arrays.path, arrays.metadata
    if said.get("format", NAME) != NAME:
        raise wrong(file, "format", repr(said["format"]), repr(NAME))
    if "format" not in said and features == d_in:
        raise wrong(file, "W_enc", f"shape {[features, d_in]} and no metadata", "format: saesteer, or F other than d")
    activation = _one_of(
        file, said, "activation", get_args(Activation), "jumprelu" if "threshold" in arrays.entries else "relu"
    )
    if (activation == "jumprelu") != ("threshold" in arrays.entries):
        raise wrong(
            file, "threshold", f"{'there' if activation != 'jumprelu' else 'missing'}", "one for jumprelu, else none"
        )
    try:
        return CoderInfo(
            format=NAME,
            d_in=d_in,
            d_out=d_out,
            features=features,
            activation=activation,
            k=int(said["k"]) if "k" in said else None,
            in_norm=_one_of(file, said, "in_norm", get_args(InNorm), "none"),
            site_in=_site(file, said, "site_in"),
            site_out=_site(file, said, "site_out"),
            feature_unit=_one_of(file, said, "feature_unit", get_args(FeatureUnit), "raw"),
            has_max_act="max_act" in arrays.entries,
            skip_first=int(said.get("skip_first", "1")),
            source=str(place),
            fingerprint=fingerprint([file]),
            feature_ids=_feature_ids(file, said),
            can_reconstruct=_one_of(file, said, "can_reconstruct", ("true", "false"), "true") == "true",
            model=said.get("model"),
            stored_dtype=str(arrays.dtype("W_enc", "W_dec")).removeprefix("torch."),
            bytes_on_disk=bytes_on_disk([file]),
        )
    except (ValueError, AssertionError) as exc:
        if isinstance(exc, LoadError):
            raise
        raise wrong(file, "__metadata__", f"{said} ({exc})", "values that agree with the arrays") from exc


def _one_of(file: Path, said: dict[str, str], key: str, known: tuple[str, ...], default: str) -> Any:
    value = said.get(key, default)
    if value not in known:
        raise wrong(file, key, repr(value), f"one of {', '.join(known)}")
    return value


def _site(file: Path, said: dict[str, str], key: str) -> str | None:
    if key in said and not _SITE.fullmatch(said[key]):
        raise wrong(file, key, repr(said[key]), "a site such as resid_post.15")
    return said.get(key)


def _feature_ids(file: Path, said: dict[str, str]) -> tuple[int, ...] | None:
    if "feature_ids" not in said:
        return None
    ids = json.loads(said["feature_ids"])
    if not isinstance(ids, list) or not all(type(feature) is int and feature >= 0 for feature in ids):
        raise wrong(file, "feature_ids", said["feature_ids"], "a list of whole numbers")
    return tuple(ids)
