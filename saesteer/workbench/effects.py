"""What clamps of features make a model write: the requests that show it, and what their answers say of each feature.

Each feature is clamped at a few doses, and a few questions are asked that leave the subject open. The answers are
greedy, as the documentation's are, so the numbers repeat. Of an answer that is broken nothing counts.

A word w counts ``k(d)`` of the answers at dose d. Its share there is taken together with that of the doses next to d,
``s(d) = (2 k(d) + k(d−) + k(d+)) / (2 n(d) + n(d−) + n(d+))``, as a word that comes at one dose alone is chance. It is
the feature's if s is RISE times the share of the answers without it, under other clamps or none, that have it. Its best
dose is the one with the largest s, the smallest one of equals. The largest of several doses counts for no word: it
shows where text breaks.
"""

import re
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

from rich.console import Console

from saesteer.commands.embedded import clamp
from saesteer.commands.waiting import steps
from saesteer.config.config import SaesteerConfig
from saesteer.dictionaries.coder import CoderInfo
from saesteer.errors import ConfigError
from saesteer.labels.places import place_of
from saesteer.labels.search import stems
from saesteer.labels.store import Effect, Written
from saesteer.labels.writing import keep
from saesteer.plugin.job import Batch
from saesteer.workbench.evidence import repetition
from saesteer.workbench.prove import Known, resolved
from saesteer.workbench.reading import ask, questions, tokenizer_of
from saesteer.workbench.trials import PROMPTS
from saesteer.workbench.written import say

QUESTIONS = PROMPTS[:4]
TOKENS, PENALTY = 24, 1.1  # of an answer; what repeats a token is worth
# In max_act, what tells most first. One MLP moves the stream less than a whole layer's features do.
DOSES, DOSES_INSIDE = (2.0, 1.5, 3.0, 1.0, 4.0), (6.0, 4.0, 8.0, 2.0, 12.0)
REPEATED, LETTERS = 0.4, 0.75  # a sound text has fewer repeated phrases, and as many letters among its characters
RISE, LEAST = 4.0, 0.25  # times as often as elsewhere; share of the answers
MOST = 4  # words that are kept of a feature, and features of a word
OTHERS, RUNNING = 8, 64  # features to compare with, where not all are measured; requests at once
_WORD = re.compile(r"[^\W\d_]{3,}")


def doses_of(info: CoderInfo) -> tuple[float, ...]:
    """The doses at which features of a dictionary are measured."""
    return DOSES if info.site_in == info.site_out else DOSES_INSIDE


def run(console: Console, model: str, config: SaesteerConfig, features: Collection[int], *, verbose: bool) -> Path:
    """Measure features of one dictionary in an engine, and store what they do with its labels.

    Args:
        console: where to print.
        model: a folder, a hub id or `demo`.
        config: its dictionary, which has labels.
        features: which ones.
        verbose: show vLLM's output.

    Returns:
        The file of the labels.

    Raises:
        SaesteerError: the model, the dictionary or a feature is invalid, there are no labels, the engine failed, or the
            file cannot be written.
    """
    place, config, options = resolved(model, config)
    known = Known.open(place, config)
    known.labels.close()
    name, info = known.name, known.info
    if unknown := [one for one in features if info.row_of(one) is None]:
        raise ConfigError(f"--effects {unknown[0]}: dictionary {name!r} has no such feature")
    others = {*Random(0).sample(info.ids, min(OTHERS, info.features))}.difference(features)
    doses = doses_of(info)
    asked = [(-1, 0.0), *((one, doses[0]) for one in others), *((one, dose) for dose in doses for one in features)]
    prompts = questions(tokenizer_of(place), QUESTIONS)
    specs = [clamp(name, *one) if one[1] else None for one in asked for _ in prompts]
    batch = Batch(prompts * len(asked), specs, max_tokens=TOKENS, repetition_penalty=PENALTY)
    with steps(console, hidden=verbose) as show:
        show(f"Asking the engine {len(specs):,} times")
        [made] = ask(place, config, {**options, "max_num_seqs": RUNNING}, [batch], verbose=verbose)
    texts = iter([one.text for one in made])
    found = effects([Answers(*one, [next(texts) for _ in prompts]) for one in asked])
    file = place_of(info).file
    keep(file, [one for one in found if one.feature in features])
    say(console, f"{name}: effects of {len(features):,} features; saved in {file}")
    return file


def is_sound(text: str) -> bool:
    """Whether a text has neither begun to repeat itself nor fallen into signs and numbers."""
    shown = [one for one in text if not one.isspace()]
    return bool(shown) and repetition(text) < REPEATED and sum(map(str.isalpha, shown)) >= LETTERS * len(shown)


class Answers(NamedTuple):
    """The answers to the questions under one clamp."""

    feature: int  # -1: none is clamped
    dose: float
    texts: Sequence[str]


class _At(NamedTuple):
    dose: float
    answers: int
    sound: int  # how many of them are
    words: Counter[str]  # in how many of these each stem is


def effects(asked: Sequence[Answers]) -> list[Effect]:
    """What the answers show of each feature, in the features' order.

    Args:
        asked: of the features, of others to compare with, and without a clamp.
    """
    spellings = Counter(word for one in asked for text in one.texts for word in _words(text)).most_common()
    stem = stems([word for word, _ in spellings])
    spelled = {stem[word]: word for word, _ in reversed(spellings)}  # the most frequent one

    def counted(texts: Sequence[str]) -> Counter[str]:
        return Counter(one for text in texts for one in {stem[word] for word in _words(text)})

    # What still passes for sound at the largest dose is seldom worth reading.
    doses = {one.dose for one in asked if one.dose}
    loudest = max(doses) if len(doses) > 1 else None
    found: dict[int, list[_At]] = {}
    breaks: dict[int, float] = {}
    usual, total = Counter[str](), 0
    for answers in sorted(asked, key=lambda one: (one.feature, one.dose)):
        sound = [text for text in answers.texts if is_sound(text)]
        ats = found.setdefault(answers.feature, [])
        if 2 * len(sound) <= len(answers.texts):
            breaks.setdefault(answers.feature, answers.dose)
        if answers.dose == loudest:
            continue
        at = _At(answers.dose, len(answers.texts), len(sound), counted(sound))
        ats.append(at)
        usual.update(at.words)
        total += at.sound
    writes: list[tuple[int, int, str, float]] = []  # minus the share, feature, stem, dose
    for feature, ats in found.items():
        own, others = Counter[str](), total - sum(at.sound for at in ats)
        for at in ats:
            own.update(at.words)
        for one, count in own.items():
            share, dose = _best(ats, one)
            if share >= max(LEAST, RISE * (usual[one] - count + 1) / (others + 1)):
                writes.append((-round(100 * share), feature, one, dose))
    kept: dict[int, list[Written]] = {feature: [] for feature in found}
    writers = Counter[str]()
    for share, feature, one, dose in sorted(writes):
        writers[one] += 1
        if len(kept[feature]) < MOST or writers[one] <= MOST:
            kept[feature].append(Written(spelled[one], dose, -share))
    return [Effect(feature, breaks.get(feature), tuple(kept[feature])) for feature in found if feature >= 0]


def _best(ats: Sequence[_At], stem: str) -> tuple[float, float]:
    """A word's share at its best dose, and that dose: the smallest one of equal shares."""
    shares = []
    for n, at in enumerate(ats):
        near = [at, *ats[max(0, n - 1) : n + 2]]  # itself twice
        shares.append((sum(one.words[stem] for one in near) / sum(one.answers for one in near), at.dose))
    return max(shares, key=lambda one: (one[0], -one[1]))


def _words(text: str) -> set[str]:
    return set(_WORD.findall(text.lower()))
