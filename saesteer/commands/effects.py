"""What clamps of features make a model write: the requests that show it, and the doses. Reads no answer.

Each feature is clamped at a few doses, and a few questions are asked that leave the subject open. The answers are
greedy, as the documentation's are, so the numbers repeat.
"""

from typing import Any

from saesteer.commands.trials import PROMPTS
from saesteer.dictionaries.coder import CoderInfo

QUESTIONS = PROMPTS[:4]
TOKENS, PENALTY = 24, 1.1  # of an answer; what repeats a token is worth
# In max_act, what tells most first. One MLP moves the stream less than a whole layer's features do.
DOSES, DOSES_INSIDE = (2.0, 1.5, 3.0, 1.0, 4.0), (6.0, 4.0, 8.0, 2.0, 12.0)


def doses_of(info: CoderInfo) -> tuple[float, ...]:
    """The doses at which features of a dictionary are measured."""
    return DOSES if info.site_in == info.site_out else DOSES_INSIDE


def clamp(dictionary: str, feature: int, dose: float) -> dict[str, Any]:
    """The spec of a request that clamps a feature."""
    edit = {"op": "clamp", "dictionary": dictionary, "feature": feature, "value": dose, "unit": "max_act"}
    return {"edits": [edit]}
