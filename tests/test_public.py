"""The public names: the list itself, that each is there, and that asking for none costs nothing."""

import subprocess
import sys
from importlib import import_module

import pytest

import saesteer

SPEC = ("Spec", "ablate", "add", "as_spec", "cap", "clamp", "flag", "from_json", "reconstruct", "stop", "use")


def test_public_names_are_these() -> None:
    """What stands here stays; a new name is added on purpose."""
    assert saesteer.__all__ == [
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


@pytest.mark.parametrize("name", [name for name in saesteer.__all__ if name != "LLM"])
def test_name_is_there(name: str) -> None:
    assert getattr(saesteer, name) is not None
    assert name in dir(saesteer)


def test_llm_is_vllms_with_steering() -> None:
    import vllm

    assert issubclass(saesteer.LLM, vllm.LLM)


def test_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'clmap'; it has .*clamp"):
        _ = saesteer.clmap


def test_import_is_free() -> None:
    code = "import saesteer, sys; assert not {'torch', 'vllm', 'transformers', 'numpy'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_request_language_needs_no_torch() -> None:
    code = "import sys; from saesteer import Spec, clamp; assert not {'torch', 'numpy'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("path", "names"),
    {
        "saesteer.client": ["Answer", "AsyncClient", "Client"],
        "saesteer.config": ["SaesteerConfig"],
        "saesteer.demo": ["DEMO_SAE", "DEMO_TRANSCODER", "engine_options"],
        "saesteer.hf": ["Model"],
        "saesteer.loaders": ["FORMATS", "describe", "load"],
        "saesteer.model": ["ensure_model"],
        "saesteer.spec": [*SPEC],
        "saesteer.plugin": ["register"],
    }.items(),
)
def test_public_paths_stay(path: str, names: list[str]) -> None:
    module = import_module(path)
    assert [name for name in names if not hasattr(module, name)] == []
