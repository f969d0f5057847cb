"""What answers show of a feature: probability, repetition, the output score, a bootstrap interval.

Takes numbers and texts: knows no engine, no model and no file.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from saesteer.labels.store import Example, word_at

Numbers = NDArray[np.float64]

GRAM = 3  # words of a phrase that may be repeated
COLLAPSED = 0.5  # share of repeated phrases from which on a text has collapsed
RESAMPLES = 10_000


def repetition(text: str) -> float:
    """The share of a text's phrases of three words that it had before; a sign counts as a word. 0 of a shorter text."""
    found = re.findall(r"\w+|[^\w\s]", text.lower())
    phrases = list(zip(*(found[start:] for start in range(GRAM)), strict=False))
    return 1 - len(set(phrases)) / len(phrases) if phrases else 0.0


def has_collapsed(text: str) -> bool:
    """Whether half of its phrases are repetitions."""
    return repetition(text) >= COLLAPSED


def spellings(examples: Sequence[Example]) -> list[str]:
    """How the words on which a feature is strongest may stand in a text: with a blank before them, and capitalised."""
    found: dict[str, None] = {}
    for one in examples:
        text, start = f"{one.before}{one.token}{one.after}", len(one.before)
        word = word_at(text, start, start + len(one.token))
        found |= dict.fromkeys([one.token, f" {word}", word, f" {word.capitalize()}", word.capitalize()])
    return list(found)


def probabilities(logits: Numbers, sampled: Numbers, logprobs: Numbers) -> Numbers:
    """How likely any of some tokens was at each step, ``Σ exp(l_t − l_s + log p_s)`` with the token s that was sampled.

    Args:
        logits: l_t [steps, tokens].
        sampled: l_s [steps].
        logprobs: log p_s [steps].

    Returns:
        [steps].
    """
    found: Numbers = np.exp(logits - sampled[:, None] + logprobs[:, None]).sum(1)
    return found


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its bootstrap 95 % interval."""

    mean: float
    low: float
    high: float


def difference(own: Numbers, others: Numbers, seed: int = 0) -> Interval:
    """How much larger what a feature's clamp brings is than what clamps of other features bring, on the same prompts.

    Both the prompts, which are the same on both sides, and the other features are drawn again with replacement; the
    interval holds the middle 95 % of the differences.

    Args:
        own: [prompts].
        others: [features, prompts].
        seed: of the draws.
    """
    draw = np.random.default_rng(seed)
    features, prompts = others.shape
    p = draw.multinomial(prompts, np.full(prompts, 1 / prompts), RESAMPLES) / prompts
    r = draw.multinomial(features, np.full(features, 1 / features), RESAMPLES) / features
    drawn = p @ own - ((r @ others) * p).sum(1)
    low, high = np.quantile(drawn, (0.025, 0.975))
    return Interval(float(own.mean() - others.mean()), float(low), float(high))


def output_score(logits: Numbers, tokens: Sequence[int]) -> float:
    """``(1 − min rank(t) / V) · max p(t)`` over the tokens t, with rank 0 for the likeliest of all V tokens.

    The output score of Arad, Mueller and Belinkov, "SAEs Are Good for Steering – If You Select the Right Features"
    (arXiv 2505.20063): the logits are of one forward pass with the feature amplified, the tokens those that the logit
    lens finds in its decoder row. A feature with a high score says what its row says, one with a low score does not.

    Args:
        logits: [V], of the next token.
        tokens: ids, at least one.
    """
    best = logits[list(tokens)].max()
    rank = int((logits > best).sum())
    probability = np.exp(best - logits.max()) / np.exp(logits - logits.max()).sum()
    return float((1 - rank / len(logits)) * probability)
