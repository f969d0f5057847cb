"""Unsteered requests keep their bits beside steered ones, and against an engine without the plugin.

Bits are compared between engines whose scheduler runs in their own process (saesteer.plugin.job), where batches have
the same shape in every run.
"""

from typing import Any

import pytest

from saesteer.plugin.job import Batch, Completion, run
from tests.plugin.conftest import BRIDGE, OCEAN, PROMPTS, Dictionaries, engine_options
from tests.plugin.said import bits

pytestmark = pytest.mark.slow

FORMS = ["second", "topk", "mid", "embed", "last"]
MIXED: list[Any] = [None, {"edits": [BRIDGE]}, None, {"edits": [OCEAN]}]
READ = {
    "features": [{"dictionary": "demo", "scope": {"positions": [[0, None]]}}, {"dictionary": "topk", "at": "after"}],
    "activations": [{"site": "resid_post.20"}, {"site": "resid_mid.7", "at": "after", "reduce": "mean"}],
    "hidden": True,
}
READING = [None, {"return": READ}, {"return": {"hidden": True}}, {"return": READ}]
# A bound far below every activation, also at one token alone: clamps that change nothing.
IDLE = [
    {"edits": [{**BRIDGE, "mode": "min", "value": -1.0, "unit": "raw"}]},
    {"edits": [{**BRIDGE, "mode": "min", "value": -1.0, "unit": "raw", "scope": {"positions": [[2, 3]]}}]},
    {"edits": []},
    None,
]


def plain(*steer: Any) -> Batch:
    """The four prompts, 16 tokens each."""
    return Batch(PROMPTS, steer, max_tokens=16, ignore_eos=True)


def form(dictionary: str) -> dict[str, Any]:
    """A strong clamp on this dictionary."""
    return {"edits": [{"op": "clamp", "dictionary": dictionary, "feature": 17, "value": 60.0}]}


@pytest.fixture(scope="module")
def stock(served_dir: str) -> list[Completion]:
    (answers,) = run(served_dir, [plain()], dictionaries=None, options=engine_options())
    return answers


@pytest.fixture(scope="module")
def ours(served_dir: str, dictionaries: Dictionaries) -> dict[str, list[Completion]]:
    steers: dict[str, Any] = {"before": (), "mixed": MIXED, "clean": (), "idle": IDLE}
    steers |= {"reading": READING, "mixed and read": [one and {**one, "return": READ} for one in MIXED]}
    steers |= {name: [None, form(name), None, form(name)] for name in FORMS}
    batches = [Batch(PROMPTS, steer, max_tokens=16, ignore_eos=True, fresh=True) for steer in steers.values()]
    answers = run(served_dir, batches, dictionaries=dictionaries.arguments, options=engine_options())
    return dict(zip(steers, answers, strict=True))


@pytest.mark.parametrize("batch", ["before", "clean", "idle", "reading"])
def test_whoever_is_not_edited_has_stocks_bits(
    stock: list[Completion], ours: dict[str, list[Completion]], batch: str
) -> None:
    assert bits(ours[batch]) == bits(stock)


@pytest.mark.parametrize("batch", ["mixed", "mixed and read", *FORMS])
def test_plain_requests_have_stocks_bits_beside_steered_ones(
    stock: list[Completion], ours: dict[str, list[Completion]], batch: str
) -> None:
    expected, made = bits(stock), bits(ours[batch])
    assert made[0] == expected[0] and made[2] == expected[2]
    assert made[1] != expected[1] and made[3] != expected[3]


@pytest.mark.gpu
def test_a_dummy_gemma_is_stock_to_the_bit(tmp_path: Any) -> None:
    """Gemma 2 2B's shape without weights, a random dictionary of 16,384 features; compiled, full graphs.

    On two H100s, logprobs differed by up to 9.8e-4 from stock's (see bench/LOG.md), and were the same beside others.
    """
    from bench.dummy import dictionary_file, model_folder

    options = engine_options(load_format="dummy", skip_tokenizer_init=True)
    model = str(model_folder("gemma-2-2b", tmp_path))
    prompts = [[2, *range(7 + n, 40 + 9 * n)] for n in range(4)]
    clamp = {"edits": [{"op": "clamp", "dictionary": "random", "feature": 9001, "value": 50.0}]}
    batches = [Batch(prompts, s, max_tokens=24, ignore_eos=True, fresh=True) for s in ((), [None, clamp] * 2, ())]
    random = {"random": f"{dictionary_file(2304, 16384, tmp_path)}@resid_post.13"}
    (expected,) = [bits(one) for one in run(model, batches[:1], dictionaries=None, options=options)]
    idle, steered, clean = (bits(one) for one in run(model, batches, dictionaries=random, options=options))
    assert clean == idle
    assert steered[0] == idle[0] and steered[2] == idle[2]
    assert steered[1] != idle[1] and steered[3] != idle[3]
    if options.get("tensor_parallel_size", 1) == 1:
        assert idle == expected
    else:  # what is compiled for several ranks rounds otherwise around an op
        for (ids, logprobs), (stock_ids, stock_logprobs) in zip(idle, expected, strict=True):
            assert ids == stock_ids and logprobs == pytest.approx(stock_logprobs, abs=2e-3)
