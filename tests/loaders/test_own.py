"""saesteer's own file: what is written is what is read, bit for bit, and the same dictionary gives the same bytes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

import saesteer
from saesteer.demo import DEMO_TRANSCODER
from saesteer.dictionaries.coder import CoderInfo, SparseCoder
from saesteer.errors import LoadError
from saesteer.loaders import describe, load
from saesteer.loaders.formats import own
from tests.loaders import writers

EMBEDDED = Path(saesteer.__file__).parent / "data" / "smollm2-135m-l15-9216.safetensors"
TENSORS = ("w_enc", "w_dec", "b_enc", "b_dec", "threshold", "max_act")
SITES = [None, "resid_post.15", "mlp_in_pregain.3", "embed"]


@st.composite
def coders(draw: st.DrawFn) -> SparseCoder:
    features, d_in, d_out = (draw(st.integers(1, 9)) for _ in range(3))
    activation: Any = draw(st.sampled_from(["relu", "jumprelu", "topk"]))
    norm: Any = draw(st.sampled_from(["none", "layer_norm", "l2_sqrt_d"])) if d_in == d_out else "none"
    ids = (
        st.none()
        if activation == "topk"
        else st.none() | st.permutations(range(20)).map(lambda all: tuple(all[:features]))
    )
    has_max_act = draw(st.booleans())
    info = CoderInfo(
        format="saesteer",
        d_in=d_in,
        d_out=d_out,
        features=features,
        activation=activation,
        k=draw(st.integers(1, features)) if activation == "topk" else None,
        in_norm=norm,
        site_in=draw(st.sampled_from(SITES)),
        site_out=draw(st.sampled_from(SITES)),
        feature_unit=draw(st.sampled_from(["raw", "normalised"])),
        has_max_act=has_max_act,
        skip_first=draw(st.integers(0, 3)),
        exclude_special_tokens=draw(st.booleans()),
        feature_ids=draw(ids),
        can_reconstruct=draw(st.booleans()),
        model=draw(st.none() | st.text(min_size=1, max_size=5)),
        centred=norm == "none" and draw(st.booleans()),
        l0=draw(st.none() | st.floats(0, allow_infinity=False)),
        max_act_gaps=draw(st.sampled_from([(), (0, 1), (1, 3, 5, 8)])) if has_max_act else (),
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    threshold = random(1).repeat(features) if draw(st.booleans()) else random(features)
    return SparseCoder(
        w_enc=random(features, d_in).to(dtype),
        b_enc=random(features),
        w_dec=random(features, d_out).to(dtype),
        b_dec=random(d_out),
        info=info,
        threshold=threshold if activation == "jumprelu" else None,
        max_act=random(features).abs() if has_max_act else None,
    )


def same(one: SparseCoder, other: SparseCoder) -> None:
    for name in TENSORS:
        ours, theirs = getattr(one, name), getattr(other, name)
        assert (ours is None) == (theirs is None), name
        assert ours is None or (ours.dtype == theirs.dtype and torch.equal(ours, theirs)), name


def meaning(info: CoderInfo) -> CoderInfo:
    """What a file carries: not where it lies."""
    return replace(info, format="", source="", fingerprint="", bytes_on_disk=0, stored_dtype="")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(coder=coders())
def test_round_trip(coder: SparseCoder, tmp_path: Path) -> None:
    first, second = tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    own.write(first, coder)
    again = load(first)
    same(coder, again)
    assert meaning(again.info) == meaning(coder.info)
    assert again.info == describe(first)
    own.write(second, again)
    assert first.read_bytes() == second.read_bytes()
    with safe_open(first, "pt") as opened:  # the official reader takes our bytes
        assert torch.equal(opened.get_tensor("W_enc"), coder.w_enc)
        assert opened.metadata()["format"] == "saesteer"


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = writers.own(tmp_path / "x.safetensors", writers.own_tensors(writers.raw()))
    before, coder = file.read_bytes(), load(file)

    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("saesteer.loaders.write._write", full)
    with pytest.raises(LoadError, match="no space left"):
        own.write(file, coder)
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]


def test_the_embedded_dictionary() -> None:
    coder = load(EMBEDDED)
    info = coder.info
    assert (info.site_in, info.site_out, info.feature_unit) == ("resid_post.15", "resid_post.15", "raw")
    assert (info.features, info.d_in, info.d_out, info.activation, info.has_max_act) == (
        9216,
        576,
        576,
        "jumprelu",
        True,
    )
    assert info.model == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert coder.w_enc.dtype == torch.bfloat16
    assert coder.threshold is not None
    assert (coder.threshold == coder.threshold[0]).all()
    # A feature is found again in its own decoder row, added to the mean.
    for feature in (3497, 6511, 7081, 546):
        f = coder.encode(coder.b_dec + 40 * coder.w_dec[feature].float())
        assert f.argmax() == feature


def test_the_embedded_transcoder() -> None:
    coder, info = load(DEMO_TRANSCODER), describe(DEMO_TRANSCODER)
    assert (info.kind, info.site_in, info.site_out) == ("skip transcoder", "mlp_in.12", "mlp_out.12")
    assert (info.features, info.d_in, info.d_out, info.activation) == (9216, 576, 576, "jumprelu")
    assert (info.has_max_act, info.stored_dtype, info.model) == (
        True,
        "bfloat16",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
    )
    assert coder.max_act is not None and coder.w_skip is not None
    with safe_open(DEMO_TRANSCODER, "pt") as opened:
        measured = json.loads(opened.metadata()["measured"])
    assert measured["dead"] == int((coder.max_act == 0).sum()) < 0.15 * 9216
    assert 30 < measured["l0"] < 36 and measured["fvu"] < 0.2
    assert (coder.w_dec.float().norm(dim=-1) - 1).abs().max() < 0.01
