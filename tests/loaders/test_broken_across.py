"""Every array of every format's good cross-layer transcoder, broken in turn, and its files as a whole.

As test_broken_parts does for a dictionary of one layer. What only one format can get wrong is in across.py.
"""

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from saesteer.config.assets import Assets
from saesteer.config.config import SaesteerConfig
from saesteer.errors import LoadError
from tests.loaders import across, writers
from tests.loaders.across import LAYERS
from tests.loaders.writers import D, F

# One of each format, with a threshold that is read.
GOOD = {one.name.partition("-")[0]: one for one in reversed(across.cases()) if "relu" not in one.name.split("-")}
LAYER = 1  # whose files are broken
OF_ALL = ("W_E", "b_E", "activation_function.log_jumprelu_threshold")  # arrays that hold every layer, the last one last
every_format = pytest.mark.parametrize("name", GOOD)


def store(place: Path) -> Any:
    source = {"path": str(place), "site": None}
    return Assets.open(SaesteerConfig.from_json({"dictionaries": {"clt": source}})).rows


def files(place: Path) -> list[Path]:
    """The files of a layer."""
    found = sorted(place.rglob("*.safetensors"))
    return [one for one in found if f"_{LAYER}." in one.name] or found


def parts(place: Path) -> Iterator[tuple[Path, dict[str, Any], str]]:
    """The file, its arrays and the name of one of them: of each array of a layer."""
    for path in files(place):
        arrays = load_file(path)
        yield from ((path, arrays, key) for key in arrays if not key.startswith("dataset_average"))
        writers.tensors(path, arrays)


def refused(place: Path, *words: str) -> None:
    with pytest.raises(LoadError) as caught:
        store(place)
    message = str(caught.value)
    assert all(word in message for word in (*words, str(place), "expected")), message
    assert "\n" not in message


@every_format
def test_an_array_of_another_kind_or_none(name: str, tmp_path: Path) -> None:
    place = GOOD[name].write(tmp_path)
    assert store(place).row(f"clt@{LAYER}", F - 1, torch.float32).rows.shape == (2, D)
    for path, arrays, key in parts(place):
        value = arrays[key]
        turned = np.swapaxes(value, -1, -2) if value.ndim > 1 else value[:-1]
        for broken in (np.ones(value.shape, np.int32), value[None], value[:0]):
            writers.tensors(path, arrays | {key: broken})
            refused(place, path.name, key)
        writers.tensors(path, arrays | {key: turned})
        refused(place, "shape [")  # where the shapes alone give the sizes, it contradicts another array
        writers.tensors(path, {one: arrays[one] for one in arrays if one != key})
        unlike = key == f"threshold_{LAYER}"  # without one it is a relu
        refused(place, path.name, "activation: relu; expected jumprelu, as at layer 0" if unlike else key)
        writers.tensors(path, arrays | {"more": np.ones(F, np.float32)})
        refused(place, path.name, "more: an unknown key")


@every_format
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_value_that_is_not_finite(bad: float, name: str, tmp_path: Path) -> None:
    """The last number of each array belongs to the last feature, or to no feature."""
    place = GOOD[name].write(tmp_path)
    for path, arrays, key in parts(place):
        spoiled = arrays[key].copy()
        spoiled.flat[-1] = bad
        writers.tensors(path, arrays | {key: spoiled})
        opened, layer = store(place), int(key[-1]) if key.startswith("W_D.") else LAYER
        layer = LAYERS - 1 if key in OF_ALL else layer
        opened.row(f"clt@{layer}", 0, torch.float32)
        if key.startswith(("b_d", "b_D")):  # of no feature
            opened.row(f"clt@{layer}", F - 1, torch.float32)
            continue
        with pytest.raises(LoadError, match=rf"{path.name}: {key}.*holds {bad}; expected finite values"):
            opened.row(f"clt@{layer}", F - 1, torch.float32)


@every_format
def test_a_file_that_is_no_whole_one(name: str, tmp_path: Path) -> None:
    place = GOOD[name].write(tmp_path)
    for path in files(place):
        whole = path.read_bytes()
        for content in (b"", whole[:5], whole[:100], whole[:-1], pickle.dumps({"W_enc": Path()})):
            path.write_bytes(content)
            refused(place, path.name)
        path.write_bytes(whole)
