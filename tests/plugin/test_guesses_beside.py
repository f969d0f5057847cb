"""Guesses by n-grams beside what else an engine may have: transcoders, registers, a limit on doses, handles, consumers
and --fail-fast. Answers are those of an engine that guesses nothing.

Each engine runs in a process of its own; this file is both the tests and that process.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.apart import hear, tell
from tests.plugin.asked import CLAMP, EVERYWHERE, FEATURES, LAYERS, NAN, NOISE, ROWS, WIDTH, add, broken_llama
from tests.plugin.conftest import CUDA
from tests.plugin.judge import Judge
from tests.plugin.said import same
from tests.plugin.stored import tensors_in
from tests.plugin.tiny_engine import GENERATED, TOKENS, left, metric, params_of, told

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,  # two engines
    pytest.mark.skipif(CUDA, reason="tested on CPUs"),
]

PROMPTS = [[5, 6, 7, 8, 9, 10, 11] * 4, [400, 3, 77] * 9, [12, 9, 9, 30] * 10]
FORCED = 7  # a token that is the only one allowed
LIMIT = 0.5  # of doses
MOST = 16  # tokens of an answer that repeats itself
OWN = {"op": "clamp", "dictionary": "own", "feature": 17, "value": 8.0}
ADDED = {"op": "clamp", "dictionary": "added", "feature": 17, "value": 8.0}
READ = {"dictionary": "random", "feature": 3, "slope": 0.5, "bias": 0.2, "min": -1, "max": 2}
STRONG = {**CLAMP, "value": 60.0}
TENSORS: list[dict[str, Any]] = [
    {"site": "resid_post.1", "scope": EVERYWHERE},
    {"site": "resid_post.2", "scope": EVERYWHERE},
    {"site": "resid_post.3", "scope": GENERATED, "at": "after", "reduce": "max"},
    {"site": "resid_post.0", "reduce": "mean"},
]
SPECS: dict[str, Any] = {
    "plain": None,
    "hidden alone": {"return": {"hidden": True}},
    "hidden of all": {"return": {"hidden": {"scope": EVERYWHERE}}},
    "hidden of the answer": {"return": {"hidden": {"scope": {"positions": [[45, 60]]}}}},
    "registers": {
        "edits": [{**add(ROWS[0], "resid_post.3"), "scale": READ}, {**add(ROWS[1], "resid_post.2"), "scale": READ}],
        "return": {"dose": True},
    },
    "transcoder": {
        "edits": [OWN, {**OWN, "feature": 5, "mode": "add", "scope": GENERATED}],
        "return": {"dose": True, "activations": [{"site": "mlp_out.2"}, {"site": "mlp_out.2", "at": "after"}]},
    },
    "transcoder without an op": {
        "edits": [ADDED, {**ADDED, "feature": 5, "value": 3.0, "scope": {"positions": [[50, 70]]}}],
        "return": {
            "features": [{"dictionary": "added", "features": [17, 5], "scope": EVERYWHERE}],
            "activations": [{"site": "resid_post.0"}, {"site": "resid_post.0", "at": "after", "reduce": "mean"}],
        },
    },
    "above the limit": {"edits": [STRONG, add(ROWS[0], "resid_post.3")], "return": {"dose": True}},
    "above the limit at times": {
        "edits": [{**STRONG, "when": {"dictionary": "random", "feature": 3, "above": 0.2}, "scope": GENERATED}],
        "return": {"dose": True, "activations": [{"site": "resid_post.1", "at": "after", "scope": GENERATED}]},
    },
    "handles": {"edits": [CLAMP], "return": {"activations": [{**one, "as": "handle"} for one in TENSORS]}},
    "consumers": {
        "edits": [CLAMP],
        "return": {
            "activations": [*TENSORS[:3], {**TENSORS[3], "as": "handle"}],
            "features": [{"dictionary": "random", "top_k": 3}],
            "hidden": True,
            "consumers": {"filesystem": {"tag": "all"}, "judge": {}},
        },
    },
}
# What ends with an error, or would with one token more.
FAILING: dict[str, tuple[list[int], Any, dict[str, Any]]] = {
    # An edit would make it finite.
    "NaN in the answer": (PROMPTS[0], {"return": SPECS["handles"]["return"]}, {"allowed_token_ids": [NAN]}),
    "NaN in the prompt": ([5, 6, NAN, 8, 9] * 4, None, {}),
    "collapsed": (PROMPTS[2], None, {"allowed_token_ids": [FORCED]}),
    "collapsed, steered": ([FORCED] * 30, SPECS["consumers"], {"allowed_token_ids": [FORCED]}),
    "just collapsed": ([FORCED] * 30, SPECS["handles"], {"allowed_token_ids": [FORCED], "max_tokens": MOST}),
    "just not": ([FORCED] * 30, SPECS["handles"], {"allowed_token_ids": [FORCED], "max_tokens": MOST - 1}),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the engine that guesses said, and the one that does not."""
    folder = tmp_path_factory.mktemp("guesses")
    environment = {**os.environ, "VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    words = "-m", "tests.plugin.test_guesses_beside", str(folder)
    return {how: hear(*words, how, environment=environment, timeout=700, fork=True) for how in ("sure", "guesses")}


def test_some_guesses_hold_and_some_do_not(runs: dict[str, Any]) -> None:
    assert runs["sure"]["guessed"] == [0, 0]
    guessed, held = runs["guesses"]["guessed"]
    assert 100 < held < guessed - 100


def without_names(said: Any) -> Any:
    """What consumers say, but for the names of their files."""
    if "consumers" in said:
        files = said["consumers"].pop("filesystem")
        said["consumers"]["rows"] = files["rows"]
    return said


@pytest.mark.parametrize("name", SPECS)
def test_answers_are_those_without_guesses(runs: dict[str, Any], name: str) -> None:
    for answer, found in zip(runs["sure"]["answers"][name], runs["guesses"]["answers"][name], strict=True):
        assert found["tokens"] == answer["tokens"]
        same(found["logprobs"], answer["logprobs"], 10 * NOISE, name)
        same(without_names(found["said"]), without_names(answer["said"]), 10 * NOISE, name)


def test_the_limit_was_reached(runs: dict[str, Any]) -> None:
    """Else the comparison above says little."""
    for name in ("above the limit", "above the limit at times"):
        limited = [dose["tokens_limited"] for one in runs["guesses"]["answers"][name] for dose in one["said"]["dose"]]
        assert any(limited), name


def test_files_of_consumers_hold_what_answers_have(runs: dict[str, Any]) -> None:
    for how in runs:
        for answer, files in zip(runs[how]["answers"]["consumers"], runs[how]["files"], strict=True):
            for entry in answer["said"]["activations"]:
                positions, rows = files[
                    f"activation.{'.'.join(str(entry[w]) for w in ('site', 'at', 'reduce') if w in entry)}"
                ]
                assert positions == entry["positions"] and rows == entry["data"]


@pytest.mark.parametrize("name", FAILING)
def test_what_fails_does_so_where_it_would_without_guesses(runs: dict[str, Any], name: str) -> None:
    one, two = (runs[how]["failing"][name] for how in runs)
    assert (one["code"], one["tokens"]) == (two["code"], two["tokens"])
    expected = "" if name == "just not" else "non_finite" if "NaN" in name else "collapsed"
    assert one["code"] == expected
    assert len(one["pieces"]) < MOST and len(two["pieces"]) < MOST, "what a stream has had before"


def test_others_go_on_beside_those_that_fail(runs: dict[str, Any]) -> None:
    for how in runs:
        beside = runs[how]["beside"]
        failed = {name for name, one in beside.items() if one["end"][0] == "error"}
        assert failed == {name for name in FAILING if "NaN" not in name and name != "just not"}
        for name in beside.keys() & SPECS.keys():
            alone = runs[how]["answers"][name][0]
            assert beside[name]["tokens"] == alone["tokens"], (how, name)
            same(beside[name]["logprobs"], alone["logprobs"], 10 * NOISE, name)


def test_a_cache_that_is_emptied_takes_nothing_from_who_runs(runs: dict[str, Any]) -> None:
    """vLLM begins all running requests anew. Doses as in a crowd: some are preempted behind that."""
    for how in runs:
        assert len(runs[how]["emptied"]) == len(SPECS) - 1
        for name, found in runs[how]["emptied"].items():
            answer = runs["sure"]["answers"][name][0]
            assert found["tokens"] == answer["tokens"], (how, name)
            said, wanted = (
                {word: one for word, one in each["said"].items() if word != "dose"} for each in (found, answer)
            )
            same(said, wanted, 10 * NOISE, f"{how}: {name}")


def test_a_crowd_that_preempts_says_the_same(runs: dict[str, Any]) -> None:
    """But for doses: they are of what was computed, and the cache had some of it."""
    assert runs["guesses"]["preemptions"] > 0
    for answer, found in zip(*(runs[how]["crowd"] for how in runs), strict=True):
        assert found["tokens"] == answer["tokens"]
        for one in (answer, found):
            one["said"].pop("dose", None)
        if "applied" in answer["said"] and "when" not in str(answer["spec"]):
            same(without_names(found["said"]), without_names(answer["said"]), 10 * NOISE, str(answer["spec"]))


def test_nothing_is_left(runs: dict[str, Any]) -> None:
    for how in runs:
        assert runs[how]["results"] == 0 and runs[how]["left"]
        assert all(not any(rank) for rank in runs[how]["left"])


def _code(llm: Any, prompt: list[int], spec: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """How a request ends that may fail: the code of its error, and how many tokens it has if there is none."""
    from saesteer import SpecError

    try:
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params_of(spec, **options), use_tqdm=False)
    except SpecError as error:
        return {"code": error.code, "tokens": 0}
    for entry in getattr(output, "saesteer", {}).get("activations", ()):
        entry.pop("handle").delete()
    return {"code": "", "tokens": len(output.outputs[0].token_ids)}


def _together(
    llm: Any, asked: Mapping[str, tuple[Any, Any, Mapping[str, Any]]], empty: Sequence[int] = ()
) -> dict[str, Any]:
    """Requests that begin at once, stepped by hand; one that fails has an end that says so, and what it said before.

    Args:
        llm: the engine.
        asked: prompt, spec and options of each.
        empty: steps in front of which the cache is emptied, so that all that run begin anew.
    """
    engine, steps = llm.llm_engine, 0
    found: dict[str, Any] = {}
    said: dict[str, list[int]] = {}
    for name, (prompt, spec, options) in asked.items():
        engine.add_request(name, {"prompt_token_ids": prompt}, params_of(spec, **options))
    while engine.has_unfinished_requests():
        steps += 1
        if steps in empty:
            assert engine.reset_prefix_cache(reset_running_requests=True)
        for output in engine.step():
            (made,), name = output.outputs, output.request_id
            if made.finish_reason == "error":
                found[name] = {"end": ["error"], "pieces": said.get(name, [])}
                continue
            said[name] = list(made.token_ids)
            if output.finished:
                entries = getattr(made, "saesteer", {}).get("activations", ())
                handles = [entry["handle"] for entry in entries if "handle" in entry]
                found[name] = told(output) | {"pieces": said[name]}
                for handle in handles:
                    handle.delete()
    return found


def _files(llm: Any, folder: Path, outputs: Any) -> list[Any]:
    """Of each answer, what the filesystem has: by tensor, positions and numbers."""

    found = []
    for output in outputs:
        [shard] = output["said"]["consumers"]["filesystem"]["shards"]
        there = tensors_in(folder / "asked" / shard)
        rows = {name: (at, np.frombuffer(data, "<f4").tolist()) for name, (at, data) in there.items()}
        found.append({name: pair for name, pair in rows.items() if name.startswith("activation")})
    return found


def main(folder: Path, how: str) -> None:
    """Start an engine, ask it everything, and say what it said."""
    import gc

    from vllm.sampling_params import RequestOutputKind

    from bench.dummy import dictionary_file
    from saesteer import LLM
    from saesteer.consumers import register

    register("judge", Judge)
    place = folder / how
    place.mkdir()
    options: dict[str, Any] = {}
    if how == "guesses":
        lookup = {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
        options["speculative_config"] = {"method": "ngram", "num_speculative_tokens": 4, **lookup}
    file = dictionary_file(WIDTH, FEATURES, folder)
    llm = LLM(
        broken_llama(folder),
        dictionaries={
            "random": f"{file}@resid_post.1",
            "own": f"{file}@mlp_in.2:mlp_out.2",
            "added": f"{file}@mlp_in.0:mlp_out.0",
        },
        sites=["resid_post.all", "mlp_out.2"],
        reads=[*(f"resid_post.{layer}" for layer in range(LAYERS)), "mlp_out.2"],
        consumers={"filesystem": {"folder": str(place / "asked")}, "judge": {}},
        max_dose=LIMIT,
        fail_fast=True,
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        block_size=32,
        max_model_len=256,
        max_num_seqs=4,
        kv_cache_memory_bytes=64 << 20,
        num_gpu_blocks_override=12,
        seed=0,
        disable_log_stats=False,
        **options,
    )
    results = llm.llm_engine.input_processor.saesteer_door.results

    def ask(specs: Any, prompts: Any = PROMPTS, **more: Any) -> list[dict[str, Any]]:
        assert llm.reset_prefix_cache()
        each = specs if isinstance(specs, list) else [specs] * len(prompts)
        params = [params_of(spec, **more) for spec in each]
        outputs = llm.generate([{"prompt_token_ids": one} for one in prompts], params, use_tqdm=False)
        made = []
        for output, spec in zip(outputs, each, strict=True):
            entries = getattr(output, "saesteer", {}).get("activations", ())
            handles = [entry["handle"] for entry in entries if "handle" in entry]
            made.append({**told(output), "spec": spec})
            for handle in handles:
                handle.delete()
        return made

    found: dict[str, Any] = {"answers": {name: ask(spec) for name, spec in SPECS.items()}}
    found["files"] = _files(llm, place, found["answers"]["consumers"])
    # On a CPU vLLM's attention reads what others have left in a block behind a request's last token: NaN come last.
    collapsing = {name: asked for name, asked in FAILING.items() if "NaN" not in name}
    assert llm.reset_prefix_cache()
    mixed: dict[str, Any] = {name: (PROMPTS[0], spec, {}) for name, spec in SPECS.items()}
    found["beside"] = _together(llm, collapsing | mixed)
    whole = {"output_kind": RequestOutputKind.FINAL_ONLY}
    # Consumers are waited for in a call to LLM.
    reading = {name: (PROMPTS[0], spec, whole) for name, spec in SPECS.items() if name != "consumers"}
    found["emptied"] = _together(llm, reading, empty=(3, 4, 9, 20))
    before = metric(llm, "num_preemptions")
    crowd = 2 * [*SPECS.values()]
    found["crowd"] = ask(crowd, [PROMPTS[n % 3] for n in range(len(crowd))], max_tokens=2 * TOKENS)
    found["preemptions"] = metric(llm, "num_preemptions") - before
    found["failing"] = {}
    for name, asked in (collapsing | FAILING).items():
        pieces = _together(llm, {name: asked})[name]["pieces"]
        found["failing"][name] = _code(llm, *asked) | {"pieces": pieces}
    _code(llm, PROMPTS[0], None, {})
    gc.collect()
    found["results"] = len(results.sweep())
    found["left"] = llm.collective_rpc(left)
    found["guessed"] = [metric(llm, f"spec_decode_num_{word}_tokens") for word in ("draft", "accepted")]
    tell(found)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
