"""Edits in the small world for a part of an answer, and the same with the positions of that part."""

from typing import Any

from saesteer.planning.windows import of_part

PROMPT, TOKENS, CLOSES = 4, 12, 9  # CLOSES: the token that ends the reasoning
EDITS: list[dict[str, Any]] = [
    {"op": "add", "vector": "any", "site": ["resid_mid.1", "resid_post.2"]},
    {"op": "clamp", "dictionary": "jump", "feature": 3, "value": 2.5, "when": {"probe": "one", "above": 0.0}},
    {"op": "clamp", "dictionary": "across", "feature": 5, "value": 1.5},
    {"op": "clamp", "dictionary": "best", "feature": 1, "value": 2.0},
    {"op": "cap", "vector": "each", "site": "resid_post.2", "max": 0.5},
    {"op": "ablate", "vector": "any", "site": "mlp_in.2"},
    {"op": "reconstruct", "dictionary": "rect"},
    {"op": "add", "vector": "any", "site": "resid_mid.2", "scale": {"dictionary": "rect", "feature": 2}},
]


def explicit(edit: dict[str, Any], part: str, border: int) -> dict[str, Any] | None:
    """The edit with the positions of the part; None where these are none."""
    low, high = of_part(part, border)  # type: ignore[arg-type]
    low, high = max(low, PROMPT), min(high, TOKENS)
    return {**edit, "scope": {"positions": [[low, high]]}} if low < high else None
