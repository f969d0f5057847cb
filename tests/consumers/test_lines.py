"""The line that the consumer ``logging`` writes for an answer."""

import numpy as np
import pytest

from saesteer.consumers.consumer import Array, Rows
from saesteer.consumers.lines import Logging
from tests.consumers.rows import SITE, request, rows


def _features(at: int, index: int, strength: float) -> Rows:
    one = {"indices": np.array([[3, index]], "<i4"), "strengths": np.array([[0.5, strength]], "<f4")}
    arrays = {
        name: Array("float32" if name == "strengths" else "int32", (1, 2), array.tobytes())
        for name, array in one.items()
    }
    return Rows("features", SITE | {"dictionary": "sae"}, np.array([at]), np.array([7]), arrays)


def test_a_line_has_the_rows_and_the_largest_number_of_each_read(caplog: pytest.LogCaptureFixture) -> None:
    logging = Logging({})
    asked = request()
    for piece in (rows(0, 0, 2), rows(0, 2, 5), _features(0, 81, 2.5), _features(1, 82, 1.0)):
        logging.take(asked, piece)
    largest = max(float(rows(0, 0, 5).arrays["data"].numpy().max()), 0)
    with caplog.at_level("INFO", "vllm.saesteer.consumers"):
        logging.end(asked)
    [line] = caplog.messages
    assert f": 5 rows, largest {largest:.4g} at 0" in line
    assert line.endswith("sae: 2 rows, largest 2.5 at 81"), line


def test_rows_without_an_active_feature_have_no_number(caplog: pytest.LogCaptureFixture) -> None:
    logging, asked = Logging({}), request()
    none = {"indices": Array("int32", (1, 0), b""), "strengths": Array("float32", (1, 0), b"")}
    idle = {"indices": Array("int32", (1, 1), b"\xff" * 4), "strengths": Array("float32", (1, 1), b"\0" * 4)}
    for at, arrays in enumerate((none, idle)):
        logging.take(asked, Rows("features", SITE, np.array([at]), np.array([7]), arrays))
    with caplog.at_level("INFO", "vllm.saesteer.consumers"):
        logging.end(asked)
    assert caplog.messages[0].endswith(": 2 rows")
