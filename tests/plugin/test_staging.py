"""Rows for files wait on the device for those of later steps, and come home in their order. No engine.

Two need a GPU. This file is both the last of them, of what happens beside a second one, and its process.
"""

import gc
import pickle
import random
import stat
import tempfile
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from saesteer.engine import filer, staging
from saesteer.engine.brought import Brought
from saesteer.engine.filer import LACKING
from saesteer.engine.sinks import Sink
from saesteer.engine.spool import Writer
from saesteer.engine.staging import Filed, Staging
from tests.apart import hear, tell
from tests.plugin.filers import filing, in_this_process, sinks_in, soon, steps_of_copies

FILES, ROWS = 3, 12
WIDTHS = {torch.bfloat16: 3, torch.float32: 5}  # of what files of a dtype have; the last file is the other one's
CPU = torch.device("cpu")
KINDS = (torch.bfloat16, torch.bfloat16, torch.float32)


class Files:
    """Some files, what they should have, and a step's tensors, which the next step overwrites."""

    def __init__(self, folder: Path, device: torch.device = CPU, side: Any = None) -> None:
        self.folder, paths = folder, [folder / str(number) for number in range(FILES)]
        for path in paths:
            path.touch()
        self.sinks = [Sink(str(path), 0, ROWS) for path in paths]
        self.staging = Staging(device, side)
        self.banks = {kind: torch.zeros(FILES, width, dtype=kind, device=device) for kind, width in WIDTHS.items()}
        self.expected = [torch.zeros(ROWS, WIDTHS[kind], dtype=kind) for kind in KINDS]

    def step(self, number: int, rows: dict[int, int]) -> Filed:
        """One in which each of these files gets a row."""
        for kind, bank in self.banks.items():
            bank[:] = torch.arange(bank.numel(), device=bank.device).view(bank.shape) + 16 * number
            files = [file for file in rows if KINDS[file] is kind]
            if files:
                for place, file in enumerate(files):
                    self.expected[file][rows[file]] = bank[place].cpu()
                where = filing([self.sinks[file] for file in files], [rows[file] for file in files])
                self.staging.add(where, bank, torch.arange(len(files), device=bank.device))
        return Filed({str(file): {0: sink} for file, sink in enumerate(self.sinks)}, self.staging)

    def content(self, file: int) -> torch.Tensor:
        kind = KINDS[file]
        size = ROWS * WIDTHS[kind] * kind.itemsize
        data = (self.folder / str(file)).read_bytes().ljust(size, b"\0")
        return torch.frombuffer(bytearray(data), dtype=kind).view(ROWS, -1)


@settings(deadline=None, max_examples=80, suppress_health_check=list(HealthCheck))
@given(
    steps=st.lists(
        st.tuples(
            st.dictionaries(st.integers(0, FILES - 1), st.integers(0, ROWS - 1), max_size=FILES),
            st.none() | st.tuples(st.integers(0, FILES - 1), st.integers(0, 3)),  # who asks, about a step so long ago
        ),
        min_size=1,
        max_size=20,
    ),
    room=st.sampled_from([0, 5, 12, 30, 100, 1 << 20]),
    most=st.sampled_from([600, 2048, 1 << 20]),
)
def test_who_asks_has_all_rows_up_to_the_step(tmp_path: Path, steps: list[Any], room: int, most: int) -> None:
    """Whatever fits into buffers and memory; a row that is computed again replaces the one before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "ROOM", room)
        patch.setattr(staging, "MOST", most)
        in_this_process(patch)
        files = Files(Path(tempfile.mkdtemp(dir=tmp_path)))
        seen: list[tuple[Filed, list[torch.Tensor]]] = []
        for number, (rows, asks) in enumerate(steps):
            filed = files.step(number, rows)
            seen.append((filed, [one.clone() for one in files.expected]))
            if asks is not None:
                file, ago = asks
                filed, least = seen[max(0, number - ago)]
                filed.ask([str(file)])[str(file)].told()
                there = files.content(file)
                assert (there >= least[file]).all(), "a later step has larger numbers"
        seen[-1][0].settle()
        for file, expected in enumerate(files.expected):
            assert torch.equal(files.content(file), expected)


def test_one_copy_brings_several_steps_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When somebody asks, and when the buffer is full."""
    several = steps_of_copies(monkeypatch)
    monkeypatch.setattr(staging, "PAUSE", 20)
    in_this_process(monkeypatch)
    row = WIDTHS[KINDS[0]] * KINDS[0].itemsize
    monkeypatch.setattr(staging, "ROOM", 7 * row)
    files = Files(tmp_path)
    for number in range(5):
        filed = files.step(number, {0: number})
    assert not several
    filed.ask(["0"])["0"].told()
    assert several == [5]
    for number in range(5, 8):
        files.step(number, {0: number, 1: number})
    assert several == [5]
    filed = files.step(8, {0: 8, 1: 8})
    assert several == [5, 3], "seven rows have room, not eight"
    filed.settle()
    assert several == [5, 3, 1]
    assert filed.settle() == {} and several == [5, 3, 1], "nothing is left"


def test_rows_of_a_step_that_nobody_asks_for_are_written_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing of a file is kept any longer."""
    monkeypatch.setattr(staging, "PAUSE", 0.05)
    monkeypatch.setattr(filer, "PAUSE", 0.05)
    in_this_process(monkeypatch)
    files = Files(tmp_path)
    closed = weakref.ref(files.sinks[0])
    for round_ in range(2):
        files.step(round_, {0: round_, 1: round_})
        soon(lambda: all(torch.equal(files.content(file), files.expected[file]) for file in (0, 1)))
        assert torch.equal(files.content(0), files.expected[0])
    files.sinks.clear()
    soon(lambda: closed() is None)
    assert closed() is None


def test_whoever_gives_an_engine_up_gives_its_buffers_thread_and_process_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notebook may begin several engines in one process."""
    monkeypatch.setattr(staging, "PAUSE", 0.05)
    begun, before = in_this_process(monkeypatch), {*threading.enumerate()}
    files = Files(tmp_path)
    files.step(1, {0: 1}).settle()
    assert len(begun) == 1 and {*threading.enumerate()} - before
    held = weakref.ref(files.staging)
    del files
    gc.collect()
    assert held() is None
    soon(lambda: {*threading.enumerate()} <= before)
    assert {*threading.enumerate()} <= before


def test_a_device_without_room_brings_each_step_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any, **__: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError

    files = Files(tmp_path)
    monkeypatch.setattr(torch, "empty", full)
    for number in range(3):
        filed = files.step(number, {0: number, 2: number})
        assert files.staging.ticket == 2 * (number + 1)
    filed.settle()
    assert [record.message for record in caplog.records] == [
        "the GPU has no room for rows to wait in, so each step brings what requests read home"
    ], "once"
    for file in (0, 2):
        assert torch.equal(files.content(file), files.expected[file])


def test_rows_that_a_thread_brings_home_meanwhile_are_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has the output of a step asks for all of its rows, whoever has handed them over by then."""
    monkeypatch.setattr(staging, "ROOM", 100)
    put, add = Writer.put, Staging.add

    def late(self: Writer, *given: Any) -> None:
        time.sleep(0.002)
        put(self, *given)

    def slow(self: Staging, *given: Any) -> None:
        add(self, *given)
        time.sleep(0.001)  # the thread takes what has been added, and is at it

    monkeypatch.setattr(Writer, "put", late)
    monkeypatch.setattr(Staging, "add", slow)
    files, ends = Files(tmp_path), threading.Event()

    def bring() -> None:
        while not ends.is_set():
            files.staging.bring_home(files.staging.ticket)

    thread = threading.Thread(target=bring)
    thread.start()
    try:
        for number in range(150):
            row = number % ROWS
            filed = files.step(number % 12, {0: row})
            filed.ask(["0"])["0"].told()
            assert torch.equal(files.content(0)[row], files.expected[0][row]), number
    finally:
        ends.set()
        thread.join()


def test_a_thread_that_fails_with_rows_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files that lack rows are marked, and no later step fails, here or where its output is pickled."""

    def broken(*_: Any) -> None:
        raise RuntimeError("a device that is lost")

    files = Files(tmp_path)
    monkeypatch.setattr(staging, "PAUSE", 0.0)
    monkeypatch.setattr(Staging, "_copy", broken)
    filed = files.step(1, {0: 0})
    soon(lambda: files.staging.writer._broken is not None)
    monkeypatch.undo()
    for one in (filed, files.step(2, {0: 1})):
        assert one.settle() == {}
        assert pickle.loads(pickle.dumps(Brought([], None, one))).told() == {}
    assert {stat.S_IMODE(Path(sink.path).stat().st_mode) for sink in files.sinks} == {LACKING}


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_rows_are_those_of_their_step_however_late_the_device_is(tmp_path: Path, kind: str) -> None:
    """Written by a process. The next step overwrites its tensor, and some files are asked for in each step."""
    device = CPU if kind == "cpu" else torch.device(kind, 0)  # as a worker has it, with a number
    names, sites, width, steps = "abcdefgh", 16, 2560, 40
    side = torch.cuda.Stream(device) if kind == "cuda" else None  # type: ignore[no-untyped-call]
    given, draw, count = torch.Generator().manual_seed(1), random.Random(1), len(names)
    sent = torch.randint(-99, 99, (steps, count * sites, width), generator=given, dtype=torch.int16)
    there = sent.to(device)
    bank, index = torch.empty_like(there[0]), torch.arange(count * sites, device=device)
    sinks, rows, expected = sinks_in(tmp_path, names, steps), Staging(device, side), sent.view(steps, count, -1)

    def check(file: int, step: int) -> None:
        written = np.fromfile(tmp_path / names[file], np.int16).reshape(-1, sites * width)
        assert np.array_equal(written[: step + 1], expected[: step + 1, file].numpy()), (file, step)

    for step in range(steps):
        if kind == "cuda" and step % 8 == 3:
            torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
        bank.copy_(there[step])
        rows.add(filing(sinks, [step] * count), bank, index)
        for file in draw.sample(range(count), draw.choice([0, 0, 1, 3])):
            Filed({"one": {0: sinks[file]}}, rows).ask(["one"])["one"].told()
            check(file, step)
    Filed({"all": dict(enumerate(sinks))}, rows).settle()
    for file in range(count):
        check(file, steps - 1)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_threads_of_a_worker_leave_other_gpus_alone() -> None:
    """A context takes hundreds of MB there, which the worker of that GPU may have given to its KV cache."""
    assert hear("-m", __name__) == {"written": True, "contexts": [False, True]}


def _beside_another_gpu() -> None:
    device = torch.device("cuda", 1)
    torch.cuda.set_device(device)
    with tempfile.TemporaryDirectory() as folder:
        files = Files(Path(folder), device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
        files.staging.warm()

        def written() -> bool:
            return all(torch.equal(files.content(file), files.expected[file]) for file in (0, 2))

        files.step(1, {0: 1, 2: 1})
        soon(written)  # nobody asks, so the threads do all of it
        assert written()
        files.step(2, {0: 2, 2: 2}).settle()
        contexts = [torch._C._cuda_hasPrimaryContext(number) for number in range(2)]  # type: ignore[attr-defined]
        tell({"written": written(), "contexts": contexts})


if __name__ == "__main__":
    _beside_another_gpu()
