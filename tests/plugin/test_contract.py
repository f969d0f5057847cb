"""Every hook point of the installed vLLM is what saesteer counts on, and a changed one is a refusal that names it."""

from typing import Any, ClassVar

import pytest

from saesteer import __version__
from saesteer.errors import ConfigError, UnsupportedError
from saesteer.loaders.formats import own
from tests.plugin import conftest

pytest.importorskip("vllm", reason="vLLM is not installed")

from saesteer.plugin import contract  # needs vLLM
from saesteer.plugin.door import admission, frontend


@pytest.mark.parametrize("place", ["", "worker", "server", "offline"])
def test_the_installed_vllm_keeps_the_contract(place: str) -> None:
    contract.check_contract(**({place: True} if place else {}))


def test_a_missing_hook_is_named_with_the_version() -> None:
    gone = contract.Hook("vllm.config", "VllmConfig.compute_hush", (), "nothing")
    with pytest.raises(UnsupportedError, match=rf"vLLM {contract.vllm_version()}.*compute_hush".replace("+", r"\+")):
        gone.find()


def test_a_changed_signature_is_named() -> None:
    changed = contract.Hook("vllm.v1.worker.gpu_model_runner", "GPUModelRunner._update_states", ("batch",), "V1")
    with pytest.raises(UnsupportedError, match=r"_update_states\(scheduler_output"):
        changed.find()


def test_an_unknown_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "vllm_version", lambda: "0.40.1")
    with pytest.raises(UnsupportedError, match=r"0\.40\.1"):
        contract.check_contract(worker=False)


class _Config:
    """The two attributes of a VllmConfig that compute_hash's wrap reads; a stand-in, since a real one needs a model."""

    def __init__(self, additional: Any) -> None:
        self.additional_config = additional


def _hash(additional: Any) -> str:
    return str(frontend._salting_compile_cache(lambda self: "0123456789")(_Config(additional)))


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


def test_a_spec_on_a_server_without_dictionaries_is_refused() -> None:
    from saesteer.errors import SpecError
    from saesteer.language.spec import from_json

    with pytest.raises(SpecError, match="started without"):
        admission.admit(from_json({"edits": []}), None, "", object())


def test_a_worker_that_disagrees_is_refused() -> None:
    from saesteer.config.config import SaesteerConfig

    config = SaesteerConfig()
    frontend._agree(config, [{"version": __version__, "fingerprint": frontend.fingerprint(config)}])
    with pytest.raises(ConfigError, match="another saesteer"):
        frontend._agree(config, [{"version": "0.0.0", "fingerprint": ""}])


def test_a_disabled_server_refuses_instead_of_ignoring(monkeypatch: pytest.MonkeyPatch) -> None:
    config = _Config({"saesteer": {"sites": ["resid_post.3"]}})
    assert frontend.config_of(config) is not None
    monkeypatch.setenv("SAESTEER_DISABLE", "1")
    assert frontend.config_of(config) is None, "without a catalog every spec is refused, see above"


def test_an_op_that_never_ran_is_a_failed_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stale graph's guard, with stand-ins for the runner and the engine: a real stale graph is in test_compiled."""
    import torch

    from saesteer.kernels import ops
    from saesteer.plugin.worker.worker import _check_hits

    class _Site:
        index = torch.zeros(1, dtype=torch.int32)

    class _Engine:
        sites: ClassVar = {"resid_post.3": _Site()}
        published = torch.zeros(1, dtype=torch.int32)

    class _Runner:
        def _dummy_run(self, tokens: int) -> None:
            assert tokens == 1

    engine: Any = _Engine()
    monkeypatch.setattr(ops, "hits", {})
    with pytest.raises(ConfigError, match=r"never ran at resid_post\.3, the end of a step"):
        _check_hits(_Runner(), engine)
    monkeypatch.setattr(ops, "hits", {_Site.index.data_ptr(): 1})
    with pytest.raises(ConfigError, match="never ran at the end of a step"):
        _check_hits(_Runner(), engine)
    monkeypatch.setattr(ops, "hits", {_Site.index.data_ptr(): 1, engine.published.data_ptr(): 1})
    _check_hits(_Runner(), engine)
