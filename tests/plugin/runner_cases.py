"""What both of vLLM's runners are asked, and what an answer must be by one pass of Transformers over its tokens."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from saesteer import hf
from tests import tiny
from tests.plugin.readings import positions_of
from tests.plugin.said import plain, same

CLOSE = 1e-4  # of a logprob: two float32 implementations of the same three layers
ROUNDED = 2e-3  # of a dose, which both round to four digits
BROKEN = 23  # a feature for which a worker fails
TOKENS = 12  # of an answer
EVERYWHERE = {"positions": [[0, None]]}
GENERATED = {"generated": True}
_TEXT = [1, *(3 + n * n % 67 for n in range(1, 120))]
PROMPTS = {"58 tokens": _TEXT[:58], "90 tokens": _TEXT[:90]}  # answers to both end in another block than they begin in


def add(site: str, seed: int, **scope: Any) -> dict[str, Any]:
    """An edit that the tiny models feel."""
    vector = [((seed * n) % 11 - 5) / 5 for n in range(tiny.WIDTH)]
    return {"op": "add", "vector": vector, "site": site, **({"scope": scope} if scope else {})}


def rule(op: str, above: float, run: int = 1, **scope: Any) -> dict[str, Any]:
    """One that watches the probe."""
    when = {"probe": "any", "site": "resid_post.1", "above": above}
    return {"op": op, "when": when, "for": run, **({"scope": scope} if scope else {})}


CLAMP = {"op": "clamp", "dictionary": "relu", "feature": 5, "value": 6.0}
READS: dict[str, Any] = {
    "activations": [{"site": "resid_post.0"}, {"site": "resid_post.1", "at": "after", "reduce": "mean"}],
    "features": [{"dictionary": "relu", "features": [5], "top_k": 2, "scope": EVERYWHERE}, {"dictionary": "topk"}],
    "probes": [{"probe": "any", "site": "resid_post.2", "scope": {"positions": [[-3, None]]}}],
    "hidden": True,
}
HANDLES = {"activations": [{"site": "resid_post.0", "at": "after", "as": "handle"}, {"site": "resid_post.2"}]}
CASES: dict[str, Any] = {
    "plain": None,
    "everywhere": {"edits": [add("resid_post.0", 3)]},
    "generated": {"edits": [{**CLAMP, "scope": GENERATED}]},
    "prompt": {"edits": [add("resid_post.1", 5, prompt=True)]},
    "from a block on": {"edits": [add("resid_post.0", 3, positions=[[32, None]])]},
    "window": {"edits": [add("resid_post.2", 5, positions=[[30, 61]]), CLAMP]},
    "several sites": {"edits": [CLAMP, add("resid_post.0", 7), add("resid_post.2", 3, **GENERATED)]},
    "gated": {"edits": [add("resid_post.2", 3) | {"when": {"dictionary": "relu", "feature": 3, "above": 0.1}}]},
    "read": {"return": READS},
    "edited and read": {"edits": [add("resid_post.0", 3), CLAMP], "return": READS},
    "measured": {"edits": [add("resid_post.0", 7, **GENERATED)], "return": {"dose": True}},
    "handles": {"edits": [add("resid_post.0", 7, positions=[[40, 95]])], "return": HANDLES},
    "flag": {"edits": [CLAMP, rule("flag", 2.0, 2, **EVERYWHERE), rule("flag", -1e9)]},
    "stop": {"edits": [add("resid_post.0", 5), rule("stop", 4.0)]},
    "refused": {"edits": [{**CLAMP, "feature": 24}]},
    "failed": {"edits": [{**CLAMP, "feature": BROKEN}]},
}
REFUSED, FAILED = {"refused": "saesteer.edits[0].feature"}, {"failed": True}
RULES = "stop", "flag"


class Ask(NamedTuple):
    """One request."""

    case: str
    prompt: Sequence[int]
    spec: Any
    tokens: int = TOKENS


WORLDS = {"together": True, "again": False}  # whether the prefix cache is empty when all begin


def check(oracle: hf.Model, asked: Ask, told: Mapping[str, Any]) -> list[str]:
    """Assert that an answer is the definition's, whoever ran beside it and whatever was cached; return what happened.

    Args:
        oracle: the same model on Transformers, with the same dictionaries.
        asked: what was asked.
        told: the answer, as tiny_engine.told gives it.
    """
    prompt, made, edits = [*asked.prompt], told["tokens"], (asked.spec or {}).get("edits", [])
    ids, rules = [*prompt, *made[:-1]], [edit for edit in edits if edit["op"] in RULES]
    lasting = [edit for edit in edits if edit["op"] not in RULES]
    logprobs = oracle.logits(ids, steer={"edits": lasting}, prompt_len=len(prompt)).log_softmax(-1)[len(prompt) - 1 :]
    for step, (token, found) in enumerate(zip(made, told["logprobs"], strict=True)):
        own = float(logprobs[step, token])
        assert abs(own - found) < CLOSE and own > float(logprobs[step].max()) - 2 * CLOSE, (step, own, found)
    said = dict(told["said"])
    applied, doses = said.pop("applied", []), said.pop("dose", [])
    for edit, entries in _by_edit(lasting, applied):
        if "when" not in edit:
            scope = edit.get("scope", {})
            scope = scope if "positions" in scope else {**scope, "skip_first": 1}
            for entry in entries:
                assert entry["tokens_edited"] == len(positions_of(scope, len(prompt), len(ids))), entry
    read = oracle.read(ids, steer=_inline(asked.spec), prompt_len=len(prompt)) if asked.spec else {}
    said, expected = (json.loads(json.dumps(one)) for one in (said, plain(read)))  # of tuples it makes lists
    same(doses, expected.pop("dose", []), ROUNDED, "dose")
    same(said, expected, CLOSE, "saesteer")
    fired = {flag["edit"]: flag["position"] for flag in expected.get("flags", ())}
    stops = {f"saesteer.edits[{edits.index(edit)}]" for edit in rules if edit["op"] == "stop"}
    ended = [name for name, at in fired.items() if name in stops]
    assert all(fired[name] == len(ids) - 1 for name in ended), "it goes on behind a stop"
    assert told["end"] == (["stop", ended[0]] if ended else ["length", None])
    assert ended or len(made) == asked.tokens
    return ["stopped"] * bool(ended) + ["flagged"] * (len(fired) > len(ended)) + ["cached"] * bool(told["cached"])


def _by_edit(edits: Sequence[Any], applied: Sequence[Any]) -> list[tuple[Any, list[Any]]]:
    assert len(edits) == len({entry["edit"] for entry in applied}) == len(applied), "what was applied"
    return [(edit, [entry]) for edit, entry in zip(edits, applied, strict=True)]


def _inline(spec: Any) -> Any:
    """The same without handles, which Transformers has none of."""
    if isinstance(spec, Mapping):
        return {key: _inline(one) for key, one in spec.items() if key != "as"}
    return [_inline(one) for one in spec] if isinstance(spec, list) else spec
