"""Every part of every format's good dictionary, broken in turn: each array, the file itself, each value of the config.

What is broken comes from the formats' samples, so a new format brings nothing for it. What only one format can get
wrong is in its own module, and read by test_wrong_files.
"""

import json
import pickle
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from saesteer.dictionaries.coder import CoderInfo
from saesteer.errors import LoadError
from saesteer.loaders import describe, load
from tests.loaders.case import Sample
from tests.loaders.every import SAMPLES, every_sample
from tests.loaders.writers import F

UNKNOWN = "expected one of the formats"
Keys = tuple[str, ...]
CONFIGURED = [name for name, sample in SAMPLES.items() if sample.config]


def headers(sample: Sample) -> Iterator[tuple[str, dict[str, Any], str]]:
    """What headers alone show: (what is wrong, the arrays, words of the message)."""
    good, file = sample.arrays, Path(sample.file).name
    yield "unknown", {**good, "unknown": np.ones(F, np.float32)}, f"{file}: unknown: an unknown key"
    for key, value in good.items():
        missing = UNKNOWN if key in sample.tells else f"{file}: {key}: missing among the keys"
        if key not in sample.optional:
            yield f"no-{key}", {one: good[one] for one in good if one != key}, missing
        yield f"integers-{key}", {**good, key: np.ones(value.shape, np.int32)}, f"{file}: {key}: dtype "
        if value.ndim:
            yield f"rank-{key}", {**good, key: value[None]}, f"{file}: {key}: shape [1, "
            yield f"empty-{key}", {**good, key: value[:0]}, f"{file}: {key}: shape [0"
        if value.ndim == 2:
            # Where the shapes alone give the sizes, a turned matrix contradicts the first vector.
            yield f"turned-{key}", {**good, key: value.T}, ": shape ["


def values(sample: Sample) -> Iterator[tuple[str, dict[str, Any], str]]:
    """What only the values show."""
    for key, value in sample.arrays.items():
        for bad in (np.nan, np.inf):
            spoiled = np.array(value)
            spoiled.flat[-1] = bad
            words = f"{Path(sample.file).name}: {key}: holds {bad}; expected finite values"
            yield f"{bad}-{key}", {**sample.arrays, key: spoiled}, words


def refused(read: Callable[[str], object], place: Path, words: str, folder: Path) -> None:
    with pytest.raises(LoadError) as caught:
        read(str(place))
    message = str(caught.value)
    assert words in message
    assert str(folder) in message
    assert "expected" in message
    assert "\n" not in message


@every_sample
def test_wrong_headers_and_values(name: str, tmp_path: Path) -> None:
    sample = SAMPLES[name]
    for which, arrays, words in headers(sample):
        place = sample.write(tmp_path / which, arrays)
        refused(load, place, words, tmp_path)
        refused(describe, place, words, tmp_path)
    for which, arrays, words in values(sample):
        refused(load, sample.write(tmp_path / which, arrays), words, tmp_path)


@every_sample
def test_what_may_be_missing(name: str, tmp_path: Path) -> None:
    for key in SAMPLES[name].optional:
        rest = {one: value for one, value in SAMPLES[name].arrays.items() if one != key}
        assert load(str(SAMPLES[name].write(tmp_path / key, rest))).info.features == F


@every_sample
def test_pickled_objects(name: str, tmp_path: Path) -> None:
    sample = SAMPLES[name]
    file = tmp_path / sample.file
    if file.suffix == ".safetensors":  # which cannot hold them, so the file is a pickle as a whole
        place = sample.write(tmp_path, dict(sample.arrays))
        file.write_bytes(pickle.dumps({"W_enc": Path()}))
        words = f"{file.name}: header: "
    elif file.suffix == ".npz":
        key = next(iter(sample.arrays))
        place = sample.write(tmp_path, {**sample.arrays, key: np.array([Path()] * F, object)})
        words = f"{file.name}: {key}: Python objects; expected numbers: pickled objects are never loaded"
    else:
        place = sample.write(tmp_path, {**sample.arrays, "object": Path()})
        words = f"{file.name}: data.pkl: objects of pathlib"
    refused(load, place, words, tmp_path)
    refused(describe, place, words, tmp_path)


def document(file: Path) -> dict[str, Any]:
    read: Callable[[str], Any] = yaml.safe_load if file.suffix == ".yaml" else json.loads
    return dict(read(file.read_text()))


def written(file: Path, changed: dict[str, Any]) -> None:
    file.write_text(yaml.safe_dump(changed) if file.suffix == ".yaml" else json.dumps(changed))


def keys_of(found: dict[str, Any], above: Keys = ()) -> Iterator[Keys]:
    for key, value in found.items():
        yield (*above, key)
        if isinstance(value, dict):
            yield from keys_of(value, (*above, key))


def told(place: Path) -> CoderInfo | str:
    """What is known about a dictionary, but for what depends on its files' bytes; or why it is refused."""
    try:
        return replace(describe(str(place)), fingerprint="", bytes_on_disk=0)
    except LoadError as exc:
        return str(exc)


@pytest.mark.parametrize("name", CONFIGURED)
def test_every_value_of_a_config_is_checked_or_means_nothing(name: str, tmp_path: Path) -> None:
    """A value of a wrong type is refused by its file and key, or the dictionary is the one that it was."""
    sample = SAMPLES[name]
    place = sample.write(tmp_path, dict(sample.arrays))
    config, before = tmp_path / str(sample.config), told(place)
    good, checked = document(config), set()
    for keys in keys_of(good):
        changed = deepcopy(good)
        at = changed
        for key in keys[:-1]:
            at = at[key]
        for bad in (-1, [3.5]) if isinstance(at[keys[-1]], dict) else ({"an": "object"}, -1, [3.5]):
            at[keys[-1]] = bad
            written(config, changed)
            after = told(place)
            if isinstance(after, str):
                checked.add(keys)
                assert f"{config}: " in after or (keys[-1] in sample.tells and UNKNOWN in after), after
                assert keys[-1] in after or keys[-1] in sample.tells, after
                assert "expected" in after
            else:
                assert after == before, keys
    assert checked


NO_OBJECTS = ["[1]", "3", '"x"', "null", "{", "", "[" * 100_000, "\xff"]


@pytest.mark.parametrize("name", CONFIGURED)
def test_a_config_that_is_no_object(name: str, tmp_path: Path) -> None:
    sample = SAMPLES[name]
    place = sample.write(tmp_path, dict(sample.arrays))
    config = tmp_path / str(sample.config)
    expected = "expected keys and values" if config.suffix == ".yaml" else "expected a JSON object"
    for text in NO_OBJECTS:
        config.write_bytes(text.encode("latin-1"))
        with pytest.raises(LoadError, match=rf"{config.name}: .*{expected}"):
            describe(str(place))
    with pytest.raises(LoadError, match=rf"{config.name}: .*{expected}"):
        load(str(place))


@pytest.mark.parametrize("name", CONFIGURED)
def test_a_config_without_one_of_its_keys(name: str, tmp_path: Path) -> None:
    """It is refused, or less is known about the dictionary."""
    sample = SAMPLES[name]
    place = sample.write(tmp_path, dict(sample.arrays))
    config, before = tmp_path / str(sample.config), describe(str(place))
    good = document(config)
    for key in good:
        written(config, {one: value for one, value in good.items() if one != key})
        after = told(place)
        if isinstance(after, str):
            assert str(tmp_path) in after and "expected" in after
        else:
            assert (after.features, after.d_in, after.d_out) == (before.features, before.d_in, before.d_out)
