"""The model families that are served: what their layers are called, and where each site lies in them.

Data, and the one way to find a family's layers in a model. Knows no vLLM, no Transformers and no torch.
"""

from collections.abc import Iterable, Mapping, Sized
from itertools import product
from typing import Any, Literal, NamedTuple

from saesteer.errors import UnsupportedError
from saesteer.language.sites import SUMS

Library = Literal["vllm", "transformers"]


class Tap(NamedTuple):
    """The module that a site's stream goes into or comes out of."""

    module: str  # path from the layer; empty: the layer itself
    side: Literal["in", "out"]
    next: bool = False  # on the next layer; after the last layer, on the final norm


class Taps(NamedTuple):
    """Where a site lies in each library."""

    vllm: Tap
    transformers: Tap


def _both(module: str, side: Literal["in", "out"]) -> Taps:
    """The same place in both libraries."""
    return Taps(Tap(module, side), Tap(module, side))


def _layer(first: str, inside: Mapping[str, Taps], *, fused: bool = False) -> dict[str, Taps]:
    """The sites inside a layer, and around them the stream: vLLM's lies at the module that reads it first."""
    after = Tap(first, "out" if fused else "in", next=True)
    return {"resid_pre": Taps(Tap(first, "in"), Tap("", "in")), **inside, "resid_post": Taps(after, Tap("", "out"))}


def _llama(norm: str, second: str, *, fused: bool = True) -> dict[str, Taps]:
    """The sites of a layer that is built as Llama's, with these norms in front of attention and of the MLP."""
    inside = {
        "attn_in": _both(norm, "out"),
        "z": _both("self_attn.o_proj", "in"),
        "attn_out": _both("self_attn", "out"),
        "resid_mid": _both(second, "in"),
        "mlp_in": _both(second, "out"),
        "mlp_out": _both("mlp", "out"),
    }
    return _layer(norm, inside, fused=fused)


LLAMA = _llama("input_layernorm", "post_attention_layernorm")
STREAM = {kind: LLAMA[kind] for kind in ("resid_pre", "resid_mid", "resid_post")}
EXPERTS = STREAM | {"z": LLAMA["z"]}
# Gemma's post_attention_layernorm, from Gemma 2 on, is another norm: it comes after attention, before the stream is
# added.
GEMMA = LLAMA | {
    "attn_out": _both("post_attention_layernorm", "out"),
    "resid_mid": _both("pre_feedforward_layernorm", "in"),
    "mlp_in": _both("pre_feedforward_layernorm", "out"),
    "mlp_out": _both("post_feedforward_layernorm", "out"),
}
GLM_4 = LLAMA | {
    "attn_out": _both("post_self_attn_layernorm", "out"),
    "mlp_out": _both("post_mlp_layernorm", "out"),
}
APERTUS = _llama("attention_layernorm", "feedforward_layernorm")
# Behind the first layers an image's features (DeepStack) are added: in Transformers outside of the layer.
QWEN3_VL = EXPERTS | {"resid_post": Taps(STREAM["resid_post"].vllm, Tap("", "in", next=True))}
GPT_OSS = STREAM | {"z": Taps(Tap("attn.o_proj", "in"), Tap("self_attn.o_proj", "in"))}
GPT2 = _layer("ln_1", {"z": _both("attn.c_proj", "in"), "resid_mid": _both("ln_2", "in")})
# Attention and the MLP read the same stream, so there is none between them.
NEOX = _layer("input_layernorm", {"z": _both("attention.dense", "in")})
# The norms come after attention and the MLP, which read the stream as it is.
OLMO = _layer("self_attn", {"z": LLAMA["z"], "resid_mid": _both("mlp", "in")})
# Built as Llama, where the stream is one tensor.
SMOLLM3 = _llama("input_layernorm", "post_attention_layernorm", fused=False)
# Layers with full attention have wider heads, so z has no one width.
GEMMA_4 = {kind: taps for kind, taps in {**GEMMA, "resid_post": SMOLLM3["resid_post"]}.items() if kind != "z"}
SERVED_KINDS = tuple(LLAMA)


class Family(NamedTuple):
    """Models with the same decoder layer, which adds to a residual stream twice: attention's part, then the MLP's."""

    name: str
    vllm: str  # class of the decoder layer
    transformers: str  # the same in Transformers
    sites: Mapping[str, Taps]  # by kind
    # In vLLM, most norms add the last part to the stream before they read it, and return the sum: before such a norm,
    # the stream is two tensors; after it, one, which stock vLLM has already rounded. Otherwise it is one tensor always.
    fused: bool = True
    layers: str = "layers"  # attribute of the trunk
    norm: str = "norm"  # the final one

    def find(self, trunk: Any, library: Library, kind: str, layer: int) -> tuple[Any, str]:
        """The module at a site, and its side where the stream is.

        Args:
            trunk: as ``find_trunk`` returns it.
            library: the library that its classes come from.
            kind: the kind of the site.
            layer: the layer of the site.

        Raises:
            UnsupportedError: layers of this family have no such site.
        """
        if kind not in self.sites:
            raise UnsupportedError(f"{self.name} layers have no {kind}.{layer}; served: {', '.join(self.sites)}")
        tap: Tap = getattr(self.sites[kind], library)
        layers, place = getattr(trunk, self.layers), layer + tap.next
        if place == len(layers):
            return getattr(trunk, self.norm), tap.side
        return layers[place].get_submodule(tap.module), tap.side


# vLLM runs OLMo and GPT-NeoX by Transformers' own layers, under the same names. Where two rows share a class, their
# sites agree, and the first row speaks for both.
FAMILIES = (
    Family("Llama", "LlamaDecoderLayer", "LlamaDecoderLayer", LLAMA),
    Family("Mistral", "MistralDecoderLayer", "MistralDecoderLayer", LLAMA),
    Family("Mixtral", "MixtralDecoderLayer", "MixtralDecoderLayer", EXPERTS),
    Family("Phi-3", "LlamaDecoderLayer", "Phi3DecoderLayer", LLAMA),
    Family("Qwen2", "Qwen2DecoderLayer", "Qwen2DecoderLayer", LLAMA),
    Family("Qwen2-MoE", "Qwen2MoeDecoderLayer", "Qwen2MoeDecoderLayer", EXPERTS),
    Family("Qwen2-VL", "Qwen2DecoderLayer", "Qwen2VLDecoderLayer", LLAMA),
    Family("Qwen3", "Qwen3DecoderLayer", "Qwen3DecoderLayer", LLAMA),
    Family("Qwen3-MoE", "Qwen3MoeDecoderLayer", "Qwen3MoeDecoderLayer", EXPERTS),
    Family("Qwen3-VL", "Qwen3VLDecoderLayer", "Qwen3VLTextDecoderLayer", QWEN3_VL),
    Family("Qwen3-Next", "Qwen3NextDecoderLayer", "Qwen3NextDecoderLayer", STREAM),
    Family("Qwen3.5", "Qwen3_5DecoderLayer", "Qwen3_5DecoderLayer", STREAM),
    Family("Gemma", "GemmaDecoderLayer", "GemmaDecoderLayer", LLAMA),
    Family("Gemma 2", "Gemma2DecoderLayer", "Gemma2DecoderLayer", GEMMA),
    Family("Gemma 3", "Gemma3DecoderLayer", "Gemma3DecoderLayer", GEMMA),
    Family("Gemma 4", "Gemma4DecoderLayer", "Gemma4TextDecoderLayer", GEMMA_4, fused=False),
    Family("DeepSeek-V2", "DeepseekV2DecoderLayer", "DeepseekV2DecoderLayer", STREAM),
    Family("DeepSeek-V3", "DeepseekV2DecoderLayer", "DeepseekV3DecoderLayer", STREAM),
    Family("GLM-4", "Glm4DecoderLayer", "Glm4DecoderLayer", GLM_4),
    Family("GLM-4-MoE", "Glm4MoeDecoderLayer", "Glm4MoeDecoderLayer", EXPERTS),
    Family("Granite", "GraniteDecoderLayer", "GraniteDecoderLayer", SMOLLM3, fused=False),
    Family("Apertus", "ApertusDecoderLayer", "ApertusDecoderLayer", APERTUS),
    Family("SmolLM3", "SmolLM3DecoderLayer", "SmolLM3DecoderLayer", SMOLLM3, fused=False),
    Family("GPT-OSS", "TransformerBlock", "GptOssDecoderLayer", GPT_OSS),
    Family("OLMo", "OlmoDecoderLayer", "OlmoDecoderLayer", SMOLLM3, fused=False),
    Family("OLMoE", "OlmoeDecoderLayer", "OlmoeDecoderLayer", EXPERTS),
    Family("OLMo 2", "Olmo2DecoderLayer", "Olmo2DecoderLayer", OLMO, fused=False),
    Family("OLMo 3", "Olmo3DecoderLayer", "Olmo3DecoderLayer", OLMO, fused=False),
    Family("GPT-2", "GPT2Block", "GPT2Block", GPT2, fused=False, layers="h", norm="ln_f"),
    Family("GPT-NeoX", "GPTNeoXLayer", "GPTNeoXLayer", NEOX, fused=False, norm="final_layer_norm"),
)


def other_widths(config: Any) -> dict[str, int]:
    """The widths of the kinds of sites that are not as wide as the stream, by kind.

    Args:
        config: the text part of a model's config, as Transformers reads it.
    """
    try:
        heads, size = (getattr(config, name, None) for name in ("num_attention_heads", "head_dim"))
    except RuntimeError:  # Transformers' word that they differ between layers: z is not served there
        return {}
    if not isinstance(heads, int):  # of no family that is served
        return {}
    z = heads * (size or config.hidden_size // heads)
    return {} if z == config.hidden_size else {"z": z}


def has_pregain(config: Any) -> bool:
    """Whether MLPs read an RMS norm of resid_mid, so that its result before the gain follows from resid_mid alone.

    Args:
        config: the text part of a model's config, as Transformers reads it.
    """
    return hasattr(config, "rms_norm_eps") and config.model_type not in ("olmo2", "olmo3")  # their norms come behind


def sums_of(config: Any) -> Mapping[str, str]:
    """The kinds of sites that hold what is added at others and nothing else, as ``op_site`` takes them.

    Args:
        config: the text part of a model's config, as Transformers reads it.
    """
    if config.model_type == "granite":  # multiplies what attention and the MLP make before it adds it
        return {}
    if config.model_type.startswith("gemma4"):  # adds and multiplies once more behind the MLP
        return {kind: place for kind, place in SUMS.items() if kind != "mlp_out"}
    return SUMS


def of_layers(config: Any) -> dict[str, Any]:
    """What requests have to know of how layers are built, by field of a ``Catalog``.

    Args:
        config: the text part of a model's config, as Transformers reads it.
    """
    return {"pregain": has_pregain(config), "sums": sums_of(config)}


def find_trunk(model: Any, library: Library) -> tuple[Any, Family]:
    """The module that holds the decoder's layers and the final norm, and the family of all its layers.

    Args:
        model: a torch module of either library.
        library: the library that the model's classes come from.

    Raises:
        UnsupportedError: the layers belong to no known family, or to more than one.
    """
    known: dict[str, Family] = {}
    for family in FAMILIES:
        known.setdefault(getattr(family, library), family)
    others: set[str] = set()
    for module, (name, norm) in product(model.modules(), dict.fromkeys((one.layers, one.norm) for one in FAMILIES)):
        layers = getattr(module, name, None)
        if not (isinstance(layers, Iterable) and isinstance(layers, Sized) and len(layers)):
            continue
        classes = {type(layer).__name__ for layer in layers} - {"PPMissingLayer"}  # another stage has that layer
        if hasattr(module, norm) and len(classes) == 1 and classes <= known.keys():
            return module, known[classes.pop()]
        others |= classes
    found = f"with layers of the class {', '.join(sorted(others))}" if others else "without decoder layers"
    message = f"model {type(model).__name__} {found} is not served by this version"
    raise UnsupportedError(f"{message}; served: {', '.join(known)}, all layers alike")
