"""Files that are not what they should be: each is refused by a LoadError with the file, the key and the expectation."""

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

from saesteer.errors import LoadError
from saesteer.loaders import FORMATS, describe, load
from saesteer.loaders.arrays import open_arrays
from tests.loaders import writers
from tests.loaders.case import Row
from tests.loaders.test_formats import MORE
from tests.loaders.writers import SEEN, D, F

R = writers.raw()
PLAIN = {key: R[key] for key in ("W_enc", "W_dec", "b_enc", "b_dec")}
ONE = ((20, "post_block"),)


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in R.items() if name != key}


def spoiled(key: str, value: float) -> dict[str, Any]:
    changed = R[key].copy()
    changed.flat[-1] = value
    return R | {key: changed}


def gemma_rows() -> list[Row]:
    def row(name: str, arrays: dict[str, Any], words: str, place: str = "g", **more: Any) -> Row:
        return f"gemma-{name}", lambda folder: writers.gemma_scope(folder / place, arrays, **more), words

    square = writers.raw(features=D)
    objects = R | {"threshold": np.array([{}] * F, object)}
    other_name = "gemma-scope-2b-pt-res/layer_1"
    return [
        *(row(f"no-{key}", without(key), f"params.npz: {key}: missing") for key in R),
        row("transposed", R | {"W_enc": R["W_enc"].T}, "W_dec: shape [40, 24]; expected [F, d_out] = [24, 24]"),
        row("w_dec-transposed", R | {"W_dec": R["W_dec"].T}, "W_dec: shape [24, 40]"),
        row("rank", R | {"W_enc": R["W_enc"][None]}, "W_enc: shape [1, 24, 40]; expected 2 sizes above 0"),
        row("scalar-threshold", R | {"threshold": np.float32(0.4)}, "threshold: shape []"),
        row("one-threshold", R | {"threshold": np.ones(1, np.float32)}, "threshold: shape [1]; expected [F] = [40]"),
        row("b_dec", R | {"b_dec": R["b_dec"][1:]}, "b_dec: shape [23]; expected [d_out] = [24]"),
        row("square", square, "W_enc: shape [24, 24]; expected F other than d_in"),
        row("integers", R | {"W_enc": R["W_enc"].astype(np.int32)}, "W_enc: dtype <i4; expected one of"),
        row("big-endian", R | {"W_enc": R["W_enc"].astype(">f4")}, "W_enc: dtype >f4"),
        row("objects", objects, "threshold: Python objects; expected numbers"),
        row("nan", spoiled("W_enc", np.nan), "W_enc: holds nan; expected finite"),
        row("inf", spoiled("b_dec", -np.inf), "b_dec: holds -inf; expected finite"),
        row("negative-threshold", spoiled("threshold", -0.5), "threshold: holds -0.5; expected values of 0 or more"),
        row("scaled", R, "scaling_factor: not all ones", scaling_factor=np.full(F, 2, np.float32)),
        row("extra", R, "W_skip: an unknown key", W_skip=np.ones((D, D), np.float32)),
        row("widths", writers.raw(d_out=12), "W_dec: width 12 for an input of 24", place=other_name),
        row("empty", {}, "params.npz: W_dec: missing"),
    ]


def saelens_rows() -> list[Row]:
    def row(name: str, cfg: dict[str, Any], words: str, arrays: dict[str, Any] = R) -> Row:
        return f"saelens-{name}", lambda folder: writers.saelens(folder, cfg, arrays), words

    def meta(**more: Any) -> dict[str, Any]:
        cfg = v6("jumprelu")
        return cfg | {"metadata": cfg["metadata"] | more}

    v6, old = writers.saelens_cfg, writers.old_saelens_cfg
    refused = ["skip_transcoder", "matching_pursuit", "temporal", "batchtopk", "jumprelu_skip_transcoder", "new"]
    head = "blocks.1.attn.hook_z"
    return [
        *(row(f"no-{key}", v6("jumprelu"), f"sae_weights.safetensors: {key}: missing", without(key)) for key in R),
        *(row(name, v6(name), f"cfg.json: architecture: '{name}' (", PLAIN) for name in refused),
        row("no-d_out", v6("transcoder"), "d_out: None; expected a whole number", PLAIN),
        row(
            "normed", v6("transcoder", d_out=D, normalize_activations="layer_norm"), "layer_norm; expected none", PLAIN
        ),
        row("written", v6("transcoder", d_out=12), "W_dec: shape [40, 24]; expected [d_sae, d_out] = [40, 12]", PLAIN),
        row("no-architecture", {k: v for k, v in v6("standard").items() if k != "architecture"}, "architecture: None"),
        row(
            "average",
            v6("jumprelu", normalize_activations="expected_average_only_in"),
            "its constant is not in the files",
        ),
        row("average-bool", old(normalize_activations=True), "its constant is not in the files", PLAIN),
        row(
            "whitening", v6("jumprelu", normalize_activations="covariance_whitening"), "the whitening is not folded in"
        ),
        row("norm", v6("jumprelu", normalize_activations="other"), "normalize_activations: 'other'"),
        row("norm-number", v6("jumprelu", normalize_activations=3), "normalize_activations: 3"),
        row(
            "subtract",
            v6("jumprelu", apply_b_dec_to_input="yes"),
            "apply_b_dec_to_input: 'yes'; expected true or false",
        ),
        row("no-k", v6("topk"), "k: None; expected a whole number", PLAIN),
        row("k-bool", v6("topk", k=True), "k: True; expected a whole number", PLAIN),
        row("large-k", v6("topk", k=F + 1), "k: 41; expected at most d_sae = 40", PLAIN),
        row("old-no-k", old(activation_fn="topk"), "activation_fn_kwargs: None", PLAIN),
        row("tanh", old(activation_fn="tanh-relu"), "activation_fn: 'tanh-relu'; expected relu", PLAIN),
        row("d_in", v6("jumprelu", d_in=D + 1), "W_enc: shape [24, 40]; expected [d_in, d_sae] = [25, 40]"),
        row("transposed", v6("standard"), "W_enc: shape [40, 24]", PLAIN | {"W_enc": R["W_enc"].T}),
        row("square", v6("standard", d_sae=D), "F other than d_in", {k: writers.raw(features=D)[k] for k in PLAIN}),
        row("skip", v6("standard"), "W_skip: an unknown key", PLAIN | {"W_skip": R["W_enc"]}),
        row("unsaid-threshold", v6("standard"), "threshold: an unknown key"),
        row("scaled", old(), "scaling_factor: not all ones", PLAIN | {"scaling_factor": R["b_enc"]}),
        row("int", v6("standard"), "b_enc: dtype I32", PLAIN | {"b_enc": np.ones(F, np.int32)}),
        row("one-head", meta(hook_name=head, hook_head_index=3), "hook_head_index: 3; expected null"),
        row("mlp_in", meta(hook_name="blocks.1.hook_mlp_in"), "hook_name: blocks.1.hook_mlp_in, on either side"),
        row("two-places", meta(hf_hook_name="model.layers.4.output"), "is resid_post.4, hook_name"),
        row("reshape", v6("jumprelu", reshape_activations="hook_z"), "reshape_activations: 'hook_z'"),
        row("name", meta(hook_name=7), "hook_name: 7; expected a string"),
        row("metadata", v6("jumprelu") | {"metadata": []}, "metadata: []; expected a JSON object"),
        row(
            "log-overflow",
            v6("jumprelu"),
            "finite",
            without("threshold") | {"log_threshold": np.full(F, np.inf, np.float32)},
        ),
    ]


def manifest_rows() -> list[Row]:
    tensors = writers.manifest_tensors(R, SEEN)

    def row(name: str, words: str, arrays: dict[str, Any] = tensors, place: str = "", **more: Any) -> Row:
        more = {"layers": ONE} | more
        return f"manifest-{name}", lambda folder: Path(f"{writers.manifest(folder, arrays, **more)}{place}"), words

    def lacks(key: str) -> dict[str, Any]:
        return {name: value for name, value in tensors.items() if name != key}

    two = ((20, "post_block"), (4, "pre_attn"))
    topk: dict[str, Any] = {"activation": "topk", "activation_params": {"k": 2}}
    everything = list(range(F))
    return [
        *(row(f"no-{key}", f"layer_20_post_block.safetensors: {key}: missing", lacks(key)) for key in tensors),
        row("d_model", "d_model: 0; expected a whole number", d_model=0),
        row("d_sae", "d_sae: 40.0; expected a whole number", d_sae=40.0),
        row("activation", "activation: 'gelu'", activation="gelu"),
        row("topk-subset", "topk over a part of the features; expected every feature", lacks("threshold"), **topk),
        row(
            "topk-k",
            "expected k alone, from 1 to 40",
            clampable_features=everything,
            activation="topk",
            activation_params={"k": 41},
        ),
        row("topk-no-k", "expected k alone", clampable_features=everything, activation="topk"),
        row("scalar-threshold", "activation_params.threshold: 0.5", activation_params={"threshold": 0.5}),
        row("params", "activation_params: [1]", activation_params=[1]),
        row("range", "clampable_features: 40; expected whole numbers from 0 to 39", clampable_features=[0, 40]),
        row("bool", "clampable_features: True", clampable_features=[True, 3]),
        row("twice", "clampable_features: a feature twice", clampable_features=[1, 2, 1]),
        row("none", "clampable_features: []", clampable_features=[]),
        row(
            "more-rows",
            "decoder_weight: shape [3, 24]; expected [features, d_model] = [4, 24]",
            clampable_features=[1, 2, 3, 4],
        ),
        row("hook", "layers: [3, 'somewhere']", layers=((3, "somewhere"),)),
        row("layer", "layers: [-1, 'post_block']", layers=((-1, "post_block"),)),
        row("site-twice", "layers: a site twice", layers=(ONE[0], ONE[0])),
        row("no-layers", "layers: []", layers=()),
        row("two-sites", "2 sites and none chosen", layers=two),
        row("no-such-site", "no file layer_9_post_block.safetensors", place="#layer_9_post_block"),
        row("kind", "kind: 'other'", kind="other"),
        row("uri", "weights_uri: 's3://x'; expected null", weights_uri="s3://x"),
        row("unknown", "in_norm: an unknown key", in_norm="layer_norm"),
        row("bias-in-delta", "decoder_bias: an unknown key", tensors | {"decoder_bias": R["b_dec"]}),
        row(
            "full-rows",
            "decoder_weight: shape [3, 24]",
            tensors | {"decoder_bias": R["b_dec"]},
            kind="sae_full_reconstruction",
        ),
        row("negative-threshold", "threshold: holds -1.0", tensors | {"threshold": -np.ones(3, np.float32)}),
        row("nan", "encoder_weight: holds nan", tensors | {"encoder_weight": np.full((3, D), np.nan, np.float32)}),
    ]


def own_rows() -> list[Row]:
    tensors = writers.own_tensors(R)
    bare = {key: value for key, value in tensors.items() if key != "threshold"}

    def row(name: str, words: str, arrays: dict[str, Any], **said: str) -> Row:
        return f"own-{name}", lambda folder: writers.own(folder / "saesteer.safetensors", arrays, said or None), words

    square = writers.own_tensors(writers.raw(features=D), max_act=False) | {"max_act": np.ones(D, np.float32)}
    return [
        *(row(f"no-{key}", f"{key}: missing", {k: v for k, v in tensors.items() if k != key}) for key in PLAIN),
        row(
            "others-orientation",
            "b_enc: shape [40]; expected [F] of W_enc [F, d_in] = [24]",
            tensors | {"W_enc": R["W_enc"]},
        ),
        row("square", "no metadata; expected format: saesteer", square),
        row("max_act", "max_act: holds -1.0", tensors | {"max_act": -np.ones(F, np.float32)}),
        row("max_act-shape", "max_act: shape [1]; expected [F] = [40]", tensors | {"max_act": np.ones(1, np.float32)}),
        row("threshold", "threshold: shape [2]", tensors | {"threshold": np.ones(2, np.float32)}),
        row("no-threshold", "threshold: missing", bare, format="saesteer", activation="jumprelu"),
        row("relu-threshold", "threshold: there", tensors, format="saesteer", activation="relu"),
        row("activation", "activation: 'gelu'", tensors, format="saesteer", activation="gelu"),
        row("k", "__metadata__", bare, format="saesteer", activation="topk", k="many"),
        row("large-k", "__metadata__", bare, format="saesteer", activation="topk", k="41"),
        row("site", "site_in: '../x'; expected a site", tensors, format="saesteer", site_in="../x"),
        row("ids", "feature_ids", tensors, format="saesteer", feature_ids="[1, true]"),
        row("deep-ids", "feature_ids", tensors, format="saesteer", feature_ids="[" * 100_000),
        row("few-ids", "__metadata__", tensors, format="saesteer", feature_ids="[1, 2]"),
        row("format", "format: 'other'; expected 'saesteer'", tensors, format="other"),
        row("skip", "W_skip: an unknown key", tensors | {"W_skip": R["W_enc"]}),
    ]


ROWS = [*gemma_rows(), *saelens_rows(), *manifest_rows(), *own_rows()]
ROWS += [row for module in MORE for row in module.wrong()]


def test_every_format_has_wrong_files() -> None:
    names = {"gemma": "gemma_scope", "own": "saesteer"}
    assert {names.get(found := name.partition("-")[0], found) for name, _, _ in ROWS} == set(FORMATS)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("write", "words"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_refused_with_the_file_the_key_and_the_expectation(
    write: Callable[[Path], Path], words: str, tmp_path: Path
) -> None:
    place = str(write(tmp_path))
    with pytest.raises(LoadError) as caught:
        load(place)
    message = str(caught.value)
    assert words in message
    assert str(tmp_path) in message
    assert "expected" in message or "known names" in message
    assert "\n" not in message


GOOD: dict[str, Callable[[Path], Path]] = {
    "gemma": lambda folder: writers.gemma_scope(folder, R) / "params.npz",
    "saelens": lambda folder: writers.saelens(folder, writers.saelens_cfg("jumprelu"), R) / "sae_weights.safetensors",
    "manifest": lambda folder: (
        writers.manifest(folder, writers.manifest_tensors(R, SEEN), layers=ONE) / "layer_20_post_block.safetensors"
    ),
    "own": lambda folder: writers.own(folder / "saesteer.safetensors", writers.own_tensors(R)),
}
GOOD |= {module.__name__.rpartition(".")[2]: module.good for module in MORE}
every_good_file = pytest.mark.parametrize("name", GOOD)


@every_good_file
@pytest.mark.parametrize("keep", [0, 5, 8, 100, -4, -1])
def test_cut_short(name: str, keep: int, tmp_path: Path) -> None:
    file = GOOD[name](tmp_path)
    file.write_bytes(file.read_bytes()[:keep])
    for read in (load, describe):
        with pytest.raises(LoadError, match=file.name):
            read(str(file))


@pytest.mark.parametrize("name", ["saelens", "manifest", "own"])
def test_cut_short_while_it_is_read(name: str, tmp_path: Path) -> None:
    file = GOOD[name](tmp_path)
    opened = open_arrays(file)
    file.write_bytes(file.read_bytes()[:-4])
    last = max(opened.index, key=lambda key: opened.index[key].start)
    with pytest.raises(LoadError, match=f"{last}: not readable .the file is cut short."):
        list(opened._blocks(last))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=150)
@given(data=st.data())
@every_good_file
def test_broken_bytes_give_a_load_error_or_a_dictionary(name: str, tmp_path: Path, data: st.DataObject) -> None:
    file = GOOD[name](tmp_path)
    content = bytearray(file.read_bytes())
    header = len(content) if file.suffix != ".safetensors" else 8 + struct.unpack("<Q", content[:8])[0]
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(content)
    try:
        coder = load(str(file))
    except LoadError:
        return
    assert coder.w_enc.isfinite().all()


@pytest.mark.parametrize("document", ["[1]", "3", '"x"', "null", "{", "", "[" * 100_000, "\xff"])
@pytest.mark.parametrize("name", ["saelens", "manifest"])
def test_json_that_is_not_an_object(name: str, document: str, tmp_path: Path) -> None:
    file = GOOD[name](tmp_path)
    config = tmp_path / ("cfg.json" if name == "saelens" else "manifest.json")
    config.write_bytes(document.encode("latin-1"))
    with pytest.raises(LoadError, match=rf"{config.name}: .*expected a JSON object"):
        load(str(file.parent))


HEADERS: list[tuple[Any, str]] = [
    ([], "a JSON list; expected a JSON object"),
    ({"W_enc": 3}, "not readable"),
    ({"W_enc": {"dtype": "F32", "shape": [2, -2], "data_offsets": [0, 16]}}, "W_enc: [2, -2]"),
    ({"W_enc": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 8]}}, "8 bytes for F32 [2, 2]"),
    ({"W_enc": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}, "cut short"),
    ({"__metadata__": {"format": 3}}, "__metadata__: not strings"),
]


@pytest.mark.parametrize(("header", "words"), HEADERS)
def test_safetensors_headers_that_lie(header: Any, words: str, tmp_path: Path) -> None:
    file = tmp_path / "saesteer.safetensors"
    head = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(head)) + head)
    with pytest.raises(LoadError) as caught:
        describe(file)
    assert words in str(caught.value)


def test_safetensors_arrays_that_share_bytes(tmp_path: Path) -> None:
    """A million arrays over the same bytes would fill the memory from a small file."""
    span = {"dtype": "F32", "shape": [2]}
    header = {"W_dec": span | {"data_offsets": [4, 12]}, "W_enc": span | {"data_offsets": [0, 8]}}
    head = json.dumps(header).encode()
    file = tmp_path / "saesteer.safetensors"
    file.write_bytes(struct.pack("<Q", len(head)) + head + bytes(12))
    with pytest.raises(LoadError, match="W_dec: begins at byte 4, inside another array; expected bytes of its own"):
        describe(file)


def test_changed_value_in_an_npz_fails_its_checksum(tmp_path: Path) -> None:
    large = writers.raw(features=400)  # beyond what zipfile reads ahead of a header
    file = writers.gemma_scope(tmp_path, large) / "params.npz"
    content = file.read_bytes()
    at = content.index(large["W_dec"].tobytes()) + 300 * D * 4
    file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    assert describe(file).features == 400
    with pytest.raises(LoadError, match="W_dec: not readable"):
        load(file)


def test_compressed_npz_and_its_checksum(tmp_path: Path) -> None:
    large: dict[str, Any] = writers.raw(features=400)
    file = tmp_path / "params.npz"
    np.savez_compressed(file, **large)
    assert np.array_equal(load(file).w_enc.numpy().T, large["W_enc"])
    with zipfile.ZipFile(file) as archive:
        crc = struct.pack("<L", archive.getinfo("W_dec.npy").CRC)
    content = bytearray(file.read_bytes())
    content[content.rindex(crc)] ^= 1  # in the directory at the file's end
    file.write_bytes(content)
    with pytest.raises(LoadError, match="W_dec: not readable"):
        load(file)


def test_npz_with_a_member_twice(tmp_path: Path) -> None:
    file = GOOD["gemma"](tmp_path)
    with zipfile.ZipFile(file, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("W_enc.npy", archive.read("W_enc.npy"))
    with pytest.raises(LoadError, match="W_enc: a member twice"):
        load(file)


def test_value_too_large_for_float16_is_refused_only_there(tmp_path: Path) -> None:
    file = writers.own(tmp_path / "x.safetensors", writers.own_tensors(R | {"W_dec": R["W_dec"] * np.float32(1e6)}))
    assert load(file, dtype=torch.bfloat16).w_dec.isfinite().all()
    with pytest.raises(LoadError, match=r"W_dec: a value outside the range of torch\.float16"):
        load(file, dtype=torch.float16)


def test_dtype_that_is_none_of_ours(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="float8"):
        load(GOOD["own"](tmp_path), dtype=torch.float8_e4m3fn)


def test_folders_and_files_of_no_format(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="a folder with nothing; expected one of the formats gemma_scope"):
        load(tmp_path)
    (tmp_path / "ae.pt").write_bytes(b"x")
    with pytest.raises(LoadError, match=r"a folder with ae\.pt"):
        load(tmp_path)
    save_file({"lm_head.weight": R["W_enc"]}, tmp_path / "model.safetensors")
    for place in (tmp_path / "ae.pt", tmp_path / "model.safetensors"):
        with pytest.raises(LoadError, match="a file of no known format"):
            load(place)
