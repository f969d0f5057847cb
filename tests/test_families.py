"""Model families: the classes exist in both libraries, resid_mid is what it should be, all others are refused."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from saesteer import hf
from saesteer.errors import ConfigError, SpecError, UnsupportedError
from saesteer.language.sites import SUMS
from saesteer.loaders.formats import own
from saesteer.models.families import FAMILIES, SERVED_KINDS, Family, Library, find_trunk
from tests import tiny
from tests.plugin.conftest import random_coder

IDS = [3, 1, 4, 1, 5, 9, 2, 6]
# In Cohere 2 and Phi attention and the MLP read the same; the others are like Llama's today, but nobody has looked
# whether they stay so.
UNKNOWN = ["Cohere2", "StableLm", "Starcoder2", "Phi", "OPT"]


def unknown(name: str) -> Any:
    """A random model that is not served."""
    import transformers

    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
    sizes |= {"num_key_value_heads": 1, "intermediate_size": 48, "max_position_embeddings": 64, "pad_token_id": 0}
    if name == "OPT":
        sizes |= {"ffn_dim": 48, "word_embed_proj_dim": 32}
    return getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**sizes)).eval()


each_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
each_row = pytest.mark.parametrize("row", tiny.ROWS)
each_row_with_resid_mid = pytest.mark.parametrize(
    "row", [row for row in tiny.ROWS if "resid_mid" in tiny.family_of(row).sites]
)


def attention_part(row: str, block: Any) -> Any:
    """The module whose output attention adds to the stream: in some families a norm, else attention itself."""
    if row.startswith(("Gemma 2", "Gemma 3", "Gemma 4", "OLMo 2", "OLMo 3")):
        return block.post_attention_layernorm
    if row == "GLM-4":
        return block.post_self_attn_layernorm
    return next(getattr(block, name) for name in ("self_attn", "linear_attn", "attn") if hasattr(block, name))


def multiplied(model: Any) -> float:
    """What the parts of layers are multiplied by before they are added to the stream, in Granite."""
    return float(getattr(model.config, "residual_multiplier", 1.0))


def first(out: Any) -> Tensor:
    return out[0] if isinstance(out, tuple) else out


@each_row
def test_the_layers_of_each_family_are_found(row: str) -> None:
    model, family = tiny.made(row), tiny.family_of(row)
    trunk, found = find_trunk(model, "transformers")
    assert (trunk, found) == (model.get_decoder(), family)
    layers, norm = getattr(trunk, family.layers), getattr(trunk, family.norm)
    assert len(layers) == tiny.LAYERS
    for kind in family.sites:
        # vLLM's layers' modules have the same names, but for GPT-OSS's attention.
        library: Library = "transformers" if (row, kind) == ("GPT-OSS", "z") else "vllm"
        module, side = family.find(trunk, library, kind, 0)
        assert isinstance(module, nn.Module) and side == family.sites[kind].vllm.side
    entry = family.sites["resid_pre"].vllm.module
    assert family.find(trunk, "vllm", "resid_pre", 0) == (getattr(layers[0], entry), "in")
    assert family.find(trunk, "vllm", "resid_post", 0)[0] is getattr(layers[1], entry)
    last = family.find(trunk, "vllm", "resid_post", tiny.LAYERS - 1)
    assert last == (norm, "out" if family.fused else "in")
    assert family.find(trunk, "transformers", "resid_pre", 0) == (layers[0], "in")
    late = row == "Qwen3-VL"  # whose layers are followed by an addition
    assert family.find(trunk, "transformers", "resid_post", 2) == ((norm, "in") if late else (layers[2], "out"))
    if "resid_mid" in family.sites:
        name = family.sites["resid_mid"].transformers.module
        assert family.find(trunk, "transformers", "resid_mid", 1) == (getattr(layers[1], name), "in")


def test_each_family_has_each_site_but_where_attention_and_the_mlp_read_the_same() -> None:
    parallel = next(family for family in FAMILIES if family.name == "GPT-NeoX")
    assert tuple(parallel.sites) == ("resid_pre", "z", "resid_post")
    stream, others = {"resid_pre", "resid_mid", "resid_post"}, {"Qwen3-Next", "Qwen3.5", "DeepSeek-V2", "DeepSeek-V3"}
    parts = {"Llama", "Mistral", "Phi-3", "Qwen2", "Qwen2-VL", "Qwen3", "Gemma", "Gemma 2", "Gemma 3", "GLM-4"}
    parts |= {"Apertus", "Granite", "SmolLM3", "OLMo"}
    some = {"Gemma 4": {"z"}}
    for family in FAMILIES:
        if family.name in parts | some.keys():
            assert family.sites.keys() == set(SERVED_KINDS) - some.get(family.name, set())
        elif family is not parallel:
            assert family.sites.keys() == (stream if family.name in others else stream | {"z"})
    told = r"GPT-NeoX layers have no resid_mid\.1; served: resid_pre, z, resid_post$"
    with pytest.raises(UnsupportedError, match=told):
        hf.Model(tiny.made("GPT-NeoX"), sites=["resid_mid.1"])


@each_row
def test_resid_mid_is_the_stream_behind_attention(row: str) -> None:
    model, family = tiny.made(row), tiny.family_of(row)
    seen: dict[str, Tensor] = {}

    def watch(name: str, module: Any) -> None:
        module.register_forward_hook(lambda _m, _i, out: seen.__setitem__(name, first(out)[0].clone()))

    between = "resid_mid" in family.sites
    for layer, block in enumerate(getattr(model.get_decoder(), family.layers)):
        if between:
            watch(f"attention {layer}", attention_part(row, block))
        watch(f"block {layer}", block)
    kinds = ("resid_mid", "resid_post") if between else ("resid_post",)
    wanted = [f"{kind}.{layer}" for kind in kinds for layer in range(tiny.LAYERS)]
    steered = hf.Model(model, sites=["resid_pre.0", *wanted])
    streams = steered.streams(IDS)
    for layer in range(tiny.LAYERS):
        torch.testing.assert_close(streams[f"resid_post.{layer}"], seen[f"block {layer}"])
        if between:
            before = streams["resid_pre.0" if layer == 0 else f"resid_post.{layer - 1}"]
            expected = before + seen[f"attention {layer}"] * multiplied(model)
            torch.testing.assert_close(streams[f"resid_mid.{layer}"], expected)
            assert (expected - before).norm() > 0.01 * before.norm(), "attention adds too little to tell"


@each_row_with_resid_mid
def test_an_edit_at_resid_mid_is_read_by_all_that_comes_behind_it(row: str) -> None:
    """It is as if attention had added the vector: the MLP reads it, and the stream carries it on."""
    plain, steered = tiny.made(row), hf.Model(tiny.made(row), sites=["resid_mid.1"])
    push = torch.randn(tiny.WIDTH, generator=torch.Generator().manual_seed(2))

    def pushed(_module: Any, _inputs: Any, out: Any) -> Any:
        added = first(out).clone()
        added[:, 1:] += push / multiplied(plain)  # position 0 is left alone
        return (added, *out[1:]) if isinstance(out, tuple) else added

    tokens = torch.tensor([IDS])
    with torch.no_grad():
        before = plain(tokens).logits[0]
        block = getattr(plain.get_decoder(), tiny.family_of(row).layers)[1]
        attention_part(row, block).register_forward_hook(pushed)
        expected = plain(tokens).logits[0]
    edit = {"edits": [{"op": "add", "vector": push.tolist(), "site": "resid_mid.1", "scale": 1.0}]}
    torch.testing.assert_close(steered.logits(IDS, steer=edit), expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(steered.logits(IDS), before, atol=1e-5, rtol=1e-4)
    assert (expected - before)[1:].abs().max() > 1e-3


@pytest.mark.parametrize("kind", SUMS)
@pytest.mark.parametrize("row", [row for row in tiny.ROWS if "attn_out" in tiny.family_of(row).sites])
def test_what_is_added_at_a_part_is_added_at_its_sum_or_refused(row: str, kind: str) -> None:
    """Where the sum holds the part as it is, its op makes the edit; elsewhere nothing but an op at the part does."""
    push = torch.randn(tiny.WIDTH, generator=torch.Generator().manual_seed(2)).tolist()
    edit = {"op": "add", "vector": push, "site": f"{kind}.1"}
    part, sum_ = (hf.Model(tiny.made(row), sites=[f"{site}.1"]) for site in (kind, SUMS[kind]))
    expected = part.logits(IDS, steer=edit)
    assert (expected - part.logits(IDS)).abs().max() > 1e-3
    if row == "Granite" or (row.startswith("Gemma 4") and kind == "mlp_out"):
        with pytest.raises(SpecError, match=rf"edits\[0\]\.site: got {kind}\.1, where this server has no op"):
            sum_.logits(IDS, steer=edit)
    else:
        torch.testing.assert_close(sum_.logits(IDS, steer=edit), expected, atol=1e-4, rtol=1e-4)


def test_a_dictionary_whose_output_no_sum_holds_needs_its_own_op(tmp_path: Path) -> None:
    """A transcoder of Gemma 4: what is added at resid_post is neither read by the embedding nor multiplied."""
    own.write(tmp_path / "tc.safetensors", random_coder("relu", 3, width=tiny.WIDTH))
    dictionaries = {"tc": f"{tmp_path}/tc.safetensors@mlp_in.1:mlp_out.1"}
    told = r"dictionary 'tc' writes mlp_out\.1, and in this model .*; add --sites mlp_out\.1$"
    with pytest.raises(ConfigError, match=told):
        hf.Model(tiny.made("Gemma 4"), dictionaries=dictionaries)
    model = hf.Model(tiny.made("Gemma 4"), dictionaries=dictionaries, sites=["mlp_out.1"])
    edit = {"op": "clamp", "dictionary": "tc", "feature": 3, "value": 4.0}
    assert (model.logits(IDS, steer=edit) - model.logits(IDS)).abs().max() > 1e-3
    hf.Model(tiny.made("Llama"), dictionaries=dictionaries)


@pytest.mark.parametrize("name", UNKNOWN)
@pytest.mark.parametrize("sites", [["resid_mid.1"], []], ids=["mid", "none"])
def test_other_families_are_refused_by_name(name: str, sites: list[str]) -> None:
    with pytest.raises(UnsupportedError) as caught:
        hf.Model(unknown(name), sites=sites)
    told = str(caught.value)
    assert f"model {name}ForCausalLM with layers of the class {name}DecoderLayer is not served" in told
    assert all(family.transformers in told for family in FAMILIES)
    assert "\n" not in told


class Layer(nn.Module):
    """Stands for a decoder layer of vLLM, of which the name is what counts here."""


def vllm_model(*classes: str, layers: str = "layers", norm: str = "norm") -> Any:
    model = nn.Module()
    setattr(model, norm, nn.Identity())
    setattr(model, layers, nn.ModuleList([type(name, (Layer,), {})() for name in classes]))
    return model


@each_family
def test_vllm_s_layers_are_found(family: Family) -> None:
    model = vllm_model(family.vllm, family.vllm, layers=family.layers, norm=family.norm)
    trunk, found = find_trunk(model, "vllm")
    assert trunk is model
    # Families may share vLLM's class; then all that is read of either is the same.
    assert (found.vllm, found.layers, found.norm, found.fused) == (
        family.vllm,
        family.layers,
        family.norm,
        family.fused,
    )
    assert {k: taps.vllm for k, taps in found.sites.items()} == {k: taps.vllm for k, taps in family.sites.items()}


@pytest.mark.parametrize(
    "classes", [("StablelmDecoderLayer",), ("LlamaDecoderLayer", "StablelmDecoderLayer")], ids=["other", "mixed"]
)
def test_vllm_s_other_layers_are_refused_by_name(classes: tuple[str, ...]) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from saesteer.plugin.worker import layers

    engine: Any = None  # it is not asked for anything
    attach: Callable[[Any, Any], None] = layers.attach
    with pytest.raises(UnsupportedError, match=rf"with layers of the class {', '.join(classes)} is not served") as told:
        attach(vllm_model(*classes), engine)
    assert all(family.vllm in str(told.value) for family in FAMILIES)


def test_all_that_the_op_reads_is_a_buffer_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's sleep mode, at level 2, saves the buffers of the model and drops all else that was loaded with it."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from saesteer.plugin.worker import layers

    class Norm(nn.Module):
        """Stands for vLLM's RMSNorm, which is made in an engine alone."""

        variance_epsilon = 1e-6

    monkeypatch.setattr(layers, "RMSNorm", Norm)
    engine = hf.Model(tiny.made("Llama"), sites=["resid_mid.0", "resid_post.0", "resid_post.1"]).engine
    model = vllm_model("LlamaDecoderLayer", "LlamaDecoderLayer")
    model.norm = Norm()
    for layer in model.layers:
        layer.input_layernorm, layer.post_attention_layernorm = Norm(), Norm()
    layers.attach(model, engine)
    kept = {buffer.data_ptr() for buffer in model.buffers()}
    of_sites = [getattr(site, field.name) for site in engine.sites.values() for field in fields(site)]
    tensors = [one for one in [*of_sites, *vars(engine).values()] if isinstance(one, torch.Tensor) and one.numel()]
    missing = {one.data_ptr() for one in tensors} - kept
    assert missing <= {engine._nobody.data_ptr(), engine._numbers.data_ptr()}, "which hold numbers of a batch alone"


@pytest.mark.parametrize(
    ("layer", "flag", "family"),
    [
        ("Qwen3NextDecoderLayer", "use_attn_reduce_scatter_for_moe", "Qwen3-Next"),
        ("DeepseekV2DecoderLayer", "use_sequence_parallel_moe", "DeepSeek-V2"),
    ],
)
def test_layers_that_share_out_the_tokens_of_the_stream_are_refused(layer: str, flag: str, family: str) -> None:
    """As they may with experts on several ranks: the op's tokens are those of a whole batch."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from saesteer.plugin.worker import layers

    engine: Any = None
    model = vllm_model(layer)
    setattr(model.layers[0], flag, True)
    with pytest.raises(UnsupportedError, match=f"cannot serve {family} with sequence-parallel experts"):
        layers.attach(model, engine)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_stream_that_vllm_divides_is_refused(dtype: torch.dtype) -> None:
    """In float16, DeepSeek's layers divide it by the factor of their experts."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from saesteer.plugin.worker import layers

    engine: Any = SimpleNamespace(dtype=dtype, sites={})  # stands for an engine without sites
    refused = pytest.raises(UnsupportedError, match="cannot serve DeepSeek-V2 with a stream that is divided")
    with refused if dtype is torch.float16 else nullcontext():
        layers.attach(vllm_model("DeepseekV2DecoderLayer"), engine)


def test_transformers_layers_in_vllm_are_refused_where_the_row_is_for_vllm_s_own() -> None:
    """They have the same name, and a stream of one tensor."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from saesteer.plugin.worker import layers

    engine: Any = None
    with pytest.raises(UnsupportedError, match=r"cannot serve Llama with Transformers' layers \(--model-impl"):
        layers.attach(tiny.made("Llama"), engine)
