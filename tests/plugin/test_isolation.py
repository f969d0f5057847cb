"""Unsteered requests keep their bits beside steered ones, and against an engine without the plugin."""

from typing import Any

import pytest

from tests.plugin.conftest import BRIDGE, OCEAN, PROMPTS, engine_options, generate, run_apart

pytestmark = pytest.mark.slow

MIXED = [None, {"edits": [BRIDGE]}, None, {"edits": [OCEAN]}]


def test_plain_requests_are_stock_to_the_bit(make_engine: Any, model_dir: str) -> None:
    llm = make_engine()
    job = {"model": model_dir, "options": engine_options(), "dictionaries": None}
    (stock,) = run_apart({**job, "batches": [{"prompts": PROMPTS, "tokens": 16}]}, VLLM_PLUGINS="")
    stock = [[(token, logprob) for token, logprob in one] for one in stock]
    mixed = generate(llm, PROMPTS, MIXED)
    clean = generate(llm, PROMPTS)

    assert mixed[0] == stock[0] and mixed[2] == stock[2]
    assert mixed[1] != stock[1] and mixed[3] != stock[3]
    assert clean == stock


@pytest.mark.parametrize("dictionary", ["second", "topk", "mid", "embed", "last"])
def test_every_form_of_site_steers_and_leaves_others_alone(make_engine: Any, dictionary: str) -> None:
    llm = make_engine()
    spec = {"edits": [{"op": "clamp", "dictionary": dictionary, "feature": 17, "value": 60.0}]}
    plain = generate(llm, PROMPTS)
    mixed = generate(llm, PROMPTS, [None, spec, None, spec])
    assert mixed[0] == plain[0] and mixed[2] == plain[2]
    assert mixed[1] != plain[1] and mixed[3] != plain[3]


def test_a_clamp_that_changes_nothing_changes_no_bit(make_engine: Any) -> None:
    llm = make_engine()
    unreached = {**BRIDGE, "mode": "min", "value": -1.0, "unit": "raw"}
    outside = {**BRIDGE, "scope": {"positions": [[900, 901]]}}
    plain = generate(llm, PROMPTS[:2])
    assert generate(llm, PROMPTS[:2], [{"edits": [unreached]}, {"edits": [outside]}]) == plain


def test_an_empty_spec_is_plain(make_engine: Any) -> None:
    llm = make_engine()
    assert generate(llm, PROMPTS[:1], {"edits": []}) == generate(llm, PROMPTS[:1])


@pytest.mark.gpu
def test_a_dummy_gemma_is_stock_to_the_bit(tmp_path: Any) -> None:
    """Gemma 2 2B's shape without weights, a random dictionary of 16,384 features; compiled, full graphs."""
    from bench.dummy import dictionary_file, model_folder

    options = engine_options(load_format="dummy", skip_tokenizer_init=True)
    prompts = [{"prompt_token_ids": [2, *range(7 + n, 40 + 9 * n)]} for n in range(4)]
    job = {"model": str(model_folder("gemma-2-2b", tmp_path)), "options": options, "dictionaries": None}
    clamp = {"edits": [{"op": "clamp", "dictionary": "random", "feature": 9001, "value": 50.0}]}
    plain, mixed = {"prompts": prompts, "tokens": 24}, {"prompts": prompts, "tokens": 24, "steer": [None, clamp] * 2}
    (stock,) = run_apart({**job, "batches": [plain]}, VLLM_PLUGINS="")
    ours = {"random": f"{dictionary_file(2304, 16384, tmp_path)}@resid_post.13"}
    idle, steered, clean = run_apart({**job, "dictionaries": ours, "batches": [plain, mixed, plain]})
    assert idle == stock and clean == stock
    assert steered[0] == stock[0] and steered[2] == stock[2]
    assert steered[1] != stock[1] and steered[3] != stock[3]
