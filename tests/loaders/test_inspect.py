"""What `saesteer inspect` says of a file, held against what plans and configs do with the same dictionary."""

import json
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from saesteer.config.assets import Assets
from saesteer.config.config import SaesteerConfig
from saesteer.dictionaries.coder import RANKED, Activation, InNorm
from saesteer.errors import ConfigError, LoadError, SpecError
from saesteer.language.spec import from_json
from saesteer.loaders import load
from saesteer.loaders.formats import own
from saesteer.planning.planner import plan
from saesteer.workbench.inspect import report
from tests.loaders import writers
from tests.loaders.case import Case, Told
from tests.loaders.every import CASES, DESCRIBED, SAMPLES, every_case

ACTIVATIONS = get_args(Activation)
CLAMP = {"op": "clamp", "dictionary": "d", "feature": 2, "value": 1.0}
ADD = {"op": "add", "vector": [1.0] * writers.D, "site": "resid_post.3"}
DROP = {"op": "reconstruct", "dictionary": "d"}
KEEP = {"op": "reconstruct", "dictionary": "d", "error": "keep"}


def lines(place: Path | str) -> dict[str, list[str]]:
    """What is said by the name of the line."""
    found: dict[str, list[str]] = {}
    for line in report(place).splitlines():
        name, _, value = line.partition("  ")
        found.setdefault(name, []).append(value.strip())
    return found


def written(folder: Path, **facts: Any) -> Path:
    """A file of ours with a dictionary of which these facts are true."""
    arrays = {key: value for key, value in writers.raw().items() if key != "threshold"}
    base = load(writers.saelens(folder / "base", writers.saelens_cfg("standard"), arrays))
    info = replace(base.info, **facts)
    threshold = base.b_enc.abs() if info.activation == "jumprelu" else None
    own.write(folder / "made.safetensors", replace(base, info=info, threshold=threshold))
    return folder / "made.safetensors"


def served(place: Path | str, *edits: Any) -> bool:
    """Whether a server with this dictionary takes a request with these edits."""
    config = SaesteerConfig.from_json({"dictionaries": {"d": str(place)}})
    try:
        assets = Assets.open(config)
        plan(from_json({"edits": list(edits)}), assets.catalog(width=assets.infos["d"].d_in, layers=99), 20)
    except (ConfigError, SpecError):
        return False
    return True


@pytest.mark.parametrize("in_norm", get_args(InNorm))
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_what_is_not_served_is_what_a_plan_refuses(activation: Any, in_norm: Any, tmp_path: Path) -> None:
    k = 5 if activation in RANKED else None
    place = written(tmp_path, activation=activation, k=k, in_norm=in_norm)
    said = lines(place)
    notes = said.get("not served", [])
    assert served(place, CLAMP)
    assert not any("this dictionary" in note for note in notes)
    assert served(place, CLAMP, KEEP)
    assert served(place, DROP) == (not any(note.startswith("reconstruct with error drop") for note in notes))
    assert served(place, ADD, CLAMP) == (not any(note.startswith("clamps after other edits") for note in notes))
    assert not served(place, {**CLAMP, "unit": "max_act"})
    assert "values in unit max_act, until it is calibrated" in notes
    assert said["max_act"] == ["unknown: `saesteer calibrate` measures it"]
    expected = {"groupmax": "groupmax, 5 groups of 8"}.get(activation, f"{activation}, k = 5" if k else activation)
    assert said["activation"] == [expected]
    assert said["input norm"] == [in_norm if in_norm == "none" else f"{in_norm}, of each token"]


@every_case
def test_every_format_is_told_as_it_is_served(case: Case, tmp_path: Path) -> None:
    place = str(case.write(tmp_path))
    info = load(place).info
    said = lines(place)
    notes = said.get("not served", [])
    clamp = {**CLAMP, "feature": info.feature_ids[0] if info.feature_ids else 2}
    unnamed = None in (info.site_in, info.site_out)
    assert said["site"][0].startswith("not stated in the files: give it") == unnamed
    taken = f"{place}@resid_post.3" if unnamed and info.d_in == info.d_out else place
    assert served(taken, clamp) == (not any(note.startswith("this dictionary, in a server: it ") for note in notes))
    if served(taken, clamp):
        assert served(taken, DROP) == (not any(note.startswith("reconstruct with error drop") for note in notes))
        assert served(taken, {**clamp, "unit": "max_act"}) == (said["max_act"] == ["known"])
        absent = next(n for n in range(10**6) if info.row_of(n) is None)
        assert not served(taken, {**clamp, "feature": absent})
        assert ("features that the file does not hold" in notes) == (info.feature_ids is not None)
    else:
        assert said["max_act"][0] in ("known", "unknown")
    assert said["fingerprint"] == [info.fingerprint[:16]]


@pytest.mark.parametrize("site", ["embed", "mlp_in_pregain.3"])
def test_a_site_that_is_not_served(site: str, tmp_path: Path) -> None:
    said = lines(written(tmp_path, site_in=site, site_out=site))
    assert said["site"] == [site]
    [note] = said["not served"]
    assert note == (
        f"this dictionary, in a server: it reads {site} and writes {site}, which is not served by this version; "
        "served: resid_pre, attn_in, z, attn_out, resid_mid, mlp_in, mlp_out, resid_post"
    )
    with pytest.raises(ConfigError, match=f"dictionary 'd' reads {site} and writes {site}, which is not served"):
        Assets.open(SaesteerConfig.from_json({"dictionaries": {"d": f"{tmp_path}/made.safetensors"}}))


@pytest.mark.parametrize("site_out", ["mlp_out.3", None])
def test_a_transcoder_is_not_served_as_an_sae(site_out: str | None, tmp_path: Path) -> None:
    place = written(tmp_path, site_in="mlp_in.3", site_out=site_out)
    with pytest.raises(
        ConfigError, match=rf"reads mlp_in\.3 and writes {site_out or 'another place'}.*got @resid_post"
    ):
        Assets.open(SaesteerConfig.from_json({"dictionaries": {"d": f"{place}@resid_post.3"}}))


def test_what_a_file_is(tmp_path: Path) -> None:
    cases = {case.name: str(case.write(tmp_path / case.name)) for case in CASES}
    said = lines(cases["gemma_scope-transcoder"])
    assert said["format"] == ["gemma_scope"]
    assert said["site"] == ["mlp_in_pregain.19 -> mlp_out.19"]
    assert said["shapes"] == ["w_enc [40, 24]  w_dec [40, 12]"]
    assert (said["activation"], said["dtype"]) == (["jumprelu"], ["float32"])
    assert lines(cases["saesteer-no-metadata"])["max_act"] == ["known"]
    assert lines(cases["saelens-v6-topk"])["activation"] == ["topk, k = 5"]
    assert lines(cases["saelens-v6-standard-layer_norm"])["input norm"] == ["layer_norm, of each token"]
    assert lines(cases["manifest-jumprelu"])["features"] == ["3 of a larger dictionary: 17, 2, 30"]
    with pytest.raises(LoadError):
        report(tmp_path / "nowhere")


@pytest.mark.parametrize("told", DESCRIBED, ids=lambda told: told[0])
def test_a_skip_transcoder(told: Told, tmp_path: Path) -> None:
    place = told[1](tmp_path)
    said = lines(place)
    assert said["kind"] == ["skip transcoder"]
    assert said["shapes"][0].endswith(f"w_skip [{told[2].get('d_out', writers.D)}, {writers.D}]")
    if said["shapes"][0].endswith(f"w_skip [{writers.D}, {writers.D}]"):
        assert not any("this dictionary, in a server" in note for note in said["not served"])


def a_sparse_file(folder: Path) -> Path:
    """19 GB that are empty behind the header."""
    shapes = {"W_enc": [2304, 1 << 20], "W_dec": [1 << 20, 2304], "b_dec": [2304]}
    shapes |= {"b_enc": [1 << 20], "threshold": [1 << 20]}
    header: dict[str, Any] = {}
    end = 0
    for key, shape in shapes.items():
        start, end = end, end + 4 * math.prod(shape)
        header[key] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    head = json.dumps(header).encode()
    with (folder / "sae_weights.safetensors").open("wb") as stream:
        stream.write(struct.pack("<Q", len(head)) + head)
        stream.truncate(8 + len(head) + end)
    writers.config(folder / "cfg.json", writers.saelens_cfg("jumprelu", d_in=2304, d_sae=1 << 20))
    return folder


def zeros(arrays: Mapping[str, Any], features: int = 400_000) -> dict[str, Any]:
    """Arrays as these, with more features: 77 MB."""
    return {
        key: np.zeros([features if size == writers.F else size for size in one.shape], np.float32)
        for key, one in arrays.items()
    }


def an_npz(folder: Path) -> Path:
    return writers.gemma_scope(folder, zeros(writers.raw()))


def a_torch_file(folder: Path) -> Path:
    return writers.torch_file(folder / "a.pth", zeros(SAMPLES["goodfire"].arrays))


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="Linux counts what a process reads, others do not")
@pytest.mark.parametrize("write", [a_sparse_file, an_npz, a_torch_file])
def test_no_more_than_headers_are_read_of_a_large_file(write: Callable[[Path], Path], tmp_path: Path) -> None:
    """All bytes that this process reads are counted, whatever it calls for them."""
    place = write(tmp_path)
    report(place)  # what Python imports is read here
    before = read_so_far()
    said = lines(place)
    assert read_so_far() - before < 256 << 10
    assert said["fingerprint"] == ["not computed: it takes reading the whole file once"]
    if write == a_sparse_file:
        assert said["in memory"] == ["9.7 GB in float16 or bfloat16, 19.3 GB in float32"]


def read_so_far() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def test_nothing_in_a_file_speaks_to_the_terminal(tmp_path: Path) -> None:
    info = load(writers.gemma_scope(tmp_path / "one", writers.raw())).info
    coder = load(tmp_path / "one")
    own.write(
        tmp_path / "x.safetensors", replace(coder, info=replace(info, model="gpt2\nmax_act  known\x1b]0;own\x07"))
    )
    said = report(tmp_path / "x.safetensors")
    assert all(line.isprintable() for line in said.splitlines())
    assert not any(line.startswith("max_act  known") for line in said.splitlines())
    assert "gpt2·max_act  known·]0;own·" in said
