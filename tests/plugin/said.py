"""What an answer says in ``saesteer``, as plain numbers that JSON can hold and two engines can be compared by."""

from base64 import b64decode
from typing import Any

import numpy as np
import pytest

from saesteer.plugin.job import Completion


def plain(said: Any) -> dict[str, Any]:
    """An answer's fields with the numbers of its tensors; tokens from the prefix cache count as edited."""
    said = dict(said)
    for entry in said.get("applied", ()):
        entry["tokens_edited"] += entry.pop("tokens_cached")
    for entry in (*said.get("activations", ()), *said.get("hidden", ())):
        handle = entry.pop("handle", None)
        data = np.frombuffer(b64decode(entry["data"]), "<f4") if handle is None else handle.numbers()
        entry["data"] = data.ravel().tolist()
    for word in ("features", "probes"):  # these entries come with the pieces of an answer, which are of any size
        if word in said:
            several = (one.get("rows") or zip(one["positions"], one["scores"], strict=True) for one in said[word])
            said[word] = [row for rows in several for row in rows]
    return said


def same(found: Any, expected: Any, noise: float, at: str = "") -> None:
    """The same, with numbers within some noise of each other, relative to the largest number of a list.

    Raises:
        AssertionError: they are not.
    """
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), at
        for key in expected:
            same(found[key], expected[key], noise, f"{at}.{key}")
    elif isinstance(expected, list) and expected and all(isinstance(one, float) for one in expected):
        assert found == pytest.approx(expected, abs=noise * max(map(abs, expected))), at
    elif isinstance(expected, list):
        assert len(found) == len(expected), at
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            same(one, other, noise, f"{at}[{number}]")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=noise, abs=noise), at
    else:
        assert found == expected, at


def bits(answers: list[Completion]) -> list[Any]:
    """Tokens and logprobs."""
    return [(answer.ids, answer.logprobs) for answer in answers]
