"""Probes with a function, registered and replaced while a server runs, in answers, chunks, gates and rules."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from saesteer.client import numbers
from tests.plugin.conftest import ADMIN, PROMPTS, WIDTH
from tests.plugin.serving import events_of
from tests.plugin.turns import TURNS

pytestmark = pytest.mark.slow

SITE = "resid_post.15"
EVERYWHERE = {"positions": [[0, None]]}
_DRAW = np.random.default_rng(23)
ROWS = [_DRAW.normal(size=WIDTH).astype(np.float32) for _ in range(2)]
READ = {"probe": "mood", "site": SITE, "scope": EVERYWHERE}
FUNCTIONS: dict[str, Any] = {
    "linear": lambda s: s,
    "sigmoid": lambda s: 1 / (1 + np.exp(-s)),
    "tanh": np.tanh,
}


class Mood:
    """The probe of a server, scaled so that its functions tell most tokens apart.

    Args:
        server: its client.
        typical: the scores of a prompt by each of ROWS, without a bias.
    """

    def __init__(self, server: httpx.Client, typical: list[Any]) -> None:
        self.server = server
        self.rows = [row / np.std(scores[1:]) for row, scores in zip(ROWS, typical, strict=True)]
        self.biases = [
            float(-np.median(scores[1:]) / np.std(scores[1:])) for scores in typical
        ]  # position 0 is an outlier

    def put(self, number: int, function: str) -> dict[str, Any]:
        body = {"name": "mood", "vector": self.rows[number].tolist(), "bias": self.biases[number], "function": function}
        made = self.server.post("/v1/saesteer/vectors", headers=ADMIN, json=body)
        assert made.status_code == 200, made.text
        return dict(made.json())

    def of(self, x: Any, number: int, function: str) -> Any:
        """What it makes of rows of the stream."""
        score = x.astype(np.float64) @ self.rows[number].astype(np.float64) + self.biases[number]
        return FUNCTIONS[function](score)


@pytest.fixture
def mood(any_server: httpx.Client) -> Iterator[Mood]:
    x = ask(any_server, {"return": {"activations": [{"site": SITE}]}})["saesteer"]["activations"][0]
    yield Mood(any_server, [numbers(x).astype(np.float64) @ row for row in ROWS])
    any_server.delete("/v1/saesteer/vectors/mood", headers=ADMIN)


def body_of(spec: Any, **more: Any) -> dict[str, Any]:
    body = {"model": "base", "prompt": PROMPTS[2], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    return {**body, "saesteer": spec, **more}


def ask(server: httpx.Client, spec: Any, **more: Any) -> dict[str, Any]:
    response = server.post("/v1/completions", json=body_of(spec, **more))
    assert response.status_code == 200, response.text
    return dict(response.json())


def check(mood: Mood, said: Any, number: int, function: str) -> None:
    """The scores of an answer are those of the rows that it has read beside them."""
    [tensor], entries = said["activations"], said["probes"]
    positions = [at for entry in entries for at in entry["positions"]]
    assert positions == tensor["positions"]
    wanted = mood.of(numbers(tensor), number, function)
    assert [one for entry in entries for one in entry["scores"]] == pytest.approx(wanted.tolist(), rel=1e-3, abs=1e-3)
    if function != "linear":
        assert np.ptp(wanted[1:]) > 0.5, "it tells tokens apart"


def test_a_probe_is_read_as_it_was_registered_last(any_server: httpx.Client, mood: Mood) -> None:
    spec = {"return": {"probes": [READ], "activations": [{"site": SITE}]}}
    versions = set()
    for number, function in ((0, "sigmoid"), (1, "tanh"), (1, "linear"), (0, "sigmoid")):
        made = mood.put(number, function)
        assert (made["function"], made["bias"]) == (function, pytest.approx(mood.biases[number]))
        versions.add(made["version"])
        check(mood, ask(any_server, spec)["saesteer"], number, function)
        [listed] = [
            one
            for one in any_server.get("/v1/saesteer/vectors", headers=ADMIN).json()["vectors"]
            if one["name"] == "mood"
        ]
        assert (listed["function"], listed["uses"]) == (function, 1)
    assert len(versions) == 3, "the function is part of the version"


def test_chunks_keep_the_probe_that_their_stream_began_with(any_server: httpx.Client, mood: Mood) -> None:
    """It is replaced in mid-answer, by another row with another function."""
    mood.put(0, "sigmoid")
    spec = {"return": {"probes": [READ], "activations": [{"site": SITE}]}}
    whole = ask(any_server, spec, max_tokens=60)["saesteer"]
    pieces: list[Any] = []
    with any_server.stream("POST", "/v1/completions", json=body_of(spec, max_tokens=60, stream=True)) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            pieces.append(json.loads(line.removeprefix("data: ")))
            if len(pieces) == 3:
                mood.put(1, "tanh")
                assert ask(any_server, spec, max_tokens=2)["saesteer"]["probes"]
    entries = [entry for piece in pieces for entry in piece.get("saesteer", {}).get("probes", ())]
    assert len(entries) > 3, "chunk by chunk"
    scores = [score for entry in entries for score in entry["scores"]]
    assert scores == pytest.approx(whole["probes"][0]["scores"], rel=1e-3, abs=1e-3)
    check(mood, ask(any_server, spec)["saesteer"], 1, "tanh")


ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TURNS, "max_tokens": 4},
    "/v1/responses": {"input": TURNS, "max_output_tokens": 4},
    "/v1/messages": {"messages": TURNS, "max_tokens": 4},
    "/invocations": {"prompt": PROMPTS[2], "max_tokens": 4},
}


def found_in(value: Any, word: str) -> list[Any]:
    """All values of a key, however deep."""
    if isinstance(value, list):
        return [one for item in value for one in found_in(item, word)]
    if not isinstance(value, dict):
        return []
    return [one for key, item in value.items() for one in ([item] if key == word else found_in(item, word))]


@pytest.mark.parametrize("path", ROUTES)
def test_scores_that_overflow_are_null(any_server: httpx.Client, mood: Mood, path: str) -> None:
    """A probe may be as long as float32 numbers get; a sum of its products is then infinite, or not a number."""
    huge = np.where(np.arange(WIDTH) % 2, 3e38, -3e38).tolist()
    made = any_server.post("/v1/saesteer/vectors", headers=ADMIN, json={"name": "mood", "vector": huge})
    assert made.status_code == 200, made.text
    spec = {
        "edits": [{"op": "flag", "when": {"probe": "mood", "site": SITE, "below": 0}}],
        "return": {"probes": [READ]},
    }
    body = {"model": "base", "temperature": 0, **ROUTES[path], "saesteer": spec}
    for stream in (False, True):
        with any_server.stream("POST", path, json={**body, "stream": stream} if stream else body) as response:
            assert response.status_code == 200, response.read()
            if stream:
                told: Any = events_of(response)
            else:
                response.read()
                assert "NaN" not in response.text and "Infinity" not in response.text
                told = response.json()
        assert not found_in(told, "error") or not any(found_in(told, "error"))
        scores = [score for each in found_in(told, "scores") for score in each]
        assert scores and any(score is None for score in scores)
        assert found_in(told, "flags"), "and it ends as ever"
