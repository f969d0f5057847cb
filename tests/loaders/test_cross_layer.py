"""Cross-layer transcoders of each format, feature by feature, against their formulas in numpy; and faulty files."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from saesteer.config.assets import Assets
from saesteer.config.config import SaesteerConfig
from saesteer.errors import ConfigError, LoadError
from saesteer.loaders import describe, later, load
from saesteer.loaders.rows import open_rows
from tests.loaders import across, writers
from tests.loaders.across import LAYERS

X = writers.tokens()
every_case = pytest.mark.parametrize("case", across.cases(), ids=lambda case: case.name)


def assets(place: Path | str, **changes: object) -> Assets:
    return Assets.open(SaesteerConfig.from_json({"dictionaries": {"clt": str(place)}, **changes}))


@every_case
def test_each_feature_adds_what_the_formula_says_at_each_layer(case: across.Case, tmp_path: Path) -> None:
    opened = assets(case.write(tmp_path))
    assert opened.sets == {"clt": tuple(range(LAYERS))}
    for layer in range(LAYERS):
        info = opened.infos[f"clt@{layer}"]
        assert (info.targets, info.kind, info.by_rows) == (LAYERS - layer, "cross-layer transcoder", True)
        assert (info.site_in, info.can_reconstruct) == (f"mlp_in.{layer}", False)
        assert info.writes == tuple(f"mlp_out.{to}" for to in range(layer, LAYERS))
        file, whole = open_rows(info.source, site=info.site_in), load(info.source, site=info.site_in)
        truth = [case.adds(layer, to, X.astype(float)) for to in range(layer, LAYERS)]
        for row in (0, 1, 17, info.features - 1):
            one, behind = file.row(row, None), file.later(row, None)
            f = one.encode(torch.from_numpy(X))
            decoders = torch.cat([one.w_dec, behind])
            assert torch.equal(decoders, torch.stack([rows[row] for rows in (whole.w_dec, *later(info))]))
            assert decoders.shape == (LAYERS - layer, info.d_out)
            for at, decoder in enumerate(decoders):
                ours, size = (f * decoder).numpy(), 1 + np.abs(X).max(-1, keepdims=True)
                np.testing.assert_array_less(np.abs(ours - truth[at][row]) / size, 5e-5)
                assert np.array_equal(ours.any(-1), truth[at][row].any(-1))


@every_case
def test_what_is_known_says_what_it_is(case: across.Case, tmp_path: Path) -> None:
    opened = assets(f"{case.write(tmp_path)}@1")
    [(name, info)] = opened.infos.items()
    assert (name, info.site_in, info.targets) == ("clt", "mlp_in.1", 2)
    assert type(info).from_json(info.to_json()) == info
    assert describe(info.source, site=info.site_in).targets == 2
    [told] = opened.memory(2)
    assert "0 bytes in memory" in told and "on disk" in told
    assert opened.sites(LAYERS) == ("mlp_in.1", "resid_post.1", "resid_post.2")


def test_sites_that_the_files_do_not_say_are_named(tmp_path: Path) -> None:
    place = across.circuit_tracer(tmp_path, across.layers(), feature_input_hook=None, feature_output_hook=None)
    with pytest.raises(ConfigError, match="do not say where they belong"):
        assets(place)
    info = assets(f"{place}@resid_mid:mlp_out").infos["clt@1"]
    assert (info.site_in, info.writes) == ("resid_mid.1", ("mlp_out.1", "mlp_out.2"))


WRONG = across.wrong()


@pytest.mark.parametrize(("write", "words"), [one[1:] for one in WRONG], ids=[one[0] for one in WRONG])
def test_faulty_files_are_refused(write: Callable[[Path], Path], words: str, tmp_path: Path) -> None:
    with pytest.raises(LoadError) as caught:
        assets(write(tmp_path))
    assert words in str(caught.value)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("name", ["W_enc_0.safetensors", "W_dec_0.safetensors"])
def test_a_file_that_changes_gives_no_more_rows(name: str, tmp_path: Path) -> None:
    place = across.circuit_tracer(tmp_path, across.layers())
    file = open_rows(place / "W_enc_0.safetensors")
    file.later(3, None)
    (place / name).write_bytes((place / name).read_bytes())
    for read in (lambda: file.row(3, None), lambda: file.later(3, None), file.check):
        with pytest.raises(LoadError, match=rf"{name}: has changed since the server opened it"):
            read()
    (place / name).unlink()
    with pytest.raises(LoadError, match=rf"{name}: cannot be read any more"):
        file.check()


def test_a_store_has_a_row_for_each_layer_and_reads_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = across.layers()
    store = assets(across.circuit_tracer(tmp_path, found)).rows
    first = store.row("clt@0", 5, torch.float32)
    monkeypatch.setattr(os, "pread", None)  # all are known
    for to in range(LAYERS):
        row = store.row("clt@0", 5, torch.float32, to)
        assert np.array_equal(row.rows, np.stack([found[0].w_enc[:, 5], found[0].w_dec[to][5]]))
        assert (row.bias, row.threshold) == (found[0].b_enc[5], found[0].threshold[5])
        assert (row is first) == (to == 0) == (row.digest == first.digest)
