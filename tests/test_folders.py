"""Dictionaries below --dictionary-folder: their names, sets among them, what is refused; opened when asked for."""

from pathlib import Path
from typing import Any

import pytest
import torch

from saesteer.config import row_store
from saesteer.config.assets import Assets
from saesteer.config.config import SaesteerConfig
from saesteer.engine.engine import Engine
from saesteer.errors import ConfigError, LoadError, SpecError
from saesteer.language.spec import from_json
from saesteer.loaders.folder import sets_in
from saesteer.loaders.formats import own
from saesteer.loaders.rows import open_rows
from saesteer.plugin.door.admission import Door
from saesteer.plugin.door.rows import Fetching
from tests.loaders import writers
from tests.rows import making
from tests.small_engine import forward
from tests.small_world import CLAMP, CODERS, HEADS, SITES, TOKENS, WIDTH


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A folder of dictionaries of several formats; one is of another width, and one file is broken."""
    (tmp_path / "a").mkdir()
    own.write(tmp_path / "a" / "first.safetensors", CODERS["jump"])
    wide = writers.raw(d_in=WIDTH, d_out=WIDTH)
    writers.gemma_scope(tmp_path / "gemma-scope-2b-pt-res" / "layer_1" / "width_16k" / "average_l0_7", wide)
    writers.gemma_scope(tmp_path / "gemma-scope-2b-pt-res" / "layer_3" / "width_16k" / "average_l0_7", wide)
    narrow = writers.raw(d_in=12, d_out=12)
    writers.gemma_scope(tmp_path / "narrow" / "gemma-scope-2b-pt-res" / "layer_1" / "w" / "l", narrow)
    own.write(tmp_path / "top.safetensors", CODERS["top"])
    (tmp_path / "broken.safetensors").write_bytes(b"no")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "params.npz").write_bytes(b"no")
    return tmp_path


NAMES = [
    "broken.safetensors",
    "top.safetensors",
    "a/first.safetensors",
    "gemma-scope-2b-pt-res/layer_1/width_16k/average_l0_7",
    "gemma-scope-2b-pt-res/layer_3/width_16k/average_l0_7",
    "narrow/gemma-scope-2b-pt-res/layer_1/w/l",
]


FROM_FOLDER: dict[str, tuple[str, str, str, str]] = {
    "no op there": (NAMES[4], "dictionary", "not_served", "start it with --sites resid_post.3 to have one there"),
    "no site": (NAMES[2], "dictionary", "not_served", "do not say where they belong"),
    "broken": (NAMES[0], "dictionary", "not_served", "cannot be opened: "),
    "ranked": (f"{NAMES[1]}@resid_post.1", "dictionary", "not_served", "uses topk, which ranks all features"),
    "another width": (NAMES[5], "dictionary", "conflict", "is 12 wide, expected 24, the width of this model"),
    "unknown": ("a/firts.safetensors", "dictionary", "unknown_name", "did you mean 'a/first.safetensors'?"),
    "outside": ("../top.safetensors", "dictionary", "unknown_name", "expected one of"),
}


@pytest.mark.parametrize("name", FROM_FOLDER)
def test_what_a_folder_cannot_serve_is_refused(name: str, tree: Path) -> None:
    called, part, code, words = FROM_FOLDER[name]
    assets = Assets.open(SaesteerConfig.from_json({"dictionary_folder": str(tree), "sites": ["resid_post.1"]}))
    door = Door("server", assets.config, Fetching(assets.rows, torch.float32))
    with pytest.raises(SpecError) as refused:
        door.meaning(from_json({"edits": [{**CLAMP, "dictionary": called}]}), assets.catalog(width=WIDTH, layers=4), 4)
    assert (refused.value.field, refused.value.code) == (f"saesteer.edits[0].{part}", code)
    assert words in str(refused.value)
    assert str(tree) not in str(refused.value)


@pytest.mark.parametrize("called", [NAMES[3], f"{NAMES[2]}@resid_post.1"])
def test_a_dictionary_of_a_folder_does_the_same_as_in_memory(called: str, tree: Path) -> None:
    place, _, _ = called.partition("@")
    size: dict[str, Any] = {"width": WIDTH, "other_widths": {"z": HEADS}, "layers": 4, "max_rows": 4, "max_tokens": 64}
    alone = {"sites": SITES, "dictionaries": {"it": f"{tree}/{place}@resid_post.1"}}
    below = Assets.open(SaesteerConfig.from_json({"sites": SITES, "dictionary_folder": str(tree)}))
    engines = [
        Engine(one, dtype=torch.float32, device=torch.device("cpu"), **size)
        for one in (Assets.open(SaesteerConfig.from_json(alone)), below)
    ]
    x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(4))
    specs = [{"edits": [{**CLAMP, "dictionary": name, "value": 4.0}]} for name in ("it", called)]
    theirs = forward(engines[0], [specs[0]], 4, x)
    assert not torch.equal(theirs, forward(engines[0], [None], 4, x))
    torch.testing.assert_close(forward(engines[1], [specs[1]], 4, x, making(below)), theirs, rtol=1e-6, atol=1e-6)


SET = "gemma-scope-2b-pt-res"


def test_folders_with_a_dictionary_for_each_layer_are_sets() -> None:
    assert sets_in(NAMES) == {SET: {1: NAMES[3], 3: NAMES[4]}}
    nested = ["all/mlp/layer_0/p", "all/mlp/layer_10/p", "all/res/layer_0/p", "all/res/layer_2/p", "all/res/notes.pt"]
    found = {"all/mlp": {0: nested[0], 10: nested[1]}, "all/res": {0: nested[2], 2: nested[3]}}
    assert sets_in(nested) == found
    across = [
        "clt/W_dec_0.safetensors",
        "clt/W_dec_1.safetensors",
        "clt/W_enc_0.safetensors",
        "clt/W_enc_1.safetensors",
    ]
    assert sets_in(across) == {"clt": {0: across[2], 1: across[3]}}
    two_of_a_layer = ["s/layer_1/w_16k", "s/layer_1/w_64k", "s/layer_2/w_16k"]
    assert not sets_in([*two_of_a_layer, "alone/layer_1/x", "layer_7/x.pt", "layer_8/x.pt", "k/a.pt", "k/b.pt"])
    assert not sets_in(["s", "s/layer_1", "s/layer_2"]), "the folder is a dictionary itself"


OF_A_SET: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "no layer": ({}, "layer", "missing_field", "expected one of 1, 3"),
    "another layer": (
        {"layer": 2},
        "layer",
        "out_of_range",
        "got 2, expected a layer of 'gemma-scope-2b-pt-res': 1, 3",
    ),
    "its key": ({"dictionary": f"{SET}@1"}, "dictionary", "unknown_name", f"did you mean '{SET}'?"),
    "nearly": ({"dictionary": f"{SET[:-1]}"}, "dictionary", "unknown_name", f"did you mean '{SET}'?"),
}


@pytest.mark.parametrize("name", OF_A_SET)
def test_what_a_set_below_a_folder_does_not_have_is_refused(name: str, tree: Path) -> None:
    given, part, code, words = OF_A_SET[name]
    assets = Assets.open(SaesteerConfig.from_json({"dictionary_folder": str(tree), "sites": ["resid_post.1"]}))
    spec = from_json({"edits": [{**CLAMP, "dictionary": SET, **given}]})
    with pytest.raises(SpecError) as refused:
        Door("server", assets.config).meaning(spec, assets.catalog(width=WIDTH, layers=4), 4)
    assert (refused.value.field, refused.value.code) == (f"saesteer.edits[0].{part}", code)
    assert words in str(refused.value)


def test_clients_cannot_keep_everything_open(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_store, "OPENED", 2)
    own_one = {"it": f"rows:{tree}/{NAMES[2]}@resid_post.1"}
    told = {"dictionary_folder": str(tree), "dictionaries": own_one}
    store = Assets.open(SaesteerConfig.from_json(told)).rows
    first = store["it"]
    for layer in range(9):
        assert store[f"{NAMES[2]}@resid_post.{layer}"].site_in == f"resid_post.{layer}"
    assert list(store._opened) == ["it", f"{NAMES[2]}@resid_post.7", f"{NAMES[2]}@resid_post.8"]
    assert store["it"] is first


def test_what_cannot_be_opened_is_not_opened_again_until_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of the folder, a folder below it, and one that has no site here; the route lists them for any client."""
    broken = [tmp_path / "a.safetensors", tmp_path / "b" / "params.npz"]
    for path in broken:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"no dictionary")
    writers.gemma_scope(tmp_path / "unsaid", writers.raw(d_in=WIDTH, d_out=WIDTH))
    store = Assets.open(SaesteerConfig.from_json({"dictionary_folder": str(tmp_path)})).rows
    opened: list[str] = []

    def counted(place: Any, **more: Any) -> Any:
        opened.append(Path(place).name)
        return open_rows(place, **more)

    monkeypatch.setattr("saesteer.config.row_store.open_rows", counted)

    def listing() -> tuple[list[str], list[str]]:
        opened.clear()
        said = []
        for name in sorted(store):
            with pytest.raises((ConfigError, LoadError)) as refused:
                store[name]
            said.append(f"{type(refused.value).__name__}: {refused.value}")
        return sorted(opened), said

    names, said = listing()
    assert names == ["a.safetensors", "b", "unsaid"]
    for _ in range(2):
        assert listing() == ([], said)
    writers.gemma_scope(tmp_path / "b", writers.raw(d_in=WIDTH, d_out=WIDTH))
    assert listing()[0] == ["b"]
    (tmp_path / "a.safetensors").write_bytes(b"another")
    assert listing()[0] == ["a.safetensors"]
    (tmp_path / "a.json").touch()
    assert listing()[0] == ["a.safetensors"], "a file beside it may say what it lacked"
    assert listing()[0] == []
