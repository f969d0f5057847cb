"""A label made by a rule, for dictionaries that nobody has explained. No language model wrote it, and none is needed.

The label says what was measured and nothing more: the words on which the feature is strongest, the most frequent first.
Of a feature that no text activated it has the tokens that the decoder row promotes, behind an arrow: ``→ span, arch``.
Knows no file.
"""

from collections import Counter
from collections.abc import Sequence

NAME = "rule"  # as who made a label
MOST = 3  # words


def label(peaks: Sequence[str], promotes: Sequence[str]) -> str | None:
    """The label of a feature; None if nothing is known of it.

    Args:
        peaks: the words where it is strongest, strongest first.
        promotes: tokens, the one that it promotes most first.
    """
    # Counter keeps the order of what it counts equally often.
    if words := [word for word, _ in Counter(filter(None, peaks)).most_common(MOST)]:
        return ", ".join(words)
    tokens = list(dict.fromkeys(token.strip() for token in promotes if token.strip()))[:MOST]
    return f"→ {', '.join(tokens)}" if tokens else None
