"""Bits of answers do not depend on which set of graphs a step replays, and graphs without ops are stock vLLM's.

Each engine runs in a process of its own, with its worker inside: this file is both the test and that process.
"""

import json
import os
import sys
from functools import partial
from itertools import groupby
from typing import Any

import pytest

from tests.apart import hear, tell
from tests.plugin.conftest import BRIDGE, OCEAN, PROMPTS, WIDTH, Dictionaries, engine_options

pytestmark = [pytest.mark.slow, pytest.mark.gpu]

CLAMP = {"edits": [BRIDGE]}
CLAMPS = {"edits": [BRIDGE, OCEAN]}
ADD = {"edits": [{"op": "add", "vector": [((7 * n) % 11 - 5) / 5 for n in range(WIDTH)], "site": "resid_post.7"}]}
READ = {"return": {"features": [{"dictionary": "demo", "top_k": 4}], "activations": [{"site": "resid_post.15"}]}}
MIXED = [None, CLAMP, None, ADD]
CLAMPED = [None, CLAMP, None, CLAMPS]
READING = [None, READ, READ, None]
# Tokens of each answer: who steers ends before the others, in either order.
TOKENS = {"clamp first": [48, 12, 40, 24], "vector first": [48, 24, 40, 12]}
NONE, READS, DICTIONARY, ALL = range(4)
# Sets, one after the other.
REPLAYED = {
    "clamp first": {"mixed": [ALL, NONE], "clamped": [DICTIONARY, NONE]},
    "vector first": {"mixed": [ALL, DICTIONARY, NONE], "clamped": [DICTIONARY, NONE]},
}
WAYS = {"plain": None, "mixed": MIXED, "clamped": CLAMPED, "again": None, "reading": READING}


def told(kind: str, model: str, dictionaries: dict[str, str]) -> Any:
    """What an engine of a kind has answered and captured."""
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if kind == "stock":
        environment["VLLM_PLUGINS"] = ""
    job = {"kind": kind, "model": model, "dictionaries": {"demo": dictionaries["demo"]}}
    return hear("-m", "tests.plugin.test_graph_bits", json.dumps(job), environment=environment)


def test_a_request_keeps_its_bits_whichever_graphs_are_replayed(model_dir: str, dictionaries: Dictionaries) -> None:
    stock, one, four = (told(kind, model_dir, dictionaries.arguments) for kind in ("stock", "1", "4"))
    for name, sets in REPLAYED.items():
        answers, replayed = ({way: four[what][f"{name}, {way}"] for way in WAYS} for what in ("answers", "replayed"))
        expected = stock["answers"][name]
        for way in ("plain", "again", "reading"):
            assert answers[way] == expected
        for way in sets:
            found = answers[way]
            assert found[0] == expected[0] and found[2] == expected[2], "beside others, and when they have ended"
            assert found[1] != expected[1] and found[3] != expected[3]
            assert found == one["answers"][f"{name}, {way}"], "with all ops in every step"
            assert replayed[way] == sets[way]
        assert answers["clamped"][1] == answers["mixed"][1] and answers["clamped"][3] != answers["mixed"][3]
        assert four["read"][name] == one["read"][name] != []
        assert replayed["plain"] == replayed["again"] == [NONE]
        assert replayed["reading"] in ([READS], [READS, NONE])
    assert stock["kernels"] == four["kernels"][:1], "nothing is launched for nobody"
    none, read, dictionary, every = four["kernels"]
    assert one["kernels"] == [every]
    for some in (dictionary, every):
        assert {name: some.get(name) for name in none} == none, "the same kernels beside ours"
    # What captures is torch's copy, of which the model may have some.
    assert all(read.get(name, 0) >= times for name, times in none.items())
    assert sum(read.values()) == sum(none.values()) + 1
    assert sum(dictionary.values()) == sum(none.values()) + 3, "encoder, op and counts"
    assert sum(every.values()) == sum(none.values()) + 30 + 2


def main() -> None:
    """Generate, and tell what came out."""
    from vllm import LLM as Stock
    from vllm import SamplingParams

    from bench.nodes import keep_graphs, kernels, plain
    from saesteer import LLM
    from saesteer.engine import engine
    from saesteer.engine.graph_sets import sets_of
    from saesteer.plugin.worker import graphs

    job = json.loads(sys.argv[1])
    replayed: list[int] = []
    replay = graphs.Chosen.replay

    def remembering(self: Any) -> None:
        replayed.append(self._choice.at)
        replay(self)

    graphs.Chosen.replay = remembering  # type: ignore[method-assign]
    keep_graphs()
    options = engine_options(max_num_seqs=4, cudagraph_capture_sizes=[1, 2, 4], enable_prefix_caching=False)
    if job["kind"] == "stock":
        llm: Any = Stock(job["model"], **options)
    else:
        vars(engine)["sets_of"] = partial(sets_of, most=int(job["kind"]))
        llm = LLM(job["model"], dictionaries=job["dictionaries"], sites=["resid_post.all"], **options)
    found: dict[str, Any] = {"answers": {}, "replayed": {}, "read": {}}

    def generate(name: str, tokens: list[int], **steer: Any) -> list[Any]:
        replayed.clear()
        params = [SamplingParams(temperature=0, max_tokens=most, logprobs=0, ignore_eos=True) for most in tokens]
        outputs = [one.outputs[0] for one in llm.generate(PROMPTS, params, use_tqdm=False, **steer)]
        found["answers"][name] = [
            [[token, step[token].logprob] for token, step in zip(one.token_ids, one.logprobs, strict=True)]
            for one in outputs
        ]
        found["replayed"][name] = [at for at, _ in groupby(replayed)]
        return [one.saesteer for one in outputs if steer.get("steer") is READING and hasattr(one, "saesteer")]

    for name, tokens in TOKENS.items():
        if job["kind"] == "stock":
            generate(name, tokens)
        else:
            for what, steer in WAYS.items():
                found["read"][name] = generate(f"{name}, {what}", tokens, steer=steer)

    def captured(worker: Any) -> list[Any]:
        held = getattr(worker, "worker", worker).model_runner.cudagraph_manager.graphs
        (graph,) = [graph for shape, graph in held.items() if shape.num_tokens == 4]
        sets = [one for _, one in sorted(graph.graphs.items())] if isinstance(graph, graphs.Chosen) else [graph]
        return [dict(plain(kernels(one))) for one in sets]

    [found["kernels"]] = llm.collective_rpc(captured)
    tell(found)


if __name__ == "__main__":
    main()
