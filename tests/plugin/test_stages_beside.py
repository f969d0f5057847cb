"""Two and three stages of a pipeline, and two of two ranks: handles, parts of answers, and where things go wrong: where
requests are preempted, aborted, or fail on one stage, and names are gone. One rank says what is right.

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
from tests.plugin.admin import Puts
from tests.plugin.asked import CLAMP, EVERYWHERE, FEATURES, HEADS, LAYERS, NAN, NOISE, ROWS, WIDTH, add, broken_llama
from tests.plugin.conftest import CUDA
from tests.plugin.said import same
from tests.plugin.tiny_engine import GENERATED, left, metric, params_of, told

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,  # four engines, the last of which has four processes
    pytest.mark.skipif(CUDA, reason="its ways need four GPUs"),
]

WAYS: dict[str, dict[str, Any]] = {
    "one": {},
    "two": {"pipeline_parallel_size": 2},  # layers 0 and 1, and 2 and 3
    "three": {"pipeline_parallel_size": 3},  # layer 0, 1 and 2, and 3
    "two by two": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
}
PROMPTS = [[5, 6, 7, 8, 9, 10, 11] * 4, [400, 3, 77] * 9, [3 + (7 * n) % 490 for n in range(40)]]
LIMIT = 1000.0  # of doses
TOKENS = 40
SITES = ["mlp_out.0", *(f"resid_post.{layer}" for layer in range(LAYERS)), "z.1", "attn_out.3"]
HERE, THERE = add(ROWS[0], "mlp_out.0"), add(ROWS[1], "attn_out.3")  # on the first stage and on the last, however many
HUGE = {"op": "add", "vector": ROWS[0], "scale": 1e4}
WATCHED = [{"probe": "probe", "site": site} for site in SITES if site != "z.1"]  # the probe is as wide as the stream
PROBES = [{**one, "scope": EVERYWHERE} for one in WATCHED]
ALWAYS = [{**one, "above": -1e9} for one in WATCHED]
REASONING, ANSWER = {"part": "reasoning"}, {"part": "answer"}
SPECS: dict[str, Any] = {
    "plain": None,
    "first": {"edits": [HERE], "return": {"dose": True}},
    "last": {"edits": [THERE], "return": {"dose": True}},
    "all": {
        "edits": [HERE, CLAMP, add(HEADS, "z.1"), {**THERE, "scope": GENERATED}],
        "return": {"dose": True, "probes": PROBES, "hidden": True},
    },
    "handles": {
        "edits": [CLAMP],
        "return": {"activations": [{"site": site, "as": "handle", "scope": EVERYWHERE} for site in SITES]},
    },
    "handles of reductions": {
        "edits": [HERE, THERE],
        "return": {
            "activations": [
                {"site": site, "as": "handle", "reduce": how, "at": "after"}
                for site, how in zip(SITES, ("mean", "max", "last", "mean", "max", "last", "mean"), strict=True)
            ],
            "features": [{"dictionary": "random", "top_k": 3, "scope": EVERYWHERE}],
        },
    },
    "watched": {
        "edits": [
            HERE,
            {"op": "flag", "when": [ALWAYS[0], ALWAYS[-1]], "for": 5},
            {"op": "stop", "when": [ALWAYS[1], ALWAYS[-1]], "for": 20},
        ],
        "return": {"hidden": {"scope": EVERYWHERE}},
    },
    "stopped in the prompt": {
        "edits": [{"op": "stop", "when": ALWAYS[0], "scope": {"positions": [[-1, None]]}}, THERE],
        "return": {"probes": PROBES, "hidden": True, "activations": [{"site": "resid_post.0", "as": "handle"}]},
    },
    "edits of parts": {"edits": [{**HERE, "scope": ANSWER}, {**THERE, "scope": REASONING}, {**CLAMP, "scope": ANSWER}]},
    "reads of parts": {
        "edits": [{"op": "flag", "when": ALWAYS[0], "for": 2, "scope": ANSWER}],
        "return": {
            "probes": [{**one, "scope": [REASONING, ANSWER][n % 2]} for n, one in enumerate(PROBES)],
            "activations": [{"site": "resid_post.3", "scope": REASONING, "as": "handle"}],
        },
    },
}
# By the site whose stage fails; what ends each of them.
FAILING: dict[str, tuple[list[int], Any, str]] = {
    "NaN": ([5, 6, NAN, 8], None, "non_finite"),
    "NaN, read": ([5, 6, NAN, 8], SPECS["handles"], "non_finite"),
    **{
        f"dose at {site}": (PROMPTS[0], {"edits": [{**HUGE, "site": site}]}, "dose")
        for site in ("mlp_out.0", "attn_out.3")
    },
    **{
        f"gone at {site}": (PROMPTS[1], {"edits": [add("lost", site)], "return": {"hidden": True}}, "gone")
        for site in ("mlp_out.0", "resid_post.1", "attn_out.3")
    },
    "late dose": (
        PROMPTS[2],
        {
            "edits": [{**HUGE, "site": "attn_out.3", "scope": {"positions": [[50, None]]}}],
            "return": SPECS["handles"]["return"],
        },
        "dose",
    ),
}
PARSER = """
from pathlib import Path

from vllm.reasoning import ReasoningParser, ReasoningParserManager


@ReasoningParserManager.register_module("until")
class Until(ReasoningParser):
    def __init__(self, tokenizer, *args, **kwargs):
        super().__init__(tokenizer, *args, **kwargs)
        self.end = int((Path(__file__).parent / "end").read_text())

    def is_reasoning_end(self, input_ids):
        return False

    def is_reasoning_end_streaming(self, input_ids, delta_ids):
        return self.end in delta_ids

    def extract_content_ids(self, input_ids):
        return []

    def extract_reasoning(self, model_output, request):
        return None, model_output

    def extract_reasoning_streaming(self, *args, **kwargs):
        return None
"""


class Runs(dict[str, Any]):
    """What each engine answered, which runs when it is first asked for; the one of one rank comes first."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        (folder / "until.py").write_text(PARSER)
        (folder / "end").write_text("0")
        self["one"] = self[next(iter(WAYS))]

    def __missing__(self, way: str) -> Any:
        environment = {**os.environ, "VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
        words = "-m", "tests.plugin.test_stages_beside", str(self._folder), way
        self[way] = hear(*words, environment=environment, timeout=850, fork=True)
        return self[way]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("stages"))


@pytest.fixture(params=[*WAYS][1:])
def engine(request: pytest.FixtureRequest, runs: Runs) -> Any:
    """What an engine with several stages said."""
    return runs[request.param]


@pytest.mark.parametrize("name", SPECS)
def test_several_stages_say_what_one_says(runs: Runs, engine: Any, name: str) -> None:
    for answer, found in zip(runs["one"]["answers"][name], engine["answers"][name], strict=True):
        assert (found["tokens"], found["end"]) == (answer["tokens"], answer["end"])
        same(found["logprobs"], answer["logprobs"], 10 * NOISE, name)
        same(found["said"], answer["said"], 10 * NOISE, name)


def test_an_answer_had_two_parts(runs: Runs) -> None:
    """Else their specs say little."""
    reads = [one["said"] for one in runs["one"]["answers"]["reads of parts"]]
    assert any(one["flags"] and one["probes"] for one in reads)
    edited = [one["said"]["applied"] for one in runs["one"]["answers"]["edits of parts"]]
    assert any(all(part["tokens_edited"] > 0 for part in parts) for parts in edited)


def test_a_crowd_that_preempts_says_the_same(runs: Runs, engine: Any) -> None:
    assert engine["preemptions"] > 0 < runs["one"]["preemptions"]
    for answer, found in zip(runs["one"]["crowd"], engine["crowd"], strict=True):
        assert (found["tokens"], found["end"]) == (answer["tokens"], answer["end"])
        for one in (answer, found):
            one["said"].pop("dose", None)  # of what was computed, and the cache had some
        same(found["said"], answer["said"], 10 * NOISE, str(answer["spec"]))


def test_a_cache_that_is_emptied_takes_nothing_from_who_runs(runs: Runs, engine: Any) -> None:
    """vLLM begins all running requests anew, while a step of each stage is on its way."""
    assert engine["emptied"].keys() == SPECS.keys()
    for name, found in engine["emptied"].items():
        answer = runs["one"]["answers"][name][0]
        assert (found["tokens"], found["end"]) == (answer["tokens"], answer["end"]), name
        same(found["said"], answer["said"], 10 * NOISE, name)


@pytest.mark.parametrize("name", FAILING)
def test_what_fails_on_a_stage_ends_its_request_with_its_reason(engine: Any, name: str) -> None:
    assert engine["failing"][name] == FAILING[name][2]


def test_others_go_on_beside_those_that_fail(runs: Runs, engine: Any) -> None:
    beside = engine["beside"]
    assert {name for name, one in beside.items() if one["end"] == ["error"]} == FAILING.keys() - {"NaN", "NaN, read"}
    for name in beside.keys() & SPECS.keys():
        alone = runs["one"]["answers"][name][0]
        assert beside[name]["tokens"] == alone["tokens"], name
        same(beside[name]["logprobs"], alone["logprobs"], 10 * NOISE, name)


def test_nothing_is_left(engine: Any) -> None:
    assert engine["results"] == 0
    assert len(engine["left"]) > 1 and all(not any(rank) for rank in engine["left"])


def lost(llm: Any) -> Any:
    """The front end gets a name of which no worker has the vector; returns what takes it away."""
    from dataclasses import replace

    from saesteer.dictionaries.vectors import from_inline

    known = llm.llm_engine.input_processor.saesteer_names
    before = known._now
    vectors = {**known.catalog.vectors, "lost": from_inline((0.5, *ROWS[0][1:]))}
    known._now = replace(before, catalog=replace(known.catalog, vectors=vectors), puts=Puts())
    return lambda: setattr(known, "_now", before)


def _ask(llm: Any, specs: Any, prompts: Any = PROMPTS, **more: Any) -> list[dict[str, Any]]:
    each = specs if isinstance(specs, list) else [specs] * len(prompts)
    params = [params_of(spec, **({"max_tokens": TOKENS} | more)) for spec in each]
    outputs = llm.generate([{"prompt_token_ids": one} for one in prompts], params, use_tqdm=False)
    return [{**_taken(output), "spec": spec} for output, spec in zip(outputs, each, strict=True)]


def _taken(output: Any) -> dict[str, Any]:
    """An answer with what its handles hold, which are deleted."""
    entries = getattr(output.outputs[0], "saesteer", {}).get("activations", ())
    handles = [entry["handle"] for entry in entries if "handle" in entry]
    found = told(output)
    for handle in handles:
        handle.delete()
    return found


def _together(llm: Any, asked: Mapping[str, tuple[Any, Any]], empty: Sequence[int] = ()) -> dict[str, Any]:
    """Requests that begin at once, stepped by hand; in front of some steps all that run begin anew."""
    from vllm.sampling_params import RequestOutputKind

    engine, steps = llm.llm_engine, 0
    found: dict[str, Any] = {}
    for name, (prompt, spec) in asked.items():
        params = params_of(spec, max_tokens=TOKENS, output_kind=RequestOutputKind.FINAL_ONLY)
        engine.add_request(name, {"prompt_token_ids": prompt}, params)
    while engine.has_unfinished_requests():
        steps += 1
        if steps in empty:
            assert engine.reset_prefix_cache(reset_running_requests=True)
        for output in engine.step():
            if output.finished:
                failed = output.outputs[0].finish_reason == "error"
                found[output.request_id] = {"end": ["error"]} if failed else _taken(output)
    return found


def _code(llm: Any, prompt: list[int], spec: Any) -> str:
    from saesteer import SpecError

    try:
        _ask(llm, spec, [prompt])
    except SpecError as error:
        return error.code
    return ""


def main(folder: Path, way: str) -> None:
    """Start an engine, ask it everything, and say what it said."""
    import gc

    from vllm.reasoning import ReasoningParserManager

    from bench.dummy import dictionary_file, tokenizer_folder
    from saesteer import LLM

    ReasoningParserManager.import_reasoning_parser(str(folder / "until.py"))
    np.save(folder / "probe.npy", np.array(ROWS[1], dtype=np.float32))
    llm = LLM(
        broken_llama(folder),
        tokenizer=str(tokenizer_folder(512, folder)),
        reasoning_parser="until",
        reasoning_parser_plugin=str(folder / "until.py"),
        dictionaries={"random": f"{dictionary_file(WIDTH, FEATURES, folder)}@resid_post.1"},
        vectors={"probe": str(folder / "probe.npy")},
        sites=SITES,
        reads=SITES,
        max_dose=LIMIT,
        max_dose_action="refuse",
        fail_fast=True,
        dtype="float32",
        enforce_eager=True,
        block_size=32,
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        enable_chunked_prefill=True,
        kv_cache_memory_bytes=64 << 20,
        num_gpu_blocks_override=12,
        seed=0,
        disable_log_stats=False,
        **WAYS[way],
    )
    results = llm.llm_engine.input_processor.saesteer_door.results
    if way == "one":  # the token that ends the reasoning is one in the middle of an answer
        [answer] = _ask(llm, None, PROMPTS[:1])
        middle = answer["tokens"][8:20]
        (folder / "end").write_text(str(next(one for one in middle if one not in answer["tokens"][:8])))
        llm.llm_engine.input_processor.saesteer_door.borders._closing.clear()

    def ask(*words: Any, **more: Any) -> list[dict[str, Any]]:
        assert llm.reset_prefix_cache()
        return _ask(llm, *words, **more)

    found: dict[str, Any] = {"answers": {name: ask(spec) for name, spec in SPECS.items()}}
    before = metric(llm, "num_preemptions")
    crowd = 2 * [*SPECS.values()]
    found["crowd"] = ask(crowd, [PROMPTS[n % 3] for n in range(len(crowd))], max_tokens=2 * TOKENS)
    found["preemptions"] = metric(llm, "num_preemptions") - before
    specs = {name: (PROMPTS[0], spec) for name, spec in SPECS.items()}
    found["emptied"] = _together(llm, specs, empty=(3, 4, 11, 30, 60))
    forget = lost(llm)
    # On a CPU vLLM's attention reads what others have left in a block behind a request's last token: NaN come last.
    failing = {name: (prompt, spec) for name, (prompt, spec, _) in FAILING.items() if "NaN" not in name}
    found["beside"] = _together(llm, failing | specs)
    found["failing"] = {name: _code(llm, *asked) for name, asked in failing.items()}
    forget()
    engine = llm.llm_engine
    for name in ("all", "handles"):
        engine.add_request(name, {"prompt_token_ids": PROMPTS[2]}, params_of(SPECS[name]))
    for _ in range(9):
        engine.step()
    engine.abort_request(["all", "handles"], internal=False)
    for name in ("NaN", "NaN, read"):
        found["failing"][name] = _code(llm, *FAILING[name][:2])
    _code(llm, PROMPTS[0], None)
    gc.collect()
    found["results"] = len(results.sweep())
    found["left"] = llm.collective_rpc(left)
    tell(found)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
