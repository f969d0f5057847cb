"""Sites of another width than the stream: what fits where, what is refused, and Gemma Scope's attention SAEs at z."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from saesteer import hf
from saesteer.dictionaries.vectors import from_inline
from saesteer.errors import RegistryError, SpecError
from saesteer.language.inline import InlineVector
from saesteer.language.spec import from_json
from saesteer.models.families import other_widths
from saesteer.planning.plan import Catalog
from saesteer.planning.planner import plan
from saesteer.plugin.names.changes import check_put
from tests import tiny

IDS = [3, 1, 4, 1, 5, 9, 2, 6]
FEATURES = 20
WIDE = tiny.width_at("Gemma 2", "z.1")
NARROW = tiny.WIDTH
CATALOG = Catalog(
    {},
    frozenset({"z.1", "resid_post.1", "resid_post.2"}),
    64,
    vectors={
        "narrow": from_inline((1.0,) * 4),
        "wide": from_inline((1.0,) * 6),
        "narrow of 1": from_inline(InlineVector("float32", (1, 4), np.ones(4, "<f4").tobytes(), (1,))),
        "wide of 1": from_inline(InlineVector("float32", (1, 6), np.ones(6, "<f4").tobytes(), (1,))),
    },
    width=4,
    other_widths={"z": 6},
)


def test_the_width_of_z_is_that_of_all_heads() -> None:
    def of(**config: Any) -> Mapping[str, int]:
        return other_widths(SimpleNamespace(**config))

    assert of(hidden_size=2304, num_attention_heads=8, head_dim=256) == {"z": 2048}
    assert (
        of(hidden_size=768, num_attention_heads=12) == of(hidden_size=768, num_attention_heads=12, head_dim=None) == {}
    )
    assert of(hidden_size=64) == {}, "of no family that is served"


@pytest.mark.parametrize("row", [row for row in tiny.ROWS if "z" in tiny.family_of(row).sites])
def test_z_is_what_attention_s_projection_reads(row: str) -> None:
    """Its width is that of all heads, and a vector that is added there comes out of the projection's weights."""
    steered, plain = hf.Model(tiny.made(row), sites=["z.1"]), tiny.made(row)
    assert other_widths(plain.config.get_text_config()).get("z", tiny.WIDTH) == tiny.width_at(row, "z.1")

    def projection(model: Any) -> Any:
        family = tiny.family_of(row)
        layer = getattr(model.get_decoder(), family.layers)[1]
        return layer.get_submodule(family.sites["z"].transformers.module)

    seen: list[torch.Tensor] = []
    push = torch.randn(tiny.width_at(row, "z.1"), generator=torch.Generator().manual_seed(2))
    before = plain(torch.tensor([IDS])).logits[0].detach()

    def pushed(module: Any, inputs: Any, out: torch.Tensor) -> torch.Tensor:
        seen.append(inputs[0][0].clone())
        zeros = torch.zeros_like(push)
        added = out.clone()
        added[:, 1:] += module.forward(push[None])[0] - module.forward(zeros[None])[0]  # position 0 is left alone
        return added

    projection(plain).register_forward_hook(pushed)
    with torch.no_grad():
        expected = plain(torch.tensor([IDS])).logits[0]
    edit = {"edits": [{"op": "add", "vector": push.tolist(), "site": "z.1", "scale": 1.0}]}
    torch.testing.assert_close(steered.logits(IDS, steer=edit), expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(steered.logits(IDS), before, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(steered.stream(IDS, "z.1"), seen[0])
    assert (expected - before)[1:].abs().max() > 1e-3


ADD = {"op": "add", "scale": 1.0}
GATED = {**ADD, "vector": [1.0] * 6, "site": "z.1"}
NARROW_AT_Z = "is 4 wide, expected 6, the width of z.1 of this model"
WIDE_AT_STREAM = "is 6 wide, expected 4, the width of this model"
# The edit, and where it is wrong and what it is told.
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "a list": ({**ADD, "vector": [1.0] * 4, "site": "z.1"}, "vector", NARROW_AT_Z),
    "a list for both": ({**ADD, "vector": [1.0] * 6, "site": ["z.1", "resid_post.1"]}, "vector", WIDE_AT_STREAM),
    "bytes": (
        {**ADD, "vector": {"dtype": "float32", "shape": [4], "data": "AACAPwAAgD8AAIA/AACAPw=="}, "site": "z.1"},
        "vector.shape",
        NARROW_AT_Z,
    ),
    "a name": ({**ADD, "vector": "narrow", "site": "z.1"}, "vector", NARROW_AT_Z),
    "a probe": ({**GATED, "when": {"probe": "narrow", "above": 0}}, "when.probe", NARROW_AT_Z),
    "a probe of another layer": (
        {**ADD, "vector": "narrow", "site": "resid_post.2", "when": {"probe": "wide of 1", "above": 0}},
        "when.probe",
        WIDE_AT_STREAM,
    ),
    "a strength": ({**GATED, "scale": {"probe": "narrow"}}, "scale.probe", NARROW_AT_Z),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_vector_of_another_width_than_its_site_is_refused(name: str) -> None:
    edit, field, told = REFUSED[name]
    with pytest.raises(SpecError) as caught:
        plan(from_json({"edits": [edit]}), CATALOG, 9)
    assert (caught.value.field, caught.value.code) == (f"saesteer.edits[0].{field}", "conflict")
    assert told in str(caught.value)


def vector_of(*layers: int, width: int) -> InlineVector:
    data = np.ones(width * max(1, len(layers)), "<f4").tobytes()
    return InlineVector("float32", (len(layers), width) if layers else (width,), data, layers or None)


@pytest.mark.parametrize(
    ("vector", "sites", "error", "told"),
    [
        (vector_of(width=5), CATALOG.sites, SpecError, "is 5 wide, expected 4, .* of this model, or 6, that of its z"),
        (vector_of(width=6), {"resid_post.1"}, RegistryError, "no site of this.* 6 wide has an op.*--sites z.all"),
        (vector_of(width=4), {"z.1"}, RegistryError, "no site of this.* 4 wide has an op.*--sites resid_post.all"),
        (vector_of(width=6), (), RegistryError, "no site of this server has an op.*--sites z.all"),
        (vector_of(0, 1, width=6), CATALOG.sites, RegistryError, "op on this server: 0; start it with --sites z.0"),
        (vector_of(1, width=4), {"z.1", "resid_post.2"}, RegistryError, "start it with --sites resid_post.1"),
        (vector_of(width=6), CATALOG.sites, None, ""),
        (vector_of(1, width=6), CATALOG.sites, None, ""),
        (vector_of(1, width=4), CATALOG.sites, None, ""),
    ],
)
def test_a_name_that_is_registered_needs_a_site_of_its_width(
    vector: InlineVector, sites: Any, error: Any, told: str
) -> None:
    catalog = Catalog({}, frozenset(sites), 64, {"v": from_inline(vector)}, width=4, other_widths={"z": 6})
    if error is None:
        check_put(("vector", "v"), catalog, 3)
        return
    with pytest.raises(error, match=told):
        check_put(("vector", "v"), catalog, 3)


def gemma_scope(folder: Path) -> tuple[str, dict[str, torch.Tensor]]:
    """An attention SAE as Gemma Scope 1 has them: a path that names kind and layer, and one file of arrays."""
    draw = torch.Generator().manual_seed(4)
    arrays = {
        "W_enc": torch.randn(WIDE, FEATURES, generator=draw) / WIDE**0.5,
        "W_dec": torch.randn(FEATURES, WIDE, generator=draw) / WIDE**0.5,
        "b_enc": torch.randn(FEATURES, generator=draw) * 0.1,
        "b_dec": torch.randn(WIDE, generator=draw) * 0.1,
        "threshold": torch.rand(FEATURES, generator=draw) * 0.1,
    }
    place = folder / "gemma-scope-2b-pt-att" / "layer_1" / "width_16k" / "average_l0_104"
    place.mkdir(parents=True)
    np.savez(place / "params.npz", **{name: one.numpy() for name, one in arrays.items()})
    return str(place), arrays


@pytest.mark.parametrize("op", ["clamp", "reconstruct"])
def test_a_gemma_scope_attention_sae_stands_at_z(tmp_path: Path, op: str) -> None:
    place, arrays = gemma_scope(tmp_path)
    steered, plain = hf.Model(tiny.made("Gemma 2"), dictionaries={"att": place}), tiny.made("Gemma 2")
    assert list(steered.engine.sites) == ["z.1"] and steered.engine.sites["z.1"].width == WIDE != NARROW
    found: list[torch.Tensor] = []

    def edited(_module: Any, args: Any) -> Any:
        z = args[0].clone()
        pre = z[0] @ arrays["W_enc"] + arrays["b_enc"]
        f = torch.where(pre > arrays["threshold"], pre, 0.0)
        found.append(f)
        whole = f @ arrays["W_dec"] + arrays["b_dec"]
        changed = z[0] + (3.0 - f[:, 7:8]) * arrays["W_dec"][7] if op == "clamp" else whole
        z[0, 1:] = changed[1:]
        return (z, *args[1:])

    before = plain(torch.tensor([IDS])).logits[0].detach()
    plain.get_decoder().layers[1].self_attn.o_proj.register_forward_pre_hook(edited)
    with torch.no_grad():
        expected = plain(torch.tensor([IDS])).logits[0]
    edit = {"op": op, "dictionary": "att"} | ({"feature": 7, "value": 3.0} if op == "clamp" else {})
    torch.testing.assert_close(steered.logits(IDS, steer=edit), expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(steered.activations(IDS, "att"), found[0], atol=1e-5, rtol=1e-4)
    assert (expected - before)[1:].abs().max() > 1e-3
