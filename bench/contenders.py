"""Systems that steer or read under vLLM, ours among them: which requests each can serve, and the vLLM that it pins.

Knows names and versions; starts no engine, and imports none of the systems.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from saesteer.plugin.contract import vllm_version

STOCK = "stock"

# What every request of a burst brings; L is the layer in the middle, and a capture is of all tokens that are inputs.
ASKS: Mapping[str, str] = {
    "nothing": "no edit and no capture",
    "vector": "one vector, added at layer L",
    "vectors": "a vector for each layer, added there",
    "clamp": "one feature of a dictionary at layer L, clamped",
    "capture": "the stream behind layer L, handed back",
    "captures": "the stream behind each layer, handed back",
}
STEERS = ("nothing", "vector", "vectors")
READS = ("nothing", "capture", "captures")


@dataclass(frozen=True, slots=True)
class Contender:
    """One system in one configuration.

    Attributes:
        distribution: its name on PyPI; None for vLLM alone.
        plugin: the entry point that vLLM is to load, the value of VLLM_PLUGINS.
        asks: the keys of ASKS that it serves.
        settings: how it is configured, in words.
        asked: how its requests say what they want, in words.
        environment: more variables of its process; ``{vectors}`` stands for the file of the vectors.
    """

    distribution: str | None
    plugin: str
    asks: tuple[str, ...]
    settings: str
    asked: str
    environment: Mapping[str, str]

    @property
    def version(self) -> str | None:
        """What is installed here; None if nothing is."""
        if self.distribution is None:
            return vllm_version()
        try:
            return version(self.distribution)
        except PackageNotFoundError:
            return None

    @property
    def pin(self) -> str | None:
        """The versions of vLLM that it asks for, as in ``==0.30.0``; None if it takes any."""
        found = map(Requirement, requires(self.distribution) or ()) if self.distribution and self.version else ()
        return next((str(one.specifier) for one in found if one.name == "vllm" and len(one.specifier)), None)

    def missing(self, *, any_vllm: bool = False) -> str | None:
        """Why it cannot be started here; None if it can.

        Args:
            any_vllm: start it although it pins another vLLM than is installed.
        """
        if self.version is None:
            return f"{self.distribution} is not installed"
        here, pin = vllm_version(), self.pin
        if pin is not None and not any_vllm and not SpecifierSet(pin).contains(here, prereleases=True):
            return f"{self.distribution} {self.version} pins vllm{pin}, and vLLM {here} is installed"
        return None


_NOT_STEERED = "no argument"
CONTENDERS: Mapping[str, Contender] = {
    STOCK: Contender(None, "", ("nothing",), "vLLM's defaults", _NOT_STEERED, {}),
    "saesteer": Contender(
        "saesteer",
        "saesteer",
        (*STEERS, "clamp"),
        "a dictionary at layer L, ops and a named vector at all layers",
        "extra_args: the edits of a spec, with the vector's name",
        {},
    ),
    "saesteer-reads": Contender(
        "saesteer",
        "saesteer",
        READS,
        "as saesteer, and reads at all layers",
        "extra_args: return.activations of a spec, inline",
        {},
    ),
    "hotwire": Contender(
        "hotwire-vllm",
        "hotwire",
        STEERS,
        "HOTWIRE_VECTORS names the vectors, HOTWIRE_SLOTS=256",
        "extra_args: id, layer and scale, for each layer",
        {"HOTWIRE_VECTORS": "{vectors}", "HOTWIRE_SLOTS": "256"},
    ),
    "vllm-lens": Contender(
        "vllm-lens",
        "activations",
        (*STEERS, "capture", "captures"),
        "its defaults: it turns CUDA graphs off and takes vLLM's V1 runner",
        "extra_args: a SteeringVector with the numbers, or output_residual_stream",
        {},
    ),
    "interp-engine": Contender(
        "interp-engine",
        "",
        (*STEERS, "capture", "captures"),
        "VLLMModel with its defaults: hooks, without CUDA graphs",
        "generate_steered: a SteeringSpec with the numbers, or capture_points",
        {},
    ),
    "interp-engine-static": Contender(
        "interp-engine",
        "",
        (*STEERS, "capture", "captures"),
        "VLLMModel(static_points='auto', enforce_eager=False): taps at all layers in CUDA graphs",
        "generate_steered: a SteeringSpec with the numbers, or capture_points",
        {},
    ),
}
