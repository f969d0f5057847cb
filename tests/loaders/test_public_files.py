"""One public dictionary of each format, by its public name: inspected by its headers, then loaded and used.

These tests download gigabytes. Formats that are on no hub under a public name of their own are not among them: the
manifest, OpenAI's, Apollo's and saesteer's.
"""

import pytest
import torch

from saesteer.loaders import FORMATS, load
from saesteer.workbench.inspect import report

pytestmark = pytest.mark.network

ATTENTION = "gpt2-small_L5_Hcat_z_lr1.20e-03_l11.00e+00_ds49152_bs4096_dc1.00e-06_rsanthropic_rie25000_nr4_v9.pt"
# format -> place, and where it reads
PUBLIC = {
    "gemma_scope": ("google/gemma-scope-2b-pt-res/layer_20/width_16k/average_l0_71", "resid_post.20"),
    "gemma_scope_2": ("google/gemma-scope-2-270m-pt/resid_post/layer_9_width_16k_l0_small", "resid_post.9"),
    "dictionary_learning": ("andyrdt/saes-qwen2.5-7b-instruct/resid_post_layer_3/trainer_0", "resid_post.3"),
    "llama_scope": ("OpenMOSS-Team/Llama3_1-8B-Base-LXR-8x/Llama3_1-8B-Base-L15R-8x", "resid_post.15"),
    "llama_scope_r1": (
        "fnlp/Llama-Scope-R1-Distill/400M-Slimpajama-400M-OpenR1-Math-220k/L15R",
        "resid_post.15",
    ),
    "llamascopium": (
        "OpenMOSS-Team/Llama-Scope-2-Qwen3-1.7B/transcoder/8x/k64/layer12_transcoder_8x_k64",
        "mlp_in_pregain.12",
    ),
    "saelens": ("jbloom/GPT2-Small-SAEs-Reformatted/blocks.8.hook_resid_pre", "resid_pre.8"),
    "sparsify": ("EleutherAI/sae-pythia-70m-32k/layers.3", "resid_post.3"),
    "circuit_tracer": ("mwhanna/qwen3-0.6b-transcoders-lowl0#layer_3", "mlp_in.3"),
    "qwen_scope": ("Qwen/SAE-Res-Qwen3-1.7B-Base-W32K-L0_50/layer12.sae.pt", "resid_post.12"),
    "connor_rob": (f"ckkissane/attn-saes-gpt2-small-all-layers/{ATTENTION}", "z.5"),
    "goodfire": ("Goodfire/Llama-3.1-8B-Instruct-SAE-l19/Llama-3.1-8B-Instruct-SAE-l19.pth", "resid_post.19"),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_public_dictionary(name: str) -> None:
    place, site = PUBLIC[name]
    said = report(place)  # first, while the hub's cache is empty: reads headers alone
    assert f"format        {name}" in said
    assert site in said
    coder = load(place, dtype=torch.bfloat16)
    assert (coder.info.format, coder.info.site_in) == (name, site)
    x = torch.randn(4, coder.info.d_in)
    assert coder.decode(coder.encode(x), like=x).isfinite().all()


@pytest.mark.parametrize(
    "place",
    [
        "google/gemma-scope-2-270m-pt/resid_post/layer_*_width_16k_l0_small",
        "mwhanna/qwen3-0.6b-transcoders-lowl0@3,4",
        "EleutherAI/sae-pythia-70m-32k@resid_post.0-3",
    ],
)
def test_public_set(place: str) -> None:
    assert "\nset " in report(place)


def test_the_formats_are_known() -> None:
    assert set(FORMATS) >= PUBLIC.keys()
