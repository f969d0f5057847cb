"""What `saesteer doctor` concludes from answers; that it asks real engines is tested in test_real.py."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from saesteer.errors import ConfigError
from saesteer.plugin.job import Completion
from saesteer.workbench.doctor import TOKENS, Distances, _choose, compare
from tests.cli.coders import coder

CLOSE = Distances(plain=0.01, steered=0.02, unlike=5.0)


def answer(start: int, *, cached: int = 0) -> Completion:
    return Completion("", [1] * 400, list(range(start, start + TOKENS)), [-float(start)] * TOKENS, cached)


PLAIN_A, PLAIN_B, STEERED_B = answer(0), answer(100), answer(200)
PLAIN, STEERED = answer(300), answer(400)
# With a part from the cache the sums are others, and on some machines so are the last bits.
CACHED = replace(PLAIN, cached=384, logprobs=[-300.001] * TOKENS)
STOCK = [[PLAIN_A, PLAIN_B], [PLAIN_A, PLAIN_B], [PLAIN], [CACHED], [CACHED], [PLAIN], [CACHED]]
OURS = [
    [PLAIN_A, STEERED_B],
    [PLAIN_A, PLAIN_B],
    [STEERED],
    [PLAIN],
    [CACHED],
    [PLAIN],
    [STEERED],
]


def failed(ours: list[list[Completion]], distances: Distances = CLOSE) -> list[str]:
    return [check.name for check in compare(STOCK, ours, distances) if not check.passed]


def with_answer(batch: int, place: int, other: Completion) -> list[list[Completion]]:
    ours = [list(answers) for answers in OURS]
    ours[batch][place] = other
    return ours


@pytest.mark.parametrize(
    ("ours", "name"),
    [
        (with_answer(0, 0, replace(PLAIN_A, logprobs=[-0.001] * TOKENS)), "unsteered = stock"),
        (with_answer(0, 1, PLAIN_B), "steered ≠ stock"),
        (with_answer(1, 1, STEERED_B), "the next batch is clean"),
        (with_answer(2, 0, replace(STEERED, logprobs=[float("nan")] * TOKENS)), "finite"),
        (with_answer(3, 0, STEERED), "prefix cache, steered first"),
        (with_answer(3, 0, replace(PLAIN, cached=16)), "prefix cache, steered first"),
        (with_answer(5, 0, STEERED), "prefix cache, plain first"),
        (with_answer(6, 0, PLAIN), "prefix cache, plain first"),
        (with_answer(6, 0, replace(STEERED, cached=16)), "prefix cache, plain first"),
        (with_answer(4, 0, PLAIN), "prefix caching is on"),
        (with_answer(4, 0, replace(PLAIN, cached=384)), "prefix caching is on"),
    ],
)
def test_each_fault_is_seen(ours: list[list[Completion]], name: str) -> None:
    assert name in failed(ours)


@pytest.mark.parametrize(
    "distances",
    [Distances(plain=0.01, steered=0.5, unlike=5.0), Distances(plain=0.01, steered=0.02, unlike=0.02)],
    ids=["apart", "clamp-without-effect"],
)
def test_disagreement_is_seen(distances: Distances) -> None:
    assert failed(OURS, distances) == ["Transformers agrees"]


def oracle(**info: Any) -> Any:
    """Of a model, as much as the choice of a feature asks for: the second row is the strongest."""
    known = replace(coder()[1], features=3, has_max_act=False, can_reconstruct=False, **info)
    return SimpleNamespace(
        layers_of=lambda name: (None,),
        info=lambda name, layer: known,
        activations=lambda prompt, name, layer: torch.tensor([[9.0, 0, 0], [1.0, 4.0, 0]]),
    )


@pytest.mark.parametrize(("ids", "feature"), [(None, 1), ((10, 20, 30), 20)], ids=["whole", "some features"])
def test_the_strongest_feature_has_its_own_number(ids: tuple[int, ...] | None, feature: int) -> None:
    """A file may hold only some features of a dictionary."""
    [edit] = _choose(oracle(feature_ids=ids), "d", None)["edits"]
    assert (edit["feature"], edit["value"], edit["unit"]) == (feature, 8.0, "raw")


def test_a_feature_that_is_not_there_is_told_before_an_engine_starts() -> None:
    for ids, feature in ((None, 3), ((10, 20, 30), 1)):
        with pytest.raises(ConfigError, match=f"--feature {feature}: dictionary 'd' has no such feature"):
            _choose(oracle(feature_ids=ids), "d", feature)
