"""A new format is one class and one row of FORMATS; everything else comes with the builder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from saesteer.commands.inspect import report
from saesteer.errors import LoadError
from saesteer.loaders import FORMATS, alone, describe, load, max_act
from saesteer.loaders.arrays import open_arrays
from saesteer.loaders.draft import Axis, Draft
from saesteer.loaders.files import read_json, whole_number
from tests.loaders import writers
from tests.loaders.writers import D, F

R = writers.raw(d_out=12)
X = writers.tokens()
Arrays = dict[str, Any]


def test_a_format_is_one_class_and_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain:
        FILES = ("plain.safetensors",)

        def draft(self, place: Path) -> Draft | None:
            if not (file := place / self.FILES[0]).is_file():
                return None
            keys = {"w_enc": "e", "b_enc": "eb", "w_dec": "d", "b_dec": "db", "threshold": "t"}
            return Draft(open_arrays(file), keys, "jumprelu", transposed={"w_enc"}, sites=("mlp_in.3", "mlp_out.3"))

    monkeypatch.setitem(FORMATS, "plain", Plain())

    def write(**changed: Any) -> Path:
        named = dict(zip(("e", "d", "eb", "db", "t"), R.values(), strict=True)) | changed
        stored = {key: np.ascontiguousarray(value) for key, value in named.items() if value is not None}
        save_file(stored, tmp_path / "plain.safetensors")
        return tmp_path

    coder = load(write())
    assert describe(write()) == coder.info
    pre = X @ R["W_enc"] + R["b_enc"]
    f = coder.encode(torch.from_numpy(X))
    np.testing.assert_allclose(f, pre * (pre > R["threshold"]), rtol=1e-4, atol=1e-2)
    np.testing.assert_allclose(coder.decode(f), f.numpy() @ R["W_dec"] + R["b_dec"], rtol=1e-4, atol=1e-2)
    assert "format        plain\n" in report(write())
    assert "mlp_in.3 -> mlp_out.3" in report(write())
    for changed, words in (
        ({"e": R["W_enc"].T}, r"plain\.safetensors: eb: shape \[40\]; expected \[F\] of e \[d_in, F\] = \[24\]"),
        ({"t": None}, "t: missing among the keys d, db, e, eb"),
        ({"t": -R["threshold"]}, r"t: holds -1\..*; expected values of 0 or more"),
        ({"more": R["b_enc"]}, "more: an unknown key"),
        ({"d": R["W_dec"] * np.float32(np.nan)}, "d: holds nan; expected finite values"),
    ):
        with pytest.raises(LoadError, match=words):
            load(write(**changed))


# The rest of this file is about a format that uses more of a draft: a config with sizes, and folds.
# W_dec is stored as [d_out, F]; pre is subtracted from the input.
GOOD: Arrays = {"enc": R["W_enc"].T, "bias": R["b_enc"], "dec": R["W_dec"].T, "out": R["b_dec"], "pre": X[0, 0]}


class Toy:
    """``toy.json`` with the size, and ``toy.safetensors``."""

    FILES = ("toy.json", "toy.safetensors")

    def draft(self, place: Path) -> Draft | None:
        config, file = (place / name for name in self.FILES)
        if not config.is_file():
            return None
        cfg = read_json(config)
        width, wide = whole_number(config, cfg, "width"), whole_number(config, cfg, "latents")
        return Draft(
            open_arrays(file),
            {"w_enc": "enc", "b_enc": "bias", "w_dec": "dec", "b_dec": "out", "b_in": "pre"},
            "topk",
            transposed={"w_dec"},
            configs=(config,),
            sizes=(Axis("latents", wide), Axis("width", width), Axis("written", len(R["b_dec"]))),
            decoder_norm="values",
            k=whole_number(config, cfg, "k"),
            sites=("mlp_in.3", "mlp_out.3"),
            model="org/model",
        )


@pytest.fixture(autouse=True)
def one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, "toy", Toy())


def write(folder: Path, arrays: Arrays = GOOD, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = {"latents": F, "width": D, "k": 5} | config
    (folder / "toy.json").write_text(str(config).replace("'", '"'))
    save_file({key: np.ascontiguousarray(value) for key, value in arrays.items()}, folder / "toy.safetensors")
    return folder


def test_it_is_described_and_read(tmp_path: Path) -> None:
    place = write(tmp_path)
    info, coder = describe(place), load(place)
    assert info == coder.info
    assert (info.format, info.features, info.d_in, info.d_out, info.k) == ("toy", F, D, 12, 5)
    assert (info.site_in, info.site_out, info.model) == ("mlp_in.3", "mlp_out.3", "org/model")
    assert info.bytes_on_disk == sum(file.stat().st_size for file in place.iterdir())
    norms = np.linalg.norm(R["W_dec"].astype(float), axis=1)
    pre = ((X - GOOD["pre"]).astype(float) @ R["W_enc"] + R["b_enc"]) * norms
    np.testing.assert_allclose(coder.pre(torch.from_numpy(X)), pre, rtol=1e-4, atol=1e-2)
    f = coder.encode(torch.from_numpy(X))
    assert ((f != 0).sum(-1) <= 5).all()
    assert (f != 0).any()
    np.testing.assert_allclose(coder.decode(f), (f.numpy() / norms) @ R["W_dec"] + R["b_dec"], rtol=1e-4, atol=1e-2)
    assert load(place, dtype=torch.bfloat16).w_dec.dtype == torch.bfloat16


def test_it_is_inspected_and_calibrated(tmp_path: Path) -> None:
    place = write(tmp_path)
    before = report(place)
    assert "format        toy\n" in before
    assert "site          mlp_in.3 -> mlp_out.3\n" in before
    assert f"shapes        w_enc [{F}, {D}]  w_dec [{F}, 12]\n" in before
    max_act.write(place, alone(place), torch.ones(F), tokens=1)
    assert "max_act       known" in report(place)
    assert load(place).max_act is not None


def test_describing_reads_no_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = write(tmp_path)
    monkeypatch.setattr("saesteer.loaders.arrays.Arrays._blocks", None)
    assert describe(place).features == F


def test_the_fingerprint_covers_both_files(tmp_path: Path) -> None:
    first = describe(write(tmp_path)).fingerprint
    assert describe(write(tmp_path, k=6)).fingerprint != first
    assert describe(write(tmp_path, GOOD | {"bias": R["b_enc"] + 1})).fingerprint != first


def test_the_hub_is_asked_for_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def snapshot_download(repo: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.extend(allow_patterns)
        write(tmp_path / "sub")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert describe("org/repo/sub").format == "toy"
    assert {"sub/toy.json", "sub/toy.safetensors"} <= set(asked)
    asked.clear()
    with pytest.raises(LoadError):
        describe("org/repo/sub/toy.safetensors")
    assert asked[0] == "sub/toy.safetensors"
    assert "sub/toy.json" in asked
    assert not {"sub/params.npz", "sub/sae_weights.safetensors"} & set(asked)


def spoiled(key: str, value: float) -> Arrays:
    changed = np.array(GOOD[key])
    changed.flat[-1] = value
    return GOOD | {key: changed}


def lacks(key: str) -> Arrays:
    return {name: value for name, value in GOOD.items() if name != key}


SQUARE: Arrays = GOOD | {"enc": np.eye(D), "bias": np.ones(D), "dec": np.ones((12, D))}
# What is wrong -> the arrays, the config, and words of the message.
WRONG_HEADERS: dict[str, tuple[Arrays, dict[str, int], str]] = {
    **{f"no-{key}": (lacks(key), {}, f"toy.safetensors: {key}: missing among the keys ") for key in GOOD},
    "unknown": (GOOD | {"skip": R["W_enc"]}, {}, "skip: an unknown key; expected only bias, dec, enc, out, pre"),
    "transposed": (
        GOOD | {"enc": R["W_enc"]},
        {},
        "toy.safetensors: enc: shape [24, 40]; expected [latents, width] = [40, 24]",
    ),
    "decoder": (GOOD | {"dec": R["W_dec"]}, {}, "dec: shape [40, 12]; expected [written, latents] = [12, 40]"),
    "bias": (
        GOOD | {"bias": R["b_enc"][1:]},
        {},
        "bias: shape [39]; expected [latents] of enc [latents, width] = [40]",
    ),
    "config": (GOOD, {"latents": 41}, "enc: shape [40, 24]; expected [latents, width] = [41, 24]"),
    "square": (SQUARE, {"latents": D}, "enc: shape [24, 24]; expected F other than d_in"),
    "integers": (GOOD | {"out": np.ones(12, np.int32)}, {}, "out: dtype I32; expected one of"),
    "large-k": (GOOD, {"k": 41}, "toy.json: k: 41; expected at most latents = 40"),
}
WRONG_VALUES: dict[str, tuple[Arrays, str]] = {
    "nan": (spoiled("dec", np.nan), "dec: holds nan; expected finite values"),
    "infinity": (spoiled("pre", np.inf), "pre: holds inf; expected finite values"),
    "folded": (GOOD | {"pre": np.full(D, 3e38, np.float32)}, "bias: outside the range of float32 once folded"),
}


@pytest.mark.parametrize("read", [load, describe])
@pytest.mark.parametrize("name", WRONG_HEADERS)
def test_wrong_headers_are_refused(name: str, read: Callable[[Path], object], tmp_path: Path) -> None:
    arrays, config, words = WRONG_HEADERS[name]
    place = write(tmp_path, arrays, **config)
    with pytest.raises(LoadError) as caught:
        read(place)
    assert words in str(caught.value)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("name", WRONG_VALUES)
def test_wrong_values_are_refused(name: str, tmp_path: Path) -> None:
    arrays, words = WRONG_VALUES[name]
    with pytest.raises(LoadError, match=words):
        load(write(tmp_path, arrays))


def test_equal_sites_of_unequal_widths_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Guess(Toy):
        def draft(self, place: Path) -> Draft | None:
            arrays = open_arrays(place / "toy.safetensors")
            keys = {"w_enc": "enc", "b_enc": "bias", "w_dec": "dec", "b_dec": "out", "b_in": "pre"}
            return Draft(arrays, keys, "relu", transposed={"w_dec"}, sites=("resid_post.3", "resid_post.3"))

    monkeypatch.setitem(FORMATS, "toy", Guess())
    with pytest.raises(LoadError, match=r"dec: width 12 for an input of 24; expected equal widths at resid_post\.3"):
        describe(write(tmp_path))


def test_facts_that_contradict_each_other_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Normed(Toy):
        def draft(self, place: Path) -> Draft | None:
            found = super().draft(place)
            assert found is not None
            return Draft(found.weights, found.keys, "relu", transposed={"w_dec"}, in_norm="layer_norm")

    monkeypatch.setitem(FORMATS, "toy", Normed())
    with pytest.raises(LoadError, match="a transcoder's output has no input statistics; expected values that agree"):
        describe(write(tmp_path))
