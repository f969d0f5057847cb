"""Vector files of every kind, written with each format's own tools: what they mean, and how wrong ones are refused."""

import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from saesteer.dictionaries.vectors import VectorSet, from_inline
from saesteer.errors import LoadError
from saesteer.language.inline import InlineVector
from saesteer.loaders import vectors as files
from saesteer.loaders.vectors import read_vectors
from saesteer.workbench.inspect import report
from tests.loaders.control_vectors import control_vector

D = 6
A = np.random.default_rng(0).normal(size=(3, D)).astype(np.float32)


def tensors(file: Path, **named: Any) -> Path:
    save_file({key.replace("__", "."): np.asarray(value) for key, value in named.items()}, file)
    return file


def npy(file: Path, array: Any) -> Path:
    np.save(file, array)
    return file


def torch_file(file: Path, value: Any) -> Path:
    torch.save(value, file)
    return file


Write = Callable[[Path], Path]
T = torch.from_numpy(A)

# id -> (writer, rows, bias)
GOOD: dict[str, tuple[Write, dict[int | None, Any], float]] = {
    "st-one": (lambda f: tensors(f / "v.safetensors", happy=A[0]), {None: A[0]}, 0.0),
    "st-stack": (lambda f: tensors(f / "v.safetensors", happy=A), {0: A[0], 1: A[1], 2: A[2]}, 0.0),
    "st-layers": (lambda f: tensors(f / "v.safetensors", layer__12=A[0], layer__3=A[1]), {3: A[1], 12: A[0]}, 0.0),
    "st-one-layer": (lambda f: tensors(f / "v.safetensors", layer_12=A[0]), {12: A[0]}, 0.0),
    "st-directions": (lambda f: tensors(f / "v.safetensors", direction__1=A[0]), {1: A[0]}, 0.0),
    "st-probe": (lambda f: tensors(f / "v.safetensors", w=A[0], bias=np.float32(-1.5)), {None: A[0]}, -1.5),
    "st-probe-1": (lambda f: tensors(f / "v.safetensors", w=A[0], bias=np.array([2], np.float32)), {None: A[0]}, 2.0),
    "st-half": (
        lambda f: tensors(f / "v.safetensors", w=A[0].astype(np.float16)),
        {None: A[0].astype(np.float16).astype(np.float32)},
        0.0,
    ),
    "npy-one": (lambda f: npy(f / "v.npy", A[0].astype(np.float64)), {None: A[0]}, 0.0),
    "npy-fortran": (lambda f: npy(f / "v.npy", np.asfortranarray(A)), {0: A[0], 1: A[1], 2: A[2]}, 0.0),
    "gguf": (lambda f: control_vector(f / "v.gguf", {1: A[0], 2: A[1], 29: A[2]}), {1: A[0], 2: A[1], 29: A[2]}, 0.0),
    "pt-tensor": (lambda f: torch_file(f / "v.pt", T[0]), {None: A[0]}, 0.0),
    "pt-stack": (lambda f: torch_file(f / "v.pt", T.T.contiguous().T), {0: A[0], 1: A[1], 2: A[2]}, 0.0),
    "pt-dict": (lambda f: torch_file(f / "v.pt", {4: T[0], 5: T[1].double()}), {4: A[0], 5: A[1]}, 0.0),
    "pt-probe": (lambda f: torch_file(f / "v.pt", {"w": torch.nn.Parameter(T[0]), "bias": 0.5}), {None: A[0]}, 0.5),
    "pt-bf16": (lambda f: torch_file(f / "v.pt", T[0].bfloat16()), {None: T[0].bfloat16().float().numpy()}, 0.0),
}
every_good_file = pytest.mark.parametrize("name", GOOD)


@every_good_file
def test_rows_layers_and_bias(name: str, tmp_path: Path) -> None:
    write, rows, bias = GOOD[name]
    place = write(tmp_path)
    found = read_vectors(str(place))
    assert list(found.rows) == list(rows)
    for layer, row in rows.items():
        assert found.rows[layer].dtype == np.float32
        assert np.array_equal(found.rows[layer], row)
        assert not found.rows[layer].flags.writeable
    assert (found.width, found.bias) == (D, bias)
    assert found.layers == (None if None in rows else tuple(rows))
    assert read_vectors(place).fingerprint == found.fingerprint
    assert read_vectors(place, bias=7.0).bias == 7.0


def test_the_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    """Not of the name, the format or the dtype; but of every value, layer and bias."""
    one = [
        read_vectors(tensors(tmp_path / "a.safetensors", x=A[0])),
        read_vectors(npy(tmp_path / "b.npy", A[0].astype(np.float64))),
        read_vectors(torch_file(tmp_path / "c.pt", T[0])),
        from_inline(tuple(map(float, A[0]))),
        from_inline(InlineVector("float32", (D,), A[0].tobytes())),
    ]
    assert len({found.fingerprint for found in one}) == 1
    layers = InlineVector("float32", (3, D), A.tobytes(), (0, 1, 2))
    assert from_inline(layers).fingerprint == read_vectors(npy(tmp_path / "d.npy", A)).fingerprint
    changed = A.copy()
    changed[2, 5] += np.float32(1e-6)
    others = [
        one[0],
        read_vectors(tmp_path / "a.safetensors", bias=1.0),
        from_inline(layers),
        from_inline(InlineVector("float32", (3, D), A.tobytes(), (0, 1, 3))),
        from_inline(InlineVector("float32", (3, D), changed.tobytes(), (0, 1, 2))),
        from_inline(InlineVector("float32", (2, 9), A.tobytes(), (0, 1))),
        from_inline(InlineVector("float32", (18,), A.tobytes())),
    ]
    assert len({found.fingerprint for found in others}) == len(others)


class Evil:
    def __reduce__(self) -> Any:
        return print, ("unpickled",)


def bomb(folder: Path) -> Path:
    """A .pt whose data are compressed: 60 MB in 60 KB."""
    file = torch_file(folder / "plain.pt", torch.zeros(15_000_000))
    with zipfile.ZipFile(file) as plain, zipfile.ZipFile(folder / "v.pt", "w", zipfile.ZIP_DEFLATED) as packed:
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    return folder / "v.pt"


def cut_short(file: Path) -> Path:
    file.write_bytes(file.read_bytes()[:-1])
    return file


def version_3(file: Path) -> Path:
    file.write_bytes(b"\x93NUMPY\x03" + file.read_bytes()[7:])
    return file


def claims(folder: Path, body: bytes, tensors: int = 0, pairs: int = 1) -> Path:
    """A GGUF header and whatever follows."""
    (folder / "v.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, tensors, pairs) + body)
    return folder / "v.gguf"


def large(folder: Path) -> Path:
    with (folder / "v.npy").open("wb") as stream:
        stream.truncate(files.MAX_FILE_BYTES + 1)
    return folder / "v.npy"


ZERO, NAN, INF = (np.array(row, np.float32) for row in ([0.0] * D, [1.0, np.nan], [1.0, np.inf]))
STRING = struct.pack("<Q", 1) + b"a"
WRONG: dict[str, tuple[Write, str]] = {
    "nowhere": (lambda f: f / "v.npy", "no such file"),
    "folder": (lambda f: f, "a folder; expected a file of vectors"),
    "suffix": (lambda f: torch_file(f / "v.bin", T), "the suffix '.bin'"),
    "large": (large, "67108865 bytes; expected vectors, of at most 67108864"),
    "empty": (lambda f: tensors(f / "v.safetensors"), "no array: not named by a layer"),
    "zero": (lambda f: npy(f / "v.npy", ZERO), "the vector: all zeros"),
    "zero-row": (lambda f: npy(f / "v.npy", np.stack([A[0], ZERO])), "layer 1: all zeros"),
    "nan": (lambda f: npy(f / "v.npy", NAN), "the vector: holds NaN"),
    "inf": (lambda f: torch_file(f / "v.pt", {7: torch.from_numpy(INF)}), "layer 7: holds NaN, infinity"),
    "over-float32": (lambda f: npy(f / "v.npy", np.array([1.0, 1e39])), "beyond float32"),
    "under-float32": (lambda f: npy(f / "v.npy", np.array([1e-50, 0])), "all zeros"),
    "st-nan": (lambda f: tensors(f / "v.safetensors", w=NAN), "w: holds nan; expected finite"),
    "rank-0": (lambda f: npy(f / "v.npy", np.float32(3)), "shape []; expected [d] or [layers, d]"),
    "rank-3": (lambda f: npy(f / "v.npy", A[None]), "shape [1, 3, 6]"),
    "no-width": (lambda f: npy(f / "v.npy", A[:, :0]), "float32 [3, 0]"),
    "one-row": (lambda f: npy(f / "v.npy", A[:1]), "shape [1, 6]; expected [d], or [layers, d] with at least two"),
    "wide": (lambda f: npy(f / "v.npy", np.ones(files.MAX_WIDTH + 1)), "d up to 131072"),
    "integers": (lambda f: npy(f / "v.npy", np.arange(4)), "int64 [4]; expected floats"),
    "complex": (lambda f: npy(f / "v.npy", np.ones(4, complex)), "complex128 [4]"),
    "objects": (lambda f: npy(f / "v.npy", np.array([Evil()], object)), "object [1]; expected floats"),
    "cut-short": (lambda f: cut_short(npy(f / "v.npy", A)), "v.npy: not readable (buffer is smaller"),
    "npy-version": (lambda f: version_3(npy(f / "v.npy", A)), "the header: version 3.0"),
    "two-names": (lambda f: tensors(f / "v.safetensors", w=A[0], v=A[1]), "v, w: not named by a layer"),
    "mixed-names": (lambda f: tensors(f / "v.safetensors", layer__1=A[0], v=A[1]), "v: not named by a layer"),
    "leading-zero": (lambda f: tensors(f / "v.safetensors", layer__01=A[0], layer__2=A[1]), "layer.01: not named"),
    "layer-twice": (lambda f: tensors(f / "v.safetensors", layer__1=A[0], layer_1=A[1]), "the second array of layer 1"),
    "layer-matrix": (lambda f: tensors(f / "v.safetensors", layer__1=A), "layer.1: shape [3, 6]"),
    "widths": (lambda f: tensors(f / "v.safetensors", layer__1=A[0], layer__2=A[1, :3]), "3 and 6 wide"),
    "bias-alone": (lambda f: tensors(f / "v.safetensors", bias=np.float32(1)), "no array"),
    "bias-vector": (lambda f: tensors(f / "v.safetensors", w=A[0], bias=A[1]), "bias: shape [6]"),
    "bias-nan": (lambda f: torch_file(f / "v.pt", {"w": T[0], "bias": float("nan")}), "bias: shape [], or not finite"),
    "pickle": (lambda f: torch_file(f / "v.pt", {"w": Evil()}), "v.pt: not readable"),
    "pickled-list": (lambda f: torch_file(f / "v.pt", [T[0]]), "a list; expected a tensor, or a dict"),
    "sparse": (lambda f: torch_file(f / "v.pt", T.to_sparse()), "expected a dense tensor"),
    "torch-ints": (lambda f: torch_file(f / "v.pt", torch.arange(4)), "torch.int64"),
    "expanded": (lambda f: torch_file(f / "v.pt", T[0, :1].expand(10**9, 10**6)), "4000000000000000 bytes as float32"),
    "expanded-often": (
        lambda f: torch_file(f / "v.pt", {f"layer.{n}": T[0, :1].expand(1 << 17) for n in range(300)}),
        "157286400 bytes as float32; expected at most 134217728",
    ),
    "bomb": (bomb, "compressed; expected what torch.save writes"),
    "gguf-model": (lambda f: control_vector(f / "v.gguf", {1: A[0]}, "llama"), "general.architecture: 'llama'"),
    "gguf-layer-0": (lambda f: control_vector(f / "v.gguf", {0: A[0]}), "direction.0: no name of a direction"),
    "gguf-matrix": (lambda f: control_vector(f / "v.gguf", {1: A}), "direction.1: type 0 of shape [6, 3]"),
    "gguf-half": (lambda f: control_vector(f / "v.gguf", {1: A[0].astype(np.float16)}), "type 1 of shape [6]"),
    "gguf-no-tensor": (lambda f: control_vector(f / "v.gguf", {}), "no array"),
    "gguf-other": (lambda f: torch_file(f / "v.gguf", T), "begins with b'PK"),
    "gguf-endless-array": (
        lambda f: claims(f, STRING + struct.pack("<IIQ", 9, 4, 2**40)),
        "4398046511104 bytes wanted",
    ),
    "gguf-endless-strings": (lambda f: claims(f, STRING + struct.pack("<IIQ", 9, 8, 2**40)), "8 bytes wanted"),
    "gguf-endless-pairs": (lambda f: claims(f, b"", pairs=2**60), "8 bytes wanted"),
    "gguf-nested": (lambda f: claims(f, STRING + struct.pack("<IIQ", 9, 9, 1)), "not readable (9)"),
    "gguf-version": (lambda f: claims(f, b"", pairs=0, tensors=2**60), "general.architecture: None"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_refused_in_one_sentence(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write, words = WRONG[name]
    place = write(tmp_path)
    with pytest.raises(LoadError) as caught:
        read_vectors(place)
    message = str(caught.value)
    assert words in message
    assert str(tmp_path) in message
    assert "expected" in message or "no such file" in message
    assert "\n" not in message
    assert "unpickled" not in capsys.readouterr().out


def test_inspect_tells_vectors(tmp_path: Path) -> None:
    text = report(GOOD["gguf"][0](tmp_path))
    for words in ("vectors", "1, 2, 29", "6 wide", "fingerprint"):
        assert words in text
    text = report(GOOD["st-probe"][0](tmp_path))
    for words in ("one, for any site", "6 wide", "-1.5", "length"):
        assert words in text
    save_file({"lm_head.weight": A, "norm.weight": A[0]}, tmp_path / "model.safetensors")
    with pytest.raises(LoadError, match="a file of no known format"):
        report(tmp_path / "model.safetensors")
    with pytest.raises(LoadError, match="all zeros"):
        report(npy(tmp_path / "zero.npy", ZERO))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)
@given(data=st.data())
@pytest.mark.parametrize("name", ["st-layers", "npy-fortran", "gguf", "pt-dict"])
def test_broken_bytes_give_a_load_error_or_vectors(name: str, tmp_path: Path, data: st.DataObject) -> None:
    file = GOOD[name][0](tmp_path)
    content = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(content[: data.draw(st.sampled_from([len(content), len(content) - 1, 40]))])
    try:
        found = read_vectors(file)
    except LoadError:
        return
    assert isinstance(found, VectorSet)
    assert all(np.isfinite(row).all() and row.any() for row in found.rows.values())
