"""Places: paths, names inside a folder, hub ids (with a fake hub), and describe() on files far too large to read."""

import hashlib
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from saesteer.config.assets import Assets
from saesteer.config.config import SaesteerConfig
from saesteer.errors import LoadError
from saesteer.loaders import alone, describe, load, max_act
from saesteer.loaders.sets import members
from saesteer.loaders.vectors import read_vectors
from saesteer.workbench.inspect import report
from tests.loaders import writers
from tests.loaders.formats import circuit_tracer, connor_rob, llama_scope, qwen_scope
from tests.loaders.hub import FakeHub

LEAF = "layer_20/width_16k/average_l0_71"


def test_a_line_of_yaml_that_stands_for_gigabytes_is_refused(tmp_path: Path) -> None:
    circuit_tracer.write(tmp_path, circuit_tracer.ARRAYS, (3,))
    lines = ["a0: &a0 x"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    (tmp_path / "config.yaml").write_text("\n".join([*lines, "model_name: *a11"]))
    with pytest.raises(LoadError, match=r"config.yaml: not readable; expected .*without aliases"):
        describe(tmp_path / "layer_3.safetensors")


POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 12345\n"


@pytest.mark.parametrize("name", ["cfg.json", "config.yaml", "params.npz", "x.pt", "x.safetensors", "v.npy", "v.gguf"])
def test_a_pointer_of_git_lfs_is_no_file(name: str, tmp_path: Path) -> None:
    """Whatever opens it, whether by its own name or with its folder."""
    writers.saelens(tmp_path, writers.saelens_cfg("jumprelu"), writers.raw())
    if name == "config.yaml":
        circuit_tracer.write(tmp_path, circuit_tracer.ARRAYS, (3,))
    (tmp_path / name).write_text(POINTER)
    place = {"cfg.json": tmp_path, "config.yaml": tmp_path / "layer_3.safetensors"}.get(name, tmp_path / name)
    for look in (report, read_vectors if name.startswith("v.") else describe):
        with pytest.raises(LoadError, match=rf"{name}: a Git LFS pointer; expected .*git lfs pull"):
            look(place)


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


def others(folder: Path, *names: str) -> None:
    """Files beside a dictionary that nobody asks for."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")


def on_the_hub(root: Path) -> None:
    """A repository of each kind, which holds more than is asked for."""
    for leaf in (LEAF, LEAF.replace("71", "139")):
        writers.gemma_scope(root / "google/gemma-scope-2b-pt-res" / leaf, writers.raw())
    for folder in ("sae", "sae/layer_1"):
        writers.saelens(root / "org" / folder, writers.saelens_cfg("jumprelu"), writers.raw())
    others(root / "org/sae", "other.pt", "model.safetensors", "layer_1/x.safetensors", "run.py")
    circuit_tracer.write(root / "org/set", circuit_tracer.ARRAYS, (1, 3))
    qwen_scope.write(root / "org/qwen", qwen_scope.ARRAYS, (1, 3))
    for folder in ("z", "z/deeper"):
        connor_rob.write(root / "org" / folder, connor_rob.ARRAYS)
    llama_scope.write(root / "org/scope/L15R-8x", llama_scope.ARRAYS)
    others(root / "org/scope/L15R-8x/checkpoints", "5.safetensors")
    for name in ("mine", "other"):
        writers.own(root / "org/own/sub" / f"{name}.safetensors", writers.own_tensors(writers.raw()))


GIVEN = [  # place, where it reads, the files that are fetched
    (f"google/gemma-scope-2b-pt-res/{LEAF}", "resid_post.20", [f"{LEAF}/params.npz"]),
    ("org/sae", "resid_post.3", ["cfg.json", "sae_weights.safetensors"]),
    ("org/set#layer_3", "mlp_in.3", ["config.yaml", "layer_3.safetensors"]),
    ("org/qwen/layer3.sae.pt", "resid_post.3", ["config.json", "layer3.sae.pt"]),
    ("org/z/gpt2-small_L3.pt", "z.3", ["gpt2-small_L3.pt", "gpt2-small_L3_cfg.json"]),
    (
        "org/scope/L15R-8x",
        "resid_post.15",
        [f"L15R-8x/{n}" for n in ("checkpoints/final.safetensors", "hyperparams.json")],
    ),
    ("org/own/sub/mine.safetensors", None, ["sub/mine.safetensors"]),
]


def test_the_hub_gives_what_a_place_needs_and_no_other_file(fake_hub: FakeHub) -> None:
    on_the_hub(fake_hub.root)
    for place, config in (("org/set", "config.yaml"), ("org/qwen", "config.json")):  # a whole set is not fetched
        with pytest.raises(LoadError, match="0 files and none chosen"):
            describe(place)
        assert fake_hub.given == [config]
    for place, site, given in GIVEN:
        info = describe(place)
        assert (info.site_in, fake_hub.given) == (site, given)
        assert load(place).info == info
    for place in ("org/set#layer_2", "org/other#layer_3"):
        with pytest.raises(LoadError, match=f"{place.partition('#')[0]}/layer_"):
            describe(place)


@pytest.mark.parametrize("place", ["gs/params.safetensors", "gs/16k/layer_20"])
def test_fake_hub_is_not_asked_where_the_folder_is_here(
    fake_hub: FakeHub, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(place).parent.mkdir(parents=True)
    Path(place).with_name("layer_2").mkdir()
    (tmp_path / "org").mkdir()
    for ask in (describe, report, members):
        with pytest.raises(LoadError, match=f"{place}: no such file; {Path(place).parent} has layer_2"):
            ask(place)
    assert fake_hub.given == []
    writers.gemma_scope(fake_hub.root / "org" / "sae", writers.raw())
    assert describe("org/sae").features == writers.F  # a folder may have an organisation's name
    monkeypatch.setattr(os, "access", lambda *_: False)  # what the folder has cannot be told, so the hub is asked
    with pytest.raises(LoadError) as caught:
        describe(place)
    assert "no such file; " not in str(caught.value)


def test_fake_hub_name_inside_a_folder(fake_hub: FakeHub) -> None:
    tensors = writers.manifest_tensors(writers.raw(), writers.SEEN)
    writers.manifest(fake_hub.root / "org" / "sae" / "m", tensors, layers=((20, "post_block"), (4, "pre_attn")))
    assert describe("org/sae/m#layer_4_pre_attn").site_in == "resid_pre.4"
    with pytest.raises(
        LoadError, match=r"2 dictionaries and none chosen; expected one of .*layer_20_post_block.safetensors"
    ):
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


@pytest.mark.parametrize(
    "place", ["nowhere", "/no/such/file", "./a/b", "../a", "a/../b", "a//b", "~/no/such", "a/b?c", "", "a b/c"]
)
def test_neither_a_path_nor_a_hub_id(place: str, fake_hub: FakeHub) -> None:
    with pytest.raises(LoadError):
        load(place)
    assert not fake_hub.given


def in_hub_cache(root: Path, seed: int = 0, digest: str | None = None) -> Path:
    """A snapshot as the hub's cache has it, where a name leads to content that is named by its digest."""
    snapshot, blobs = root / "snapshots" / "abc", root / "blobs"
    file = writers.gemma_scope(snapshot, writers.raw(seed=seed)) / "params.npz"
    blobs.mkdir()
    name = digest or hashlib.sha256(file.read_bytes()).hexdigest()
    file.rename(blobs / name)
    file.symlink_to(f"../../blobs/{name}")
    return snapshot


def test_the_same_files_are_the_same_dictionary_on_every_node(tmp_path: Path) -> None:
    """In the hub's cache, as a plain folder, as a file by another name, and whatever their times are."""
    folder = writers.gemma_scope(tmp_path / "a", writers.raw())
    other = tmp_path / "deep" / "down" / "other.npz"
    other.parent.mkdir(parents=True)
    shutil.copy(folder / "params.npz", other)
    os.utime(other, (100, 100))
    places = [folder, other, in_hub_cache(tmp_path / "hub")]
    places.append(in_hub_cache(tmp_path / "small", digest="1f" * 20))  # git's digest is not of the content alone
    assert {describe(place).fingerprint for place in places} == {
        hashlib.sha256((folder / "params.npz").read_bytes()).hexdigest()
    }
    assert describe(in_hub_cache(tmp_path / "next", seed=1)).fingerprint != describe(folder).fingerprint
    configs = [
        SaesteerConfig.from_json({"dictionaries": {"d": f"{place}@resid_post.3"}, "sites": ["resid_mid.1"]})
        for place in places
    ]
    assert len({Assets.open(config).fingerprint for config in configs}) == 1
    assert Assets.open(replace(configs[0], sites=())).fingerprint != Assets.open(configs[0]).fingerprint


def test_inspect_hashes_no_large_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "1f" * 32
    places = [writers.gemma_scope(tmp_path / "a", writers.raw()), in_hub_cache(tmp_path / "hub", digest=name)]
    assert f"fingerprint   {describe(places[0]).fingerprint[:16]}" in report(places[0])
    monkeypatch.setattr("saesteer.loaders.draft.UNASKED", 0)
    assert "fingerprint   not computed: it takes" in report(places[0])
    assert f"fingerprint   {name[:16]}" in report(places[1])
    max_act.write(places[0], alone(places[0]), torch.ones(writers.F), tokens=1)
    said = describe(places[0], hashed=False)
    assert (said.fingerprint, said.has_max_act) == ("", True)
    assert replace(describe(places[0]), fingerprint="") == said


def test_every_byte_of_every_file_counts(tmp_path: Path) -> None:
    arrays = {key: value for key, value in writers.raw().items() if key != "threshold"}
    folder = writers.saelens(tmp_path, writers.saelens_cfg("standard"), arrays)
    first = describe(folder).fingerprint
    config, weights = folder / "cfg.json", folder / "sae_weights.safetensors"
    for file, content in ((config, config.read_bytes() + b" "), (weights, weights.read_bytes()[:-1] + b"\x00")):
        before, times = file.read_bytes(), (file.stat().st_atime_ns, file.stat().st_mtime_ns)
        assert content != before
        file.write_bytes(content)
        os.utime(file, ns=times)
        assert describe(folder).fingerprint != first
        file.write_bytes(before)
        assert describe(folder).fingerprint == first
