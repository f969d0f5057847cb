"""Numbers of what was read, from bytes, as answers have them. Knows no readout."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from saesteer.dictionaries.vectors import Function

_MANY = 64  # numbers that are rounded together
_BORDERS = np.array([float(f"1e{power}") for power in range(-5, 7)])  # between numbers of unlike powers of ten
_TENS = 10.0 ** np.arange(13)
SIZES = {"bfloat16": 2, "float16": 2, "float32": 4}  # bytes of a number


def apart(data: bytes, rows: int, count: int) -> list[bytes]:
    """What each of several readouts has of rows in which they stand side by side, equally wide."""
    if count == 1 or not rows:
        return [data] * count
    # Whole rows as single elements: byte by byte it takes 15 times as long.
    found = np.frombuffer(data, f"V{len(data) // (rows * count)}").reshape(rows, count)
    return [found[:, at].tobytes() for at in range(count)]


def score(numbers: NDArray[np.float32], function: Function) -> NDArray[np.float32]:
    """What a probe's function makes of its products."""
    if function == "linear":
        return numbers
    long = numbers.astype(np.float64)
    found = np.tanh(long) if function == "tanh" else (1 + np.tanh(long / 2)) / 2  # no exp overflows
    return found.astype(np.float32)


def tensor(positions: list[Any], data: bytes, dtype: str, rows: int) -> dict[str, Any]:
    """The fields of a tensor of so many rows."""
    width = len(data) // (SIZES[dtype] * rows) if rows else 0
    return {"positions": positions, "dtype": dtype, "shape": [rows, width], "data": data}


def floats(data: bytes) -> list[float]:
    """As text would have them: of seven digits, as float32 has no more."""
    numbers: NDArray[np.float64] = np.frombuffer(data, "<f4").astype(np.float64)
    if len(numbers) < _MANY:
        return [float(f"{number:.7g}") for number in numbers.tolist()]
    # The same, 15 times as fast: where seven digits end 0 to 12 places behind the point, the product with a power of
    # ten is exact, so it is rounded as text is, and the quotient of two exact numbers is what text would be read as.
    sizes = np.abs(numbers)
    usual = (sizes >= 1e-6) & (sizes < 1e7)
    powers = _TENS[12 - np.searchsorted(_BORDERS, np.where(usual, sizes, 1.0), "right")]
    found: list[float] = (np.rint(numbers * powers) / powers).tolist()
    for at in np.flatnonzero(~usual & (sizes != 0)).tolist():
        found[at] = float(f"{numbers[at]:.7g}")
    return found
