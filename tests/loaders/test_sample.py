"""The digest of a sample of weights: which changes it notices, and how little it reads. Knows no calibration."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from saesteer.errors import LoadError
from saesteer.loaders import alone, arrays, choose
from saesteer.loaders.draft import Draft
from saesteer.loaders.files import fetch
from saesteer.loaders.opening import open_arrays
from saesteer.loaders.sample import PIECE_BYTES, PIECES, sample
from tests.loaders import writers
from tests.loaders.case import Case
from tests.loaders.every import every_format

WIDTH, FEATURES = 1024, 4096  # an encoder of 16 MiB, of which one is read
WIDE = np.random.default_rng(0).normal(size=(FEATURES, WIDTH)).astype(np.float32)


def draft_of(file: Path, weights: np.ndarray, **more: object) -> Draft:
    """A draft of nothing but an encoder."""
    return Draft(open_arrays(writers.tensors(file, {"enc": weights})), {"w_enc": "enc"}, "relu", **more)  # type: ignore[arg-type]


@every_format
def test_it_is_the_same_for_a_copy_and_for_rows(case: Case, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    drafts = [choose(fetch(case.write(tmp_path / name)), None)[1] for name in ("one", "two")]
    digests = {sample(draft) for draft in drafts}
    decoders = drafts[0].decoders
    seekable = None if decoders is None else decoders.seekable()
    digests.add(sample(replace(drafts[0], weights=drafts[0].weights.seekable(), decoders=seekable)))
    assert len(digests) == 1


@pytest.mark.parametrize("row", [0, 2048, FEATURES - PIECE_BYTES // (4 * WIDTH)])
def test_a_change_everywhere_and_at_either_end_is_noticed(row: int, tmp_path: Path) -> None:
    before = sample(draft_of(tmp_path / "a.safetensors", WIDE))
    assert sample(draft_of(tmp_path / "b.safetensors", WIDE)) == before
    assert sample(draft_of(tmp_path / "c.safetensors", WIDE * np.float32(1.001))) != before
    there = WIDE.copy()
    there[row // 64 * 64 : row + 64] += 1
    assert sample(draft_of(tmp_path / "d.safetensors", there)) != before


def test_no_more_than_a_megabyte_of_an_array_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, read = draft_of(tmp_path / "a.safetensors", WIDE), []
    real = arrays.Arrays.opened

    class Counted:
        def __init__(self, stream: object) -> None:
            self.stream = stream

        def seek(self, at: int) -> None:
            self.stream.seek(at)  # type: ignore[attr-defined]

        def read(self, size: int) -> bytes:
            read.append(size)
            return self.stream.read(size)  # type: ignore[attr-defined]

    def opened(self: arrays.Arrays, array: arrays.StoredArray) -> Iterator[Counted]:
        with real(self, array) as stream:
            yield Counted(stream)

    monkeypatch.setattr(arrays.Arrays, "opened", contextmanager(opened))
    sample(one)
    assert len(read) == PIECES and sum(read) == PIECES * PIECE_BYTES < WIDE.nbytes / 8


def test_a_file_that_is_gone_or_changed_is_refused(tmp_path: Path) -> None:
    place = writers.gemma_scope(tmp_path / "sae", writers.raw())
    draft = alone(place)
    writers.gemma_scope(place, writers.raw(seed=3))
    with pytest.raises(LoadError, match="changed since they were opened; expected the same file"):
        sample(draft)
    (place / "params.npz").unlink()
    with pytest.raises(LoadError, match=r"params\.npz.*not readable"):
        sample(draft)
