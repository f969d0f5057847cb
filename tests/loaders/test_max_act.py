"""What calibrate saves beside a dictionary: found for every format, only for the weights it was measured on."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from saesteer.config.assets import Assets
from saesteer.config.config import SaesteerConfig
from saesteer.dictionaries.coder import CoderInfo, SparseCoder
from saesteer.errors import LoadError
from saesteer.loaders import alone, describe, load, max_act
from saesteer.loaders.files import fetch
from saesteer.loaders.formats import own
from saesteer.loaders.rows import open_rows
from saesteer.workbench.inspect import report
from tests.loaders import writers
from tests.loaders.case import Case
from tests.loaders.every import every_format


def values(features: int) -> torch.Tensor:
    return torch.arange(features).float() / 2


@every_format
def test_every_format_has_it_afterwards(case: Case, tmp_path: Path) -> None:
    place = case.write(tmp_path)
    before, coder = describe(place), load(place)
    path = fetch(place)
    max_act.write(path, alone(path), values(coder.info.features), tokens=1000)
    after = describe(place)
    assert after.max_act_from == max_act.CALIBRATION
    assert after.has_max_act
    assert after.fingerprint != before.fingerprint
    for dtype in (None, torch.bfloat16):
        found = load(place, dtype=dtype)
        assert found.max_act is not None and torch.equal(found.max_act, values(coder.info.features))
        assert found.info.fingerprint == after.fingerprint
    assert "max_act       known" in report(place)
    # Those of labels count only where the file has none of its own.
    max_act.write(path, alone(path), values(coder.info.features), tokens=None, by=max_act.LABELS)
    if before.has_max_act:
        assert describe(place) == before
        assert torch.equal(load(place).max_act, coder.max_act)  # type: ignore[arg-type]
    else:
        assert describe(place).max_act_from == load(place).info.max_act_from == max_act.LABELS


def test_rows_have_the_values_that_count(tmp_path: Path) -> None:
    """The file has values of its own."""
    measured = values(3)
    coder = SparseCoder(
        *(torch.ones(3, 4), torch.zeros(3), torch.ones(3, 4), torch.zeros(4)),
        CoderInfo("saesteer", 4, 4, 3, "relu", site_in="resid_post.1", site_out="resid_post.1", has_max_act=True),
        max_act=torch.full((3,), 9.0),
    )
    own.write(tmp_path / "d.safetensors", coder)
    for by, expected in ((None, 9.0), (max_act.LABELS, 9.0), (max_act.CALIBRATION, 1.0)):
        if by is not None:
            max_act.write(tmp_path / "d.safetensors", alone(tmp_path / "d.safetensors"), measured, tokens=None, by=by)
        file = open_rows(tmp_path / "d.safetensors")
        row = file.row(2, None)
        assert row.max_act is not None and row.max_act.item() == expected
        assert file.feature(2, torch.float32)[0].max_act == expected
        assert file.info.max_act_from == (max_act.CALIBRATION if expected == 1.0 else "file")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return writers.gemma_scope(tmp_path / "sae", writers.raw())


def test_other_weights_do_not_get_the_values(place: Path) -> None:
    max_act.write(place, alone(place), values(writers.F), tokens=1)
    writers.gemma_scope(place, writers.raw(seed=9))
    with pytest.raises(LoadError, match="measured on other weights; expected one made for this dictionary"):
        load(place)
    writers.gemma_scope(place, writers.raw(features=writers.F + 1))
    for read in (load, describe):
        with pytest.raises(LoadError, match=r"max_act: 40 values for 41 features.*calibrate"):
            read(place)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("key", ["W_enc", "b_enc", "W_dec"])
def test_weights_that_were_trained_further_do_not_get_them(key: str, save: Callable[..., None], place: Path) -> None:
    """Equal thresholds and b_dec, so only the rest tells."""
    arrays = writers.raw()
    save(place / "params.npz", **arrays)
    max_act.write(place, alone(place), values(writers.F), tokens=1)
    assert load(place).max_act is not None
    save(place / "params.npz", **{**arrays, key: arrays[key] * np.float32(1.25)})
    with pytest.raises(LoadError, match=r"weights: measured on other weights.*run `saesteer calibrate` again"):
        load(place)
    if save is np.savez:
        with pytest.raises(LoadError, match="measured on other weights"):
            open_rows(place).row(7, None)


def test_values_of_another_site_do_not_count(tmp_path: Path) -> None:
    """An operator who named a wrong site, calibrated there, and now names the right one."""
    place = writers.gemma_scope(tmp_path / "copied", writers.raw())
    max_act.write(place, alone(place), values(writers.F), tokens=1, site="resid_pre.13")
    for site, counts in (("resid_post.12", True), ("resid_pre.13", True), (None, True), ("resid_post.20", False)):
        coder = load(place, site=site)
        assert (coder.max_act is not None) == coder.info.has_max_act == counts
        assert describe(place, site=site).has_max_act == open_rows(place, site=site).info.has_max_act == counts
    config = {"dictionaries": {"gs": f"{place}@resid_post.20"}}
    info = Assets.open(SaesteerConfig.from_json(config)).infos["gs"]
    assert not info.has_max_act and load(info.source, site=info.site_in).max_act is None


ONES = torch.ones(writers.F)
GAPS = r"saesteer\.max_act: max_act_gaps: .*; expected pairs of whole numbers"
WRONG: list[tuple[dict[str, torch.Tensor], dict[str, str], str]] = [
    ({"other": ONES}, {}, "max_act: missing"),
    ({"max_act": ONES, "more": torch.ones(1)}, {}, "more: an unknown key"),
    ({"max_act": -ONES}, {}, "measured on other weights"),
    ({"max_act": torch.ones(2, writers.F)}, {}, r"shape \[2, 40\]"),
    ({"max_act": ONES}, {"by": "nobody"}, "by: 'nobody'; expected calibration or labels"),
    *(({"max_act": ONES}, {max_act.GAPS: gaps}, GAPS) for gaps in ("x", "[1]", "[2, 1]", "[1.5, 2]", "[-1, 3]", "{}")),
]


def test_wrong_files(place: Path) -> None:
    for tensors, about, words in WRONG:
        save_file(tensors, place / "saesteer.max_act", about)
        with pytest.raises(LoadError, match=words):
            load(place)
    for value in (-1.0, np.nan, np.inf):
        wrong = values(writers.F)
        wrong[3] = value
        max_act.write(place, alone(place), wrong, tokens=1)
        with pytest.raises(LoadError, match=f"holds {value}"):
            load(place)
    (place / "saesteer.max_act").write_bytes(b"x")
    with pytest.raises(LoadError, match=r"saesteer\.max_act"):
        describe(place)
