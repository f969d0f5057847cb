"""One row of a dictionary in a file against the same row of the whole, for every format; and files that change."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from saesteer.dictionaries.coder import RANKED, SparseCoder
from saesteer.errors import LoadError
from saesteer.loaders import alone, describe, load, max_act
from saesteer.loaders.formats import own
from saesteer.loaders.rows import RowFile, feature_rows, open_rows
from saesteer.loaders.write import write_arrays
from tests.loaders import writers
from tests.loaders.case import Case
from tests.loaders.every import every_case


def same_row(one: SparseCoder, whole: SparseCoder, row: int) -> None:
    """To the last bit: nobody can tell whether a row came alone."""
    assert (one.info.features, one.info.d_in, one.info.d_out) == (1, whole.info.d_in, whole.info.d_out)
    for name in ("w_enc", "w_dec", "b_enc", "threshold", "max_act"):
        ours, theirs = getattr(one, name), getattr(whole, name)
        assert (ours is None) == (theirs is None), name
        assert ours is None or torch.equal(ours, theirs[row : row + 1]), name


def same_feature(found: RowFile, row: int, dtype: torch.dtype) -> None:
    """What a request takes of a row, read as fast as its file allows, is what the row says; of a square SAE."""
    one, layered = found.row(row, torch.float32 if found.info.in_norm == "layer_norm" else dtype), found.info.targets
    expected = feature_rows(one, one.w_dec[:0] if layered is None else found.later(row, dtype), dtype)
    ours = found.feature(row, dtype)
    assert [one.digest for one in ours] == [one.digest for one in expected]
    for mine, theirs in zip(ours, expected, strict=True):
        assert np.array_equal(mine.rows, theirs.rows)
        assert (mine.bias, mine.threshold, mine.max_act) == (theirs.bias, theirs.threshold, theirs.max_act)


@every_case
def test_every_row_is_the_row_of_the_whole(case: Case, tmp_path: Path) -> None:
    place = str(case.write(tmp_path))
    whole = load(place)
    if whole.info.activation in RANKED:
        with pytest.raises(LoadError, match=f"uses {whole.info.activation}, which ranks all features.*NAME="):
            open_rows(place)
        return
    found = open_rows(place)
    assert found.info == describe(place, hashed=False)
    for row in {*range(0, whole.info.features, 7), whole.info.features - 1}:
        same_row(found.row(row, None), whole, row)
        if found.info.d_in == found.info.d_out:
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                same_feature(found, row, dtype)
    narrow = load(place, dtype=torch.bfloat16)
    same_row(found.row(1, torch.bfloat16), narrow, 1)
    with pytest.MonkeyPatch.context() as patch:
        asked: list[int] = []
        real = os.pread

        def counted(descriptor: int, size: int, at: int) -> bytes:
            asked.append(size)
            return real(descriptor, size, at)

        patch.setattr(os, "pread", counted)
        found.row(0, None)
    info = found.info
    # Both rows and what is subtracted from the input, and a handful of numbers.
    assert 0 < sum(asked) <= 8 * (2 * info.d_in + info.d_out + 12)


@settings(max_examples=30)
@given(data=st.data())
def test_a_row_of_random_files_is_the_row_of_the_whole(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A gated SAE that subtracts b_dec, which uses most folds, in sizes at which blocks and sums end anywhere."""
    draw = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    features, width = data.draw(st.integers(2, 70)), data.draw(st.integers(2, 300))
    features += features == width

    def array(*shape: int) -> Any:
        return draw.normal(size=shape).astype(np.float32)

    arrays = {"W_enc": array(width, features), "W_dec": array(features, width), "b_dec": array(width)}
    arrays |= {key: array(features) for key in ("b_mag", "b_gate", "r_mag")}
    cfg = writers.saelens_cfg("gated", d_in=width, d_sae=features)
    place = writers.saelens(tmp_path_factory.mktemp("random"), cfg, arrays)
    dtype = data.draw(st.sampled_from([None, torch.bfloat16, torch.float16]))
    whole, row = load(place, dtype=dtype), data.draw(st.integers(0, features - 1))
    same_row(open_rows(place).row(row, dtype), whole, row)


@pytest.mark.parametrize("key", ["W_enc", "W_dec", "b_enc", "threshold", "max_act"])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -1.0])
def test_a_wrong_number_is_refused_in_the_same_words(key: str, number: float, file: Path) -> None:
    arrays = safetensors.torch.load_file(file) | {"max_act": torch.ones(writers.F)}
    arrays[key].view(-1)[-1] = number
    write_arrays(file, arrays, {"format": "saesteer", "activation": "jumprelu"})
    found = open_rows(file)
    found.feature(0, torch.bfloat16)
    if number == -1.0 and key != "max_act":  # a threshold below 0 is what our own format says
        found.feature(writers.F - 1, torch.bfloat16)
        return
    for read in (found.row, found.feature):
        with pytest.raises(LoadError, match=rf"{key}: (holds|a value outside)"):
            read(writers.F - 1, torch.bfloat16)


def test_maximum_activations_next_to_a_dictionary_belong_to_its_rows(tmp_path: Path) -> None:
    place = writers.gemma_scope(tmp_path / "layer_3", writers.raw())
    coder = load(place)
    max_act.write(place, alone(place), torch.arange(coder.info.features).float(), tokens=9)
    found = open_rows(place)
    same_row(found.row(7, None), load(place), 7)
    assert found.row(7, None).max_act == torch.tensor([7.0])
    max_act.write(
        place, alone(writers.gemma_scope(tmp_path / "layer_4", writers.raw(seed=2))), coder.b_enc.abs(), tokens=9
    )
    same_feature(found, 7, torch.bfloat16)
    with pytest.raises(LoadError, match="measured on other weights"):
        open_rows(place).row(7, None)


def replaced(file: Path) -> None:
    other = file.with_name("other")
    other.write_bytes(file.read_bytes())
    os.utime(other, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))
    other.replace(file)


def edited(file: Path) -> None:
    with file.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"\x40")
    os.utime(file, ns=(0, 0))  # the clock of a file system ticks slowly


def spoiled(file: Path) -> None:
    file.write_bytes(b"\xff" * file.stat().st_size)
    os.utime(file, ns=(0, 0))


CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "replaced": (replaced, "has changed since"),
    "edited": (edited, "has changed since"),
    "spoiled": (spoiled, "has changed since"),  # which is more than that it holds NaN
    "cut": (lambda file: os.truncate(file, file.stat().st_size - 1), "has changed since"),
    "emptied": (lambda file: os.truncate(file, 0), "has changed since"),
    "removed": (Path.unlink, r"cannot be read any more \(No such file"),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    own.write(tmp_path / "saesteer.safetensors", load(writers.gemma_scope(tmp_path / "layer_3", writers.raw())))
    return tmp_path / "saesteer.safetensors"


@pytest.mark.parametrize("name", CHANGES)
def test_a_file_that_is_no_longer_the_same_gives_no_row(name: str, file: Path) -> None:
    change, words = CHANGES[name]
    found = open_rows(file)
    found.check()
    change(file)
    with pytest.raises(LoadError, match=words):
        found.row(0, None)
    with pytest.raises(LoadError, match=words):
        found.feature(0, torch.bfloat16)
    with pytest.raises(LoadError, match=words):
        found.check()


@pytest.mark.parametrize("name", ["edited", "cut", "emptied"])
def test_a_file_that_changes_during_a_read_gives_no_row(name: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, real = open_rows(file), os.pread

    def late(descriptor: int, size: int, at: int) -> bytes:
        monkeypatch.setattr(os, "pread", real)
        CHANGES[name][0](file)
        return real(descriptor, size, at)

    monkeypatch.setattr(os, "pread", late)
    with pytest.raises(LoadError, match="cut short" if name == "emptied" else "has changed since"):
        found.feature(0, torch.bfloat16)
