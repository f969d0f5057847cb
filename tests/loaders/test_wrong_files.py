"""Files that are not what they should be: each is refused by a LoadError with the file, the key and the expectation."""

import json
import os
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from saesteer.errors import LoadError
from saesteer.loaders import describe, load
from saesteer.loaders.sets import members
from tests.loaders import writers
from tests.loaders.every import ROWS, SAMPLES, every_sample
from tests.loaders.writers import D

R = writers.raw()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("write", "words"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_refused_with_the_file_the_key_and_the_expectation(
    write: Callable[[Path], Path], words: str, tmp_path: Path
) -> None:
    place = str(write(tmp_path))
    with pytest.raises(LoadError) as caught:
        load(place)
    message = str(caught.value)
    assert words in message
    assert str(tmp_path) in message
    assert "expected" in message or "known names" in message
    assert "\n" not in message


def good(name: str, folder: Path) -> Path:
    """The file with the arrays of a format's good dictionary."""
    sample = SAMPLES[name]
    sample.write(folder, dict(sample.arrays))
    return folder / sample.file


@every_sample
def test_cut_short(name: str, tmp_path: Path) -> None:
    file = good(name, tmp_path)
    whole = file.read_bytes()
    for keep in (0, 5, 8, 100, -4, -1):
        file.write_bytes(whole[:keep])
        for read in (load, describe):
            with pytest.raises(LoadError, match=file.name):
                read(str(file))


@settings(deadline=None, max_examples=300)
@given(name=st.sampled_from(sorted(SAMPLES)), data=st.data())
def test_broken_bytes_give_a_load_error_or_a_dictionary(
    name: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = good(name, tmp_path_factory.getbasetemp() / "broken" / name)
    content = bytearray(file.read_bytes())
    header = len(content) if file.suffix != ".safetensors" else 8 + struct.unpack("<Q", content[:8])[0]
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(content)
    with suppress(LoadError):
        assert load(str(file)).w_enc.isfinite().all()


HEADERS: list[tuple[Any, str]] = [
    ([], "a JSON list; expected a JSON object"),
    ({"W_enc": 3}, "not readable"),
    ({"W_enc": {"dtype": "F32", "shape": [2, -2], "data_offsets": [0, 16]}}, "W_enc: [2, -2]"),
    ({"W_enc": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 8]}}, "8 bytes for F32 [2, 2]"),
    ({"W_enc": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}, "cut short"),
    ({"__metadata__": {"format": 3}}, "__metadata__: not strings"),
]


def headed(folder: Path, header: Any, size: int = 0) -> Path:
    """A safetensors file of this header and so many bytes of zeros."""
    head = json.dumps(header).encode()
    file = folder / "saesteer.safetensors"
    file.write_bytes(struct.pack("<Q", len(head)) + head + bytes(size))
    return file


def test_safetensors_headers_that_lie(tmp_path: Path) -> None:
    for header, words in HEADERS:
        with pytest.raises(LoadError) as caught:
            describe(headed(tmp_path, header))
        assert words in str(caught.value)


def test_npz_that_is_much_larger_than_its_file(tmp_path: Path) -> None:
    """A few hundred KB of deflated zeros would take GBs of memory; what is declared is refused before it is read."""
    file = tmp_path / "params.npz"
    arrays = writers.raw() | {"W_enc": np.zeros((D, (80 << 20) // D // 4), np.float32)}
    np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
    assert file.stat().st_size < 1 << 20
    for read in (describe, load):
        with pytest.raises(LoadError, match=r"params\.npz: W_enc: 838\d{5} bytes, packed into \d{5}; expected weights"):
            read(file)
    small = writers.raw() | {"b_dec": np.zeros(D, np.float32)}
    np.savez_compressed(file, **small)  # type: ignore[arg-type]
    assert describe(file).d_in == D


def test_folders_and_files_of_no_format(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="a folder with nothing; expected one of the formats gemma_scope"):
        load(tmp_path)
    (tmp_path / "ae.pt").write_bytes(b"x")
    with pytest.raises(LoadError, match=r"a folder with ae\.pt"):
        load(tmp_path)
    save_file({"lm_head.weight": R["W_enc"]}, tmp_path / "model.safetensors")
    for place in (tmp_path / "ae.pt", tmp_path / "model.safetensors"):
        with pytest.raises(LoadError, match="a file of no known format"):
            load(place)


@contextmanager
def as_a_user() -> Iterator[None]:
    """Not as root, who may read everything."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("closed", [".", "sae", "sae/one.safetensors"])
def test_what_the_user_may_not_read_is_no_question_of_its_format(closed: str) -> None:
    """As where a container's user looks at files that root has written."""
    with tempfile.TemporaryDirectory() as made:  # pytest's own folders are closed to others
        root = Path(made)
        (root / "sae").mkdir()
        file = root / "sae/one.safetensors"
        save_file({"lm_head.weight": R["W_enc"]}, file)
        for path in (root, root / "sae", file):
            path.chmod(0o755)
        (root / closed).chmod(0)
        try:
            with as_a_user():
                place = file if closed.endswith("one.safetensors") else root / "sae"
                for look in (load, members):
                    with pytest.raises(
                        LoadError, match=r"sae.*: cannot be read \(Permission denied\); expected a file"
                    ):
                        look(place)
        finally:
            root.chmod(0o755)
            (root / "sae").chmod(0o755)
