"""Decoder rows out of files, of dictionaries whose features are ranked as well, and TransformerLens' names of sites."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from saesteer.config.decoders import Decoders, hook_of_site, nearest, site_of_hook
from saesteer.errors import LoadError
from saesteer.loaders import alone, describe, load, max_act
from saesteer.loaders.formats import own
from tests.plugin.conftest import random_coder


@pytest.mark.parametrize("activation", ["jumprelu", "topk"])
def test_rows_and_neighbours(activation: Any, tmp_path: Path) -> None:
    file = tmp_path / "d.safetensors"
    own.write(file, random_coder(activation, 3))
    info, rows = describe(file), load(file).w_dec.float().numpy()
    decoders = Decoders()
    assert (decoders.alone(info, [5, 3]) is None) == (activation == "topk"), "whose features need the others"
    for ask, features in ((decoders.whole, [5, 3, 5]), (decoders.alone, [3, 5])):
        found = ask(info, features)
        assert found is not None
        np.testing.assert_array_equal(found, rows[features])
        assert all(row.base is None for row in found), "a view would keep the matrix"
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    wanted = np.argsort(-(unit @ unit[5]), kind="stable")[:6].tolist()
    near = nearest(info, 3 * rows[5], 6)
    assert [feature for feature, _ in near] == wanted
    assert near[0][1] == pytest.approx(1.0, abs=1e-5)
    assert [cosine for _, cosine in nearest(info, 0 * rows[5], 2)] == [0.0, 0.0]
    file.unlink()
    with pytest.raises(LoadError):
        decoders.whole(info, [6])


@pytest.mark.parametrize("features", [96, 12])
@pytest.mark.parametrize("activation", ["jumprelu", "topk"])
def test_rows_of_other_files_than_were_loaded_are_refused(activation: Any, features: int, tmp_path: Path) -> None:
    file = tmp_path / "d.safetensors"
    own.write(file, random_coder(activation, 3))
    info, decoders = describe(file), Decoders()
    [kept] = decoders.whole(info, [5])
    own.write(file, random_coder(activation, 4, features))
    assert decoders.whole(info, [5])[0] is kept
    asks: list[Callable[[], Any]] = [lambda: decoders.whole(info, [60]), lambda: nearest(info, kept, 3)]
    if activation == "jumprelu":
        asks.append(lambda: decoders.alone(info, [5, 60]))
    for ask in asks:
        with pytest.raises(LoadError, match="has changed since the server opened it"):
            ask()


def test_max_act_that_came_since_changes_no_row(tmp_path: Path) -> None:
    file = tmp_path / "d.safetensors"
    coder = random_coder("jumprelu", 3)
    own.write(file, replace(coder, max_act=None, info=replace(coder.info, has_max_act=False)))
    before = describe(file)
    max_act.write(file, alone(file), torch.ones(coder.info.features), tokens=None)
    assert describe(file).fingerprint != before.fingerprint
    assert Decoders().alone(before, [5]) is not None


def test_hooks_and_sites() -> None:
    for hook, site in [
        ("blocks.20.hook_resid_post", "resid_post.20"),
        ("blocks.3.hook_resid_pre", "resid_pre.3"),
        ("blocks.3.attn.hook_z", "z.3"),
        ("blocks.12.hook_mlp_out", "mlp_out.12"),
    ]:
        assert (site_of_hook(hook), hook_of_site(site)) == (site, hook)
    assert hook_of_site("") is hook_of_site("nothing.3") is hook_of_site("resid_post") is None
