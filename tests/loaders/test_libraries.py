"""What a format's own library makes of the same file: of those whose library is light, where the extra is installed."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from saesteer.loaders import load
from tests.loaders import writers
from tests.loaders.case import Case
from tests.loaders.formats import sparsify

X = torch.from_numpy(writers.tokens()).reshape(-1, writers.D)


@pytest.fixture(scope="module")
def library() -> Any:
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARSIFY_DISABLE_TRITON", "1")  # it would take a GPU
        warnings.simplefilter("ignore")  # what it imports is not ours
        return pytest.importorskip("sparsify", reason="the extra saesteer[libraries] is not installed")


# The library of today knows no signed files.
@pytest.mark.parametrize(
    "case", [one for one in sparsify.cases() if "signed" not in one.name], ids=lambda one: one.name
)
def test_sparsify(case: Case, tmp_path: Path, library: Any) -> None:
    place = case.write(tmp_path)
    ours, theirs = load(str(place)), library.SparseCoder.load_from_disk(place)
    values, indices, _ = theirs.encode(X)
    f = torch.zeros(len(X), writers.F).scatter(1, indices, values).detach()
    size = 1 + X.abs().amax(1, keepdim=True)
    assert (f != 0).any()
    assert ((ours.encode(X) - f).abs() < 2e-5 * size).all()
    assert ((ours.decode(f) - theirs.decode(values, indices).detach()).abs() < 2e-5 * size).all()
