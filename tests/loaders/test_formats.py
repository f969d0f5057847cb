"""Every format, architecture and generation of config against its formula written out in numpy, in float64.

The formulas know no loader and no torch; each case is a row of its format's module in ``formats``.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from saesteer.config.assets import Assets
from saesteer.config.config import SaesteerConfig
from saesteer.errors import LoadError
from saesteer.loaders import arrays, describe, load
from saesteer.workbench.inspect import report
from tests.loaders import writers
from tests.loaders.case import Array, Case, Told
from tests.loaders.every import DESCRIBED, MODULES, every_case
from tests.loaders.formats import apollo

X = writers.tokens()


def close(ours: torch.Tensor, truth: Array, x: NDArray[np.float32]) -> None:
    """Within 1e-5 of each token's own size."""
    size = 1 + np.abs(x).max(-1, keepdims=True)
    assert ours.dtype == torch.float32
    assert ours.shape == truth.shape
    np.testing.assert_array_less(np.abs(ours.numpy() - truth) / size, 2e-5)


@every_case
def test_a_file_means_its_formula_and_its_facts(case: Case, tmp_path: Path) -> None:
    place = str(case.write(tmp_path))
    coder, x = load(place), X.astype(float)
    f = case.encode(x)
    assert (f == 0).any() and (f != 0).any()
    ours = coder.encode(torch.from_numpy(X))
    close(ours, f, X)
    assert np.array_equal(ours.numpy() == 0, f == 0)
    close(coder.decode(ours, like=torch.from_numpy(X)), case.decode(f, x), X)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrays.Arrays, "_blocks", None)  # headers are enough
        info = describe(place)
        assert report(place)
    assert info == coder.info and info.source == place
    assert {name: getattr(info, name) for name in case.facts} == case.facts
    assert type(info).from_json(info.to_json()) == info
    for dtype in (torch.bfloat16, torch.float16):
        narrow = load(place, dtype=dtype)
        assert coder.w_enc.dtype == coder.w_dec.dtype == torch.float32
        assert torch.equal(narrow.w_enc, coder.w_enc.to(dtype)) and torch.equal(narrow.w_dec, coder.w_dec.to(dtype))
        for name in ("b_dec", "threshold", "max_act"):
            one, other = getattr(narrow, name), getattr(coder, name)
            assert (one is None and other is None) or torch.equal(one, other)


def test_every_format_has_cases() -> None:
    for name, module in MODULES.items():
        assert module.cases()
        assert all(case.name.startswith(f"{name}-") for case in module.cases())
        assert all(row[0].startswith(f"{name}-") for row in module.wrong())


@pytest.mark.parametrize("told", DESCRIBED, ids=lambda told: told[0])
def test_a_skip_transcoder_adds_its_input(told: Told, tmp_path: Path) -> None:
    place, expected = str(told[1](tmp_path)), dict(told[2])
    w_skip = expected.pop("w_skip")
    info = describe(place)
    assert (info.skip, info.kind) == (True, "skip transcoder")
    assert {name: getattr(info, name) for name in expected} == expected
    coder = load(place, dtype=torch.float32)
    assert coder.w_skip is not None
    np.testing.assert_array_equal(coder.w_skip.numpy(), w_skip)
    x = torch.randn(5, info.d_in, generator=torch.Generator().manual_seed(1))
    f = coder.encode(x)
    plain = f.double().numpy() @ coder.w_dec.double().numpy() + coder.b_dec.double().numpy()
    np.testing.assert_allclose(coder.decode(f, x).numpy(), plain + x.double().numpy() @ w_skip.T, atol=1e-4)


def test_one_of_several_dictionaries_of_a_file_is_chosen_by_its_site(tmp_path: Path) -> None:
    place = apollo.write(tmp_path, apollo.TWO)
    first, second = (load(place, site=f"resid_pre.{layer}") for layer in (5, 6))
    alone = load(apollo.write(tmp_path / "alone", apollo.ARRAYS))
    assert torch.equal(first.w_dec, alone.w_dec)
    torch.testing.assert_close(second.b_enc, first.b_enc + 1)
    assert describe(place, site="resid_pre.6") == second.info
    assert "site          resid_pre.6\n" in report(f"{place}@resid_pre.6")
    config = SaesteerConfig.from_json({"dictionaries": {"d": f"{place}@resid_pre.6"}})
    assert Assets.open(config).infos["d"].site_in == "resid_pre.6"
    with pytest.raises(LoadError, match=r"100\.pt: no dictionary of resid_post\.6; expected one of .*pt@resid_pre\.5"):
        load(place, site="resid_post.6")
