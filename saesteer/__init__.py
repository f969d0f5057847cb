"""saesteer clamps features of sparse autoencoders, per request, inside a stock vLLM server.

This file is the list of public names. It imports none of them before they are used: `import saesteer` costs
nothing and works without torch or vLLM, since vLLM imports it in each of its processes.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from saesteer.dictionaries.coder import CoderInfo, SparseCoder
    from saesteer.errors import ConfigError, LoadError, PromptsFailed, SaesteerError, SpecError, UnsupportedError
    from saesteer.language.spec import Spec, ablate, add, cap, clamp, flag, reconstruct, stop, use
    from saesteer.loaders import describe, load
    from saesteer.plugin.llm import LLM

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CoderInfo",
    "ConfigError",
    "LoadError",
    "PromptsFailed",
    "SaesteerError",
    "SparseCoder",
    "Spec",
    "SpecError",
    "UnsupportedError",
    "__version__",
    "ablate",
    "add",
    "cap",
    "clamp",
    "describe",
    "flag",
    "load",
    "reconstruct",
    "stop",
    "use",
]

_HOMES = {
    "saesteer.dictionaries.coder": ("CoderInfo", "SparseCoder"),
    "saesteer.errors": ("ConfigError", "LoadError", "PromptsFailed", "SaesteerError", "SpecError", "UnsupportedError"),
    "saesteer.language.spec": ("Spec", "ablate", "add", "cap", "clamp", "flag", "reconstruct", "stop", "use"),
    "saesteer.loaders": ("describe", "load"),
    "saesteer.plugin.llm": ("LLM",),
}


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names:
            with import_module("saesteer.errors").needs():
                value: object = getattr(import_module(home), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'saesteer' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)
