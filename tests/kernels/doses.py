"""What a site's counted doses may be, given the true ones. Knows neither tables nor how a dose comes about."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from saesteer.kernels import layout
from tests.kernels.truth import Array

# A yardstick is within 2e-5 of the length of y (harness.py), which is |x| * (1 + dose) at most; twice that is as
# accurate.
SLACK = 4e-5


def judge_doses(words: Tensor, sure: Array, unsure: int, limit: float, slack_of_one: float = SLACK) -> None:
    """Hold counted doses, DOSE_WORDS of int32 that were 0 before the step, against the truth.

    Args:
        words: of a site.
        sure: [T] doses of the tokens that are edited for certain, before the limit.
        unsure: number of other tokens that may be edited.
        limit: of the row; 0 = any.
        slack_of_one: how far y may be off, in its own lengths.
    """
    tokens, limited = words[[layout.DOSE_TOKENS, layout.DOSE_LIMITED]].tolist()
    most, total = words.view(torch.float32)[[layout.DOSE_MAX, layout.DOSE_SUM]].tolist()
    slack = slack_of_one * (1 + sure)
    assert len(sure) <= tokens <= len(sure) + unsure
    over = sure - slack > limit if limit else np.zeros(len(sure), dtype=bool)
    near = np.abs(sure - limit) <= slack if limit else over
    assert over.sum() <= limited <= over.sum() + near.sum() + unsure * (limit > 0)
    assert np.max(sure - slack, initial=0.0) <= most
    # A sum in fp32 loses half a digit at its end with each addend.
    lost = slack.sum() + len(sure) * np.finfo(np.float32).eps * sure.sum()
    assert sure.sum() - lost <= total
    if not unsure:
        assert most <= np.max(sure + slack, initial=0.0)
        assert total <= sure.sum() + lost
