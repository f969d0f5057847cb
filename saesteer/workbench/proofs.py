"""What the answers to trials show of each feature, as one record. Reads answers, labels and a Transformers model.

The engine's answers hold hidden states, so that the probability of any token can be told afterwards: the difference of
its logit and that of the token that was sampled, whose probability the engine has told. Knows no table and no file.
"""

from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from saesteer.dictionaries.vectors import numbers_of
from saesteer.labels.lens import lens, logits_of
from saesteer.labels.store import Labels
from saesteer.plugin.job import Completion
from saesteer.workbench import evidence, trials
from saesteer.workbench.evidence import Interval
from saesteer.workbench.trials import ARMS, CLAMP, DOSES, PLAIN, PROMPTS, SCORE, Key, Subject

LENS = 20  # tokens of the logit lens, as many as the authors of the output score take


@dataclass(frozen=True, slots=True)
class Response:
    """What the answers of one arm at one dose show, in means over the prompts; of a collapsed answer nothing counts."""

    context: float  # probability of the tokens on which the feature is strongest, in the mean over an answer's tokens
    lens: float  # of the tokens that the logit lens promises, which the clamp adds by construction
    collapsed: float  # share of the answers


@dataclass(frozen=True, slots=True)
class Proof:
    """What was found of one feature; what has an item for each dose follows trials.DOSES."""

    dictionary: str
    feature: int
    label: str | None
    max_act: float
    tokens: tuple[str, ...]  # on which it is strongest, in a text that was read without a clamp
    lens: tuple[str, ...]
    plain: Response  # without a clamp
    arms: Mapping[str, tuple[Response, ...]]
    random: tuple[float, ...]  # probability of the same tokens under clamps of other features, in the mean
    difference: Interval  # of the two, in the mean over the doses
    stronger_than: float  # share of the other features whose clamp makes their own tokens less likely than this one
    collapses_at: float | None  # the smallest dose at which half of the answers have collapsed
    output_score: float
    factor: float | None  # e · d: after a clamp to v the encoder reads f + (v − f) · (e · d); None: it reads elsewhere
    reads_back: tuple[float | None, ...]  # what it reads, in parts of v
    texts: tuple[str, ...]  # the answers to the first prompt: without a clamp, and at each dose


class Numbers:
    """What the answers show of each feature, with what only the model's weights tell: the logit lens, and logits."""

    def __init__(
        self,
        place: str,
        dtype: str,
        labels: Labels,
        tokenizer: Any,
        proved: Sequence[Subject],
        others: Sequence[Subject],
        answers: Mapping[Key, Completion],
    ) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self._labels, self._tokenizer, self._answers = labels, tokenizer, answers
        self._proved, self._others = proved, others
        self._model = AutoModelForCausalLM.from_pretrained(place, dtype=dtype)
        self._hidden = {key: _rows(one) for key, one in answers.items()}
        every = [*proved, *others]
        rows = torch.from_numpy(np.stack([one.row for one in every]))
        self._lens = {
            one.feature: likely for one, (likely, _) in zip(every, lens(rows, self._model, LENS), strict=True)
        }
        self._tokens = {one.feature: self._tokens_of(one.feature) for one in every}

    def proofs(self, seed: int) -> Iterator[Proof]:
        """One for each feature that is proved."""
        gains = [self._gain(one.feature) for one in self._others]
        for one in self._proved:
            feature, tokens = one.feature, self._tokens[one.feature]
            random = np.stack([self._likely(CLAMP, other.feature, tokens) for other in self._others])
            own = self._likely(CLAMP, feature, tokens)
            arms = {arm: tuple(self._response(arm, feature, dose) for dose in DOSES) for arm in ARMS}
            answers = [[self._answers[Key(CLAMP, p, dose, feature)] for p in range(len(PROMPTS))] for dose in DOSES]
            about = self._labels.feature(feature)
            yield Proof(
                one.dictionary,
                feature,
                None if about is None else about.label,
                one.max_act,
                self._words(tokens),
                self._words(self._lens[feature]),
                self._response(PLAIN, -1, 0.0, feature),
                arms,
                tuple(random.mean((0, 2)).tolist()),
                evidence.difference(own.mean(0), random.mean(1), seed),
                float(np.mean([gain < self._gain(feature) for gain in gains])),
                next((d for d, at in zip(DOSES, arms[CLAMP], strict=True) if at.collapsed >= 0.5), None),
                self._score(one),
                one.factor,
                tuple(_read_back(at, dose * one.max_act) for dose, at in zip(DOSES, answers, strict=True)),
                tuple(one.text for one in (self._answers[Key(PLAIN)], *(at[0] for at in answers))),
            )

    def _tokens_of(self, feature: int) -> list[int]:
        """The tokens of a feature's words, without those of the logit lens; of a long word, the first token."""
        about = self._labels.feature(feature)
        assert about is not None
        spelled = [
            self._tokenizer(one, add_special_tokens=False).input_ids for one in evidence.spellings(about.examples)
        ]
        whole = [ids[0] for ids in spelled if len(ids) == 1] or [ids[0] for ids in spelled if ids]
        return [token for token in dict.fromkeys(whole) if token not in self._lens[feature]]

    def _words(self, tokens: Sequence[int]) -> tuple[str, ...]:
        return tuple(self._tokenizer.batch_decode([[token] for token in tokens]))

    def _likely(self, arm: str, feature: int, tokens: Sequence[int]) -> evidence.Numbers:
        """How likely tokens are under an arm [doses, prompts]."""
        keys = [[Key(arm, prompt, dose, feature) for prompt in range(len(PROMPTS))] for dose in DOSES]
        return np.array([[self._probability(key, tokens) for key in row] for row in keys])

    def _probability(self, key: Key, tokens: Sequence[int]) -> float:
        """The probability of any of some tokens, in the mean over an answer's tokens; 0 of one that has collapsed."""
        answer, hidden = self._answers[key], self._hidden[key]
        if evidence.has_collapsed(answer.text) or not tokens or not len(hidden):
            return 0.0
        asked = logits_of(hidden, self._model, torch.tensor(tokens)).double().numpy()
        ids = answer.ids[1 : 1 + len(hidden)]
        sampled = logits_of(hidden, self._model, torch.tensor(ids)).diagonal().double().numpy()
        return float(evidence.probabilities(asked, sampled, np.array(answer.logprobs[1 : 1 + len(hidden)])).mean())

    def _response(self, arm: str, feature: int, dose: float, of: int | None = None) -> Response:
        keys = [Key(arm, prompt, dose, feature) for prompt in range(len(PROMPTS))]
        wanted = self._tokens[feature if of is None else of], self._lens[feature if of is None else of]
        context, promised = (float(np.mean([self._probability(key, tokens) for key in keys])) for tokens in wanted)
        collapsed = [evidence.has_collapsed(self._answers[key].text) for key in keys]
        return Response(context, promised, float(np.mean(collapsed)))

    def _gain(self, feature: int) -> float:
        """How much a clamp raises a feature's own tokens, in the mean over doses and prompts."""
        tokens = self._tokens[feature]
        plain = np.mean([self._probability(Key(PLAIN, prompt), tokens) for prompt in range(len(PROMPTS))])
        return float(self._likely(CLAMP, feature, tokens).mean() - plain)

    def _score(self, subject: Subject) -> float:
        [row] = logits_of(self._hidden[Key(SCORE, feature=subject.feature)], self._model).double().numpy()
        return evidence.output_score(row, self._lens[subject.feature])


def _rows(answer: Completion) -> torch.Tensor:
    """The hidden states of an answer [n, d_model]."""
    [entry] = answer.saesteer["hidden"]
    numbers = numbers_of(entry["dtype"], b64decode(entry["data"]))
    return torch.from_numpy(numbers.reshape(entry["shape"]).copy())


def _read_back(answers: Sequence[Completion], value: float) -> float | None:
    found = [number for one in answers for number in trials.read_back(one.saesteer)]
    return float(np.mean(found)) / value if found else None
