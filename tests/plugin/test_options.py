"""The list of options is what every entry point takes, and what they name is opened once in each process."""

import inspect
from dataclasses import MISSING, fields
from typing import Any

import pytest
import typer

pytest.importorskip("vllm", reason="vLLM is not installed")

from saesteer import hf
from saesteer.commands.cli import app
from saesteer.config.config import OPTIONS, SaesteerConfig
from saesteer.plugin.llm import LLM


def test_the_fields_of_a_configuration_are_the_options() -> None:
    assert [one.name for one in fields(SaesteerConfig)] == [*OPTIONS]


@pytest.mark.parametrize("entry", [LLM, hf.Model], ids=["LLM", "hf"])
def test_python_takes_the_options_under_the_same_names_and_defaults(entry: Any, request: pytest.FixtureRequest) -> None:
    served = {name for name, option in OPTIONS.items() if request.node.callspec.id in option.python}
    found = inspect.signature(entry.__init__).parameters
    ours = {name: one for name, one in found.items() if name in OPTIONS}
    assert ours.keys() == served
    usual = {one.name: one.default for one in fields(SaesteerConfig) if one.default is not MISSING}
    for name, one in ours.items():
        assert one.kind is inspect.Parameter.KEYWORD_ONLY
        assert one.default == (None if name == "max_dose_action" else usual.get(name)), name
        assert f"        {name}: " in str(inspect.getdoc(entry)).replace("\n    ", "\n        "), (
            f"{name} is undocumented"
        )


def test_the_flags_of_serve_are_the_options() -> None:
    command: Any = typer.main.get_command(app)
    params = {param.opts[0]: param for param in command.commands["serve"].params if param.param_type_name == "option"}
    assert sum(option.flag == "" for option in OPTIONS.values()) == 1, "what the settings file alone has"
    for option in filter(lambda one: one.flag, OPTIONS.values()):
        on, _, off = option.flag.partition("/")
        param = params.pop(on)
        assert (param.help, param.secondary_opts) == (option.help, [off] if off else [])
    assert params.keys() == {"--saesteer-config", "--saesteer-admin-key", "--verbose"}
