"""`saesteer convert`: the same dictionary in saesteer's own file, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from saesteer.config.assets import Assets
from saesteer.config.config import SaesteerConfig
from saesteer.errors import ConfigError, LoadError
from saesteer.loaders import load
from saesteer.loaders.rows import open_rows
from saesteer.workbench.cli import app
from saesteer.workbench.convert import run
from tests.loaders import writers

NAMES = ("w_enc", "b_enc", "w_dec", "b_dec", "threshold")


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_the_copy_is_the_dictionary_and_its_rows_are_read_at_once(dtype: str | None, tmp_path: Path) -> None:
    place, target = writers.gemma_scope(tmp_path / "layer_3", writers.raw()), tmp_path / "copy.safetensors"
    words = ["convert", str(place), str(target)] + (["--dtype", dtype] if dtype else [])
    said = CliRunner().invoke(app, words, catch_exceptions=False).output
    assert said == f"{target}: 40 features of gemma_scope, {target.stat().st_size / 1e6:.1f} MB\n"
    whole, copy = load(place, dtype=torch.bfloat16 if dtype else None), load(target)
    one = open_rows(target).row(7, None)
    for name in NAMES:
        assert torch.equal(getattr(copy, name), getattr(whole, name))
    assert torch.equal(one.w_enc, whole.w_enc[7:8])
    with target.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    assert (header["W_enc"]["shape"], header["W_dec"]["shape"]) == ([40, 24], [40, 24])


@pytest.mark.parametrize(
    ("site", "expected"),
    [
        ("resid_post.12", ("resid_post.12", "resid_post.12")),
        ("mlp_in.12:mlp_out.12", ("mlp_in.12", "mlp_out.12")),
        (None, (None, None)),
    ],
)
def test_the_copy_names_the_site_that_the_operator_gave(
    site: str | None, expected: tuple[str | None, str | None], tmp_path: Path
) -> None:
    place, target = writers.gemma_scope(tmp_path / "copied", writers.raw()), tmp_path / "copy.safetensors"
    run(f"{place}@{site}" if site else str(place), target, dtype=None)
    info = load(target).info
    assert (info.site_in, info.site_out) == expected
    if site:
        served = Assets.open(SaesteerConfig.from_json({"dictionaries": {"gs": str(target)}})).infos["gs"]
        assert (served.site_in, served.site_out) == expected


def test_the_operators_site_counts_more_than_that_of_the_files(tmp_path: Path) -> None:
    """As on a server."""
    arrays = {key: array for key, array in writers.raw().items() if key != "threshold"}
    place = writers.saelens(tmp_path, writers.saelens_cfg("standard"), arrays)
    assert load(place).info.site_in not in (None, "resid_pre.7")
    run(f"{place}@resid_pre.7", tmp_path / "copy.safetensors", dtype=None)
    info = load(tmp_path / "copy.safetensors").info
    assert (info.site_in, info.site_out) == ("resid_pre.7", "resid_pre.7")


def test_one_of_a_set_is_chosen_as_on_a_server(tmp_path: Path) -> None:
    for layer in (3, 4):
        writers.gemma_scope(tmp_path / "set" / f"layer_{layer}", writers.raw(seed=layer))
    with pytest.raises(ConfigError, match=r"set: holds 2 dictionaries; expected one of \S*layer_3, \S*layer_4"):
        run(str(tmp_path / "set"), tmp_path / "copy.safetensors", dtype=None)
    run(f"{tmp_path / 'set'}@resid_post.4", tmp_path / "copy.safetensors", dtype=None)
    copy = load(tmp_path / "copy.safetensors")
    assert copy.info.site_in == "resid_post.4"
    assert torch.equal(copy.w_enc, load(tmp_path / "set" / "layer_4").w_enc)


def test_what_is_not_written(tmp_path: Path) -> None:
    place = str(writers.gemma_scope(tmp_path / "layer_3", writers.raw()))
    there = tmp_path / "there.safetensors"
    there.write_bytes(b"")
    for target, dtype, words in [
        (there, None, "exists; expected the name of a new file"),
        (tmp_path / "x.pt", None, r"ends in \.safetensors"),
        (tmp_path / "x.safetensors", "int8", "--dtype int8: expected one of float32, bfloat16, float16"),
    ]:
        with pytest.raises(ConfigError, match=words):
            run(place, target, dtype=dtype)
    for site, words in [("nowhere.3", "nowhere"), ("resid_post.3:", "expected"), ("17-20", "no dictionary of layer")]:
        with pytest.raises(ConfigError, match=words):
            run(f"{place}@{site}", tmp_path / "x.safetensors", dtype=None)
    with pytest.raises(LoadError, match="cannot be written"):
        run(place, tmp_path / "nowhere" / "x.safetensors", dtype=None)
