"""saesteer clamps features of sparse autoencoders, per request, inside a stock vLLM server.

This file is the list of public names. It imports none of them before they are used: `import saesteer` costs
nothing and works without torch or vLLM, since vLLM imports it in each of its processes.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from saesteer.dictionaries.coder import CoderInfo, SparseCoder
    from saesteer.errors import ConfigError, LoadError, SaesteerError, SpecError, UnsupportedError
    from saesteer.language.spec import Spec, ablate, add, cap, clamp, reconstruct, use
    from saesteer.loaders import describe, load
    from saesteer.plugin.llm import LLM

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CoderInfo",
    "ConfigError",
    "LoadError",
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
    "load",
    "reconstruct",
    "use",
]

_HOME = {
    "LLM": "saesteer.plugin.llm",
    "CoderInfo": "saesteer.dictionaries.coder",
    "SparseCoder": "saesteer.dictionaries.coder",
    "ConfigError": "saesteer.errors",
    "LoadError": "saesteer.errors",
    "SaesteerError": "saesteer.errors",
    "SpecError": "saesteer.errors",
    "UnsupportedError": "saesteer.errors",
    "describe": "saesteer.loaders",
    "load": "saesteer.loaders",
    "Spec": "saesteer.language.spec",
    "ablate": "saesteer.language.spec",
    "add": "saesteer.language.spec",
    "cap": "saesteer.language.spec",
    "clamp": "saesteer.language.spec",
    "reconstruct": "saesteer.language.spec",
    "use": "saesteer.language.spec",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'saesteer' has no attribute {name!r}; it has {', '.join(__all__)}")
    value: object = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
