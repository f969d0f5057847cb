"""The rule of `saesteer doctor` for the first token by three paths, and what it says of dictionaries and turns."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from saesteer.plugin.job import Completion
from saesteer.workbench import fits
from saesteer.workbench.doctor import ROUNDS, TOKENS, TURNS, conversation, turns
from saesteer.workbench.paths import Candidate, Paths, agree, tolerance, verdict
from tests.cli.coders import STREAMS, WIDTH, coder

ALLOWED = 0.1
LOGPROBS = st.lists(st.floats(-12, 0), min_size=5, max_size=5)


def top(*logprobs: float, first: int = 0) -> list[Candidate]:
    found = [Candidate(first + token, f"t{token}", logprob) for token, logprob in enumerate(logprobs)]
    return sorted(found, key=lambda one: -one.logprob)


@given(LOGPROBS, st.lists(st.floats(-0.99, 0.99), min_size=5, max_size=5))
def test_what_rounding_does_agrees_whatever_it_reorders(logprobs: list[float], moved: list[float]) -> None:
    """Also where the last candidates are others, since those are as likely as the last one."""
    one = top(*logprobs)
    other = top(*(a + ALLOWED * b for a, b in zip(logprobs, moved, strict=True)))
    assert agree(one, other, ALLOWED) and agree(other, one, ALLOWED)
    swapped = [*other[:-1], Candidate(99, "another", other[-1].logprob)]
    assert agree(one, swapped, 2 * ALLOWED)


@given(LOGPROBS, st.integers(0, 4), st.sampled_from([-1.0, 1.0, math.nan, math.inf]))
def test_a_candidate_that_is_elsewhere_does_not(logprobs: list[float], place: int, by: float) -> None:
    one, other = top(*logprobs), top(*(a + by * (at == place) for at, a in enumerate(logprobs)))
    assert not agree(one, other, ALLOWED) and not agree(other, one, ALLOWED)


def test_nothing_agrees_with_nothing() -> None:
    assert not agree([], [], ALLOWED) and not agree(top(-1.0), [], ALLOWED)


SOUND, SHIFTED, OTHER = [top(-1, -2, -3)], [top(-4, -5, -6)], [top(-7, -8, -9)]
NAN = [top(math.nan, -1)]


@pytest.mark.parametrize(
    ("a", "b", "c", "said"),
    [
        (SOUND, SHIFTED, SOUND, "A = C and B differs"),
        (SOUND, [], SOUND, "A = C and B differs"),
        (SOUND, NAN, SOUND, "A = C and B differs"),
        (SHIFTED, SOUND, SOUND, "A differs from both"),
        (SOUND, SOUND, SHIFTED, "A = B and C differs"),
        (SOUND, SHIFTED, OTHER, "no two agree"),
        (NAN, SOUND, SOUND, "A is not finite"),
        (NAN, NAN, NAN, "A is not finite"),
    ],
)
def test_the_rule_names_the_place(a: Any, b: Any, c: Any, said: str) -> None:
    well, told = verdict(Paths(a, b, c), ALLOWED)
    assert not well and told.startswith(said)


def test_all_is_well_up_to_noise_between_two_that_agree_with_the_reference() -> None:
    paths = Paths([top(-1, -2)], [top(-1.09, -2)], [top(-0.91, -2)])
    assert verdict(paths, ALLOWED) == (True, "A = B = C within 0.10 nats")


def test_the_tolerance_is_four_steps_of_the_dtype() -> None:
    assert tolerance("bfloat16", 16.0) == tolerance("auto", -16.0) == 0.52
    assert tolerance("float16", 16.0) == pytest.approx(0.0825)
    assert tolerance("float32", 16.0) == pytest.approx(0.02, abs=1e-4)


def answer(turn: int, seconds: float, cached: int, **changes: Any) -> Completion:
    ids = list(range(turn, turn + TOKENS))
    return replace(Completion("", [turn], ids, [-1.0] * TOKENS, cached, seconds=seconds), **changes)


def rounds(**second: Any) -> list[list[Completion]]:
    """A conversation, whose second turn of the first round is changed."""
    warm = [answer(0, 0.5, 0), answer(1, 0.1, 900), answer(2, 0.2, 950)]
    first = [warm[0], replace(warm[1], **second), warm[2]]
    slow = [answer(0, 0.9, 0), answer(1, 0.9, 900), answer(2, 0.9, 950)]  # something else ran meanwhile
    return [[one] for one in (*first, *slow, answer(0, 0.6, 0), answer(1, 0.7, 0), answer(2, 0.8, 0))]


def failed(answers: list[list[Completion]]) -> list[str]:
    return [one.name for one in turns(answers, ALLOWED) if not one.passed]


def test_a_conversation_is_faster_and_the_same() -> None:
    faster, same = turns(rounds(), ALLOWED)
    assert faster.passed and faster.detail.startswith("500, 100, 200 ms") and "900 and 950" in faster.detail
    assert same.passed and same.detail.startswith("3 of 3")
    assert len(conversation({}, chat=True)) == (ROUNDS + 1) * len(TURNS)


IDS = list(range(1, 1 + TOKENS))


@pytest.mark.parametrize(
    ("second", "names"),
    [
        ({"cached": 0}, ["later turns are faster"]),
        ({"seconds": 0.6}, ["later turns are faster"]),
        ({"ids": [99, *IDS[1:]], "logprobs": [-3.0] * TOKENS}, ["later turns = cold"]),
        ({"logprobs": [*[-1.0] * 9, math.nan, *[-1.0] * (TOKENS - 10)]}, ["later turns = cold"]),
        ({"ids": [*IDS[:3], 99, *IDS[4:]], "logprobs": [*[-1.0] * 3, -1.05, *[-9.0] * (TOKENS - 4)]}, []),
        ({"prompt_ids": [7], "ids": [99] * TOKENS}, []),
    ],
    ids=["not cached", "slow", "other tokens", "NaN", "a near tie", "behind a near tie"],
)
def test_each_fault_of_a_conversation_is_seen(second: dict[str, Any], names: list[str]) -> None:
    answers = rounds(**second)
    if "seconds" in second:
        answers[1 + len(TURNS)] = answers[1]
    assert failed(answers) == names


def odd(**changes: Any) -> list[str]:
    made, info = coder(**changes)
    return [*fits.oddities(made, info, fits.figures(made, info, STREAMS))]


def test_a_dictionary_that_fits() -> None:
    made, info = coder(l0=4.0)
    found = fits.figures(made, info, STREAMS)
    assert found.tokens == 16 and found.fvu == pytest.approx(0, abs=1e-6) and found.l0 == 4
    assert not [*fits.oddities(made, info, found)]
    assert fits.sites_of([info]) == ["resid_post.3"]


@given(st.sampled_from(["w_enc", "b_enc", "w_dec", "b_dec"]), st.sampled_from([math.nan, math.inf]), st.integers(0, 3))
def test_a_weight_that_is_not_finite_is_named(name: str, wrong: float, place: int) -> None:
    made, _ = coder()
    broken = getattr(made, name).clone()
    broken.view(-1)[place] = wrong
    assert f"{name} holds NaN or infinity" in odd(**{name: broken})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"b_enc": torch.full((2 * WIDTH,), -99.0)}, "no feature is active"),
        ({"l0": 40.0}, "4 features are active in a token, its files say 40"),
        (
            {"w_dec": torch.roll(torch.cat([torch.eye(WIDTH), -torch.eye(WIDTH)]), 1, 1)},
            "of another site, layer or model",
        ),
    ],
)
def test_what_is_odd_is_said(changes: dict[str, Any], said: str) -> None:
    assert any(said in one for one in odd(**changes))
