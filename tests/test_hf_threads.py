"""One Model in several threads, several Models over one module of Transformers, and what close leaves behind."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from saesteer import hf
from saesteer.errors import ConfigError
from tests.hf_models import IDS, SITE, V, made_with

ADD = {"op": "add", "vector": V.tolist(), "site": SITE, "scale": 3.0}
READS = {"return": {"activations": [{"site": SITE, "at": "after"}], "hidden": True}}
SPECS: list[Any] = [
    None,
    ADD,
    {**ADD, "scale": -2.0},
    {"op": "clamp", "dictionary": "jump", "feature": 3, "value": 9.0},
]


@pytest.fixture
def model(tmp_path: Path) -> hf.Model:
    return made_with(tmp_path)


def asked(model: hf.Model, steer: Any, ids: list[int]) -> list[Any]:
    """What each kind of pass returns."""
    edits = [steer] if steer else []
    return [
        model.logits(ids, steer=steer),
        model.streams(ids, steer=steer)[SITE],
        model.generate(ids, steer=steer, max_tokens=6),
        model.doses(ids, steer=steer),
        repr(model.read(ids, steer={"edits": edits, **READS})),
    ]


def assert_equal(found: list[Any], expected: list[Any]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def together(tasks: list[Any]) -> list[Any]:
    """What the tasks return when each runs in a thread of its own, all begun at the same time."""
    barrier = threading.Barrier(len(tasks))

    def begin(task: Any) -> Any:
        barrier.wait()
        return task()

    with ThreadPoolExecutor(len(tasks)) as pool:
        return [*pool.map(begin, tasks)]


def test_four_threads_have_the_answers_of_one(model: hf.Model) -> None:
    prompts = [IDS[place:] for place in range(4)]
    expected = [asked(model, *each) for each in zip(SPECS, prompts, strict=True)]
    for _ in range(4):
        found = together([lambda each=each: asked(model, *each) for each in zip(SPECS, prompts, strict=True)])
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)


def test_models_over_one_module_do_not_edit_each_others_passes(model: hf.Model) -> None:
    other = hf.Model(model.model, sites=[SITE])
    specs = [ADD, {**ADD, "scale": -2.0}]
    plain = model.model(torch.tensor([IDS])).logits[0].float()
    expected = [one.logits(IDS, steer=steer) for one, steer in zip((model, other), specs, strict=True)]
    for _ in range(8):
        found = together(
            [
                lambda: model.logits(IDS, steer=specs[0]),
                lambda: other.logits(IDS, steer=specs[1]),
                lambda: model.model(torch.tensor([IDS])).logits[0].float(),
            ]
        )
        assert_equal(found, [*expected, plain])


def test_a_pass_inside_a_pass_is_refused(model: hf.Model) -> None:
    hook = model.model.get_output_embeddings().register_forward_pre_hook(lambda *_: model.logits(IDS) and None)
    with pytest.raises(ConfigError, match=r"^this Model runs a pass on this thread, expected one pass after the other"):
        model.logits(IDS)
    hook.remove()
    model.logits(IDS)


def test_close_leaves_the_module_as_it_was(model: hf.Model) -> None:
    def hooks() -> int:
        return sum(len(one._forward_hooks) + len(one._forward_pre_hooks) for one in model.model.modules())

    before = hooks()
    with hf.Model(model.model, sites=[SITE, "resid_mid.1"]) as second:
        assert hooks() == before + 2
        second.logits(IDS, steer=ADD)
    assert hooks() == before
    with pytest.raises(ConfigError, match=r"^this Model is closed, expected one pass after the other, before close"):
        second.logits(IDS)
    second.close()
    model.logits(IDS, steer=ADD)


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_tokens", -3), *(("repetition_penalty", one) for one in (0, -1.5, float("nan"), float("inf")))],
)
def test_wrong_arguments_of_generate_are_refused_by_name(model: hf.Model, name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: got {value}, expected "):
        model.generate(IDS, **{name: value})
