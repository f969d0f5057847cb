"""Both of vLLM's runners, with a real forward pass, against one pass of Transformers: one table of cases in all worlds.

vLLM's V2 runner, the default of its releases since 0.29, runs on a CPU in Triton's interpreter.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from saesteer import hf
from tests.apart import hear
from tests.plugin import runners
from tests.plugin.runner_cases import FAILED, REFUSED, WORLDS, check
from tests.plugin.runs import BESIDE, TABLE

pytestmark = [pytest.mark.slow, pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM's runners for CPUs")]

HAPPENS = {"stopped", "flagged", "cached"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("runners")
    runners.write(made)
    return made


@pytest.fixture(scope="module", params=runners.RUNNERS)
def told(request: Any, folder: Path) -> Any:
    """What all engines of a runner have told."""
    environment = runners.environment(request.param)
    return hear("-m", "tests.plugin.runs", request.param, str(folder), environment=environment, timeout=600)


@pytest.fixture(scope="module", params=runners.MODELS)
def model(request: Any) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def oracle(folder: Path, model: str) -> Iterator[hf.Model]:
    with hf.Model(str(folder / model), tokenizer=object(), **runners.options(folder)) as made:
        yield made


@pytest.mark.parametrize("world", WORLDS)
def test_each_answer_is_the_definition(told: Any, oracle: hf.Model, model: str, world: str) -> None:
    """Beside others that preempt it, behind those that fail, and with what they have left in the cache."""
    seen = set[str]()
    for asked, found in zip(TABLE, told[model][world], strict=True):
        if asked.case in ("refused", "failed"):
            assert found == (REFUSED if asked.case == "refused" else FAILED)
            continue
        try:
            seen |= {*check(oracle, asked, found)}
        except BaseException as exc:
            exc.add_note(f"{asked.case}, a prompt of {len(asked.prompt)} tokens, {world}")
            raise
    assert seen >= HAPPENS


def test_plain_requests_have_stocks_bits_beside_steered_ones(told: Any, model: str) -> None:
    for asked, found, stock in zip(BESIDE, told[model]["beside"], told[f"{model} stock"]["beside"], strict=True):
        alike = [found[key] == stock[key] for key in ("tokens", "logprobs")]
        assert all(alike) == (asked.case == "plain"), asked.case


def test_requests_were_preempted_and_leave_nothing(told: Any, model: str) -> None:
    assert told[model]["preempted"] > 2
    assert not any(told[model]["left"])


# The first storm and how many of a model, each of which takes six seconds.
STORMS = [(0, 8), *(pytest.param(first, 26, marks=pytest.mark.long) for first in range(8, 112, 26))]
HAPPENS_IN_STORMS = {*HAPPENS, "preempted", "aborted", "failed"}


@pytest.mark.parametrize(("first", "storms"), STORMS)
def test_storms_on_the_v2_runner_with_a_real_forward_pass(folder: Path, model: str, first: int, storms: int) -> None:
    words = "-m", "tests.plugin.real_storms", str(folder), model, str(first), str(storms)
    found = hear(*words, environment=runners.environment("V2"))
    assert not found["wrong"], "\n".join(found["wrong"])
    assert not any(found["left"])
    assert found["seen"].keys() >= HAPPENS_IN_STORMS
