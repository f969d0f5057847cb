"""Model families in the installed sources: parts are added to the stream where a row of the table says."""

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

from saesteer.models.families import FAMILIES, Family

each_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
MODULES = {"vllm": "vllm.model_executor.models.{}", "transformers": "transformers.models.{0}.modeling_{0}"}
ADDED = "hidden_states,residual=self.{norm}(hidden_states,residual)"
STEPS = ["self.self_attn(", ADDED, "self.mlp("]
HYBRID = ["hidden_states=self.linear_attn(", "hidden_states=self.self_attn(", ADDED, "self.mlp(hidden_states)"]
OLMO = [
    "self.self_attn(hidden_states=hidden_states,",
    "hidden_states=self.post_attention_layernorm(hidden_states)hidden_states=residual+hidden_states",
    "residual=hidden_stateshidden_states=self.mlp(hidden_states)",
]
WHOLE = [
    "residual=hidden_stateshidden_states=self.input_layernorm(hidden_states)",
    "self.self_attn(",
    "hidden_states=residual+hidden_states#FullyConnectedresidual=hidden_states"
    "hidden_states=self.post_attention_layernorm(hidden_states)",
    "self.mlp(",
]
GRANITE = [step.replace("residual+hidden_states", "residual+hidden_states*self.residual_multiplier") for step in WHOLE]
LATENT = ["self.self_attn(positions,hidden_states)", ADDED, "hidden_states=self.mlp(hidden_states)"]
# Which source vLLM runs a family by, and where it does what, if that differs from Llama's.
SOURCES = {
    "Mixtral": ("vllm", "mixtral", ["self.self_attn(", ADDED, "self.block_sparse_moe("]),
    "Phi-3": ("vllm", "llama", STEPS),
    "Qwen2-VL": ("vllm", "qwen2", STEPS),
    "Qwen3-VL": ("vllm", "qwen3_vl", STEPS),
    "Qwen3-Next": ("vllm", "qwen3_next", HYBRID),
    "Qwen3.5": ("vllm", "qwen3_5", HYBRID),
    "GPT-OSS": ("vllm", "gpt_oss", ["self.attn(", ADDED, "self.mlp("]),
    "GPT-2": (
        "vllm",
        "gpt2",
        [
            "residual=hidden_stateshidden_states=self.ln_1(hidden_states)",
            "self.attn(",
            "=attn_output+residual",
            "residual=hidden_stateshidden_states=self.ln_2(hidden_states)",
            "self.mlp(",
        ],
    ),
    "Gemma 4": (
        "vllm",
        "gemma4",
        [
            "residual=hidden_stateshidden_states=self.input_layernorm(residual)",
            "self.self_attn(",
            "hidden_states=self.post_attention_layernorm(hidden_states)hidden_states=hidden_states+residual",
            "residual=hidden_states#",
            "hidden_states=self.pre_feedforward_layernorm(hidden_states)",
            "self.mlp(",
            "hidden_states=self.post_feedforward_layernorm(hidden_states)hidden_states=hidden_states+residual",
        ],
    ),
    "DeepSeek-V2": ("vllm", "deepseek_v2", LATENT),
    "DeepSeek-V3": ("vllm", "deepseek_v2", LATENT),
    "GLM-4-MoE": ("vllm", "glm4_moe", STEPS),
    "GLM-4": (
        "vllm",
        "glm4",
        ["self.self_attn(", "=self.post_self_attn_layernorm(", ADDED, "self.mlp(", "=self.post_mlp_"],
    ),
    "Granite": ("vllm", "granite", GRANITE),
    "SmolLM3": ("transformers", "smollm3", WHOLE),
    "OLMo": ("transformers", "olmo", WHOLE),
    "OLMo 2": ("transformers", "olmo2", OLMO),
    "OLMo 3": ("transformers", "olmo3", OLMO),
    "GPT-NeoX": (
        "transformers",
        "gpt_neox",
        [
            "self.attention(self.input_layernorm(hidden_states)",
            "self.mlp(self.post_attention_layernorm(hidden_states))",
            "=mlp_output+attn_output+hidden_states",
        ],
    ),
}


def source_of(module: str) -> str:
    """The text of an installed module, which is not imported."""
    found = find_spec(module)
    assert found is not None and found.origin is not None
    return Path(found.origin).read_text()


def where(family: Family) -> tuple[str, str, list[str]]:
    """The row of SOURCES, or what holds for families that have none."""
    usual = ("vllm", family.name.lower().replace(" ", "").replace("-", "_"), STEPS)
    return SOURCES.get(family.name, usual)


def forward_of(module: str, name: str) -> str:
    """The source of a class's forward, its own or its first parent's; without an import, which can need torchvision."""
    source = source_of(module)
    tree = ast.parse(source)
    [layer] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    for node in layer.body:
        if isinstance(node, ast.FunctionDef) and node.name == "forward":
            return str(ast.get_source_segment(source, node))
    parent = ast.unparse(layer.bases[0])
    [origin] = [
        node.module for node in tree.body if isinstance(node, ast.ImportFrom) and parent in {a.name for a in node.names}
    ]
    return forward_of(f"{module.rpartition('.')[0]}.{origin}", parent)


@each_family
def test_the_installed_source_adds_to_the_stream_where_the_row_says(family: Family) -> None:
    """Attention's part comes to the stream before the module at resid_mid reads it, and the MLP comes after."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    library, name, steps = where(family)
    source = "".join(forward_of(MODULES[library].format(name), family.vllm).split())
    norm = family.sites["resid_mid"].vllm.module if "resid_mid" in family.sites else ""
    steps = [step.format(norm=norm) for step in steps]
    places = [source.index(step) for step in steps]
    assert places == sorted(places)
    assert {source.count(step) for step in steps} == {1}


# Where attention is defined, if that is not where the layer is, and what it is projected by.
ATTENTION = {"Qwen3-VL": ("vllm", "qwen3"), "Phi-3": ("vllm", "llama"), "Qwen2-VL": ("vllm", "qwen2")}
PROJECTIONS = {"GPT-2": "attn_output,_=self.c_proj(attn_output)", "GPT-NeoX": "attn_output=self.dense(attn_output)"}


@each_family
def test_the_installed_source_projects_all_heads_by_the_module_at_z(family: Family) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    if "z" not in family.sites:
        return
    library, name = ATTENTION.get(family.name, where(family)[:2])
    source = "".join(source_of(MODULES[library].format(name)).split())
    usual_step = "output,_=self.o_proj(attn_output)" if library == "vllm" else "attn_output=self.o_proj(attn_output)"
    step = PROJECTIONS.get(family.name, usual_step)
    assert source.count(step) == 1
    assert f"self.{family.sites['z'].vllm.module.rpartition('.')[2]}(" in step
