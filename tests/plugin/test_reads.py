"""What requests read on the real engine is what Transformers computes of the same tokens, whatever runs beside them."""

import gc
from base64 import b64encode
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from saesteer import hf
from saesteer.client import Capture, numbers
from saesteer.plugin.results.spools import Spool
from tests.plugin.conftest import preemptions
from tests.plugin.read_requests import BLOCK, EVERYWHERE, OPTIONS, READS, STEERED, add, ask, check, text
from tests.plugin.readings import check_reads

pytestmark = pytest.mark.slow


@pytest.fixture
def llm(make_engine: Callable[..., Any]) -> Any:
    found = make_engine(**OPTIONS)
    assert found.reset_prefix_cache()
    return found


@pytest.mark.parametrize("kind", READS)
def test_reads_of_a_chunked_prompt_and_its_answer(llm: Any, oracle: hf.Model, kind: str) -> None:
    (output,) = ask(llm, [text(kind, 700)], {"edits": STEERED, "return": READS[kind]})
    assert len(output.prompt_token_ids) > 2 * 64, "in chunks"
    check(oracle, output, READS[kind], STEERED)


def test_a_crowd_that_preempts_and_reads_different_things(llm: Any, oracle: hf.Model) -> None:
    """Twelve requests join and end in mid-run, in a cache that is too small for the eight that run at once."""
    kinds = [*READS, None]
    wanted = [kinds[n % len(kinds)] for n in range(12)]
    edits = [[[], STEERED][n % 3 == 1] for n in range(12)]
    specs = [
        None if kind is None else {"edits": own, "return": READS[kind]} for kind, own in zip(wanted, edits, strict=True)
    ]
    before = preemptions(llm)
    outputs = ask(
        llm, [text(f"crowd {n}", 120 + 70 * (n % 5)) for n in range(12)], specs, [30 + 9 * (n % 7) for n in range(12)]
    )
    assert preemptions(llm) > before, "the cache was small enough to preempt"
    for output, kind, own in zip(outputs, wanted, edits, strict=True):
        if kind is None:
            assert not hasattr(output, "saesteer")
        else:
            check(oracle, output, READS[kind], own)


ANYWHERE = {"probes": [{"probe": "probe", "scope": {"positions": [[40, None]]}}]}
SKIPPED = {
    "features": [{"dictionary": "demo", "scope": {"positions": [[2, 5], [8, 9]]}, "cached": "skip"}],
    "probes": [{**ANYWHERE["probes"][0], "cached": "skip"}],
    "activations": [{"site": "resid_post.20", "reduce": "mean", "cached": "skip"}],
    "hidden": {"scope": EVERYWHERE, "cached": "skip"},
}


def test_cached_prompts_are_computed_again_from_the_first_read(llm: Any, oracle: hf.Model) -> None:
    """What a reader leaves in the cache serves others, and the other way round."""
    prompt = [text("cached", 500)]
    (plain,) = ask(llm, prompt, None)
    whole = (len(plain.prompt_token_ids) - 1) // BLOCK * BLOCK
    assert plain.num_cached_tokens == 0 and whole > 2 * BLOCK
    for returns, hit in (
        (ANYWHERE, 40 // BLOCK * BLOCK),
        (READS["activations"], 0),
        (READS["generated"], whole),
        (SKIPPED, whole),
        ({"hidden": True}, whole),
        ({"hidden": {"scope": {"positions": [[-1, None]]}}}, whole),
    ):
        (output,) = ask(llm, prompt, {"return": returns})
        assert output.num_cached_tokens == hit, returns
        assert output.outputs[0].token_ids == plain.outputs[0].token_ids
        check(oracle, output, returns)
    assert llm.reset_prefix_cache()
    (first,) = ask(llm, prompt, {"return": READS["all"]})
    (second,) = ask(llm, prompt, None)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, whole)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids == plain.outputs[0].token_ids
    check(oracle, first, READS["all"])


def test_handles_hold_what_the_answer_would(llm: Any, oracle: hf.Model) -> None:
    """Of every choice and reduction; what is aborted keeps nothing."""
    returns = READS["activations"]
    handled = {"activations": [{**one, "as": "handle"} for one in returns["activations"]], "hidden": True}
    results = llm.llm_engine.input_processor.saesteer_door.results
    (output,) = ask(llm, [text("handles", 500)], {"return": handled}, n=2, temperature=1.5)
    assert len(results.sweep()) == 2 * len(returns["activations"])
    for choice in output.outputs:
        for entry in choice.saesteer["activations"]:
            handle = entry.pop("handle")
            assert "data" not in entry
            entry["data"] = b64encode(handle.numbers().tobytes()).decode()
            handle.delete()
        check_reads(oracle, output.prompt_token_ids, choice, returns)
    assert results.sweep() == []
    add(llm, "gone", text("gone with its handles", 100), handled, 300)
    for _ in range(20):
        llm.llm_engine.step()
    assert len(results.sweep()) == len(returns["activations"]), "room is taken"
    llm.llm_engine.abort_request(["gone"])
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    gc.collect()
    assert results.sweep() == []


def test_several_sites_are_one_tensor_with_one_handle(llm: Any) -> None:
    """The same numbers as those of reads of one site each; a client's capture has them by site."""
    sites = [f"resid_post.{layer}" for layer in (20, 7, 15)]
    prompt = text("as one", 300)
    (alone,) = ask(llm, [prompt], {"edits": STEERED, "return": {"activations": [{"site": one} for one in sites]}})
    returns = [{"site": sites}, {"site": "resid_post", "at": "after", "as": "handle"}]
    (output,) = ask(llm, [prompt], {"edits": STEERED, "return": {"activations": returns}})
    (again,) = ask(llm, [prompt], {"edits": STEERED, "return": {"activations": [{"site": sites, "as": "handle"}]}})
    separate = np.stack([numbers(one) for one in alone.saesteer["activations"]], 1)
    inline, kind = output.saesteer["activations"]
    [kept] = again.saesteer["activations"]
    assert inline["site"] == kept["site"] == sites and inline["layers"] == [20, 7, 15]
    assert np.array_equal(numbers(inline), separate) and np.array_equal(kept["handle"].numbers(), separate)
    assert kept["shape"] == inline["shape"] == list(separate.shape)
    after = kind["handle"].numbers()
    assert after.shape == (len(separate), len(kind["site"]), separate.shape[2]) and set(sites) < set(kind["site"])
    captured = Capture.of(output.saesteer)
    for number, site in enumerate(sites):
        positions, rows = captured.at(site)
        assert np.array_equal(rows, separate[:, number]) and positions.tolist() == inline["positions"]
        assert np.array_equal(captured.at(site, "after")[1], after[:, kind["site"].index(site)])
    kept["handle"].delete()
    kind["handle"].delete()


def test_the_engine_writes_the_rows_of_several_sites(
    llm: Any, oracle: hf.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a crowd that preempts, of a prompt that is cached in part, and of an answer with a stop string."""
    monkeypatch.setattr(Spool, "write", lambda *_: pytest.fail("rows came to the front end"))
    sites = [f"resid_post.{layer}" for layer in (7, 15, 20, 29)]
    prompts = [text(f"sites {n}", 120 + 90 * (n % 5)) for n in range(10)]
    scopes = [EVERYWHERE, {"generated": True}, {"positions": [[3, 9], [-2, None]]}]
    returns = [
        {
            "activations": [
                {"site": site, "scope": scopes[n % 3], "cached": "skip" if n == 3 else "recompute"} for site in sites
            ]
        }
        for n in range(10)
    ]
    handled = [{"return": {"activations": [{**one, "as": "handle"} for one in own["activations"]]}} for own in returns]
    before = preemptions(llm)
    outputs = ask(llm, prompts, handled, [60 + 12 * (n % 5) for n in range(10)])
    assert preemptions(llm) > before
    for n, steer in ((3, handled[3]), (5, handled[5])):
        ask(llm, [prompts[n]], None, 1)
        stop = llm.get_tokenizer().decode(list(outputs[n].outputs[0].token_ids[5:7]))
        outputs += ask(llm, [prompts[n]], steer, 40, stop=[stop])
        assert outputs[-1].outputs[0].finish_reason == "stop"
    returns += [returns[3], returns[5]]
    assert outputs[10].num_cached_tokens > 0
    for output, own in zip(outputs, returns, strict=True):
        for entry in output.saesteer["activations"]:
            entry["data"] = b64encode(entry["handle"].numbers().tobytes()).decode()
            entry.pop("handle").delete()
        check(oracle, output, own)
    assert llm.llm_engine.input_processor.saesteer_door.results.sweep() == []
