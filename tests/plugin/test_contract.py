"""Every hook point of the installed vLLM is what saesteer counts on, and a changed one is a refusal that names it."""

import inspect
import os
import subprocess
import sys
from collections import Counter
from typing import Any, get_args

import pytest

from saesteer import __version__
from saesteer.errors import ConfigError, UnsupportedError
from saesteer.loaders.formats import own
from tests.plugin import conftest

pytest.importorskip("vllm", reason="vLLM is not installed")

from saesteer import plugin
from saesteer.plugin import configured, contract  # needs vLLM
from saesteer.plugin.assets import _salting_compile_cache, assets_of, fingerprint
from saesteer.plugin.door import frontend


@pytest.mark.parametrize("process", get_args(contract.Process))
def test_the_installed_vllm_keeps_the_contract(process: contract.Process) -> None:
    contract.check(process)


def test_the_table_is_the_whole_seam() -> None:
    """Each place in it exists and takes what the row says; whoever wraps or calls vLLM is in it, once a function."""
    for hook in contract.HOOKS:
        print(f"{hook.process:8}{hook.module}.{hook.path}({', '.join(hook.parameters)})  {hook.use} {hook.place}")
        ours = hook.ours()
        owner, _, name = hook.path.rpartition(".")
        if hook.use in ("", "late"):
            assert list(inspect.signature(ours).parameters) == ["original"]
        else:  # it stands there by name, or for a constructor what is read of the object
            said = inspect.getsource(sys.modules[ours.__module__])
            assert any(word in said for word in ((*hook.parameters,) if name == "__init__" else (name, owner or name)))
    assert {hook.use for hook in contract.HOOKS} == {"", "late", "instance", "used"}
    assert {hook.process for hook in contract.HOOKS} == set(get_args(contract.Process))
    twice = Counter((hook.module, hook.path, hook.place) for hook in contract.HOOKS)
    assert max(twice.values()) == 1
    makers = {hook.place for hook in contract.HOOKS if hook.use in ("", "late")}
    rooms = {hook.place.partition(":")[0] for hook in contract.HOOKS}
    for room in rooms:
        for name, one in vars(sys.modules[f"saesteer.plugin.{room}"]).items():
            if inspect.isfunction(one) and list(inspect.signature(one).parameters) == ["original"]:
                assert f"{one.__module__.removeprefix('saesteer.plugin.')}:{name}" in makers, f"{name} is put nowhere"


def test_the_rows_are_put_in_place_once() -> None:
    for _ in range(2):
        plugin.register()
        configured.configure()
        contract.install("every")
    rows = [*contract.check("stock"), *contract.check("every")]
    wraps = Counter((hook.module, hook.path) for hook in rows if hook.use in ("", "late"))
    assert len(wraps) > 15
    for hook in rows:
        found: Any = hook.find()
        depth = 0
        while getattr(found, "__globals__", {}).get("__name__", "").startswith("saesteer.plugin."):
            found, depth = found.__wrapped__, depth + 1
        assert depth == wraps[hook.module, hook.path], hook.path


def test_a_missing_hook_is_named_with_the_version() -> None:
    gone = contract.Hook("every", "vllm.config", "VllmConfig.compute_hush", (), "", "", "nothing")
    with pytest.raises(UnsupportedError, match=rf"vLLM {contract.vllm_version()}.*compute_hush".replace("+", r"\+")):
        gone.find()


def test_a_changed_signature_is_named() -> None:
    changed = contract.Hook(
        "worker", "vllm.v1.worker.gpu_model_runner", "GPUModelRunner._update_states", ("batch",), "instance", "", "V1"
    )
    with pytest.raises(UnsupportedError, match=r"_update_states\(scheduler_output"):
        changed.find()


def test_an_unknown_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "vllm_version", lambda: "0.40.1")
    with pytest.raises(UnsupportedError, match=r"0\.40\.1"):
        contract.check("every")


class _Config:
    """The two attributes of a VllmConfig that compute_hash's wrap reads; a stand-in, since a real one needs a model."""

    def __init__(self, additional: Any) -> None:
        self.additional_config = additional


def _hash(additional: Any) -> str:
    return str(_salting_compile_cache(lambda self: "0123456789")(_Config(additional)))


def test_the_compile_cache_key_changes_with_the_plugin_and_with_every_change_of_sites(tmp_path: Any) -> None:
    own.write(tmp_path / "a.safetensors", conftest.random_coder("relu", 0))
    place = f"{tmp_path}/a.safetensors"
    configs = [
        {},
        {"saesteer": {}},
        {"saesteer": {"sites": ["resid_post.3"]}},
        {"saesteer": {"sites": ["resid_post.3", "resid_post.4"]}},
        {"saesteer": {"dictionaries": {"a": f"{place}@resid_post.3"}}},
        {"saesteer": {"dictionaries": {"a": f"{place}@resid_mid.3"}}},
        {"saesteer": {"dictionaries": {"b": f"{place}@resid_mid.3"}}},
    ]
    keys = [_hash(config) for config in configs]
    assert keys[0] == "0123456789", "without saesteer's configuration the key is stock's"
    assert len(set(keys)) == len(keys)
    assert keys == [_hash(config) for config in configs]


def test_a_worker_that_disagrees_is_refused() -> None:
    from saesteer.config.assets import Assets
    from saesteer.config.config import SaesteerConfig

    assets = Assets.open(SaesteerConfig())
    frontend._agree(assets, [{"version": __version__, "fingerprint": fingerprint(assets)}])
    with pytest.raises(ConfigError, match="another saesteer"):
        frontend._agree(assets, [{"version": "0.0.0", "fingerprint": ""}])


def test_a_disabled_server_refuses_instead_of_ignoring(monkeypatch: pytest.MonkeyPatch) -> None:
    config = _Config({"saesteer": {"sites": ["resid_post.3"]}})
    assert assets_of(config) is not None
    monkeypatch.setenv("SAESTEER_DISABLE", "1")
    assert assets_of(config) is None, "without a catalog every spec is refused, see above"


def test_a_worker_imports_nothing_of_the_front_end() -> None:
    code = """
import sys
from saesteer.plugin import register
register()
import saesteer.plugin.worker.worker
from vllm.config import VllmConfig
VllmConfig().compute_hash()
wings = "client", "labels", "workbench", "bridges"
front = *("plugin." + one for one in ("http", "door")), *("plugin.results." + one for one in ("report", "kept"))
print([name for name in sys.modules if name.startswith(tuple("saesteer." + one for one in (*wings, *front)))])
"""
    environment = {**os.environ, configured.ENV: "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stdout + done.stderr[-2000:]
