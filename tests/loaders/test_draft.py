"""A new format is one class and one row of FORMATS; everything else comes with the builder."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from saesteer.errors import LoadError
from saesteer.loaders import FORMATS, describe, load
from saesteer.loaders.draft import Draft
from saesteer.loaders.opening import open_arrays
from saesteer.workbench.inspect import report
from tests.loaders import writers

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
