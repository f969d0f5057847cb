"""The rotation of contenders on made-up engines, and what they must show; no engine, no GPU."""

import re
from collections.abc import Sequence

import pytest

from bench.asks import Shape
from bench.contend import KINDS, Answer, Burst, Told
from bench.contenders import ASKS, CONTENDERS, STOCK
from bench.rotation import CHECK_TOKENS, Failed, Rotation

TINY = Shape.of("tiny")


def told(burst: Burst, answers: Sequence[Answer] = (), slow: float = 1.0) -> Told:
    begin = [0.1 * slow] * burst.requests
    return Told(begin, [one + 0.01 * slow * (burst.tokens - 1) for one in begin], list(answers))


class Engines:
    """Contenders that do what they are asked; ``bad`` says which do not."""

    def __init__(self, bad: dict[tuple[str, str], str] | None = None) -> None:
        self.bad = bad or {}
        self.asked: list[tuple[str, Burst]] = []

    def __call__(self, name: str, burst: Burst) -> Told:
        self.asked.append((name, burst))
        how = self.bad.get((name, burst.ask))
        if how == "dies":
            raise Failed("died with exit code -9")
        layers = TINY.layers if burst.ask == "captures" else 1
        rows = [layers, burst.prompt + burst.tokens - (2 if how == "short" else 1), TINY.width]
        text = "plain" if burst.ask in ("nothing", "capture", "captures") or how == "idle" else "steered"
        one = Answer(text, edited=True, captured=rows if burst.ask in ("capture", "captures") else None)
        return told(burst, [one] * burst.requests, slow=1.0 if name == STOCK else 1.1)


def rotate(ask: Engines, plans: dict[str, list[str]], requests: Sequence[int] = (1, 4)) -> Rotation:
    return Rotation(plans, requests, ask, TINY, prompt=16, tokens=8)


def test_rows_compare_with_stock_and_no_prompt_comes_twice() -> None:
    engines = Engines()
    made = rotate(engines, {"hotwire": ["nothing", "vectors"], "vllm-lens": ["captures"]})
    made.check()
    assert all(made.round(turn, left=60) for turn in range(3))
    rows = list(made.rows())
    assert [(row["contender"], row["ask"], row["requests"]) for row in rows] == [
        (*place, requests)
        for requests in (1, 4)
        for place in (("hotwire", "nothing"), ("hotwire", "vectors"), ("vllm-lens", "captures"))
    ]
    for row in rows:
        assert row["runs"] == 3
        assert row["per_token"]["delta_percent"] == pytest.approx(10.0)
        assert row["per_token"]["min_percent"] <= row["per_token"]["max_percent"]
    for name in (STOCK, "hotwire", "vllm-lens"):
        seeds = [burst.seed for who, burst in engines.asked if who == name and burst.tokens != CHECK_TOKENS]
        assert len(seeds) == len(set(seeds)), "a prompt would be in the prefix cache"


@pytest.mark.parametrize(
    ("ask", "how", "why"),
    [
        ("vector", "idle", "the answers are those without the vector"),
        ("capture", "short", r"captures are \[1, 22, 64\], expected \[1, 23, 64\]"),
        ("vectors", "dies", "died with exit code -9"),
    ],
)
def test_who_does_not_do_what_it_is_asked_is_not_timed_and_the_others_are(ask: str, how: str, why: str) -> None:
    engines = Engines({("hotwire", ask): how})
    made = rotate(engines, {"hotwire": ["nothing", ask], "saesteer": ["nothing"]}, [4])
    made.check()
    count = len(engines.asked)
    made.round(0, left=60)
    assert not [burst for name, burst in engines.asked[count:] if (name, burst.ask) == ("hotwire", ask)]
    rows = {(row["contender"], row["ask"]): row for row in made.rows()}
    assert "per_token" in rows["hotwire", "nothing"] and "per_token" in rows["saesteer", "nothing"]
    assert re.search(why, rows["hotwire", ask]["not_run"])


def test_every_contender_has_a_process_and_asks_that_exist() -> None:
    assert KINDS.keys() == CONTENDERS.keys()
    assert all(set(one.asks) <= ASKS.keys() and one.asks[0] == "nothing" for one in CONTENDERS.values())
    assert {ask for one in CONTENDERS.values() for ask in one.asks} == ASKS.keys()
