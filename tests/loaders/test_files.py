"""Places: paths, names inside a folder, hub ids (with a fake hub), and describe() on files far too large to read."""

import json
import os
import struct
import time
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
from huggingface_hub.utils._paths import filter_repo_objects

from saesteer.errors import LoadError
from saesteer.inspect import report
from saesteer.loaders import arrays, describe, load, max_act
from saesteer.loaders.files import fetch
from saesteer.vectors import read_vectors
from tests.loaders import writers
from tests.loaders.test_formats import CASES, Case, every_case

LEAF = "layer_20/width_16k/average_l0_71"
WIDE = {"W_enc": "F32", "W_dec": "F32", "b_enc": "F32", "b_dec": "F32", "threshold": "F32"}


class FakeHub:
    """Stands in for the hub: a folder per repository; gives, and records, only what the patterns allow."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.given: list[str] = []

    def snapshot_download(self, repo: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        source = self.root / repo
        if not source.is_dir():
            raise huggingface_hub.errors.EntryNotFoundError(f"404: {repo}\nmore lines")
        names = [str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()]
        self.given = sorted(filter_repo_objects(names, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns))
        snapshot = self.root / f"models--{repo.replace('/', '--')}" / "snapshots" / "abc"
        snapshot.mkdir(parents=True, exist_ok=True)
        for name in self.given:
            (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
            if not (snapshot / name).exists():  # the real one downloads once, too
                (snapshot / name).write_bytes((source / name).read_bytes())
        return str(snapshot)


@pytest.fixture
def fake_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub(tmp_path / "hub")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    return fake


def test_fake_hub_gives_one_dictionary_of_a_repository(fake_hub: FakeHub) -> None:
    repo = fake_hub.root / "google" / "gemma-scope-2b-pt-res"
    writers.gemma_scope(repo / LEAF, writers.raw())
    writers.gemma_scope(repo / LEAF.replace("71", "139"), writers.raw(seed=1))
    place = f"google/gemma-scope-2b-pt-res/{LEAF}"
    coder = load(place)
    assert (coder.info.site_in, coder.info.source) == ("resid_post.20", place)
    assert describe(place) == coder.info
    assert fake_hub.given == [f"{LEAF}/params.npz"]


def test_fake_hub_is_asked_for_no_other_file(fake_hub: FakeHub) -> None:
    repo = writers.saelens(fake_hub.root / "org" / "sae", writers.saelens_cfg("jumprelu"), writers.raw())
    writers.saelens(repo / "layer_1", writers.saelens_cfg("jumprelu"), writers.raw())
    for name in ("ae.pt", "model.safetensors", "layer_1/x.safetensors", "run.py"):
        (repo / name).write_bytes(b"x")
    assert load("org/sae").info.format == "saelens"
    assert fake_hub.given == ["cfg.json", "sae_weights.safetensors"]


def test_fake_hub_gives_one_file_of_vectors_and_no_other(fake_hub: FakeHub) -> None:
    repo = fake_hub.root / "org" / "vectors"
    repo.mkdir(parents=True)
    for name in ("happy", "sad"):
        np.save(repo / f"{name}.npy", np.ones(4))
        (repo / f"{name}.pt").write_bytes(b"x")
    assert read_vectors("org/vectors/happy.npy").width == 4
    assert fake_hub.given == ["happy.npy"]
    with pytest.raises(LoadError, match=r"a folder|nothing there"):
        read_vectors("org/vectors")


def test_fake_hub_keeps_what_was_calibrated(fake_hub: FakeHub) -> None:
    writers.gemma_scope(fake_hub.root / "org" / "sae", writers.raw())
    coder = load("org/sae")
    assert not coder.info.has_max_act
    max_act.write(fetch("org/sae"), coder, torch.ones(coder.info.features), tokens=1)
    assert describe("org/sae").has_max_act
    assert load("org/sae").max_act is not None


def test_fake_hub_single_file_and_name_inside_a_folder(fake_hub: FakeHub) -> None:
    raw = writers.raw()
    repo = fake_hub.root / "org" / "sae"
    writers.own(repo / "sub" / "mine.safetensors", writers.own_tensors(raw))
    writers.own(repo / "sub" / "other.safetensors", writers.own_tensors(raw))
    assert load("org/sae/sub/mine.safetensors").info.format == "saesteer"
    assert fake_hub.given == ["sub/mine.safetensors"]
    tensors = writers.manifest_tensors(raw, writers.SEEN)
    writers.manifest(repo / "m", tensors, layers=((20, "post_block"), (4, "pre_attn")))
    assert describe("org/sae/m#layer_4_pre_attn").site_in == "resid_pre.4"
    with pytest.raises(LoadError, match="2 sites and none chosen"):
        describe("org/sae/m")
    with pytest.raises(LoadError, match="known names: layer_20_post_block, layer_4_pre_attn"):
        describe("org/sae/m#../sub/mine")


def test_fake_hub_failures_are_one_sentence(fake_hub: FakeHub) -> None:
    with pytest.raises(
        LoadError, match=r"^org/none: no such file or folder, and the hub did not give it \(404: org/none\)$"
    ):
        load("org/none")
    (fake_hub.root / "org" / "sae").mkdir(parents=True)
    for place in ("org/sae", "org/sae/sub"):
        with pytest.raises(LoadError, match="has nothing there that saesteer reads"):
            load(place)


def test_hub_that_is_offline_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(LoadError, match="the hub did not give it") as caught:
        load("org/repo")
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize(
    "place", ["nowhere", "/no/such/file", "./a/b", "../a", "a/../b", "a//b", "~/no/such", "a/b?c", "", "a b/c"]
)
def test_neither_a_path_nor_a_hub_id(place: str, fake_hub: FakeHub) -> None:
    with pytest.raises(LoadError):
        load(place)
    assert not fake_hub.given


def test_the_same_download_is_the_same_dictionary(tmp_path: Path) -> None:
    """Laid out as in the hub's cache, where a name leads to content named by its digest; nodes have their own times."""

    def fingerprint(node: str, digest: str, seconds: int) -> str:
        blob, snapshot = tmp_path / node / "blobs" / digest, tmp_path / node / "snapshots" / "abc"
        blob.parent.mkdir(parents=True)
        writers.gemma_scope(snapshot, writers.raw())
        (snapshot / "params.npz").rename(blob)
        os.utime(blob, (seconds, seconds))
        (snapshot / "params.npz").symlink_to(f"../../blobs/{digest}")
        return describe(snapshot).fingerprint

    one, two = "1f" * 32, "2f" * 32
    assert fingerprint("one", one, 100) == fingerprint("two", one, 200) != fingerprint("three", two, 100)
    assert fingerprint("four", "plain", 100) != fingerprint("five", "plain", 200), "a folder may be called so by chance"
    for node in ("one", "two"):  # as plain files they differ by their times
        (tmp_path / node / "blobs").rename(tmp_path / node / "files")
        link = tmp_path / node / "snapshots" / "abc" / "params.npz"
        link.unlink()
        link.symlink_to(f"../../files/{one}")
    first, second = (describe(tmp_path / node / "snapshots" / "abc").fingerprint for node in ("one", "two"))
    assert first != second


def test_a_path_object_is_never_asked_from_the_hub(fake_hub: FakeHub) -> None:
    with pytest.raises(LoadError, match="no such file or folder"):
        load(Path("org/repo"))


def test_an_existing_path_with_a_hash_in_its_name(tmp_path: Path) -> None:
    file = writers.own(tmp_path / "a#b" / "c#d.safetensors", writers.own_tensors(writers.raw()))
    assert fetch(str(file)) == file
    assert fetch(str(file.parent)) == file.parent


@every_case
def test_describe_reads_no_values(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = str(case.write(tmp_path))
    expected = load(place).info

    def forbidden(*_: Any) -> None:
        raise AssertionError("describe() read weights")

    monkeypatch.setattr(arrays.Arrays, "_blocks", forbidden)
    assert describe(place) == expected
    assert report(place)


def test_describe_of_a_million_features_is_instant(tmp_path: Path) -> None:
    """A sparse file of 19 GB that holds a header and nothing else."""
    features, width = 1 << 20, 2304
    shapes = {"W_enc": [width, features], "W_dec": [features, width], "b_dec": [width]}
    header: dict[str, Any] = {}
    end = 0
    for key, dtype in WIDE.items():
        shape = shapes.get(key, [features])
        start, end = end, end + 4 * torch.Size(shape).numel()
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    head = json.dumps(header).encode()
    with (tmp_path / "sae_weights.safetensors").open("wb") as stream:
        stream.write(struct.pack("<Q", len(head)) + head)
        stream.truncate(8 + len(head) + end)
    (tmp_path / "cfg.json").write_text(json.dumps(writers.saelens_cfg("jumprelu", d_in=width, d_sae=features)))
    started = time.process_time()  # others on the machine take no part in it
    info = describe(tmp_path)
    assert time.process_time() - started < 1
    assert (info.features, info.bytes_on_disk > 19e9) == (features, True)
    assert "1,048,576" in report(tmp_path)
    assert "19.3 GB" in report(tmp_path)


def test_report_tells_what_a_file_is_and_what_is_not_served(tmp_path: Path) -> None:
    cases = {case.name: str(case.write(tmp_path / case.name)) for case in CASES}
    text = report(cases["gemma_scope-transcoder"])
    for words in (
        "gemma_scope",
        "mlp_in_pregain.19 -> mlp_out.19",
        "w_enc [40, 24]  w_dec [40, 12]",
        "jumprelu",
        "float32",
    ):
        assert words in text
    assert "reads at one site and writes at another" in text
    assert "not said by the files: give it" in report(cases["own-no-metadata"])
    assert "max_act       known" in report(cases["own-no-metadata"])
    assert "`saesteer calibrate`" in report(cases["saelens-v6-topk"])
    assert "topk, k = 5" in report(cases["saelens-v6-topk"])
    assert "per-token layer_norm" in report(cases["saelens-v6-standard-layer_norm"])
    manifest = report(cases["manifest-jumprelu"])
    assert "3 of a larger dictionary: 17, 2, 30" in manifest
    assert "not served    reconstruct" in manifest
    with pytest.raises(LoadError):
        report(tmp_path / "nowhere")
