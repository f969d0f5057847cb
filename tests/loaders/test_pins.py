"""A dictionary that is pinned stays what it was: a revision of the hub in its place, a version in the settings."""

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from saesteer.config.assets import Assets
from saesteer.config.config import SaesteerConfig
from saesteer.config.settings import read_settings
from saesteer.errors import ConfigError, LoadError
from saesteer.loaders import describe, hub, is_as_loaded, load, neuronpedia
from saesteer.loaders.neuronpedia import Source
from saesteer.workbench.inspect import report
from tests.loaders import writers
from tests.loaders.hub import FakeHub
from tests.loaders.sets import opened, scope

INSIDE = "layer_3/width_16k/average_l0_63"
PLACE = f"google/gemma-scope-2b-pt-res/{INSIDE}"


@pytest.fixture
def revisions(fake_hub: FakeHub) -> FakeHub:
    """A repository whose default branch has come to hold other weights than its tag."""
    writers.gemma_scope(fake_hub.folder("google/gemma-scope-2b-pt-res") / INSIDE, writers.raw(seed=2))
    writers.gemma_scope(fake_hub.folder("google/gemma-scope-2b-pt-res", "v1") / INSIDE, writers.raw(seed=1))
    return fake_hub


def test_a_revision_is_what_is_loaded(revisions: FakeHub) -> None:
    pinned, moving = describe(f"{PLACE}@@v1"), describe(PLACE)
    assert pinned.fingerprint != moving.fingerprint and pinned.source == f"{PLACE}@@v1"
    assert is_as_loaded(load(f"{PLACE}@@v1").info)
    with pytest.raises(LoadError, match="google/gemma-scope-2b-pt-res"):
        describe(f"{PLACE}@@v9")


@pytest.mark.parametrize("text", ["{}@@v1", "{}@@v1@resid_post.3", "rows:{}@@v1", "rows:{}@@v1@resid_post.3"])
def test_a_revision_stands_before_the_site(revisions: FakeHub, text: str) -> None:
    config = read_settings([f"gs={text.format(PLACE)}"])
    [source] = config.dictionaries.values()
    assert (source.path, source.rows) == (f"{PLACE}@@v1", text.startswith("rows:"))
    assert source.site == ("resid_post.3" if text.endswith("resid_post.3") else None)
    assert SaesteerConfig.from_json(config.to_json()) == config
    info = Assets.open(config).infos["gs"]
    assert info.site_in == "resid_post.3"
    assert info.by_rows or info.fingerprint == describe(f"{PLACE}@@v1").fingerprint


def test_a_revision_in_the_settings(revisions: FakeHub) -> None:
    given = {"dictionaries": {"gs": {"path": PLACE, "revision": "v1", "site": "resid_post.3"}}}
    config = SaesteerConfig.from_json(given)
    assert config.dictionaries["gs"].path == f"{PLACE}@@v1"
    assert Assets.open(config).infos["gs"].fingerprint == describe(f"{PLACE}@@v1").fingerprint


def test_sets_and_names_of_neuronpedia_are_pinned(fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    made = scope(fake_hub.root / "google", 3, 7)
    made.rename(fake_hub.folder("google/gemma-scope-2b-pt-res", "v1"))
    assets = opened("google/gemma-scope-2b-pt-res/layer_*/width_16k/*@@v1@7,3")
    assert [info.site_in for info in assets.infos.values()] == ["resid_post.3", "resid_post.7"]
    assert len(opened("google/gemma-scope-2b-pt-res@@v1").infos) == 2
    with pytest.raises(LoadError):
        opened("google/gemma-scope-2b-pt-res")
    rows = {"m/s": Source(PLACE, "m", "resid_mid.2")}
    monkeypatch.setattr(neuronpedia, "_table", lambda: rows)
    config = read_settings(["np:m/s@@v1"])
    assert [*config.dictionaries] == ["np:m/s"] and config.dictionaries["np:m/s"].path == "np:m/s@@v1"
    assert Assets.open(config).infos["np:m/s"].fingerprint == describe(f"{PLACE}@@v1").fingerprint


def test_a_version_must_be_the_dictionarys(tmp_path: Path) -> None:
    file = writers.own(tmp_path / "x.safetensors", writers.own_tensors(writers.raw()))
    other = describe(file).fingerprint

    def opened_with(version: str, path: str = str(file), **more: Any) -> Assets:
        one = {"path": path, "version": version, "site": "resid_post.3", **more}
        return Assets.open(SaesteerConfig.from_json({"dictionaries": {"gs": one}}))

    for rows in (False, True):
        for version in (other, other[:16], other[:8]):
            assert opened_with(version, rows=rows).infos
        words = rf"dictionary 'gs' has the version {other[:16]}, expected 0123456789abcdef"
        with pytest.raises(ConfigError, match=words):
            opened_with("0123456789abcdef", rows=rows)
    wrong: Any
    for wrong in ("", 12345678):
        with pytest.raises(ConfigError, match=r"gs\.version: got .*, expected"):
            opened_with(wrong)
    scope(tmp_path / "set", 3, 7)
    with pytest.raises(ConfigError, match=r"dictionary 'gs.*3' has the version \w{16}, expected"):
        opened_with(other, str(tmp_path / "set"), site=None)


@pytest.mark.parametrize(
    "name",
    [
        "../../out/params.npz",
        "layer_3/../../../out/params.npz",
        "/tmp/out/params.npz",
        "..\\out\\params.npz",
        "C:/out/params.npz",
        "layer_3/..",
        "layer_3/params.npz\0",
    ],
)
def test_a_name_from_the_hub_leads_nowhere_else(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mirror, or a proxy in between, may list what it likes; nothing is fetched then."""
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda _: ["layer_3/params.npz", name])
    monkeypatch.setattr(hub, "_copy", lambda *_: pytest.fail("something was fetched"))
    with pytest.raises(LoadError, match=r"the hub lists .*; expected names of files inside the repository") as caught:
        report("org/repo")
    assert repr(name) in str(caught.value)
    with pytest.raises(LoadError, match="the hub lists"):
        hub.Headers(str(tmp_path)).get("org/repo/layer_3")
