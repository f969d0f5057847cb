"""A label made by a rule, for dictionaries that nobody has explained. No language model wrote it, and none is needed.

The label says what was measured and nothing more: the words on which the feature is strongest, the most frequent first,
and behind an arrow the tokens that its decoder row promotes, as in ``bridge, span → Bridge, bridges``. Knows no file.
"""

from collections import Counter
from collections.abc import Sequence

NAME = "rule"  # as who made a label
PEAKS, PROMOTED = 3, 3  # words on each side of the arrow


def label(peaks: Sequence[str], promotes: Sequence[str]) -> str | None:
    """The label of a feature; None if nothing is known of it.

    Args:
        peaks: the words where it is strongest, strongest first.
        promotes: tokens, the one that it promotes most first.
    """
    words = [word for word in peaks if word]
    # Counter keeps the order of what it counts equally often.
    left = [word for word, _ in Counter(words).most_common(PEAKS)]
    right = list(dict.fromkeys(token.strip() for token in promotes if token.strip()))[:PROMOTED]
    parts = [", ".join(left)] if left else []
    return " → ".join([*parts, ", ".join(right)]) if right else (parts[0] if parts else None)
