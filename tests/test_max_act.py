"""``max_act`` is one number: what the unit multiplies by is what answers report, whatever the labels saw."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from saesteer.config.assets import Assets
from saesteer.config.config import SaesteerConfig
from saesteer.dictionaries.coder import SparseCoder
from saesteer.errors import LoadError
from saesteer.language.spec import from_json
from saesteer.loaders import alone, describe, largest, load, max_act
from saesteer.loaders.formats import own
from saesteer.planning.applied import applied
from saesteer.planning.planner import plan
from tests.plugin.conftest import random_coder

WIDTH, P = 64, 9


def coder(**changes: Any) -> SparseCoder:
    made = random_coder("relu", 0, width=WIDTH)
    return replace(made, info=replace(made.info, **changes))


def written(path: Path, by: str) -> Path:
    """A dictionary whose maximum activations come from one place, where others have other values."""
    made = coder()
    assert made.max_act is not None
    if by == "file":
        own.write(path, made)
        max_act.write(path, alone(path), made.max_act + 1, tokens=1, by=max_act.LABELS)
    elif by == "calibration":
        own.write(path, made)
        max_act.write(path, alone(path), made.max_act + 2, tokens=1)
    else:
        own.write(path, replace(made, max_act=None, info=replace(made.info, has_max_act=False)))
        max_act.write(path, alone(path), made.max_act + 3, tokens=1, by=max_act.LABELS, gaps=(5, 7))
    return path


@pytest.mark.parametrize(("by", "more"), [("file", 0), ("calibration", 2), ("labels", 3)])
def test_the_number_of_a_feature_is_that_of_the_dictionary_that_is_loaded(tmp_path: Path, by: str, more: int) -> None:
    place = written(tmp_path / "d.safetensors", by)
    info, values = describe(place), load(place).max_act
    assert values is not None and info.max_act_from == by
    torch.testing.assert_close(values, coder().max_act + more)  # type: ignore[operator]
    found = [largest(info, feature) for feature in range(info.features)]
    gaps = (5, 6) if by == "labels" else ()
    assert found == [None if n in gaps else value for n, value in enumerate(values.tolist())]
    assert largest(info, info.features) is None


def test_a_dictionary_without_them_has_none_and_stale_ones_are_refused(tmp_path: Path) -> None:
    bare = replace(coder(), max_act=None, info=replace(coder().info, has_max_act=False))
    own.write(tmp_path / "bare.safetensors", bare)
    assert largest(describe(tmp_path / "bare.safetensors"), 1) is None
    place = written(tmp_path / "d.safetensors", "calibration")
    info = describe(place)
    own.write(place, replace(coder(), b_dec=coder().b_dec + 1, w_enc=coder().w_enc * 2))
    with pytest.raises(LoadError, match="measured on other weights"):
        largest(info, 1)


def test_features_of_a_part_of_a_dictionary_are_found_by_their_own_index(tmp_path: Path) -> None:
    made = coder()
    ids = tuple(3 * n + 1 for n in range(made.info.features))
    own.write(
        tmp_path / "d.safetensors", replace(made, info=replace(made.info, feature_ids=ids, can_reconstruct=False))
    )
    info = describe(tmp_path / "d.safetensors")
    assert made.max_act is not None
    assert (largest(info, 7), largest(info, 2)) == (made.max_act[2].item(), None)


def told(tmp_path: Path, *edits: Any) -> list[dict[str, Any]]:
    """What an answer reports of the values of edits, by rows and from memory alike."""
    found = []
    for rows in ("", "rows:"):
        raw: Any = {
            "inline_rows": 8,
            "dictionaries": {"d": f"{rows}{tmp_path}/d.safetensors@resid_post.2"},
            "sites": ["resid_post.2"],
        }
        assets = Assets.open(SaesteerConfig.from_json(raw))
        catalog = assets.catalog(width=WIDTH, layers=4)
        planned = plan(from_json({"edits": list(edits)}), catalog, P)
        if rows:
            targets = [change.target for group in planned.groups for change in group.changes]
            taken = {one: assets.rows.row(one.dictionary, one.feature, torch.float32) for one in targets}  # type: ignore
            catalog = replace(catalog, rows=taken)  # type: ignore[arg-type]
        words = "edit", "feature", "mode", "value", "unit", "times_max_act", "max_act", "max_act_by"
        found.append([{word: one[word] for word in words if word in one} for one in applied(planned, catalog)])
    assert found[0] == found[1]
    return found[0]


def clamp(feature: int, value: Any, **more: Any) -> dict[str, Any]:
    return {"op": "clamp", "dictionary": "d", "feature": feature, "value": value, **more}


def test_an_answer_reports_the_value_of_each_clamp_in_both_units(tmp_path: Path) -> None:
    written(tmp_path / "d.safetensors", "calibration")
    values = load(tmp_path / "d.safetensors").max_act
    assert values is not None
    one, two, three, four, five = (values[n].item() for n in range(1, 6))
    gate = {"dictionary": "d", "feature": 9, "above": 0.5}
    by = {"max_act_by": "calibration"}
    assert told(
        tmp_path,
        clamp(1, 2.0, unit="max_act"),
        clamp(2, 3.0, mode="add"),
        clamp(3, 0.5, mode="scale"),
        clamp(4, 0.5, mode="min"),
        clamp(4, 1.5, mode="max"),
        clamp(5, 2.0, mode="max", when=gate, scope={"positions": [[20, None]]}),
    ) == [
        {"edit": "saesteer.edits[0]", "feature": 1, "mode": "set", "value": 2.0, "unit": "max_act",
         "times_max_act": 2.0, "max_act": one, **by},
        {"edit": "saesteer.edits[1]", "feature": 2, "mode": "add", "value": 3.0, "unit": "raw",
         "times_max_act": 3.0 / two, "max_act": two, **by},
        {"edit": "saesteer.edits[2]", "feature": 3, "mode": "scale", "value": 0.5, "unit": "raw",
         "max_act": three, **by},
        {"edit": "saesteer.edits[3]", "feature": 4, "mode": "band", "value": [0.5, 1.5], "unit": "raw",
         "times_max_act": [0.5 / four, 1.5 / four], "max_act": four, **by},
        {"edit": "saesteer.edits[5]", "feature": 5, "mode": "max", "value": 2.0, "unit": "raw",
         "times_max_act": 2.0 / five, "max_act": five, **by},
    ]  # fmt: skip
