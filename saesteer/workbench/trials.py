"""The requests that show what a clamp of a feature does: doses, controls, read-back. Knows no engine and no numbers.

At a token where the feature has the activation f, a clamp to v adds (v − f) · d. The controls add as much along another
direction: an ``add`` whose strength the server reads at each token as v − f, of a vector as long as d. Under an
input norm the clamp adds that times |x| / sqrt(width), or the standard deviation of x: the control then follows |x|.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from saesteer.language.fields import Fields, Json
from saesteer.language.inline import InlineVector

DOSES = (0.5, 1.0, 2.0, 4.0)  # in max_act
PLAIN, CLAMP, FLIPPED, NOISE, SCORE = "plain", "clamp", "flipped", "noise", "score"
ARMS = (CLAMP, FLIPPED, NOISE)
# Questions that leave the subject open; a model without a chat template continues them.
PROMPTS = (
    "Who are you?",
    "What should I do this weekend?",
    "Tell me a story.",
    "What is on your mind?",
    "Write a short poem.",
    "What is the most interesting thing you know?",
    "Describe a place.",
    "What happened yesterday?",
)
# What the output score amplifies, and how much: its authors' prompt and factor. They take the factor times the
# strongest activation of the last token; here it is times the feature's own max_act, which needs no second pass.
SCORE_PROMPT, SCORE_DOSE = "From my experience,", 10.0
_LAST = {"positions": [[-1, None]]}  # the last token of a prompt
_HIDDEN = {"hidden": {"scope": {"generated": True}}}  # from which all tokens of an answer but the first are sampled


class Subject(NamedTuple):
    """A feature that is clamped, and what its controls need to know of it."""

    dictionary: str
    feature: int
    max_act: float
    row: NDArray[np.float32]  # d, [d_out]
    site: str  # that the dictionary writes
    factor: float | None  # e · d; None: the encoder does not read what was written, as of a transcoder
    in_norm: str = "none"  # of the dictionary

    @property
    def named(self) -> Json:
        """The feature, as requests name it."""
        return {"dictionary": self.dictionary, "feature": self.feature}


class Key(NamedTuple):
    """What a request is for."""

    arm: str
    prompt: int = 0  # its number
    dose: float = 0.0
    feature: int = -1


Trials = Iterator[tuple[Key, Fields]]  # with the spec of each


def plain(prompts: int) -> Trials:
    """No edit."""
    for prompt in range(prompts):
        yield Key(PLAIN, prompt), {"edits": [], "return": _HIDDEN}


def clamps(subject: Subject, prompts: int, *, read_back: bool = True) -> Trials:
    """A clamp at each dose, for each prompt; the answer tells what the encoder reads after it, if that is wanted."""
    after = {"dictionary": subject.dictionary, "features": [subject.feature], "at": "after"}
    back = {"features": [after]} if read_back and subject.factor is not None else {}
    for dose in DOSES:
        for prompt in range(prompts):
            spec = {"edits": [_clamp(subject, dose)], "return": _HIDDEN | back}
            yield Key(CLAMP, prompt, dose, subject.feature), spec


def controls(subject: Subject, prompts: int, seed: int) -> Trials:
    """As much as each clamp adds, against the feature's direction, and along a random one for each prompt."""
    for dose in DOSES:
        for prompt in range(prompts):
            noise = np.random.default_rng((seed, subject.feature, prompt)).standard_normal(len(subject.row))
            noise *= np.linalg.norm(subject.row) / np.linalg.norm(noise)
            for arm, row in ((FLIPPED, -subject.row), (NOISE, noise)):
                yield Key(arm, prompt, dose, subject.feature), {"edits": [_add(subject, dose, row)], "return": _HIDDEN}


def score(subject: Subject) -> tuple[Key, Fields]:
    """The forward pass of the output score, on SCORE_PROMPT: the feature gains SCORE_DOSE at the last token."""
    amplified = _clamp(subject, SCORE_DOSE) | {"mode": "add", "scope": _LAST}
    return Key(SCORE, feature=subject.feature), {"edits": [amplified], "return": {"hidden": {"scope": _LAST}}}


def _clamp(subject: Subject, dose: float) -> Json:
    return {"op": "clamp", **subject.named, "value": dose, "unit": "max_act"}


def _add(subject: Subject, dose: float, row: NDArray[Any]) -> Json:
    numbers = np.ascontiguousarray(row, "<f4")
    vector = InlineVector("float32", numbers.shape, numbers.tobytes()).to_json()
    unit, norm = 1.0, "none"
    if subject.in_norm != "none":  # one stream length is sqrt(width) times what the norm divides by
        freedom = len(row) - (subject.in_norm == "layer_norm")
        unit, norm = float(np.linalg.norm(subject.row)) / math.sqrt(freedom), "match"
    strength = {**subject.named, "slope": -unit, "bias": unit * dose * subject.max_act}
    return {"op": "add", "vector": vector, "site": subject.site, "scale": strength, "norm": norm}


def read_back(answer: Fields) -> list[float]:
    """What the encoder read of each generated token after a clamp, from what the answer reports."""
    rows = [row for entry in answer.get("features", ()) for row in entry["rows"]]
    return [value for row in rows for value in row["features"].values()]
