"""The model families that are served: what their layers are called, and where each site lies in them.

Data, and the one way to find a family's layers in a model. Knows no vLLM, no Transformers and no torch.
"""

from collections.abc import Iterable, Mapping, Sized
from dataclasses import dataclass
from typing import Any, Literal

from saesteer.errors import UnsupportedError

Library = Literal["vllm", "transformers"]


@dataclass(frozen=True, slots=True)
class Tap:
    """The module that a site's stream goes into or comes out of."""

    module: str  # attribute of the layer; empty: the layer itself
    side: Literal["in", "out"]
    next: bool = False  # on the next layer; after the last layer, on the final norm


@dataclass(frozen=True, slots=True)
class Taps:
    """Where a site lies in each library.

    In vLLM, a norm adds the last part to the stream before it reads the stream, and returns the sum: before the norm,
    the stream is two tensors; after it, one, which stock vLLM has already rounded.
    """

    vllm: Tap
    transformers: Tap


def _both(module: str, side: Literal["in", "out"]) -> Taps:
    """The same place in both libraries."""
    return Taps(Tap(module, side), Tap(module, side))


LLAMA = {
    "resid_pre": Taps(Tap("input_layernorm", "in"), Tap("", "in")),
    "attn_in": _both("input_layernorm", "out"),
    "attn_out": _both("self_attn", "out"),
    "resid_mid": _both("post_attention_layernorm", "in"),
    "mlp_in": _both("post_attention_layernorm", "out"),
    "mlp_out": _both("mlp", "out"),
    "resid_post": Taps(Tap("input_layernorm", "out", next=True), Tap("", "out")),
}
# Gemma's post_attention_layernorm is another norm: it comes after attention, before the stream is added.
GEMMA = LLAMA | {
    "attn_out": _both("post_attention_layernorm", "out"),
    "resid_mid": _both("pre_feedforward_layernorm", "in"),
    "mlp_in": _both("pre_feedforward_layernorm", "out"),
    "mlp_out": _both("post_feedforward_layernorm", "out"),
}
SERVED_KINDS = tuple(LLAMA)


@dataclass(frozen=True, slots=True)
class Family:
    """Models with the same decoder layer, which adds to a residual stream twice: attention's part, then the MLP's."""

    name: str
    vllm: str  # class of the decoder layer
    transformers: str  # the same in Transformers
    sites: Mapping[str, Taps]  # by kind

    def find(self, trunk: Any, library: Library, kind: str, layer: int) -> tuple[Any, str]:
        """The module at a site, and its side where the stream is.

        Args:
            trunk: as ``find_trunk`` returns it.
            library: the library that its classes come from.
            kind: the kind of the site.
            layer: the layer of the site.
        """
        tap: Tap = getattr(self.sites[kind], library)
        place = layer + tap.next
        if place == len(trunk.layers):
            return trunk.norm, tap.side
        return getattr(trunk.layers[place], tap.module) if tap.module else trunk.layers[place], tap.side


FAMILIES = (
    Family("Llama", "LlamaDecoderLayer", "LlamaDecoderLayer", LLAMA),
    Family("Mistral", "MistralDecoderLayer", "MistralDecoderLayer", LLAMA),
    Family("Qwen2", "Qwen2DecoderLayer", "Qwen2DecoderLayer", LLAMA),
    Family("Qwen3", "Qwen3DecoderLayer", "Qwen3DecoderLayer", LLAMA),
    Family("Gemma 2", "Gemma2DecoderLayer", "Gemma2DecoderLayer", GEMMA),
    Family("Gemma 3", "Gemma3DecoderLayer", "Gemma3DecoderLayer", GEMMA),
)


def find_trunk(model: Any, library: Library) -> tuple[Any, Family]:
    """The module that holds the decoder's ``layers`` and the final ``norm``, and the family of all its layers.

    Args:
        model: a torch module of either library.
        library: the library that the model's classes come from.

    Raises:
        UnsupportedError: the layers belong to no known family, or to more than one.
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
