"""Vector files of every kind, written with each format's own tools: what they mean, and how wrong ones are refused."""

import json
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
from saesteer.errors import ConfigError, LoadError
from saesteer.language.inline import InlineVector
from saesteer.loaders import vectors
from saesteer.loaders.vectors import read_vectors
from saesteer.loaders.vectors.contents import MAX_FILE_BYTES
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


def npz(file: Path, **arrays: Any) -> Path:
    np.savez(file, **arrays)
    return file


def written(file: Path, document: Any) -> Path:
    file.write_text(json.dumps(document), encoding="utf-8-sig")
    return file


def linear(weight: torch.Tensor, bias: torch.Tensor, prefix: str = "") -> dict[str, torch.Tensor]:
    return {f"{prefix}weight": weight, f"{prefix}bias": bias}


def torch_file(file: Path, value: Any) -> Path:
    torch.save(value, file)
    return file


Write = Callable[[Path], Path]
T = torch.from_numpy(A)

B = np.random.default_rng(1).normal(size=(5, D)).astype(np.float32)
EACH: dict[int | None, Any] = {0: A[0], 1: A[1], 2: A[2]}

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
    "npz-layer": (lambda f: npz(f / "v.npz", vector=A[:1], layer=12, method=1.5), {12: A[0]}, 0.0),
    "npz-scikit-learn": (lambda f: npz(f / "v.npz", coef=A[:1], intercept=A[1, :1]), {None: A[0]}, float(A[1, 0])),
    "npz-layers": (lambda f: npz(f / "v.npz", v=A[:2], layers=[20, 9]), {9: A[1], 20: A[0]}, 0.0),
    "gguf-from-0": (lambda f: control_vector(f / "v.gguf", {2: A[2], 0: A[0], 1: A[1]}), EACH, 0.0),
    "pt-numpy": (lambda f: torch_file(f / "v.pt", A[0].astype(np.float64)), {None: A[0]}, 0.0),
    "pt-numpy-scalar": (lambda f: torch_file(f / "v.pt", {"v": A[0], "layer": np.int64(7)}), {7: A[0]}, 0.0),
    "pt-list": (lambda f: torch_file(f / "v.pt", [*T]), EACH, 0.0),
    "pt-axes": (lambda f: torch_file(f / "v.pth", T[None]), EACH, 0.0),
    "pt-inside": (lambda f: torch_file(f / "v.pt", {"layer_activations": {3: T[:1]}}), {3: A[0]}, 0.0),
    "pt-linear": (lambda f: torch_file(f / "v.pt", linear(T[:1], T[1, :1])), {None: A[0]}, float(A[1, 0])),
    "pt-sequential": (lambda f: torch_file(f / "v.pt", linear(T[:1], T[1, :1], "0.")), {None: A[0]}, float(A[1, 0])),
    "pt-classes": (lambda f: torch_file(f / "v.pt", linear(T[:2], T[2, :2])), {None: A[1] - A[0]}, A[2, 1] - A[2, 0]),
    "pt-compiled": (
        lambda f: torch_file(f / "v.pt", linear(T[:1], T[1, :1], "_orig_mod.")),
        {None: A[0]},
        float(A[1, 0]),
    ),
    "pt-hook": (lambda f: torch_file(f / "v.pt", {"blocks.4.hook_resid_pre": T[0]}), {3: A[0]}, 0.0),
    "json-layer": (lambda f: written(f / "v.json", {"layer": 12, "vector": A[0].tolist()}), {12: A[0]}, 0.0),
    "json-layers": (
        lambda f: written(f / "v.json", {"4": A[0].tolist(), "11": A[1].tolist()}),
        {4: A[0], 11: A[1]},
        0.0,
    ),
    "json-inside": (lambda f: written(f / "v.json", {"directions": {"4": A[:1].tolist()}}), {4: A[0]}, 0.0),
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


def test_what_stands_around_a_place_says_what_the_file_does_not(tmp_path: Path) -> None:
    """A row, an array, a site, and rows of hidden_states; the rows of an array are layers of one kind of model only."""
    rows = npy(tmp_path / "rows.npy", B)
    two = tensors(tmp_path / "two.safetensors", a=A[0], layer_3=A[1])
    several = torch_file(tmp_path / "several.pt", {"layer_3": T[0], "layer_5": T[1], "hook": "mlp_out"})
    for place, kind, found, stack in (
        (f"{rows}", None, dict(enumerate(B)), 5),
        (f"{rows}#3@resid_post.20", "resid_post", {20: B[3]}, None),
        (f"{rows}@mlp_out.4", "mlp_out", {4: B[4]}, 5),
        (f"{two}#a", None, {None: A[0]}, None),
        (f"{several}", "mlp_out", {3: A[0], 5: A[1]}, None),
        (f"{two}#layer_3@resid_pre.9", "resid_post", {8: A[1]}, None),
        (f"hidden_states:{rows}", "resid_post", {0: B[1], 1: B[2], 2: B[3]}, 4),
        (f"hidden_states:{rows}@resid_pre.2", "resid_post", {1: B[2]}, 4),
    ):
        made = read_vectors(place)
        assert (made.kind, made.stack, [*made.rows]) == (kind, stack, [*found]), place
        assert all(np.array_equal(made.rows[layer], row) for layer, row in found.items()), place
        assert report(place)
    named = npy(tmp_path / "v#3@resid_post.20.npy", A[0])
    assert read_vectors(f"{named}").layers is None, "a file of this name comes first"
    with pytest.raises(ConfigError, match="'nowhere' is not a site"):
        read_vectors(f"{rows}#3@nowhere")


# The beginning of a row of docs/coming-from.md -> a file as that project writes it, and the rows that it has here.
COMING: dict[str, tuple[Write, dict[int | None, Any]]] = {
    "[vLLM-Lens]": (
        lambda f: torch_file(f / "v.pt", T.bfloat16()[None]),
        dict(enumerate(T.bfloat16().float().numpy())),
    ),
    "[EasySteer]": (lambda f: control_vector(f / "v.gguf", {0: A[0], 1: A[1], 2: A[2]}, method="pca"), EACH),
    "[vLLM-Hook]": (lambda f: torch_file(f / "v.pt", {"dir": A[0], "avg_proj": T[0, 0]}), {15: A[0]}),
    "[repeng]": (lambda f: control_vector(f / "v.gguf", {2: A[2], 1: A[1]}), {1: A[1], 2: A[2]}),
    "[steering-vectors]": (lambda f: torch_file(f / "v.pt", {"layer_activations": {7: T[0]}}), {7: A[0]}),
    "probes in the": (lambda f: torch_file(f / "v.pt", linear(T[:1], T[1, :1])), {None: A[0]}),
}


def test_the_files_of_other_systems_are_read_as_their_rows_say(tmp_path: Path) -> None:
    rows = [line[2:] for line in Path("docs/coming-from.md").read_text().splitlines() if "`--vector" in line]
    assert rows and all(row.startswith((*COMING,)) for row in rows), "a row without a file"
    for begin, (write, expected) in COMING.items():
        [row] = [row for row in rows if row.startswith(begin)]
        place = str(write(tmp_path)) + "@resid_post.15" * ("FILE.pt@resid_post.LAYER" in row)
        found = read_vectors(place)
        assert {layer: row.tolist() for layer, row in found.rows.items()} == {
            layer: row.tolist() for layer, row in expected.items()
        }, begin


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
        stream.truncate(MAX_FILE_BYTES + 1)
    return folder / "v.npy"


ZERO, NAN, INF = (np.array(row, np.float32) for row in ([0.0] * D, [1.0, np.nan], [1.0, np.inf]))
STRING = struct.pack("<Q", 1) + b"a"
WRONG: dict[str, tuple[Write, str]] = {
    "nowhere": (lambda f: f / "v.npy", "no such file"),
    "folder": (lambda f: f, "a folder; expected a file of vectors"),
    "suffix": (lambda f: torch_file(f / "v.bin", T), "the suffix '.bin'"),
    "large": (large, "67108865 bytes; expected vectors, of at most 67108864"),
    "empty": (lambda f: tensors(f / "v.safetensors"), "the file: no array"),
    "zero": (lambda f: npy(f / "v.npy", ZERO), "the vector: all zeros"),
    "zero-row": (lambda f: npy(f / "v.npy", np.stack([A[0], ZERO])), "layer 1: all zeros"),
    "nan": (lambda f: npy(f / "v.npy", NAN), "the array: holds nan"),
    "inf": (lambda f: torch_file(f / "v.pt", {7: torch.from_numpy(INF)}), "layer 7: holds NaN, infinity"),
    "over-float32": (lambda f: npy(f / "v.npy", np.array([1.0, 1e39])), "outside the range of torch.float32"),
    "under-float32": (lambda f: npy(f / "v.npy", np.array([1e-50, 0])), "all zeros"),
    "st-nan": (lambda f: tensors(f / "v.safetensors", w=NAN), "w: holds nan; expected finite"),
    "rank-0": (lambda f: npy(f / "v.npy", np.float32(3)), "the file: no array; expected an array of floats"),
    "rank-3": (lambda f: npy(f / "v.npy", A.reshape(3, 2, 3)), "shape [3, 2, 3]; expected [d] or [layers, d]"),
    "no-width": (lambda f: npy(f / "v.npy", A[:, :0]), "shape [3, 0]"),
    "wide": (lambda f: npy(f / "v.npy", np.ones(vectors.MAX_WIDTH + 1)), "d up to 131072"),
    "integers": (lambda f: npy(f / "v.npy", np.arange(4)), "int64 [4]; expected floats"),
    "complex": (lambda f: npy(f / "v.npy", np.ones(4, complex)), "dtype <c16; expected one of"),
    "objects": (lambda f: npy(f / "v.npy", np.array([Evil()], object)), "Python objects; expected numbers"),
    "cut-short": (lambda f: cut_short(npy(f / "v.npy", A)), "71 bytes for float32 [3, 6]"),
    "npy-version": (lambda f: version_3(npy(f / "v.npy", A)), "version 3.0 of .npy"),
    "two-names": (
        lambda f: tensors(f / "v.safetensors", w=A[0], v=A[1]),
        "v, w: no name of a layer; expected one array, names such as layer_12, or #NAME behind",
    ),
    "mixed-names": (lambda f: tensors(f / "v.safetensors", layer__1=A[0], v=A[1]), "v: no name of a layer"),
    "layer-twice": (lambda f: tensors(f / "v.safetensors", layer__1=A[0], layer_1=A[1]), "the second array of layer 1"),
    "layer-matrix": (lambda f: tensors(f / "v.safetensors", layer__1=A), "layer.1: shape [3, 6]"),
    "widths": (lambda f: tensors(f / "v.safetensors", layer__1=A[0], layer__2=A[1, :3]), "3 and 6 wide"),
    "bias-alone": (lambda f: tensors(f / "v.safetensors", bias=np.float32(1)), "no array"),
    "bias-vector": (lambda f: tensors(f / "v.safetensors", w=A[0], bias=A[1]), "bias: shape [6]"),
    "bias-nan": (lambda f: torch_file(f / "v.pt", {"w": T[0], "bias": float("nan")}), "bias: shape [], or not finite"),
    "pickle": (lambda f: torch_file(f / "v.pt", {"w": Evil()}), "objects of builtins.print; expected tensors"),
    "pickled-list": (lambda f: torch_file(f / "v.pt", [1, [2]]), "a list; expected tensors by name"),
    "numpy-objects": (lambda f: torch_file(f / "v.pt", np.array([Evil()], object)), "data.pkl: "),
    "layer-and-name": (lambda f: torch_file(f / "v.pt", {"layer_3": T[0], "layer": 4}), "layer_3: at two places"),
    "layer-and-names": (
        lambda f: torch_file(f / "v.pt", {"layer_3": T[0], "layer_5": T[1], "layer": 3}),
        "layer_5: at two places",
    ),
    "layers-and-rows": (lambda f: npz(f / "v.npz", v=A, layers=[1, 2]), "3 rows for layers [1, 2]"),
    "layer-and-rows": (lambda f: npz(f / "v.npz", v=A, layer=1), "[3, 6]; expected [d] for layer 1, or #ROW behind"),
    "kinds": (lambda f: torch_file(f / "v.pt", {"mlp_out.3": T[0], "z.4": T[1]}), "of mlp_out, z; expected one kind"),
    "biases": (lambda f: torch_file(f / "v.pt", {"w": T[0], "a.bias": 1.0, "b.bias": 2.0}), "several biases"),
    "three-classes": (lambda f: torch_file(f / "v.pt", linear(T, T[0, :3])), "bias: shape [3]"),
    "bias-of-two": (lambda f: torch_file(f / "v.pt", linear(T[0], T[0, :2])), "bias: 2 numbers; expected one, or two"),
    "deep": (lambda f: torch_file(f / "v.pt", {"a": {"b": {"c": {"d": T[0]}}}}), "at most 3 dicts"),
    "function": (
        lambda f: torch_file(f / "v.pt", {"w": T[0], "function": "relu"}),
        "function: 'relu'; expected one of",
    ),
    "uneven": (lambda f: written(f / "v.json", {"v": [[1.0], [1.0, 2.0]]}), "v: a list of other things, or uneven"),
    "no-row-3": (lambda f: Path(f"{npy(f / 'v.npy', A)}#3@resid_post.20"), "#3: no row of the array [3, 6]"),
    "no-name": (lambda f: Path(f"{tensors(f / 'v.safetensors', w=A[0], v=A[1])}#x"), "#x: no array of this name"),
    "not-there": (lambda f: Path(f"{npy(f / 'v.npy', A)}@resid_post.20"), "@resid_post.20: 3 rows, none for it; exp"),
    "no-states": (lambda f: Path(f"hidden_states:{npy(f / 'v.npy', A[0])}"), "expected one array [layers + 1, d]"),
    "sparse": (lambda f: torch_file(f / "v.pt", T.to_sparse()), "expected a dense tensor"),
    "torch-ints": (lambda f: torch_file(f / "v.pt", torch.arange(4)), "int64 [4]; expected floats"),
    "expanded": (
        lambda f: torch_file(f / "v.pt", T[0, :1].expand(10**9, 10**6)),
        "more in memory than a file may hold",
    ),
    "expanded-often": (
        lambda f: torch_file(f / "v.pt", {f"layer.{n}": T[0, :1].expand(1 << 17) for n in range(300)}),
        "layer.256: more in memory",
    ),
    "bomb": (bomb, "compressed; expected what torch.save writes"),
    "gguf-model": (lambda f: control_vector(f / "v.gguf", {1: A[0]}, "llama"), "general.architecture: 'llama'"),
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
    "gguf-nested": (
        lambda f: claims(f, STRING + struct.pack("<IIQ", 9, 9, 1)),
        "header: not readable; expected a complete GGUF",
    ),
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
    assert "warning" not in text and "says         controlvector.model_hint = 'llama'" in text
    text = report(control_vector(tmp_path / "v.gguf", {0: A[0]}, method="pca"))
    assert (
        "controlvector.method = 'pca'" in text and "warning      unknown keys, which change nothing here: contr" in text
    )
    text = report(torch_file(tmp_path / "classes.pt", linear(T[:2], T[2, :2]) | {"avg_proj": 0.5}))
    assert "two classes: row 1 less row 0" in text and "avg_proj = 0.5" in text
    text = report(GOOD["st-probe"][0](tmp_path))
    for words in ("one, for any site", "6 wide", "-1.5", "length"):
        assert words in text
    save_file({"lm_head.weight": A, "norm.weight": A[0]}, tmp_path / "model.safetensors")
    with pytest.raises(LoadError, match=r"lm_head.weight, norm.weight: no name of a layer.*nor is it a dictionary"):
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
