"""Every array of every format's good cross-layer transcoder, broken in turn, and its files as a whole.

As test_broken_parts does for a dictionary of one layer. What only one format can get wrong is in across.py.
"""

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from saesteer.config.assets import Assets
from saesteer.config.config import SaesteerConfig
from saesteer.errors import LoadError
from saesteer.loaders import FORMATS
from tests.loaders import across, writers
from tests.loaders.across import LAYERS
from tests.loaders.writers import D, F

# One of each format, with a threshold that is read.
GOOD = {one.name.partition("-")[0]: one for one in reversed(across.cases()) if "relu" not in one.name.split("-")}
LAYER = 1  # whose files are broken


def store(place: Path) -> Any:
    source = {"path": str(place), "site": None}
    return Assets.open(SaesteerConfig.from_json({"dictionaries": {"clt": source}})).rows


def files(place: Path) -> list[Path]:
    """The files of a layer."""
    found = sorted(place.rglob("*.safetensors"))
    return [one for one in found if f"_{LAYER}." in one.name] or found


def parts() -> Iterator[Any]:
    """Format, the file's name and the array's: of each array of a layer."""
    # Known without writing: tests are collected before there is a folder.
    of_layer = [f"{key}_{LAYER}" for key in ("W_enc", "b_enc", "b_dec", "threshold")]
    known = {
        "circuit_tracer": {f"W_enc_{LAYER}": of_layer, f"W_dec_{LAYER}": [f"W_dec_{LAYER}"]},
        "gemma_scope_2": {f"params_layer_{LAYER}": ["w_enc", "b_enc", "threshold", "b_dec", "w_dec"]},
        "llamascopium": {
            "sae_weights": [
                *("W_E", "b_E", "activation_function.log_jumprelu_threshold"),
                *(f"{key}.{layer}" for layer in range(LAYERS) for key in ("W_D", "b_D")),
            ]
        },
    }
    for name, held in known.items():
        for file, keys in held.items():
            yield from (pytest.param(name, file, key, id=f"{name}-{key}") for key in keys)


every_part = pytest.mark.parametrize(("name", "file", "key"), [*parts()])
every_format = pytest.mark.parametrize("name", GOOD)


def refused(place: Path, folder: Path, *words: str) -> str:
    with pytest.raises(LoadError) as caught:
        store(place)
    message = str(caught.value)
    assert all(word in message for word in (*words, str(folder), "expected")), message
    assert "\n" not in message
    return message


def test_each_format_with_cross_layer_transcoders_is_here(tmp_path: Path) -> None:
    assert GOOD.keys() <= FORMATS.keys()
    assert GOOD.keys() == {one.name.partition("-")[0] for one in across.cases()}
    for name, case in GOOD.items():
        place = case.write(tmp_path / name)
        arrays = {(name, one.stem, key) for one in files(place) for key in load_file(one)}
        named = {tuple(one.values) for one in parts() if one.values[0] == name}
        assert named == {one for one in arrays if not one[2].startswith("dataset_average")}
        assert store(place).row(f"clt@{LAYER}", F - 1, torch.float32).rows.shape == (2, D)


BROKEN: dict[str, Callable[[Any], Any]] = {
    "integers": lambda value: np.ones(value.shape, np.int32),
    "rank": lambda value: value[None],
    "empty": lambda value: value[:0],
    "turned": lambda value: np.ascontiguousarray(np.swapaxes(value, -1, -2)) if value.ndim > 1 else value[:-1],
}


@every_part
@pytest.mark.parametrize("how", BROKEN)
def test_an_array_of_another_kind(how: str, name: str, file: str, key: str, tmp_path: Path) -> None:
    place = GOOD[name].write(tmp_path)
    [path] = [one for one in files(place) if one.stem == file]
    writers.tensors(path, load_file(path) | {key: BROKEN[how](load_file(path)[key])})
    # Where the shapes alone give the sizes, a turned matrix contradicts another array.
    refused(place, tmp_path, *(["shape ["] if how == "turned" else [path.name, key]))


@every_part
def test_an_array_that_is_missing(name: str, file: str, key: str, tmp_path: Path) -> None:
    place = GOOD[name].write(tmp_path)
    [path] = [one for one in files(place) if one.stem == file]
    writers.tensors(path, {one: value for one, value in load_file(path).items() if one != key})
    if (name, key) == ("circuit_tracer", f"threshold_{LAYER}"):  # without one it is a relu, unlike the layer before
        refused(place, tmp_path, path.name, "activation: relu; expected jumprelu, as at layer 0")
    else:
        refused(place, tmp_path, path.name, key)


@every_format
def test_an_array_that_nobody_knows(name: str, tmp_path: Path) -> None:
    place = GOOD[name].write(tmp_path)
    path = files(place)[0]
    writers.tensors(path, load_file(path) | {"more": np.ones(F, np.float32)})
    refused(place, tmp_path, path.name, "more: an unknown key")


@every_part
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_value_that_is_not_finite(bad: float, name: str, file: str, key: str, tmp_path: Path) -> None:
    """The last number of each array belongs to the last feature, or to no feature."""
    place = GOOD[name].write(tmp_path)
    [path] = [one for one in files(place) if one.stem == file]
    arrays = load_file(path)
    arrays[key].flat[-1] = bad
    writers.tensors(path, arrays)
    opened, layer = store(place), int(key[-1]) if key.startswith("W_D.") else LAYER
    layer = LAYERS - 1 if key in ("W_E", "b_E", "activation_function.log_jumprelu_threshold") else layer
    opened.row(f"clt@{layer}", 0, torch.float32)
    if key.startswith(("b_d", "b_D")):  # of no feature
        opened.row(f"clt@{layer}", F - 1, torch.float32)
        return
    with pytest.raises(LoadError) as caught:
        opened.row(f"clt@{layer}", F - 1, torch.float32)
    assert f"{path.name}: {key}" in str(caught.value)
    assert f"holds {bad}; expected finite values" in str(caught.value)


@every_format
@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_file_that_is_cut_short(keep: int, name: str, tmp_path: Path) -> None:
    for number in range(len(files(GOOD[name].write(tmp_path / "good")))):
        place = GOOD[name].write(tmp_path / str(number))
        path = files(place)[number]
        path.write_bytes(path.read_bytes()[:keep])
        refused(place, tmp_path, path.name)


@every_format
def test_a_file_of_pickled_objects(name: str, tmp_path: Path) -> None:
    for number in range(len(files(GOOD[name].write(tmp_path / "good")))):
        place = GOOD[name].write(tmp_path / str(number))
        path = files(place)[number]
        path.write_bytes(pickle.dumps({"W_enc": Path()}))
        refused(place, tmp_path, f"{path.name}: header: ")
