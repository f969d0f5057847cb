"""Neuronpedia's export: units, what is left out, and that a broken line is refused by file and number."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from saesteer.errors import LoadError
from saesteer.labels import neuronpedia
from saesteer.labels.neuronpedia import Export
from saesteer.labels.store import Entry

FEATURES: list[dict[str, Any]] = [
    {"modelId": "m", "layer": "3-res", "index": "0", "maxActApprox": 6.0, "frac_nonzero": 0.25, "pos_str": [" a", "b"]},
    {"index": 2, "maxActApprox": 0, "frac_nonzero": 0, "pos_str": None, "neg_str": ["x"], "unknown": {"a": [1]}},
]
EXPLANATIONS: list[dict[str, Any]] = [
    {"index": "2", "description": "bridges", "explanationModelName": "gpt-x", "typeName": "oai_token-act-pair"},
    {"index": "2", "description": "a second opinion"},
    {"index": 3, "description": "only explained"},
    {"index": 1, "description": None},
]


def export(folder: Path, features: Any = FEATURES, explanations: Any = EXPLANATIONS) -> Path:
    for name, lines in (("features", features), ("explanations", explanations)):
        if lines is not None:
            (folder / name).mkdir(exist_ok=True)
            text = "".join(f"{one if isinstance(one, str) else json.dumps(one)}\n" for one in lines)
            (folder / name / "batch-0.jsonl.gz").write_bytes(gzip.compress(text.encode("utf-8", "surrogatepass")))
    return folder


def read(folder: Path, features: int = 4, length: float | None = 3.0) -> list[Entry]:
    return list(Export(folder).entries(features, lambda feature: length))


def test_what_it_says(tmp_path: Path) -> None:
    """maxActApprox was measured on decoder rows of length 1, so it is divided by the length that they have."""
    found = Export(export(tmp_path))
    entries = list(found.entries(4, {0: 3.0, 2: 2.0, 3: 1.0}.get))
    assert entries == [
        Entry(0, max_act=2.0, density=0.25, promotes=(" a", "b")),
        Entry(2, "bridges", "gpt-x", 0.0, 0.0, (), ("x",)),
        Entry(3, "only explained", "neuronpedia"),
    ]
    assert (found.address, found.mismeasured) == ("m/3-res", False)


def test_features_that_the_dictionary_does_not_hold_are_left_out(tmp_path: Path) -> None:
    assert [one.feature for one in Export(export(tmp_path)).entries(4, {0: 1.0}.get)] == [0]


def test_a_dashboard_that_read_another_tensor_gives_no_max_act(tmp_path: Path) -> None:
    line = {"modelId": "gemma-2-2b", "layer": "0-gemmascope-transcoder-16k", "index": "0", "maxActApprox": 600.0}
    found = Export(export(tmp_path, [line]))
    assert next(one.max_act for one in found.entries(4, lambda feature: 1.0)) is None
    assert found.mismeasured


WRONG: list[tuple[str, str]] = [
    ("{", "is no JSON"),
    ("[]", "holds a JSON list; expected an object"),
    ("[" * 100_000, "is no JSON"),
    ('{"index": 1e400}', "expected a feature, 0 to 3"),
    ("{}", "index: 'None'; expected a feature, 0 to 3"),
    ('{"index": 4}', "index: '4'; expected a feature, 0 to 3"),
    ('{"index": -1}', "expected a feature"),
    ('{"index": true}', "expected a feature"),
    ('{"index": "٣"}', "expected a feature"),
    ('{"index": "0"}', "expected each feature once"),
    ('{"index": 1, "maxActApprox": -1}', "maxActApprox: '-1'; expected a number, 0 or more"),
    ('{"index": 1, "maxActApprox": NaN}', "maxActApprox: 'nan'; expected a number, 0 or more"),
    ('{"index": 1, "maxActApprox": Infinity}', "expected a number, 0 or more"),
    ('{"index": 1, "maxActApprox": "6"}', "expected a number, 0 or more"),
    ('{"index": 1, "frac_nonzero": 1.5}', "frac_nonzero: '1.5'; expected a fraction, 0 to 1"),
    ('{"index": 1, "pos_str": "a"}', "pos_str: 'a'; expected a list of texts"),
    ('{"index": 1, "pos_str": [1]}', "expected a list of texts"),
    ('{"index": 1, "pos_str": ["\\ud800"]}', "expected a list of texts"),
    (json.dumps({"index": 1, "neg_str": ["a" * 257]}), "expected a list of texts of 256 characters"),
    ('{"index": 1, "modelId": "m", "layer": "4-res"}', "layer: '4-res'; expected one source in a folder, here m/3-res"),
    ('{"index": 1, "modelId": 7}', "expected a text"),
    (json.dumps({"index": 1, "more": "a" * neuronpedia.MAX_LINE}), "too long; expected lines of 1048576 bytes"),
]


@pytest.mark.parametrize(("line", "told"), WRONG, ids=range(len(WRONG)))
def test_a_broken_line_is_refused_by_number(tmp_path: Path, line: str, told: str) -> None:
    with pytest.raises(LoadError) as caught:
        read(export(tmp_path, [FEATURES[0], "", line]))
    assert str(caught.value).startswith(f"{tmp_path}/features/batch-0.jsonl.gz, line 3: ")
    assert told in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize("text", [7, "a" * 4097, "a\0b", "\udfff"], ids=repr)
def test_a_broken_explanation_is_refused(tmp_path: Path, text: Any) -> None:
    line = json.dumps({"index": 1, "description": text})
    with pytest.raises(LoadError, match=r"line 1: description: .*expected a text of 4096 characters at most"):
        read(export(tmp_path, FEATURES, [line]))


def test_files_that_are_no_gzip_or_too_large_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = export(tmp_path) / "features" / "batch-0.jsonl.gz"
    whole = file.read_bytes()
    for broken in (b"features", whole[:-9], whole[:20] + b"\xff" * 20 + whole[40:]):
        file.write_bytes(broken)
        with pytest.raises(LoadError, match=r"batch-0.jsonl.gz, line [0-9]+: "):
            read(tmp_path)
    # A few KB that would be 100 MB: reading ends at the bound.
    file.write_bytes(gzip.compress(b"\n" * 100_000_000))
    monkeypatch.setattr(neuronpedia, "MAX_FILE", 1_000)
    with pytest.raises(LoadError, match="line 1001: too long"):
        read(tmp_path)
    monkeypatch.setattr(neuronpedia, "MOST_FILES", 0)
    with pytest.raises(LoadError, match="1 files; expected 0 at most"):
        Export(tmp_path)
