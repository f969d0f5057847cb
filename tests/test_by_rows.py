"""Dictionaries that stay in their files: the same edits as with the whole, what is refused, and files that change."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from saesteer.config.assets import Assets
from saesteer.config.config import SaesteerConfig
from saesteer.dictionaries.coder import RANKED
from saesteer.engine.engine import Engine
from saesteer.errors import SpecError
from saesteer.language.spec import from_json
from saesteer.loaders.formats import own
from saesteer.plugin.door.admission import Door
from saesteer.plugin.door.rows import Fetching
from tests.rows import making
from tests.small_engine import forward, make_engine
from tests.small_world import CLAMP, CODERS, HEADS, KINDS, SITES, TOKENS, WIDTH, edits

# A module of the small world reconstructs by jump.
SERVED = [name for name, kind in KINDS.items() if kind[0] not in RANKED and name != "jump"]


def assets_of(folder: Path, **changes: Any) -> Assets:
    """The small world by rows, as far as it can be."""
    rows = {name: "rows:" if name in SERVED else "" for name in KINDS}
    places = {name: f"{rows[name]}{folder}/{name}.safetensors@{kind[3]}" for name, kind in KINDS.items()}
    return Assets.open(SaesteerConfig.from_json({"dictionaries": places, "sites": SITES, "inline_rows": 64, **changes}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("by-rows")


@pytest.fixture(scope="module")
def whole(folder: Path) -> Engine:
    return make_engine(folder, inline_rows=64)


@pytest.fixture(scope="module")
def by_rows(folder: Path, whole: Engine) -> Engine:
    dictionaries = assets_of(folder).config.to_json()["dictionaries"]
    return make_engine(folder, inline_rows=64, dictionaries=dictionaries)  # which writes the files again


@pytest.fixture(scope="module")
def assets(by_rows: Engine, folder: Path) -> Assets:
    return assets_of(folder)


@settings(
    max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_random_specs_do_the_same_as_with_the_whole(
    data: st.DataObject, whole: Engine, by_rows: Engine, assets: Assets
) -> None:
    asked = data.draw(st.lists(edits(), min_size=1, max_size=5))
    spec = {"edits": asked}
    prompt_len = data.draw(st.integers(1, TOKENS))
    x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    try:
        theirs = forward(whole, [spec], prompt_len, x)
    except SpecError:
        with pytest.raises(SpecError):
            forward(by_rows, [spec], prompt_len, x, making(assets))
        return
    if any(
        one["op"] == "reconstruct" and one["dictionary"] in SERVED and one["error"] == "drop" for one in spec["edits"]
    ):
        with pytest.raises(SpecError, match=r"without rows:, to reconstruct"):
            forward(by_rows, [spec], prompt_len, x, making(assets))
        return
    ours = forward(by_rows, [spec], prompt_len, x, making(assets))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


REFUSED: dict[str, tuple[dict[str, Any], list[Any], str, str, str]] = {
    "reconstruct": (
        {}, [{"op": "reconstruct", "dictionary": "rect"}], "saesteer.edits[0].dictionary", "not_served",
        "needs all of 'rect', of which this server reads only the rows of features; start it with --dictionary",
    ),
    "a full pool": (
        {"inline_rows": 1}, [CLAMP, {**CLAMP, "feature": 4}], "saesteer.edits[1].feature", "too_many",
        "is feature 2 that the request takes from files for resid_post.1, expected at most 1; the server takes more "
        "when started with a higher --inline-rows, or with the dictionary in memory",
    ),
    "a gate takes a slot": (
        {"inline_rows": 1}, [{**CLAMP, "when": {"dictionary": "ahead", "feature": 1, "above": 0}}],
        "saesteer.edits[0].feature", "too_many", "is feature 2 that",
    ),
    "an unknown feature": (
        {}, [{**CLAMP, "feature": 12}], "saesteer.edits[0].feature", "out_of_range", "dictionary 'rect', 0 to 11",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_rows_cannot_do_is_refused(name: str, folder: Path, by_rows: Engine) -> None:
    changes, wrong, field, code, words = REFUSED[name]
    assets = assets_of(folder, **changes)
    with pytest.raises(SpecError) as refused:
        Door("server", assets.config, Fetching(assets.rows, torch.float32)).meaning(
            from_json({"edits": wrong}), assets.catalog(width=WIDTH, layers=4, other_widths={"z": HEADS}), 4
        )
    assert (refused.value.field, refused.value.code) == (field, code)
    assert words in str(refused.value)


def test_the_same_row_is_read_once_and_a_changed_file_ends_its_requests(tmp_path: Path) -> None:
    file = tmp_path / "one.safetensors"
    own.write(file, CODERS["jump"])
    assets = assets_of(tmp_path, dictionaries={"rect": f"rows:{file}@resid_post.1"})
    catalog = assets.catalog(width=WIDTH, layers=4)
    fetching = Fetching(assets.rows, torch.float32)
    door, spec = Door("server", assets.config, fetching), from_json({"edits": [CLAMP]})
    fetching.prepare(spec, catalog)
    meaning = door.meaning(spec, catalog, 4)
    assert door.meaning(spec, catalog, 4) is meaning
    [[kind, digest, data]] = meaning.admitted["vectors"]
    numbers = np.frombuffer(data, np.float32)
    assert kind == "feature float32"
    expected = [CODERS["jump"].w_enc[3], CODERS["jump"].w_dec[3]]
    assert np.array_equal(numbers[1:].reshape(2, -1), torch.stack(expected).numpy())
    assert meaning.applied()[0]["version"].startswith(digest.hex()[:16])
    read, other = os.pread, from_json({"edits": [{**CLAMP, "value": 2}]})
    try:
        os.pread = None  # type: ignore[assignment]  # the row is known
        assert door.meaning(other, catalog, 4).admitted["vectors"] == meaning.admitted["vectors"]
    finally:
        os.pread = read
    os.utime(file, ns=(0, 0))
    for again in (spec, from_json({"edits": [{**CLAMP, "feature": 5}]}), from_json({"edits": [{**CLAMP, "value": 3}]})):
        with pytest.raises(SpecError, match=r"one\.safetensors: has changed since the server opened it") as refused:
            door.meaning(again, catalog, 4)
        assert (refused.value.field, refused.value.code) == ("saesteer.edits[0].dictionary", "unreadable")
    file.unlink()
    with pytest.raises(SpecError, match="cannot be read any more"):
        door.meaning(spec, catalog, 4)


def test_equal_rows_share_prefixes_only_if_they_read_alike(tmp_path: Path) -> None:
    """One file at two places of one op, and files that differ in nothing but their input norm."""
    own.write(tmp_path / "plain.safetensors", one := CODERS["rect"])
    own.write(tmp_path / "length.safetensors", replace(one, info=replace(one.info, in_norm="l2_sqrt_d")))
    across = {name: f"rows:{tmp_path}/plain.safetensors@{name}.1:mlp_out.1" for name in ("resid_mid", "mlp_in_pregain")}
    here = {name: f"rows:{tmp_path}/{name}.safetensors@resid_post.1" for name in ("plain", "length")}
    here["again"] = f"rows:{tmp_path}/plain.safetensors@resid_pre.2"
    assets = assets_of(tmp_path, dictionaries={**across, **here})
    door = Door("server", assets.config, Fetching(assets.rows, torch.float32))
    catalog = assets.catalog(width=WIDTH, layers=4)

    def keys(name: str) -> list[Any]:
        one, add = {"dictionary": name, "feature": 3}, {"op": "add", "vector": [1.0] * WIDTH, "site": "resid_post.2"}
        edits: list[Any] = [{"op": "clamp", "value": 1.5, **one}, {**add, "when": {**one, "above": 1.0}}]
        edits.append({**add, "scale": one})
        return [door.meaning(from_json({"edits": [edit]}), catalog, 4).runs for edit in edits]

    assert keys("plain") == keys("again")
    for first, second in (("plain", "length"), ("resid_mid", "mlp_in_pregain")):
        assert all(one != other for one, other in zip(keys(first), keys(second), strict=True))
