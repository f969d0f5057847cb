"""Labels from Neuronpedia's export: ``features/batch-*.jsonl.gz`` and ``explanations/batch-*.jsonl.gz`` of a source.

A line of features has ``index`` and ``maxActApprox``, ``frac_nonzero``, ``pos_str`` and ``neg_str``; a line of
explanations ``index``, ``description`` and ``explanationModelName``. Other keys are ignored. Lines are read one by one,
within bounds that hold after decompression. Knows no dictionary, only how its unit differs from Neuronpedia's.
"""

import gzip
import json
import math
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from saesteer.errors import LoadError
from saesteer.labels.store import MAX_LABEL, MAX_TOKEN, MAX_TOKENS, Entry

MAX_LINE = 1 << 20  # bytes, decompressed
MAX_FILE = 1 << 30  # bytes of one file, decompressed
MOST_FILES = 4096
MOST_FEATURES = 1 << 24  # of a dictionary whose number of features is unknown, since its file holds only some


class Line(NamedTuple):
    """One line of a file, and where it stands."""

    file: Path
    number: int
    held: dict[str, Any]

    def wrong(self, key: str, expected: str) -> LoadError:
        """The error about one value."""
        return _wrong(self.file, self.number, f"{key}: {str(self.held.get(key))[:60]!r}; expected {expected}")


class Export:
    """The folder of one source.

    Args:
        folder: with ``features`` and ``explanations``, one of which may be missing.

    Raises:
        LoadError: neither is there.
    """

    def __init__(self, folder: Path) -> None:
        self._features, self._explanations = _files(folder, "features"), _files(folder, "explanations")
        if not self._features and not self._explanations:
            expected = "features/batch-*.jsonl.gz or explanations/batch-*.jsonl.gz of Neuronpedia's export"
            raise LoadError(f"{folder}: has no export; expected {expected}")
        self.address: str | None = None  # model/source, as far as lines have said it
        # Whether its maximum activations are left out: the dashboards of these read the wrong tensor, and maxActApprox
        # is a median of 12 times too high.
        self.mismeasured = False

    def entries(self, features: int, length: Callable[[int], float | None]) -> Iterator[Entry]:
        """What the export knows of each feature, in no order.

        Neuronpedia scales most dictionaries' decoder rows to length 1 before it measures, so activations there are |d|
        times the dictionary's own. They are divided by it here.

        Args:
            features: how many the dictionary had at Neuronpedia: an index is smaller.
            length: gives |d| of a feature, or 1 if its row was not scaled; None if the dictionary does not hold it.

        Raises:
            LoadError: naming the file and the line.
        """
        told: dict[int, tuple[str, str]] = {}  # the first explanation of each feature
        for line in self._lines(self._explanations):
            feature = _index(line, features)
            if text := _text(line, "description"):
                told.setdefault(feature, (text, _text(line, "explanationModelName") or "neuronpedia"))
        seen: set[int] = set()
        for line in self._lines(self._features):
            feature = _index(line, features)
            if feature in seen:
                raise line.wrong("index", "each feature once")
            seen.add(feature)
            if (own := length(feature)) is not None:
                label, by = told.pop(feature, (None, None))
                largest = _number(line, "maxActApprox", math.inf)
                if largest is not None:
                    largest = None if self.mismeasured or own == 0 else largest / own
                density = _number(line, "frac_nonzero", 1.0)
                promotes, suppresses = _tokens(line, "pos_str"), _tokens(line, "neg_str")
                yield Entry(feature, label, by, largest, density, promotes, suppresses)
        for feature, (label, by) in told.items():
            if feature not in seen and length(feature) is not None:
                yield Entry(feature, label, by)

    def _lines(self, files: list[Path]) -> Iterator[Line]:
        for file in files:
            for line in _read(file):
                model, source = (_text(line, key) for key in ("modelId", "layer"))
                if model and source:  # all lines are of one source, as far as they say so
                    address = f"{model}/{source}"
                    if self.address not in (None, address):
                        raise line.wrong("layer", f"one source in a folder, here {self.address}")
                    self.address, self.mismeasured = address, "-gemmascope-transcoder-" in source
                yield line


def _files(folder: Path, name: str) -> list[Path]:
    def order(file: Path) -> tuple[int, str]:
        found = re.search(r"(\d{1,9})", file.name)
        return (int(found[1]) if found else 0, file.name)

    files = sorted((folder / name).glob("batch-*.jsonl.gz"), key=order)
    if len(files) > MOST_FILES:
        raise LoadError(f"{folder / name}: {len(files)} files; expected {MOST_FILES} at most")
    return files


def _read(file: Path) -> Iterator[Line]:
    number, size = 0, 0
    try:
        with gzip.open(file, "rb") as stream:
            while text := stream.readline(MAX_LINE + 1):
                number, size = number + 1, size + len(text)
                if len(text) > MAX_LINE or size > MAX_FILE:
                    raise _wrong(file, number, f"too long; expected lines of {MAX_LINE} bytes and {MAX_FILE} in all")
                if not text.strip():
                    continue
                try:
                    held = json.loads(text)
                except (ValueError, RecursionError) as exc:
                    raise _wrong(file, number, f"is no JSON ({str(exc)[:80]}); expected an object") from exc
                if not isinstance(held, dict):
                    raise _wrong(file, number, f"holds a JSON {type(held).__name__}; expected an object")
                yield Line(file, number, held)
    except (OSError, EOFError, zlib.error) as exc:
        raise _wrong(file, number + 1, f"cannot be read ({exc}); expected gzip") from exc


def _index(line: Line, features: int) -> int:
    value = line.held.get("index")
    if isinstance(value, str) and re.fullmatch("[0-9]{1,9}", value):  # the export writes it as a text
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < features:
        raise line.wrong("index", f"a feature, 0 to {features - 1}")
    return value


def _number(line: Line, key: str, most: float) -> float | None:
    value = line.held.get(key)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= min(most, 1e30):
        raise line.wrong(key, "a number, 0 or more" if most > 1 else "a fraction, 0 to 1")
    return float(value)


def _text(line: Line, key: str) -> str | None:
    value = line.held.get(key)
    if value is not None and not _is_text(value, MAX_LABEL):
        raise line.wrong(key, f"a text of {MAX_LABEL} characters at most")
    return value


def _tokens(line: Line, key: str) -> tuple[str, ...]:
    value = line.held.get(key)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(_is_text(one, MAX_TOKEN) for one in value):
        raise line.wrong(key, f"a list of texts of {MAX_TOKEN} characters at most")
    return tuple(value[:MAX_TOKENS])


def _is_text(value: object, most: int) -> bool:
    """JSON may hold half of a pair of code units, which is no text."""
    return isinstance(value, str) and len(value) <= most and not re.search("[\0\ud800-\udfff]", value)


def _wrong(file: Path, number: int, what: str) -> LoadError:
    return LoadError(f"{file}, line {number}: {what}")
