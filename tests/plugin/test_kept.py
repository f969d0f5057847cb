"""Results that are fetched by a handle: where they are kept, and the routes on vLLM's app. Starts no engine."""

import errno
import gc
import os
import pickle
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from fastapi.testclient import TestClient
from vllm.v1.engine import FinishReason

from saesteer.client import Client, numbers
from saesteer.config.config import SaesteerConfig
from saesteer.errors import RequestRefused, ServerError, SpecError
from saesteer.language.spec import from_json
from saesteer.planning.plan import END, Catalog
from saesteer.plugin.door.admission import Door
from saesteer.plugin.results import errors
from saesteer.plugin.results.kept import LEAST, Handle, Results
from saesteer.plugin.results.report import Report, _receiving
from tests.plugin.apps import app_of_vllm
from tests.plugin.blobs import readout
from tests.plugin.results import DATA, files, fill_the_disk, kept, layout, results, room, state

ROUTE = "/v1/saesteer/results"
KEY = {"Authorization": "Bearer usual"}


def code(caught: pytest.ExceptionInfo[SpecError]) -> tuple[str, str]:
    return caught.value.field, caught.value.code


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    found = app_of_vllm(monkeypatch, "--api-key", "usual")
    found.state.saesteer_results = results(tmp_path)
    return found


class Transport(httpx.BaseTransport):
    """Our client's way to an app in this process."""

    def __init__(self, app: Any) -> None:
        self.app = TestClient(app)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        found = self.app.request(
            request.method, str(request.url), headers=dict(request.headers), content=request.read()
        )
        return httpx.Response(found.status_code, content=found.content)


def test_a_result_is_fetched_as_often_as_wanted_until_it_is_deleted(app: Any) -> None:
    handle = kept(app.state.saesteer_results)
    with Client(api_key="usual", transport=Transport(app)) as client:
        for _ in range(2):
            [found] = client.fetch([handle])
            assert found.dtype == np.float32 and found.tolist() == [[0, 1, 2, 3, 4, 5]]
        client.delete_result(handle)
        for ask in (lambda: client.fetch([handle]), lambda: client.delete_result(handle)):
            with pytest.raises(RequestRefused, match="was deleted, has expired 60 seconds after its answer") as caught:
                ask()
            assert (caught.value.status, caught.value.code, caught.value.field) == (404, "unknown_name", "handle")
    assert files(app.state.saesteer_results) == []


def test_a_file_says_what_it_is(app: Any, tmp_path: Path) -> None:
    from safetensors import safe_open

    client = TestClient(app, headers=KEY)
    found = client.get(f"{ROUTE}/{kept(app.state.saesteer_results)}")
    assert found.headers["content-length"] == str(len(found.content))
    (tmp_path / "file").write_bytes(found.content)
    with safe_open(tmp_path / "file", "np") as file:
        assert file.metadata() == {"site": "resid_post.3", "at": "before", "layers": "[3]"}
        assert file.get_tensor("positions").tolist() == [[4, 6]]
        assert file.get_tensor("activations").tobytes() == DATA


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_who_may_not_send_requests_may_not_fetch(app: Any, method: str) -> None:
    place = f"{ROUTE}/{kept(app.state.saesteer_results)}"
    assert TestClient(app).request(method, place).status_code == 401
    assert TestClient(app, headers=KEY).request(method, place).status_code == 200


@pytest.mark.parametrize(
    "handle",
    ["0" * 32, "lock", "..%2flock", "0" * 31, "x" * 5000, "0" * 32 + f".{os.getpid()}.1"],
    ids=["unknown", "the lock", "elsewhere", "short", "long", "a room"],
)
def test_what_is_no_handle_is_refused(app: Any, handle: str) -> None:
    promised = room(app.state.saesteer_results, 1)
    for method in ("GET", "DELETE"):
        assert TestClient(app, headers=KEY).request(method, f"{ROUTE}/{handle}").status_code == 404
    assert promised._path.exists()


def test_what_expires_is_removed_by_whoever_looks(tmp_path: Path) -> None:
    found = results(tmp_path, number=3, seconds=60)
    handles = [kept(found) for _ in range(3)]
    past = time.time() - 61
    for handle in handles:
        os.utime(found.folder / handle, (past, past))
    for act in (found.open, found.delete):
        with pytest.raises(SpecError, match="60 seconds"):
            act(handles.pop())
    kept(found)
    assert handles[0] not in files(found) and len(files(found)) == 1


@pytest.mark.parametrize("failures", [0, 1], ids=["", "once in vain"])
def test_nobody_needs_to_ask_for_what_expires_to_go(
    tmp_path: Path, failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, look = results(tmp_path, seconds=1), Results.sweep
    kept(found)
    left = [OSError(errno.EMFILE, os.strerror(errno.EMFILE))] * failures  # as when there are too many for a moment

    def failing(self: Results) -> Any:
        if left:
            raise left.pop()
        return look(self)

    monkeypatch.setattr(Results, "sweep", failing)
    deadline = time.monotonic() + 20
    while files(found) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert files(found) == [] and not left


def test_more_than_fits_is_refused_with_the_numbers_and_nothing_is_dropped(tmp_path: Path) -> None:
    one, two = results(tmp_path), results(tmp_path)  # of two API servers
    handle = kept(one)
    with pytest.raises(
        SpecError, match=f"asks for 5 results that count as {5 * LEAST} bytes, .* most {4 * LEAST}"
    ) as caught:
        room(one, 1, 5)
    assert code(caught) == ("saesteer.return.activations", "too_large")
    with pytest.raises(SpecError, match=f"asks for 1 results that count as {4 * LEAST + 4097} bytes"):
        room(one, 4 * LEAST + 1)
    rooms = [room(two, 2 * LEAST - 4096)]
    message = f"asks for 2 results that count as {2 * LEAST} bytes, while {3 * LEAST} of {4 * LEAST} .* for 60 seconds"
    with pytest.raises(SpecError, match=rf"{message} \(--max-results-mib, --result-seconds\)") as caught:
        room(one, 1, 2)
    assert code(caught) == ("saesteer.return.activations", "results_full")
    rooms.clear()
    time.sleep(0.1)  # who was refused has counted what is kept, and nobody does so again at once
    assert room(one, 1, 2)
    two.open(handle).close()


def test_handles_read_themselves_where_they_are_kept(tmp_path: Path) -> None:
    found = results(tmp_path)
    handle = kept(found)
    assert isinstance(handle, Handle)
    assert numbers({"handle": handle}).tolist() == [[0, 1, 2, 3, 4, 5]]
    elsewhere = pickle.loads(pickle.dumps(handle))
    assert type(elsewhere) is str and elsewhere == handle
    with pytest.raises(ServerError, match=f"fetch the handle {handle}"):
        numbers({"handle": elsewhere})
    handle.delete()
    with pytest.raises(SpecError, match="was deleted"):
        numbers({"handle": handle})


def report(found: Results, choices: int, reads: int = 1) -> Report:
    one = readout("activation", [(0, END)], inline=False)
    return Report(list, readouts=[one] * reads, rooms=found.promise([layout()] * choices * reads))


def test_admission_takes_room_for_every_choice(tmp_path: Path) -> None:
    found = results(tmp_path, number=4)
    config = SaesteerConfig.from_json({"max_read_mib": 1})
    door = Door(
        "", config, None, SimpleNamespace(model_config=SimpleNamespace(dtype=torch.float16, max_model_len=1 << 21))
    )
    door.results = found
    catalog = Catalog({}, frozenset({"resid_post.3"}), 64, width=8)
    reads = [{"site": "resid_post.3", "as": "handle"}, {"site": "resid_post.3", "at": "after"}]
    spec = from_json({"return": {"activations": reads}})

    def asking(**sampling: Any) -> Any:
        params = SimpleNamespace(extra_args=None, **{"max_tokens": 4, "n": 1, **sampling})
        return SimpleNamespace(prompt_token_ids=[1] * 5, sampling_params=params)

    request = asking(n=3)
    door.admit(spec, catalog, request)
    assert [size for _, size in found.sweep()] == [LEAST] * 3, "of what is inline, no room is taken"
    with pytest.raises(SpecError) as caught:
        door.admit(spec, catalog, asking(n=2))
    assert code(caught) == ("saesteer.return.activations", "results_full")
    with pytest.raises(SpecError) as caught:
        door.admit(spec, catalog, asking(max_tokens=1 << 20))
    assert code(caught) == ("saesteer.return", "too_large")
    del request
    gc.collect()
    assert found.sweep() == []


def test_a_folder_that_is_gone_or_full_is_no_error_of_the_server(tmp_path: Path) -> None:
    found = results(tmp_path)
    kept(found)
    shutil.rmtree(found.folder)
    assert kept(found) in files(found)
    shutil.rmtree(found.folder)
    found.folder.touch()
    with pytest.raises(SpecError, match=r"could not be kept \(File exists\)") as caught:
        room(found, 1)
    assert caught.value.code == "no_space"


@pytest.mark.parametrize("reads", [1, 2], ids=["", "behind another result"])
def test_a_full_disk_ends_the_request_with_an_error(tmp_path: Path, reads: int) -> None:
    found = results(tmp_path)
    answer = report(found, 1, reads).of_choice()
    fill_the_disk(answer.rooms[-1])
    one = state(answer)
    queue: list[Any] = []
    one.queue, one.request_id, one.parent_req = SimpleNamespace(put=queue.append), "a", None
    processor = SimpleNamespace(request_states={"a": one}, abort_requests=lambda *_, **__: [])

    def original(*_: Any) -> Any:
        one.ends(FinishReason.LENGTH)
        queue.append("its last output")
        return SimpleNamespace(reqs_to_abort=[])

    sent = {"saesteer": [("counted", np.zeros(1, np.int32).tobytes())]}
    _receiving(original)(processor, [SimpleNamespace(request_id="a", kv_transfer_params=sent)])
    assert isinstance(queue[-1], errors.SpecRefused), "behind the last output, whose place it takes"
    assert queue[-1].code == "no_space" and "No space left on device" in str(queue[-1])
    assert files(found) == []


def test_rooms_of_a_process_that_has_died_are_given_up(tmp_path: Path) -> None:
    found = results(tmp_path)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    (found.folder / f"{'0' * 32}.{ended.pid}.1").touch()
    promised = room(found, 10)
    assert len(files(found)) == 1 and promised
