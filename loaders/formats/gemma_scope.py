"""Gemma Scope 1: one ``params.npz`` for each dictionary, and no config; knows no other Gemma Scope.

    pre = x @ W_enc + b_enc        f = pre * (pre > threshold)        x_hat = f @ W_dec + b_dec

The input is neither shifted nor normalised: both were folded into the weights before the release. All repositories
hold the same kind of file, so the sites come from the path (the hub's cache keeps the repository's name), or are None.
Those of the embedding read the table's rows, which Gemma multiplies by sqrt(d) later. Transcoders read before the gain.
"""

import re
from pathlib import Path

from saesteer.loaders.draft import KEYS, Draft
from saesteer.loaders.opening import open_arrays

FILES = ("params.npz",)
_REPOSITORY = re.compile(r"gemma-scope-(\d+b)-(pt|it)-(res|att|mlp|transcoders)\Z")
_L0 = re.compile(r"average_l0_(\d{1,9})")
_SITES = {"res": "resid_post", "mlp": "mlp_out", "att": "z", "transcoders": "mlp_in_pregain"}  # where each kind reads


def draft(place: Path) -> Draft | None:
    """The draft of a folder with ``params.npz`` or of an .npz file; None for other places. Raises LoadError."""
    file = place / FILES[0] if place.is_dir() else place
    if file.suffix != ".npz" or not file.is_file():
        return None
    weights = open_arrays(file)
    keys = KEYS | {"threshold": "threshold"}
    if "w_enc" in weights.index:
        keys |= {"w_enc": "w_enc", "w_dec": "w_dec"}
    optional = {"ones": "scaling_factor"}
    parts = file.absolute().parts
    sites, model = _from_path(parts)
    said = _L0.fullmatch(parts[-2])
    l0 = float(said[1]) if said else None
    return Draft(weights, keys, "jumprelu", optional=optional, transposed={"w_enc"}, sites=sites, model=model, l0=l0)


def _from_path(parts: tuple[str, ...]) -> tuple[tuple[str | None, str | None], str | None]:
    """((site_in, site_out), model), each None if the path does not show it."""
    found = [(number, match) for number, part in enumerate(parts) if (match := _REPOSITORY.search(part))]
    if not found:
        return (None, None), None
    number, match = found[-1]
    size, tuning, kind = match.groups()
    model = f"google/gemma-2-{size}{'-it' if tuning == 'it' else ''}"
    if "embedding" in parts[number:] and kind == "res":
        return ("embed", "embed"), model
    layers = [int(match[1]) for part in parts if (match := re.fullmatch(r"layer_(\d+)", part))]
    if not layers:
        return (None, None), model
    written = "mlp_out" if kind == "transcoders" else _SITES[kind]
    return (f"{_SITES[kind]}.{layers[-1]}", f"{written}.{layers[-1]}"), model
