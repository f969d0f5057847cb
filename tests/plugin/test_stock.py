"""A vLLM beside which saesteer is installed stays stock until settings ask for it. This file is also that process."""

import logging
import os
import sys
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from saesteer.config.config import KEY, SaesteerConfig
from saesteer.errors import UnsupportedError
from saesteer.plugin import configured, contract
from tests.apart import hear, tell

GUARD = {"create_engine_config", "load_endpoint_plugins", "to_sampling_params", "process_inputs"}
WIRE = {KEY: SaesteerConfig(sites=("resid_post.3",)).to_json()}


def run(case: str, *words: str, **environment: str) -> dict[str, Any]:
    """What a fresh process finds that loads vLLM's plugins; it has no word of a server."""
    inherited = {name: value for name, value in os.environ.items() if name != configured.ENV}
    found: dict[str, Any] = hear("-m", "tests.plugin.test_stock", case, *words, environment=inherited | environment)
    return found


def test_until_settings_ask_for_it_only_the_guard_is_in_place(model_dir: str) -> None:
    found = run("settings", model_dir)
    assert set(found["before"]) == GUARD, "and nothing of vLLM is another object than before"
    assert found["warnings"] == [] and found["stock starts"]
    assert "started without saesteer" in found["a spec"] and found["a spec"].endswith("[not_served]")
    assert found["with settings"] == "" and found["all in place"] and found["children"] == "1"
    assert found["a config by hand"].startswith("the engine's settings were not read")


def test_a_child_of_a_server_with_settings_has_all_of_it() -> None:
    assert run("child", **{configured.ENV: "1"})["all in place"]


@pytest.mark.parametrize("disabled", ["0", "1"])
def test_an_unknown_vllm_starts_and_refuses_settings(model_dir: str, disabled: str) -> None:
    found = run("unknown", model_dir, SAESTEER_DISABLE=disabled)
    (warning,) = found["warnings"]
    assert "vLLM 0.34.0 is not known to saesteer" in warning
    assert "vLLM 0.34.0 has no vllm.engine.arg_utils.EngineArgs.gone (reads them)" in warning
    assert set(found["before"]) == GUARD and found["stock starts"]
    assert "started without saesteer" in found["a spec"]
    if disabled == "1":
        assert warning.startswith("saesteer is disabled") and found["with settings"] == ""
    else:
        assert "vLLM 0.34.0 is not known to saesteer" in found["with settings"]
    assert not found["all in place"] and found["children"] is None


def test_the_word_for_children_reaches_actors_of_ray() -> None:
    from vllm.ray.ray_env import get_env_vars_to_copy

    configured.configure()
    assert configured.ENV in get_env_vars_to_copy()


def test_a_broken_row_fails_who_has_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = contract.Hook("stock", "vllm.config", "VllmConfig.gone", (), "", "door.logs:_of_body", "nothing")
    monkeypatch.setattr(contract, "HOOKS", (broken,))
    with pytest.raises(UnsupportedError, match=r"has no vllm\.config\.VllmConfig\.gone"):
        configured.configure.__wrapped__()
    assert contract.guard() == [f"vLLM {contract.vllm_version()} has no vllm.config.VllmConfig.gone (nothing)"]


def _objects() -> dict[str, Any]:
    """What stands where each row says, as it is stored: by module, then class and name."""
    found: dict[str, Any] = {}
    for hook in contract.HOOKS:
        owner, _, name = hook.path.rpartition(".")
        try:
            home: Any = import_module(hook.module)
            found[f"{hook.module}.{hook.path}"] = getattr(getattr(home, owner) if owner else home, name)
        except (ImportError, AttributeError):
            assert hook.use == "late"
    return found


def _replaced(stock: dict[str, Any]) -> set[str]:
    return {name for name, one in _objects().items() if one != stock[name]}  # bound methods are made anew


def _all(stock: dict[str, Any]) -> bool:
    rows = [one for one in contract.HOOKS if one.process in ("stock", "every") and one.use in ("", "late")]
    return _replaced(stock) == {f"{one.module}.{one.path}" for one in rows if one.find() is not None}


def _said(make: Any) -> str:
    try:
        make()
    except Exception as error:  # noqa: BLE001  # whatever it is, the test looks at it
        return str(error)
    return ""


def _main(case: str, model: str = "") -> None:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.inputs import TokensPrompt
    from vllm.plugins import load_general_plugins
    from vllm.v1.engine.input_processor import InputProcessor

    stock, warnings = _objects(), []
    log = logging.getLogger("vllm.saesteer")
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    if case == "unknown":
        contract.vllm_version = lambda: "0.34.0"
        gone = contract.Hook("stock", "vllm.engine.arg_utils", "EngineArgs.gone", (), "", "", "reads them")
        contract.HOOKS = (*contract.HOOKS, gone)
    for _ in range(2):
        load_general_plugins()
    if case == "unknown":
        contract.HOOKS = contract.HOOKS[:-1]
    if case == "child":
        tell({"all in place": _all(stock)})
        return
    before = {name.rpartition(".")[2] for name in _replaced(stock)}
    args: dict[str, Any] = {"model": model, "max_model_len": 64, "enforce_eager": True}
    config = EngineArgs(**args).create_engine_config()
    door, prompt = InputProcessor(config), TokensPrompt(prompt_token_ids=[1, 2])

    def ask(**extra: Any) -> str:
        params = SamplingParams(max_tokens=1, detokenize=False, extra_args=extra or None)
        return _said(lambda: door.process_inputs("r", prompt, params, ("generate",)))

    found = {"before": sorted(before), "warnings": warnings, "stock starts": ask() == "" == ask(other=1)}
    found["a spec"] = ask(**{KEY: {"edits": []}})
    door.vllm_config = SimpleNamespace(additional_config=WIRE)
    found["a config by hand"] = ask()
    found["with settings"] = _said(EngineArgs(**args, additional_config=WIRE).create_engine_config)
    tell(found | {"all in place": _all(stock), "children": os.environ.get(configured.ENV)})


if __name__ == "__main__":
    _main(*sys.argv[1:])
