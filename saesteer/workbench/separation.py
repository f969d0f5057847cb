"""Directions that separate two sets of rows, and how well they do on rows held out. Knows no model, text or file."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from saesteer.errors import needs

LEAST = 4  # rows of each set: two to learn from, and two held out, which have a standard deviation
_HELD_OUT = 5  # one row in so many
_SEED = 0

Rows = NDArray[np.float64]  # [n, d]


class Direction(NamedTuple):
    """What a file will hold: a row's score is ``x · vector + bias``."""

    vector: NDArray[np.float32]  # [d]
    bias: float = 0.0

    def scores(self, rows: Rows) -> NDArray[np.float64]:
        """One number for each row."""
        found: NDArray[np.float64] = rows @ self.vector.astype(np.float64) + self.bias
        return found


class Separation(NamedTuple):
    """How far the scores of two sets of rows lie apart; the better one is the larger."""

    auc: float  # share of the pairs whose positive row has the higher score; a tie counts half
    d: float  # Cohen's d: the difference of the means, in pooled standard deviations
    accuracy: float  # share of the rows with a score above 0 if they are positive, and not if they are negative

    @classmethod
    def of(cls, direction: Direction, positive: Rows, negative: Rows) -> "Separation":
        """The separation of rows that the direction was not made from."""
        ones, others = direction.scores(positive), direction.scores(negative)
        right = int((ones > 0).sum()) + int((others <= 0).sum())
        return cls(auc(ones, others), cohens_d(ones, others), right / (len(ones) + len(others)))


def cohens_d(positive: NDArray[np.float64], negative: NDArray[np.float64]) -> float:
    """``(mean(p) − mean(n)) / s`` with ``s² = ((|p| − 1) var(p) + (|n| − 1) var(n)) / (|p| + |n| − 2)``.

    The variances are those of samples. It is infinite where all scores of a set are equal, and 0 where all are.
    """
    difference = float(positive.mean() - negative.mean())
    squares = sum(float(((one - one.mean()) ** 2).sum()) for one in (positive, negative))
    pooled = float(np.sqrt(squares / (len(positive) + len(negative) - 2)))
    if pooled == 0:
        return float(np.copysign(np.inf, difference)) if difference else 0.0
    return difference / pooled


def auc(positive: NDArray[np.float64], negative: NDArray[np.float64]) -> float:
    """The area under the ROC curve: the share of pairs in which the positive score is higher, ties counting half."""
    pairs = positive[:, None] - negative
    return float((pairs > 0).mean() + (pairs == 0).mean() / 2)


def split(rows: Rows) -> tuple[Rows, Rows]:
    """Rows to learn from, and those held out: a fifth, at least two; the same ones for each site of the same texts."""
    places = np.random.default_rng(_SEED).permutation(len(rows))
    held = max(2, round(len(rows) / _HELD_OUT))
    return rows[np.sort(places[held:])], rows[np.sort(places[:held])]


def difference_of_means(positive: Rows, negative: Rows) -> Direction:
    """``mean(positive) − mean(negative)``; it has no bias, so its accuracy says nothing."""
    return Direction((positive.mean(0) - negative.mean(0)).astype(np.float32))


def need_scikit_learn() -> None:
    """Raise ConfigError if scikit-learn is not installed."""
    with needs("'saesteer[probe]'"):
        import sklearn  # noqa: F401


def logistic_regression(positive: Rows, negative: Rows) -> Direction:
    """Scikit-learn's, with its usual L2 penalty, whose score is the logit of being positive.

    It learns from standardised numbers, ``z = (x − m) / s`` for each of the d. Its ``z · w + b`` is written as
    ``x · (w / s) + (b − m · (w / s))``, so that x can be read as it is.
    """
    from sklearn.linear_model import LogisticRegression

    rows = np.concatenate([positive, negative])
    mean, deviation = rows.mean(0), rows.std(0)
    deviation[deviation == 0] = 1
    labels = np.arange(len(rows)) < len(positive)
    fitted = LogisticRegression(max_iter=1000).fit((rows - mean) / deviation, labels)
    vector = (fitted.coef_[0] / deviation).astype(np.float32)
    return Direction(vector, float(fitted.intercept_[0] - mean @ vector.astype(np.float64)))
