"""Gemma Scope 1: one ``params.npz`` a dictionary, without a config; it knows no other Gemma Scope.

    pre = x @ W_enc + b_enc        f = pre * (pre > threshold)        x_hat = f @ W_dec + b_dec

b_dec is not subtracted from the input and nothing is normalised: both were folded before the release. The four kinds of
repository hold the same file, so the site comes from the path (the hub's cache keeps the repository's name in it):
-res resid_post, -mlp mlp_out (after Gemma's post-norm), -att z, -transcoders mlp_in_pregain -> mlp_out, with layer_{L}.
Where the path does not tell, the sites are None and the operator gives them.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

from saesteer.coder import CoderInfo, SparseCoder
from saesteer.loaders.arrays import Arrays, open_arrays
from saesteer.loaders.files import SQUARE, bytes_on_disk, fingerprint, wrong

NAME = "gemma_scope"
FILE = "params.npz"
_REPOSITORY = re.compile(r"gemma-scope-(\d+b)-(pt|it)-(res|att|mlp|transcoders)")
_SITES = {
    "res": ("resid_post", "resid_post"),
    "mlp": ("mlp_out", "mlp_out"),
    "att": ("z", "z"),
    "transcoders": ("mlp_in_pregain", "mlp_out"),
}
_KEYS = {"W_enc", "W_dec", "b_enc", "b_dec", "threshold"}
_LOWER = {"w_enc", "w_dec", "b_enc", "b_dec", "threshold"}


def matches(place: Path) -> bool:
    """A folder with ``params.npz``, or an .npz file."""
    return place.is_file() and place.suffix == ".npz" if not place.is_dir() else (place / FILE).is_file()


def describe(place: Path) -> CoderInfo:
    """The headers and the path; raises LoadError."""
    return _open(place)[1]


def read(place: Path, dtype: torch.dtype | None) -> SparseCoder:
    """The dictionary with its matrices in dtype (None: as stored); raises LoadError."""
    arrays, info = _open(place)
    w_enc, w_dec = _weight_names(arrays)
    threshold = arrays.vector("threshold")
    if (threshold < 0).any():
        raise wrong(arrays.path, "threshold", f"holds {threshold.min().item()}", "values of 0 or more")
    if "scaling_factor" in arrays.entries and not (arrays.vector("scaling_factor") == 1).all():
        raise wrong(arrays.path, "scaling_factor", "not all ones", "ones: another scale of the features is not served")
    dtype = dtype or arrays.dtype(w_enc, w_dec)
    return SparseCoder(
        w_enc=arrays.matrix(w_enc, (info.features, info.d_in), dtype, transpose=True),
        b_enc=arrays.vector("b_enc"),
        w_dec=arrays.matrix(w_dec, (info.features, info.d_out), dtype),
        b_dec=arrays.vector("b_dec"),
        info=info,
        threshold=threshold,
    )


def _open(place: Path) -> tuple[Arrays, CoderInfo]:
    file = place / FILE if place.is_dir() else place
    arrays = open_arrays(file)
    w_enc, w_dec = _weight_names(arrays)
    arrays.expect(_LOWER if w_enc == "w_enc" else _KEYS, {"scaling_factor"})
    d_in, features = arrays.shape(w_enc, 2)
    d_out = arrays.shape(w_dec, 2)[1]
    arrays.check(w_dec, (features, d_out), "[F, d_out]")
    for key in sorted({"b_enc", "threshold", "scaling_factor"} & arrays.entries.keys()):
        arrays.check(key, (features,), "[F]")
    arrays.check("b_dec", (d_out,), "[d_out]")
    if features == d_in:
        raise wrong(file, w_enc, f"shape {[d_in, features]}", SQUARE)
    site_in, site_out, model = _from_path(file)
    if site_in is not None and site_in == site_out and d_in != d_out:
        raise wrong(file, w_dec, f"width {d_out} for an input of {d_in}", f"equal widths at {site_in}")
    info = CoderInfo(
        format=NAME,
        d_in=d_in,
        d_out=d_out,
        features=features,
        activation="jumprelu",
        site_in=site_in,
        site_out=site_out,
        source=str(place),
        fingerprint=fingerprint([file]),
        model=model,
        stored_dtype=str(arrays.dtype(w_enc, w_dec)).removeprefix("torch."),
        bytes_on_disk=bytes_on_disk([file]),
    )
    return arrays, info


def _weight_names(arrays: Arrays) -> tuple[str, str]:
    return ("w_enc", "w_dec") if "w_enc" in arrays.entries else ("W_enc", "W_dec")


def _from_path(file: Path) -> tuple[str | None, str | None, str | None]:
    """(site_in, site_out, model), each None where the path does not tell."""
    parts = file.absolute().parts
    found = [match for part in parts if (match := _REPOSITORY.search(part)) and part.endswith(match[0])]
    if not found:
        return None, None, None
    size, tuning, kind = found[-1].groups()
    model = f"google/gemma-2-{size}{'-it' if tuning == 'it' else ''}"
    if "embedding" in parts and kind == "res":
        return "embed", "embed", model
    layers = [int(match[1]) for part in parts if (match := re.fullmatch(r"layer_(\d+)", part))]
    if not layers:
        return None, None, model
    return f"{_SITES[kind][0]}.{layers[-1]}", f"{_SITES[kind][1]}.{layers[-1]}", model
