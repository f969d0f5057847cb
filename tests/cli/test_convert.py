"""`saesteer convert`: the same dictionary in saesteer's own file, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from saesteer.commands.cli import app
from saesteer.commands.convert import run
from saesteer.errors import ConfigError, LoadError
from saesteer.loaders import load
from saesteer.loaders.rows import open_rows
from tests.loaders import writers

NAMES = ("w_enc", "b_enc", "w_dec", "b_dec", "threshold")


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_the_copy_is_the_dictionary_and_its_rows_are_read_at_once(dtype: str | None, tmp_path: Path) -> None:
    place, target = writers.gemma_scope(tmp_path / "layer_3", writers.raw()), tmp_path / "copy.safetensors"
    words = ["convert", "--rows", str(place), str(target)] + (["--dtype", dtype] if dtype else [])
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
    with pytest.raises(LoadError, match="cannot be written"):
        run(place, tmp_path / "nowhere" / "x.safetensors", dtype=None)
