"""The model families that are served: what their layers are called, and where in them each site is met.

Data, and the one way to find a family's layers in a model. Knows no vLLM, no Transformers and no torch.
"""

from collections.abc import Iterable, Mapping, Sized
from dataclasses import dataclass
from typing import Any, Literal

from saesteer.errors import UnsupportedError

Library = Literal["vllm", "transformers"]


@dataclass(frozen=True, slots=True)
class Tap:
    """A site is the stream that one of the norms consumes, which has the same name in both libraries.

    In Transformers the stream is the norm's input. In vLLM the norm adds the last part to it first, and returns it: in
    front of the norm it is the sum of two tensors, behind it one tensor, which stock has rounded already.
    """

    norm: str  # attribute of the layer
    behind: bool = False  # in vLLM the op stands behind the norm
    next: bool = False  # the norm of the layer behind this one; behind the last layer it is the final norm


LLAMA = {
    "resid_pre": Tap("input_layernorm"),
    "resid_mid": Tap("post_attention_layernorm"),
    "resid_post": Tap("input_layernorm", behind=True, next=True),
}
# Their post_attention_layernorm is another norm: it stands behind attention, before the stream is added.
GEMMA = LLAMA | {"resid_mid": Tap("pre_feedforward_layernorm")}
SERVED_KINDS = tuple(LLAMA)


@dataclass(frozen=True, slots=True)
class Family:
    """Models with the same decoder layer, which adds to a residual stream twice: attention's part, then the MLP's."""

    name: str
    vllm: str  # class of the decoder layer
    transformers: str  # the same there
    taps: Mapping[str, Tap]  # by kind of site

    def find(self, trunk: Any, kind: str, layer: int) -> tuple[Any, Tap]:
        """The norm that consumes the stream of a site, and how.

        Args:
            trunk: as ``find_trunk`` returns it.
            kind: of the site.
            layer: of the site.
        """
        tap = self.taps[kind]
        place = layer + tap.next
        return trunk.norm if place == len(trunk.layers) else getattr(trunk.layers[place], tap.norm), tap


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
