"""Corners of the loaders that a formula alone does not show: subsets, folds, blocks, memory order, names of hooks."""

from pathlib import Path

import numpy as np
import pytest
import torch

from saesteer.loaders import aliases, describe, load
from saesteer.loaders.formats import own
from tests.loaders import writers
from tests.loaders.every import CASES
from tests.loaders.formats import gemma_scope_2, llamascopium
from tests.loaders.writers import SEEN, D, F

X = writers.tokens()


def test_subset_rows_are_those_of_the_whole_dictionary(tmp_path: Path) -> None:
    r = writers.raw(seed=5)
    part = load(writers.manifest(tmp_path / "m", writers.manifest_tensors(r, SEEN), layers=((20, "post_block"),)))
    whole = load(writers.own(tmp_path / "w.safetensors", writers.own_tensors(r)))
    x = torch.from_numpy(X)
    assert [part.info.row_of(feature) for feature in SEEN] == [0, 1, 2]
    assert part.info.row_of(0) is part.info.row_of(F) is part.info.row_of(-1) is None
    torch.testing.assert_close(part.encode(x), whole.encode(x)[..., SEEN])


def test_the_other_site_of_a_manifest_is_another_dictionary(tmp_path: Path) -> None:
    tensors = writers.manifest_tensors(writers.raw(seed=5), SEEN)
    folder = writers.manifest(tmp_path, tensors, layers=((20, "post_block"), (4, "pre_attn")))
    first, second = (load(f"{folder}#layer_{name}") for name in ("20_post_block", "4_pre_attn"))
    assert second.info.site_in == "resid_pre.4"
    torch.testing.assert_close(second.b_enc, first.b_enc + 1)


def test_fold_uses_the_weights_as_they_will_be_used(tmp_path: Path) -> None:
    """A large b_dec and x near it: the fold of the unrounded matrix would be wrong by the rounding of |b_dec|."""
    r = writers.raw(seed=3)
    r["b_dec"] *= np.float32(100)
    arrays = {key: r[key] for key in ("W_enc", "W_dec", "b_enc", "b_dec")}
    coder = load(writers.saelens(tmp_path, writers.saelens_cfg("standard"), arrays), dtype=torch.bfloat16)
    x = r["b_dec"] + X[1]
    truth = (x - r["b_dec"]).astype(float) @ r["W_enc"] + r["b_enc"]
    assert np.abs(coder.pre(torch.from_numpy(x)).numpy() - truth).max() < 0.05


def test_many_blocks_are_one_matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = [case.write(tmp_path / case.name) for case in CASES if case.name in BLOCKED]
    whole = [load(str(place)) for place in places]
    monkeypatch.setattr("saesteer.loaders.arrays.BLOCK_BYTES", 7 * D * 4)

    monkeypatch.setattr("saesteer.dictionaries.coder.ROWS_AT_ONCE", 3)
    for before, place in zip(whole, places, strict=True):
        after = load(str(place))
        for name in ("w_enc", "w_dec", "b_enc", "b_dec"):
            assert torch.equal(getattr(before, name), getattr(after, name)), name
        x = torch.from_numpy(X)
        torch.testing.assert_close(before.encode(x), after.encode(x), rtol=1e-5, atol=1e-3)


BLOCKED = (
    "gemma_scope-res",
    "saelens-v6-gated",
    "saelens-v6-topk-rescaled",
    "manifest-full",
    "saesteer-topk",
    "dictionary_learning-AutoEncoder",
    "llama_scope-r",
    "apollo-pre",
)


def test_dead_decoder_row_stays_harmless_when_rescaled(tmp_path: Path) -> None:
    r = writers.raw()
    r["W_dec"][3] = 0
    cfg = writers.saelens_cfg("topk", k=F, rescale_acts_by_decoder_norm=True)
    coder = load(writers.saelens(tmp_path, cfg, {key: r[key] for key in ("W_enc", "W_dec", "b_enc", "b_dec")}))
    x = torch.from_numpy(X)
    assert not coder.encode(x)[..., 3].any()
    assert coder.decode(coder.encode(x)).isfinite().all()


@pytest.mark.parametrize("act", ["jumprelu", "topk"])
def test_dead_decoder_row_stays_harmless_in_a_gate(act: str, tmp_path: Path) -> None:
    arrays = {key: value.copy() for key, value in (llamascopium.PLAIN | llamascopium.LOGS).items()}
    arrays["W_D"][3] = 0
    if act == "topk":
        del arrays["activation_function.log_jumprelu_threshold"]
    coder = load(llamascopium.write(tmp_path, arrays, llamascopium.CONFIG | {"act_fn": act, "top_k": F}))
    assert not coder.encode(torch.from_numpy(X))[..., 3].any()
    own.write(tmp_path / "mine.safetensors", coder)  # which holds finite thresholds alone
    assert torch.equal(load(tmp_path / "mine.safetensors").b_enc, coder.b_enc)


def test_what_a_gate_compares_is_strictly_above(tmp_path: Path) -> None:
    arrays = {key: np.zeros_like(value) for key, value in gemma_scope_2.arrays().items()}
    arrays["b_enc"][:] = arrays["threshold"][:] = np.linspace(0.1, 0.9, F)
    arrays["threshold"][7] = np.nextafter(arrays["b_enc"][7], np.float32(0))
    active = load(gemma_scope_2.write(tmp_path, arrays)).encode(torch.zeros(1, D))[0] != 0
    assert active.nonzero().flatten().tolist() == [7]


MODULES = [
    ("layers.10", "any model", "resid_post.10"),
    ("h.3", "gpt2", "resid_post.3"),
    ("layers.0.mlp", "meta-llama/Llama-3.1-8B", "mlp_out.0"),
    ("layers.0.mlp", "google/gemma-3-1b-pt", "mlp_out_raw.0"),
    ("layers.0.self_attn", "Qwen/Qwen3-8B", "attn_out.0"),
    ("layers.0.attention", "EleutherAI/pythia-70m", "attn_out.0"),
    ("layers.0.attention", "allenai/OLMo-2-1124-7B", "attn_out_raw.0"),
    ("layers.0.mlp.down_proj", "gpt2", None),
    ("embed_tokens", "gpt2", None),
]


@pytest.mark.parametrize(("module", "model", "site"), MODULES)
def test_outputs_of_modules_become_sites(module: str, model: str, site: str | None) -> None:
    assert aliases.from_module_output(module, model) == site


CENTRED = {  # by the models of TransformerLens
    True: "gpt2 distilgpt2 stanford-crfm/alias-gpt2-small-x21 EleutherAI/gpt-neo-125M EleutherAI/gpt-neox-20b gptj "
    "EleutherAI/gpt-j-6B EleutherAI/pythia-70m-deduped facebook/opt-1.3b opt microsoft/phi-1 microsoft/phi-1_5 phi-2 "
    "allenai/OLMo-1B-hf olmo-7b roneneldan/TinyStories-33M tiny-stories-instruct-1M stablelm-base-3b santacoder",
    False: "meta-llama/Llama-3.1-8B llama-7b-hf gemma-2-2b google/medgemma-4b-it mistral-7b mistralai/Mixtral-8x7B "
    "mistralai/Mistral-Nemo-Base-2407 Qwen/Qwen3-8B Qwen/QwQ-32B-Preview openai/gpt-oss-20b microsoft/phi-4 phi-3 "
    "microsoft/Phi-3-mini-4k-instruct allenai/OLMo-2-0425-1B olmo-2-1b allenai/Olmo-3.1-32B-Think "
    "allenai/OLMoE-1B-7B-0924 01-ai/Yi-6B swiss-ai/Apertus-8B-2509 deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
    None: "bigscience/bloom-560m gelu-1l solu-2l-pile attn-only-2l mGPT adopt/a phi-10 pythia-of-llama",
}


@pytest.mark.parametrize("centred", CENTRED)
def test_a_name_tells_whether_transformer_lens_centres_a_model(centred: bool | None) -> None:
    names = CENTRED[centred].split()
    assert {name: aliases.is_centred(name) for name in names} == dict.fromkeys(names, centred)
    assert aliases.is_centred(None) is None


HOOKS = [
    ("blocks.0.hook_resid_pre", None, "resid_pre.0"),
    ("blocks.12.hook_resid_mid", None, "resid_mid.12"),
    ("blocks.1.hook_attn_out", None, "attn_out.1"),
    ("blocks.1.hook_mlp_out", None, "mlp_out.1"),
    ("blocks.1.ln2.hook_normalized", None, "mlp_in_pregain.1"),
    ("blocks.1.mlp.hook_in", None, "mlp_in.1"),
    ("blocks.1.mlp.hook_post", None, "mlp_hidden.1"),
    ("blocks.1.hook_mlp_in", "model.layers.1.pre_feedforward_layernorm.output", "mlp_in.1"),
    ("blocks.1.attn.hook_z", "model.layers.1.self_attn.o_proj.input", "z.1"),
    ("blocks.1.hook_mlp_out", "language_model.layers.1.post_feedforward_layernorm.output", "mlp_out.1"),
    ("blocks.1.hook_unheard_of", None, None),
    (None, "model.layers.9.output", "resid_post.9"),
    (None, "model.layers.9.post_attention_layernorm.output", None),
    (None, None, None),
]


@pytest.mark.parametrize(("name", "hf_name", "site"), HOOKS)
def test_hook_names_become_sites(name: str | None, hf_name: str | None, site: str | None, tmp_path: Path) -> None:
    cfg = writers.saelens_cfg("jumprelu")
    cfg["metadata"] |= {"hook_name": name, "hf_hook_name": hf_name}
    info = describe(writers.saelens(tmp_path, cfg, writers.raw()))
    assert (info.site_in, info.site_out) == (site, site)
