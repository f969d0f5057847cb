"""The model families that are served: what their layers are called, and where in them the residual stream is met.

Data, and the one way to find a family's layers in a model. Knows no vLLM, no Transformers and no torch.
"""

from collections.abc import Iterable, Sized
from dataclasses import dataclass
from typing import Any, Literal

from saesteer.errors import UnsupportedError

Library = Literal["vllm", "transformers"]


@dataclass(frozen=True, slots=True)
class Family:
    """Models with the same decoder layer, which adds to a residual stream twice: attention's part, then the MLP's."""

    name: str
    vllm: str  # class of the decoder layer
    transformers: str  # the same there
    mid_norm: str  # the layer's attribute whose input is resid_mid: the norm in front of the MLP, in both libraries


FAMILIES = (
    Family("Llama", "LlamaDecoderLayer", "LlamaDecoderLayer", "post_attention_layernorm"),
    Family("Mistral", "MistralDecoderLayer", "MistralDecoderLayer", "post_attention_layernorm"),
    Family("Qwen2", "Qwen2DecoderLayer", "Qwen2DecoderLayer", "post_attention_layernorm"),
    Family("Qwen3", "Qwen3DecoderLayer", "Qwen3DecoderLayer", "post_attention_layernorm"),
    # Their post_attention_layernorm is another norm: it stands behind attention, before the stream is added.
    Family("Gemma 2", "Gemma2DecoderLayer", "Gemma2DecoderLayer", "pre_feedforward_layernorm"),
    Family("Gemma 3", "Gemma3DecoderLayer", "Gemma3DecoderLayer", "pre_feedforward_layernorm"),
)


def find_trunk(model: Any, library: Library) -> tuple[Any, Family]:
    """The module that holds the decoder's ``layers`` and the final ``norm``, and the family of all its layers.

    Args:
        model: a module as torch has them, of either library.
        library: that the model's classes come from.

    Raises:
        UnsupportedError: the layers are of no known family, or not all of the same.
    """
    known = {getattr(family, library): family for family in FAMILIES}
    others: set[str] = set()
    for module in model.modules():
        layers = getattr(module, "layers", None)
        if not (isinstance(layers, Iterable) and isinstance(layers, Sized) and len(layers) and hasattr(module, "norm")):
            continue
        classes = {type(layer).__name__ for layer in layers}
        if len(classes) == 1 and classes <= known.keys():
            return module, known[classes.pop()]
        others |= classes
    found = f"with layers of the class {', '.join(sorted(others))}" if others else "without decoder layers"
    message = f"model {type(model).__name__} {found} is not served by this version"
    raise UnsupportedError(f"{message}; served: {', '.join(known)}, all layers alike")
