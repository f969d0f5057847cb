"""The random requests of a storm, and what a model makes up for their tokens. Knows no engine and no answer."""

from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from tests.small_world import WIDTH

SITES = FIRST, SECOND = "resid_post.1", "resid_post.2"
MAX_LEN = 96  # tokens of prompt and answer, as vLLM is told
KNOWN = 100  # tokens that are drawn for each request, more than it can have
CLOSES, STOPS, WRONG = 7, 62, 61  # tokens: it ends the reasoning; it ends the answer; a guess that never holds
PROMPTS = [[Random(number).randrange(10, 60) for _ in range(70)] for number in range(3)]  # whose beginnings are shared
KINDS = [RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE]


@dataclass(eq=False)
class Asked:
    """One choice of a request: what it asks for, what the model makes of its tokens, and what has become of it."""

    id: str  # in the engine
    outer: str  # as the client knows the request
    choice: int
    choices: int
    spec: dict[str, Any] | None
    prompt: int  # tokens
    ids: list[int]  # of the prompt and of what the model says behind it, KNOWN in all
    rows: Tensor = field(repr=False)  # [KNOWN, d], of the stream at FIRST before edits; at SECOND one more
    hidden: Tensor = field(repr=False)  # [KNOWN, d], what lm_head multiplies
    max_tokens: int
    stop_string: int | None  # with which token of the answer its stop string is found
    stop_token: bool  # whether STOPS ends it
    kind: Any  # a RequestOutputKind
    broken: bool  # its plan is damaged on its way
    computed: set[int] = field(default_factory=set)  # positions of steps that the scheduler has taken
    cached: int = 0  # tokens that came from the prefix cache when it began
    reached: int = 0  # positions below this one have been computed or cached at some time
    preemptions: int = 0
    tokens: list[int] = field(default_factory=list)  # that the answer has so far
    ended: bool = False
    aborted: bool = False

    def row(self, position: int, site: str) -> Tensor:
        """The stream [d] of one token at a site, before edits."""
        return self.rows[position] + float(site == SECOND)


def drawn(draw: Random, seed: int, number: int, guesses: int) -> list[Asked]:
    """The choices of one random request.

    Args:
        draw: what decides.
        seed: of the storm.
        number: of the request in it.
        guesses: tokens that a step may guess.
    """
    length = draw.randrange(2, 66)
    max_tokens = draw.randrange(1, min(24, MAX_LEN - 2 - length))
    prompt = draw.choice(PROMPTS)[:length]
    if draw.random() < 0.2:
        prompt = [draw.randrange(10, 60) for _ in range(length)]
    spec = _spec(draw, length, guesses) if draw.random() < 0.9 else None
    choices, how = draw.choice([1, 1, 1, 1, 2, 3]), draw.random()
    shared: dict[str, Any] = {"outer": f"q{number}", "choices": choices, "spec": spec, "prompt": length}
    shared |= {"max_tokens": max_tokens, "kind": draw.choice(KINDS), "stop_token": how > 0.8}
    shared["stop_string"] = draw.randrange(1, max_tokens + 4) if how < 0.2 else None
    shared["broken"] = spec is not None and draw.random() < 0.04
    found = []
    for choice in range(choices):
        numbers = np.random.default_rng([seed, number, choice])
        rows, hidden = torch.from_numpy(numbers.normal(size=(2, KNOWN, WIDTH)).astype(np.float32))
        ids = [*prompt, *(_token(draw) for _ in range(KNOWN - length))]
        if shared["stop_token"]:
            ids[length + draw.randrange(max_tokens + 3)] = STOPS
        id = f"q{number}" if choices == 1 else f"{choice}_q{number}"  # as vLLM's ParentRequest calls it
        found.append(Asked(id, choice=choice, ids=ids, rows=rows, hidden=hidden, **shared))
    return found


def sampling(one: Asked) -> SamplingParams:
    """What a request is sampled with."""
    stops: dict[str, Any] = {"stop_token_ids": [STOPS]} if one.stop_token else {}
    if one.stop_string is not None:
        stops["stop"] = ["found"]
    return SamplingParams(
        max_tokens=one.max_tokens, n=one.choices, temperature=1.0, output_kind=one.kind, ignore_eos=True, **stops
    )


def _token(draw: Random) -> int:
    return draw.choice([CLOSES, 5, 6, 8, 9]) if draw.random() < 0.4 else draw.randrange(10, 60)


def _spec(draw: Random, prompt: int, guesses: int) -> dict[str, Any] | None:
    """A random spec for a prompt of so many tokens; None if it asks for nothing."""
    edits, reads = _edits(draw, prompt, guesses), _reads(draw, prompt)
    return ({"edits": edits} if edits else {}) | ({"return": reads} if reads else {}) or None


def _scope(draw: Random, prompt: int) -> dict[str, Any]:
    kind = draw.random()
    if kind < 0.25:
        return {"generated": True}
    if kind < 0.4:
        return {"prompt": True}
    if kind < 0.55:
        return {"positions": [[0, None]]}
    if kind < 0.62:
        return {"part": draw.choice(["reasoning", "answer"])}
    if kind < 0.7:
        return {"positions": [[-draw.randrange(1, 6), None]]}
    start = draw.randrange(prompt)
    end = start + draw.randrange(1, 12)
    positions: list[list[int | None]] = [[start, end]]
    if draw.random() < 0.5:
        positions.append([end + draw.randrange(1, 10), draw.choice([None, end + 30])])
    return {"positions": positions}


def _edits(draw: Random, prompt: int, guesses: int) -> list[dict[str, Any]]:
    """At most one edit, and rules."""
    found: list[dict[str, Any]] = []
    if draw.random() < 0.5:
        scopes: list[Any] = [{"generated": True}, {"positions": [[2, None]]}, {"positions": [[3, prompt + 4]]}]
        if not guesses:  # with them a server refuses it
            scopes += [{"part": "answer"}, {"part": "reasoning"}]
        found.append({"op": "add", "vector": [1.0] * WIDTH, "site": FIRST, "scope": draw.choice(scopes)})
    for _ in range(draw.choice([0, 0, 0, 1, 2])):
        when = {"probe": "any", "site": draw.choice(SITES), "above": draw.choice([4.0, 7.0, 9.0, 12.0])}
        rule = {"op": draw.choice(["stop", "flag", "flag"]), "when": when, "for": draw.choice([1, 1, 2, 3])}
        found.append(rule | {"scope": _scope(draw, prompt)})
    return found


def _reads(draw: Random, prompt: int) -> dict[str, Any]:
    def read(**one: Any) -> dict[str, Any]:
        if draw.random() < 0.9:
            one = {"scope": _scope(draw, prompt)} | one
        return one | ({"cached": "skip"} if draw.random() < 0.4 else {})

    found: dict[str, Any] = {}
    if draw.random() < 0.7:
        found["activations"] = _activations(draw, read)
    if draw.random() < 0.4:
        sites = draw.sample(SITES, draw.randrange(1, 3))
        found["probes"] = [read(probe="any", site=site) for site in sites]
    if draw.random() < 0.4:
        names = draw.sample(["jump", "top"], draw.randrange(1, 3))
        found["features"] = [read(dictionary=name, features=[1, 3], top_k=2) for name in names]
    if draw.random() < 0.4:
        found["hidden"] = draw.choice([True, read(scope=_scope(draw, prompt))])
    listed = [one for several in found.values() for one in (several if isinstance(several, list) else [several])]
    parts = any(one is not True and "part" in one.get("scope", {}) for one in listed)
    if found and not parts and draw.random() < 0.25:
        found["consumers"] = {"judge": {}}
    return found


def _activations(draw: Random, read: Any) -> list[dict[str, Any]]:
    """Each of its own, or all sites alike."""
    if draw.random() < 0.25:
        one = read()
        if draw.random() < 0.5:
            return [{**one, "site": site, "as": "handle"} for site in SITES]
        return [read(**one, site=site) for site in SITES]
    found = []
    places = [(site, at) for site in SITES for at in ("before", "after")]
    for site, at in draw.sample(places, draw.randrange(1, 4)):
        one = read(site=site, at=at)
        if "part" not in one.get("scope", {}):
            one["reduce"] = draw.choice(["none", "none", "mean", "max", "last"])
        if draw.random() < 0.35:
            one["as"] = "handle"
        found.append(one)
    return found
