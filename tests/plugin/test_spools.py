"""Rows on their way from a step into the files that handles name, and back. Starts no engine."""

import io
import pickle
import platform
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="vLLM is not installed")

from saesteer.config.config import KEY, SaesteerConfig
from saesteer.consumers.known import Consumers
from saesteer.engine.brought import Brought
from saesteer.engine.sinks import SPOOLS
from saesteer.errors import SpecError
from saesteer.language.spec import from_json
from saesteer.planning.plan import END, Catalog, Window
from saesteer.plugin.door.admission import Door
from saesteer.plugin.results.kept import LEAST, Results
from tests.plugin.blobs import inside
from tests.plugin.results import files
from tests.plugin.spooling import STEP, WIDTH, Steps, check, filed, roomy, sinks_of, spool_of, told
from tests.spec.scopes import windows


def said_of(brought: Brought) -> list[Any]:
    """What an answer that may end here is told, of all rows; it waits for files."""
    return [*brought.blobs(["r"]).get("r", []), *filed(brought, "r")]


@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(
    scope=windows(),
    sites=st.integers(1, 3),
    chunks=st.lists(st.integers(1, 7) | st.just(1), min_size=1, max_size=12),
    again=st.integers(0, 8),
    end=st.integers(1, 24),
    here=st.booleans(),
    sent=st.booleans(),
)
def test_each_row_is_where_its_handle_finds_it(
    tmp_path: Path, scope: list[Window], sites: int, chunks: list[int], again: int, end: int, here: bool, sent: bool
) -> None:
    """In chunks, once more from the beginning behind a preemption, past the end, and by either process."""
    found, steps = roomy(Path(tempfile.mkdtemp(dir=tmp_path))), Steps(scope, sites)
    made = spool_of(found, scope, sum(max(0, min(hi, end) - lo) for lo, hi in scope), sites)
    rows, fields = told(made, scope)
    sinks = sinks_of(made, scope) if here else None
    for wrong, turn in ((1, chunks[:again]), (0, [*chunks, *[STEP - 2] * 3])):
        at = 0
        for tokens in turn:
            brought = steps.run(sinks, at, at + tokens, noise=wrong)
            at += tokens
            if brought is not None:
                brought = pickle.loads(pickle.dumps(brought)) if sent else brought
                blobs = said_of(brought)
                assert all(len(blob) == (2 if here else 3) for blob in blobs)
                rows.add(blobs)
    rows.tell(end, 1, final=True)
    check(found, fields["activations"], [at for lo, hi in inside(scope, 0, end) for at in range(lo, hi)])
    assert len(files(found)) == sites
    late = steps.run(sinks, end, end + 2, noise=5)
    if here and late is not None:
        filed(late, "r")
        check(found, fields["activations"], [at for lo, hi in inside(scope, 0, end) for at in range(lo, hi)])


def sizes(found: Results) -> list[int]:
    """What its results count as."""
    return [size for _, size in found.sweep()]


def test_a_file_is_there_until_its_last_handle_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = roomy(tmp_path)
    made = spool_of(found, rows=20)
    assert sizes(found) == [LEAST] * 3
    rows, fields = told(made)
    rows.add([[0, [[4, 6]], bytes(2 * 2 * WIDTH * 3)]])
    rows.tell(6, 1, final=True)
    handles = [entry["handle"] for entry in fields["activations"]]
    size = (found.folder / handles[0]).stat().st_size
    assert size == made.layout.start + 6 * 2 * WIDTH * 3
    monkeypatch.setattr("saesteer.plugin.results.kept.LEAST", 1)
    assert sizes(found) == [size // 3] * 3
    found.delete(handles[1])
    assert sizes(found) == [size // 2] * 2
    with pytest.raises(SpecError, match="was deleted"):
        found.open(handles[1])
    for handle in (handles[0], handles[2]):
        assert handle.numbers().tolist() == [[0.0] * WIDTH] * 2
        handle.delete()
    assert found.sweep() == [] == files(found)


def test_a_result_is_read_in_any_pieces(tmp_path: Path) -> None:
    found = roomy(tmp_path)
    rows, fields = told(spool_of(found))
    rows.add([[0, [[0, 9]], bytes(range(9 * 2 * WIDTH * 3))]])
    rows.tell(9, 1, final=True)
    for entry in fields["activations"]:
        file = found.open(entry["handle"])
        whole = file.read()
        assert file.read() == b"" and file.seek(0, io.SEEK_END) == len(whole)
        for piece in (1, 5, 64, 1000):
            file.seek(0)
            assert b"".join(iter(partial(file.read, piece), b"")) == whole
        file.seek(len(whole) - 3)
        assert file.read() == whole[-3:]
        file.close()


def test_a_row_that_cannot_be_written_ends_its_request_alone(tmp_path: Path) -> None:
    found, steps = roomy(tmp_path), Steps([(0, END)])
    one, two = spool_of(found), spool_of(found)
    sick, sound = sinks_of(one), sinks_of(two)
    sick[0].name = sick[0].path, 1 << 62, 9, [(0, END)]  # no file system has such a byte: as on a full disk
    answers = [told(one), told(two)]
    for sinks, (rows, _) in zip((sick, sound), answers, strict=True):
        brought = steps.run(sinks, 0, 5)
        assert brought is not None
        rows.add(said_of(brought))
    del sick, sinks, brought  # a preempted request comes anew
    with pytest.raises(OSError, match="some of its rows could not be written"):
        answers[0][0].tell(5, 1, final=True)
    answers[1][0].tell(5, 1, final=True)
    check(found, answers[1][1]["activations"], range(5))
    assert len(files(found)) == 3, "nothing of the other one stays"


def test_rows_that_come_here_and_do_not_fit_on_the_disk_end_their_request(tmp_path: Path) -> None:
    found = roomy(tmp_path)
    made = spool_of(found)
    made._path.unlink()
    made._path.symlink_to("/dev/full")
    rows, _ = told(made)
    rows.add([[0, [[0, 1]], bytes(2 * WIDTH * 3)]])
    with pytest.raises(OSError, match="No space"):
        rows.tell(1, 1, final=True)
    assert files(found) == []


@pytest.mark.parametrize("case", ["one", "two choices", "a consumer", "captured"])
def test_which_requests_have_files_that_workers_write(tmp_path: Path, case: str) -> None:
    config = SaesteerConfig.from_json({"max_read_mib": 1})
    model = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.bfloat16, max_model_len=64))
    consumers = SimpleNamespace(named={"x": SimpleNamespace(check=lambda *_: None)}, capturing=())
    capture = ["resid_post.3"] if case == "captured" else []
    door = Door("", config, None, model, consumers if case == "a consumer" else Consumers({}), capture)  # type: ignore[arg-type]
    door.results = roomy(tmp_path)
    catalog = Catalog({}, frozenset({"resid_post.3", "resid_post.4"}), 64, width=8, consumers={"x": lambda *_: None})
    reads = [
        {"site": "resid_post.4", "at": "after"},
        {"site": "resid_post.3", "at": "after", "reduce": "mean", "as": "handle"},
        {"site": "resid_post.3", "as": "handle"},
        {"site": "resid_post.4", "as": "handle"},
    ]
    if case != "one":
        del reads[0]
    spec = from_json({"return": {"activations": reads, "consumers": {"x": {}} if case == "a consumer" else {}}})
    params = SimpleNamespace(extra_args=None, max_tokens=4, n=2 if case == "two choices" else 1)
    door.admit(spec, catalog, SimpleNamespace(prompt_token_ids=[1] * 5, sampling_params=params))
    found = params.extra_args[KEY].get(SPOOLS)
    if case in ("two choices", "a consumer"):
        assert found is None
    elif case == "captured":
        numbers = [number for number, *_ in found[1]]
        assert len(numbers) == 1, "resid_post.4 alone"
    else:
        node, [[number, path, start, rows]] = found
        assert (node, number, rows) == (platform.node(), 2, 5 + 4 - 1) and start % 4096 == 0 and Path(path).exists()
