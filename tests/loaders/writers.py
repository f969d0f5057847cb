"""Faithful little weight files of every format, written with each format's own tools; nothing here reads or encodes.

F differs from d, all values are asymmetric, biases are not zero and thresholds distinct, so that neither a transposed
matrix nor a forgotten bias can pass.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file

Array = NDArray[np.float32]
Arrays = dict[str, Array]
D, F = 24, 40
SEEN = [17, 2, 30]  # the features that a manifest declares, not in order
OLD_NAMES = {
    "hook_name": "hook_point",
    "hook_head_index": "hook_point_head_index",
    "activation_fn": "activation_fn_str",
}


def raw(d_in: int = D, d_out: int = D, features: int = F, seed: int = 0) -> Arrays:
    """W_enc [d_in, F], W_dec [F, d_out], biases, thresholds in (0.1, 1): the orientation of Gemma Scope and SAELens."""
    draw = np.random.default_rng(seed)
    arrays = {
        "W_enc": draw.normal(0, 0.5, (d_in, features)),
        "W_dec": draw.normal(0, 0.5, (features, d_out)),
        "b_enc": draw.normal(0.1, 0.3, features),
        "b_dec": draw.normal(0.2, 0.5, d_out),
        "threshold": np.linspace(0.1, 1.0, features) + draw.uniform(0, 0.01, features),
    }
    return {key: value.astype(np.float32) for key, value in arrays.items()}


def tokens(width: int = D, seed: int = 1) -> Array:
    """[2, 4, width]: ordinary tokens, but one of a huge norm."""
    x = np.random.default_rng(seed).normal(0.1, 1, (2, 4, width)).astype(np.float32)
    x[0, 1] *= 1000
    return x


def tensors(file: Path, arrays: Mapping[str, NDArray[Any]]) -> Path:
    """A .safetensors file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({key: np.ascontiguousarray(value) for key, value in arrays.items()}, file)
    return file


def torch_file(file: Path, arrays: Mapping[str, Any]) -> Path:
    """A .pt file, with the strides that the arrays have, and with what is no array."""
    file.parent.mkdir(parents=True, exist_ok=True)
    arrayed = np.ndarray | np.generic
    held = {key: torch.from_numpy(np.array(one)) if isinstance(one, arrayed) else one for key, one in arrays.items()}
    torch.save(held, file)
    return file


def config(file: Path, document: Any) -> Path:
    """A JSON file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(document))
    return file


def gemma_scope(folder: Path, arrays: Mapping[str, Array], **more: NDArray[Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    everything: dict[str, Any] = {**arrays, **more}
    np.savez(folder / "params.npz", **everything)
    return folder


def saelens(folder: Path, cfg: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cfg.json").write_text(json.dumps(cfg))
    save_file({key: np.ascontiguousarray(value) for key, value in arrays.items()}, folder / "sae_weights.safetensors")
    return folder


def saelens_cfg(architecture: str, *, hook: str = "blocks.3.hook_resid_post", **more: Any) -> dict[str, Any]:
    """cfg.json as SAELens 6 writes it."""
    cfg: dict[str, Any] = {
        "architecture": architecture,
        "d_in": D,
        "d_sae": F,
        "dtype": "float32",
        "device": "cpu",
        "apply_b_dec_to_input": True,
        "normalize_activations": "none",
        "reshape_activations": "none",
        "metadata": {
            "model_name": "gpt2-small",
            "hook_name": hook,
            "hook_head_index": None,
            "context_size": 128,
            "prepend_bos": True,
            "seqpos_slice": [None],
            "sae_lens_version": "6.54.12",
        },
    }
    return cfg | more


def old_saelens_cfg(*, hook: str = "blocks.3.hook_resid_post", oldest: bool = False, **more: Any) -> dict[str, Any]:
    """The flat cfg.json from before version 6; ``oldest`` with the names of the first releases."""
    cfg: dict[str, Any] = {
        "model_name": "gpt2-small",
        "hook_name": hook,
        "hook_layer": 3,
        "hook_head_index": None,
        "d_in": D,
        "d_sae": F,
        "dtype": "torch.float32",
        "context_size": 128,
        "activation_fn": "relu",
        "sae_lens_version": "3.9.1",
    }
    cfg |= more
    return {OLD_NAMES.get(key, key): value for key, value in cfg.items()} if oldest else cfg


def manifest(folder: Path, arrays: Mapping[str, Array], *, layers: tuple[tuple[int, str], ...], **more: Any) -> Path:
    """A manifest with the given tensors (already in the format's names) at every site."""
    folder.mkdir(parents=True, exist_ok=True)
    document = {"d_model": D, "d_sae": F, "activation": "jumprelu", "activation_params": {}, "weights_uri": None}
    document |= {"layers": [list(item) for item in layers], "clampable_features": SEEN} | more
    (folder / "manifest.json").write_text(json.dumps(document))
    for number, (layer, hook) in enumerate(layers):
        shifted = {
            key: value + value.dtype.type(number) if key == "encoder_bias" else value for key, value in arrays.items()
        }
        save_file(shifted, folder / f"layer_{layer}_{hook}.safetensors")
    return folder


def manifest_tensors(
    arrays: Mapping[str, Array], rows: list[int], *, jumprelu: bool = True, full: bool = False
) -> Arrays:
    """The canonical arrays of these features, under the manifest's names."""
    tensors = {
        "encoder_weight": np.ascontiguousarray(arrays["W_enc"].T[rows]),
        "encoder_bias": arrays["b_enc"][rows],
        "decoder_weight": arrays["W_dec"][rows],
    }
    tensors |= {"threshold": arrays["threshold"][rows]} if jumprelu else {}
    return tensors | ({"decoder_bias": arrays["b_dec"]} if full else {})


def own(file: Path, arrays: Mapping[str, NDArray[Any]], metadata: dict[str, str] | None = None) -> Path:
    """saesteer's own file by the hand of safetensors, not by own.write."""
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({key: np.ascontiguousarray(value) for key, value in arrays.items()}, file, metadata=metadata)
    return file


def own_tensors(arrays: Mapping[str, Array], *, max_act: bool = True) -> Arrays:
    """The arrays under the own format's names, W_enc as [F, d]."""
    tensors = {**arrays, "W_enc": np.ascontiguousarray(arrays["W_enc"].T)}
    return tensors | ({"max_act": np.arange(1, F + 1, dtype=np.float32)} if max_act else {})
