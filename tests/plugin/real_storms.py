"""Storms on vLLM's V2 runner with a real forward pass, in a process of its own: random requests on an engine that
preempts, each answer against one pass of Transformers (runner_cases.py).
"""

import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

from saesteer import hf
from saesteer.errors import SpecError
from tests.apart import forked, tell
from tests.plugin import runners, tiny_engine
from tests.plugin.conftest import preemptions
from tests.plugin.runner_cases import BROKEN, CLAMP, EVERYWHERE, GENERATED, RULES, Ask, add, check, rule
from tests.plugin.runs import start_one

TEXTS = [[1 + n, *(3 + (n + 2) * k * k % 67 for k in range(1, 100))] for n in range(3)]  # whose beginnings are shared
PROBED = {"probes": [{"probe": "any", "site": "resid_post.1", "scope": EVERYWHERE}]}
REFUSED = "empty_scope", "duplicate", "too_many"  # what the door says of some
NEAR = 1e-3  # of a rule's bound: two implementations may disagree


def drawn(draw: Random) -> Ask:
    """A random request."""
    prompt = draw.choice(TEXTS)[: draw.randrange(2, 100)]
    tokens = draw.randrange(1, 18)
    if draw.random() < 0.25:
        return Ask("plain", prompt, None, tokens)
    if draw.random() < 0.05:
        return Ask("failed", prompt, {"edits": [{**CLAMP, "feature": BROKEN}]}, tokens)

    def scope() -> dict[str, Any]:
        start = draw.randrange(len(prompt))
        window = [start, draw.choice([None, start + draw.randrange(1, 50)])]
        return draw.choice([GENERATED, {"prompt": True}, EVERYWHERE, {"positions": [window]}])

    edits: list[Any] = []
    for _ in range(draw.choice([0, 1, 1, 2])):
        push = add(f"resid_post.{draw.randrange(3)}", draw.choice([3, 5, 7]), **scope())
        edits.append(draw.choice([push, {**CLAMP, "value": draw.choice([4.0, 6.0]), "scope": scope()}]))
    if draw.random() < 0.4:
        edits.append(rule(draw.choice(RULES), draw.choice([-2.0, 2.0, 6.0]), draw.choice([1, 2]), **GENERATED))
    reads: dict[str, Any] = {}
    if draw.random() < 0.4:
        site, at, how = (
            f"resid_post.{draw.randrange(3)}",
            draw.choice(["before", "after"]),
            draw.choice(["none", "mean"]),
        )
        reads["activations"] = [{"site": site, "at": at, "reduce": how, "scope": scope()}]
        if draw.random() < 0.3:
            reads["activations"][0]["as"] = "handle"
    if draw.random() < 0.3:
        reads["features"] = [{"dictionary": "relu", "features": [3, 5], "scope": scope()}]
    if draw.random() < 0.3:
        reads["hidden"] = draw.choice([True, {"scope": scope()}])
    return Ask("steered", prompt, {"edits": edits} | ({"return": reads} if reads else {}), tokens)


class Storm:
    """A storm of requests on an engine that others have left idle.

    Args:
        llm: the engine.
        oracle: its model on Transformers.
        seed: decides everything.
    """

    def __init__(self, llm: Any, oracle: hf.Model, seed: int) -> None:
        self.llm, self.oracle, self.draw = llm, oracle, Random(seed)
        self.asked: dict[str, Ask] = {}
        self.told: dict[str, Any] = {}
        self.aborted: set[str] = set()
        self.seen = Counter[str]()

    def run(self, requests: int = 12) -> Counter[str]:
        """Ask so many requests and assert that each answer is the definition's; return what happened.

        Raises:
            AssertionError: an answer is another one, or something is kept for a request that has ended.
        """
        draw, engine, scheduler = self.draw, self.llm.llm_engine, runners.scheduler(self.llm)
        scheduler.max_num_scheduled_tokens = draw.choice([12, 24, 48])
        before = preemptions(self.llm)
        while len(self.asked) < requests or engine.has_unfinished_requests():
            if len(self.asked) < requests and draw.random() < 0.4:
                self._ask(f"q{len(self.asked)}", drawn(draw))
            running = sorted(self.asked.keys() - self.told.keys() - self.aborted)
            if running and draw.random() < 0.02:
                self.aborted.add(gone := draw.choice(running))
                engine.abort_request([gone])
            if draw.random() < 0.02:
                scheduler.reset_prefix_cache(reset_running_requests=True)
            for output in engine.step() if engine.has_unfinished_requests() else ():
                if output.finished:
                    self.told[output.request_id] = tiny_engine.ended(output)
        self.seen["preempted"] += preemptions(self.llm) - before
        self.seen["aborted"] += len(self.aborted)
        for name, told in self.told.items():
            try:
                self._check(self.asked[name], told)
            except BaseException as exc:
                exc.add_note(f"request {name}: {self.asked[name]}")
                raise
        assert self.told.keys() | self.aborted == self.asked.keys()
        return self.seen

    def _ask(self, name: str, one: Ask) -> None:
        try:
            self.asked[name] = start_one(self.llm, name, one)
        except SpecError as exc:
            if exc.code not in REFUSED:
                raise

    def _check(self, asked: Ask, told: Mapping[str, Any]) -> None:
        if "failed" in told:
            broken = [one.prompt[: runners.BLOCK] for one in self.asked.values() if one.case == "failed"]
            assert asked.prompt[: runners.BLOCK] in broken, "another one failed, whose cached blocks it may have had"
            self.seen["failed"] += 1
            return
        assert asked.case != "failed"
        rules = [one for one in (asked.spec or {}).get("edits", ()) if one["op"] in RULES]
        if rules:
            edits = [one for one in asked.spec["edits"] if one["op"] not in RULES]
            ids = [*asked.prompt, *told["tokens"]]
            found = self.oracle.read(ids, steer={"edits": edits, "return": PROBED}, prompt_len=len(asked.prompt))
            bounds = [one["when"]["above"] for one in rules]
            if any(abs(score - bound) < NEAR for score in found["probes"][0]["scores"] for bound in bounds):
                return
        self.seen.update(check(self.oracle, asked, told))


def work(folder: Path, model: str, seeds: range) -> Mapping[str, Any]:
    """Run storms on one engine: what happened, and which were wrong."""
    llm = runners.start(folder, model)
    runners.break_rows(llm, BROKEN)
    oracle = hf.Model(str(folder / model), tokenizer=object(), **runners.options(folder))
    seen, wrong = Counter[str](), []
    for seed in seeds:
        storm = Storm(llm, oracle, seed)
        try:
            seen += storm.run()
        except AssertionError as exc:
            wrong.append("\n".join([f"storm {seed} of {model}: {exc}", *getattr(exc, "__notes__", ())]))
        llm.llm_engine.abort_request([*storm.asked])
    start_one(llm, "last", Ask("plain", TEXTS[0], None, 1))
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    return {"seen": seen, "wrong": wrong, "left": tiny_engine.left(runners.worker(llm))}


if __name__ == "__main__":
    runners.begin("V2")
    first, count = map(int, sys.argv[3:])
    tell(forked(work, Path(sys.argv[1]), sys.argv[2], range(first, first + count)))
