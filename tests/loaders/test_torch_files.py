"""The container of .pt files: what torch.save writes is read as it is, and what it never writes is refused."""

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from saesteer.errors import LoadError
from saesteer.loaders import opening
from saesteer.loaders.opening import open_arrays
from tests.loaders import writers

MATRIX = np.random.default_rng(2).normal(size=(5, 7)).astype(np.float32)


def matrix(path: Path, key: str = "a", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    opened = open_arrays(path)
    rows, columns = opened.shape(key, 2)
    return opened.matrix(key, (rows, columns), dtype)


def rezipped(path: Path, compression: int = zipfile.ZIP_STORED, **changed: bytes) -> Path:
    """The same members by the hand of zipfile, which neither aligns them nor writes torch's own header fields."""
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, changed.get(name.rpartition("/")[2].replace(".", "_"), content))
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_strides_offsets_and_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    whole = torch.from_numpy(MATRIX).to(dtype)
    held = {
        "a": whole,
        "turned": whole.T,
        "rows": whole[1:3],
        "parameter": torch.nn.Parameter(whole),
        "one": whole[0, 0],
    }
    torch.save(held, tmp_path / "x.pt")
    for key in ("a", "turned", "rows", "parameter"):
        assert torch.equal(matrix(tmp_path / "x.pt", key), held[key].float())
    assert torch.equal(open_arrays(tmp_path / "x.pt").vector("one"), whole[0, :1].float())


def test_a_view_whose_sign_is_not_in_its_numbers_is_refused(tmp_path: Path) -> None:
    numbers = torch.complex(torch.ones(3), torch.arange(3.0)).conj().imag  # without a copy: torch keeps a bit
    assert numbers.is_neg()
    torch.save({"a": numbers, "b": torch._neg_view(torch.ones(3, 2))}, tmp_path / "x.pt")
    with pytest.raises(LoadError, match=r"x\.pt: a: shape \[3\] .*; expected a dense tensor, no view"):
        open_arrays(tmp_path / "x.pt")
    torch.save({"b": torch._neg_view(torch.ones(3, 2))}, tmp_path / "x.pt")
    with pytest.raises(LoadError, match="expected a dense tensor, no view"):
        open_arrays(tmp_path / "x.pt")


def test_what_is_no_tensor_is_metadata_by_its_type_where_it_is_not_flat(tmp_path: Path) -> None:
    loop: list[Any] = []
    loop.append(loop)
    held = {"a": MATRIX, "name": "TopK", "state": {"k": 3}, "deep": {"x": {"y": 1}}, "list": loop, "number": 3}
    held |= {"inner": {"k": torch.tensor(3)}, "dtype": torch.float32}
    opened = open_arrays(writers.torch_file(tmp_path / "x.pt", held))
    types = {"deep": "dict", "list": "list", "inner": "dict", "dtype": "dtype"}
    unread = {key: f"{name} (not read)" for key, name in types.items()}
    assert opened.metadata == {"name": "TopK", "state": '{"k": 3}', "number": "3"} | unread
    assert set(opened.index) == {"a"}


def test_keys_are_those_of_the_module_that_torch_compile_wrapped(tmp_path: Path) -> None:
    file = writers.torch_file(tmp_path / "x.pt", {"_orig_mod.a": MATRIX, "ae._orig_mod.b": MATRIX})
    assert {*open_arrays(file).index} == {"a", "ae.b"}
    writers.torch_file(file, {"_orig_mod.a": MATRIX, "a": MATRIX})
    with pytest.raises(LoadError, match=r"_orig_mod\.: there as well as"):
        open_arrays(file)


def test_what_torch_never_writes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = writers.torch_file(tmp_path / "x.pt", {"a": MATRIX})
    content = file.read_bytes()
    with pytest.raises(LoadError, match=r"x\.pt: x/data\.pkl: compressed; expected what torch\.save writes"):
        open_arrays(rezipped(file, zipfile.ZIP_DEFLATED))
    file.write_bytes(content)
    with pytest.raises(LoadError, match="byteorder: not little"):
        open_arrays(rezipped(file, byteorder=b"big"))
    file.write_bytes(content)
    monkeypatch.setattr(opening, "LARGEST_PICKLE", 10)
    with pytest.raises(LoadError, match=r"data\.pkl: \d+ bytes; expected at most 10"):
        open_arrays(file)


def test_a_pickle_that_runs_code_does_not_run(tmp_path: Path) -> None:
    class Runs:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "ran",)

    with io.BytesIO() as stream:
        pickle.dump({"a": Runs()}, stream, protocol=2)
        content = stream.getvalue()
    file = rezipped(writers.torch_file(tmp_path / "x.pt", {"a": MATRIX}), data_pkl=content)
    with pytest.raises(
        LoadError,
        match=r"data\.pkl: objects of builtins.getattr.*; expected tensors.*: pickled objects are never loaded",
    ):
        open_arrays(file)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("protocol", ["old", "zip of something else"])
def test_files_of_other_kinds(protocol: str, tmp_path: Path) -> None:
    file = tmp_path / "x.pt"
    if protocol == "old":
        torch.save({"a": torch.ones(2)}, file, _use_new_zipfile_serialization=False)
    else:
        np.savez(tmp_path / "x.npz", a=MATRIX)
        (tmp_path / "x.npz").rename(file)
    words = (
        "the file: no zip archive.*PyTorch 1.6" if protocol == "old" else "header: not readable; expected a complete"
    )
    with pytest.raises(LoadError, match=words):
        open_arrays(file)
    assert (opening.open_torch(file) is None) if protocol == "old" else True
