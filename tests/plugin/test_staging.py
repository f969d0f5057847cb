"""Rows for files wait on the device for those of later steps, and come home in their order. No engine.

Two need a GPU. This file is both the last of them, of what happens beside a second one, and its process.
"""

import random
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from saesteer.engine.filer import LACKING
from saesteer.engine.sinks import Sink
from saesteer.engine.staging import Filed, Staging
from saesteer.planning.plan import END
from tests.apart import hear, tell
from tests.plugin.filers import filing, sinks_in, soon

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
        self.sinks = [Sink(str(path), 0, ROWS, [(0, END)]) for path in paths]
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


def test_rows_that_do_not_reach_the_host_are_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever thread copies them: their files are marked, so the answer fails."""

    def broken(*_: Any) -> int:
        raise RuntimeError("the device has failed")

    files = Files(tmp_path)
    files.step(1, {0: 1})
    monkeypatch.setattr(files.staging.writer, "take", broken)
    with suppress(RuntimeError):  # else the thread of the buffers was first
        files.staging.bring_home(files.staging.ticket)
    soon(lambda: stat.S_IMODE((tmp_path / "0").stat().st_mode) == LACKING)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) == LACKING for name in "01"]
    assert modes == [True, False]


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
