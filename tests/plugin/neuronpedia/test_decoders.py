"""Decoder rows out of files, of dictionaries whose features are ranked as well, and TransformerLens' names of sites."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from saesteer.config.decoders import decoder_row, hook_of_site, nearest, site_of_hook
from saesteer.errors import LoadError
from saesteer.loaders import describe, load
from saesteer.loaders.formats import own
from tests.plugin.conftest import random_coder


@pytest.mark.parametrize("activation", ["jumprelu", "topk"])
def test_rows_and_neighbours(activation: Any, tmp_path: Path) -> None:
    file = tmp_path / "d.safetensors"
    own.write(file, random_coder(activation, 3))
    info, rows = describe(file), load(file).w_dec.float().numpy()
    np.testing.assert_array_equal(decoder_row(info, 5), rows[5])
    assert decoder_row(info, 5).base is None, "a view would keep the matrix"
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    wanted = np.argsort(-(unit @ unit[5]), kind="stable")[:6].tolist()
    found = nearest(info, 3 * rows[5], 6)
    assert [feature for feature, _ in found] == wanted
    assert found[0][1] == pytest.approx(1.0, abs=1e-5)
    assert [cosine for _, cosine in nearest(info, 0 * rows[5], 2)] == [0.0, 0.0]
    file.unlink()
    with pytest.raises(LoadError):
        decoder_row(info, 6)


def test_hooks_and_sites() -> None:
    for hook, site in [
        ("blocks.20.hook_resid_post", "resid_post.20"),
        ("blocks.3.hook_resid_pre", "resid_pre.3"),
        ("blocks.3.attn.hook_z", "z.3"),
        ("blocks.12.hook_mlp_out", "mlp_out.12"),
    ]:
        assert (site_of_hook(hook), hook_of_site(site)) == (site, hook)
    assert hook_of_site("") is hook_of_site("nothing.3") is hook_of_site("resid_post") is None
