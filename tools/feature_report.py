"""What features are about: where they are strongest, and which tokens they make likely. Trains no dictionary."""

import json
from collections import Counter
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from saesteer.dictionaries.coder import SparseCoder
from saesteer.labels.lens import lens

CONTEXTS = 6  # of each feature
BEFORE, AFTER = 12, 4  # tokens around the strongest
BLOCK = 2048  # tokens of which one context may come: a handful of texts
PROMOTED = 8  # tokens
SHOWN = 40  # features
DENSITY = (0.0003, 0.01)  # of the features that are shown


class Known(Protocol):
    """What was measured before."""

    @property
    def density(self) -> Tensor:
        """[F] fraction of the tokens."""

    @property
    def max_act(self) -> Tensor:
        """[F]"""


@torch.no_grad()
def strongest(coder: SparseCoder, x: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens where each feature is strongest, at most one of each block.

    Args:
        coder: the dictionary.
        x: [tokens, d_in], what it reads.

    Returns:
        Activations and numbers of the tokens, each [F, CONTEXTS], strongest first.
    """
    best = torch.zeros(coder.info.features, CONTEXTS, device=x.device)
    where = torch.zeros_like(best, dtype=torch.int64)
    for start in range(0, len(x), BLOCK):
        value, at = coder.encode(x[start : start + BLOCK]).max(0)
        values, places = torch.cat([best, value[:, None]], 1), torch.cat([where, at[:, None] + start], 1)
        best, order = values.topk(CONTEXTS, dim=-1)
        where = places.gather(-1, order)
    return best, where


def report(
    coder: SparseCoder, x: Tensor, known: Known, model: Any, tokenizer: Any, tokens: Tensor, keep: Tensor, out: Path
) -> str:
    """Save what is known about each feature as JSON, and tell about the most distinctive ones.

    Distinctive features are rare, and strongest on the same word each time.

    Args:
        coder: the dictionary.
        x: [tokens, d_in], what it reads, at the tokens that count.
        known: their densities and largest activations.
        model: the Transformers model, at least its embeddings and its final norm.
        tokenizer: the model's.
        tokens: [texts, length] int64.
        keep: [texts, length] bool: the tokens that count.
        out: the file; a list of objects, one for each feature that is not dead.

    Returns:
        Lines on the most distinctive features, strongest first.
    """
    values, places = (part.tolist() for part in strongest(coder, x))
    likely = [tokenizer.batch_decode([[one] for one in row]) for row, _ in lens(coder.w_dec, model, PROMOTED)]
    text, position = keep.nonzero(as_tuple=True)
    found = []
    for feature in range(coder.info.features):
        contexts, peaks = [], []
        for value, place in zip(values[feature], places[feature], strict=True):
            if value > 0:
                row, at = tokens[text[place]], int(position[place])
                parts = row[max(0, at - BEFORE) : at], row[at : at + 1], row[at + 1 : at + 1 + AFTER]
                before, peak, after = (tokenizer.decode(part.tolist()) for part in parts)
                contexts.append([round(value, 2), f"{before}«{peak}»{after}"])
                peaks.append(peak.strip().lower())
        if contexts:
            about: dict[str, Any] = {"feature": feature, "max_act": round(float(known.max_act[feature]), 2)}
            about |= {"density": round(float(known.density[feature]), 6), "peak": Counter(peaks).most_common(1)[0]}
            found.append(about | {"contexts": contexts, "promotes": likely[feature]})
    out.write_text("[\n" + ",\n".join(json.dumps(one, ensure_ascii=False) for one in found) + "\n]\n")
    rare = [one for one in found if DENSITY[0] <= one["density"] <= DENSITY[1] and len(one["peak"][0]) > 2]
    clear = [one for one in rare if one["peak"][1] >= CONTEXTS - 2]
    lines = []
    for one in sorted(clear, key=lambda one: -one["max_act"])[:SHOWN]:
        lines.append(f"\n{one['feature']}: max_act {one['max_act']}, density {one['density']:.3%}, {one['promotes']}")
        lines += [f"  {value}  {context!r}" for value, context in one["contexts"]]
    return "\n".join(lines)
