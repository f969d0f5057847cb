"""Finds for each word that no feature has the word that a clamp is known to write and that the model holds most alike.

Two words are alike if the model's hidden states are, on the words at the end of one short sentence: centred, by their
cosine. Only words that are one token are compared.
"""

import re
import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from saesteer.labels import search
from saesteer.labels.store import Effect

BEFORE = "I am thinking of the word"
LAYER = 9  # of the embedded model's 30: it holds the meaning there, and no longer the spelling
LEAST = 0.4  # below that, neighbours are chance
COMMON = 20_000  # tokens of the vocabulary, whose order is that of their frequency; the rest are hardly trained
SHARE = 50  # of the answers under a clamp that have the word, in percent
BATCH = 256


def alike(file: Path, effects: Iterable[Effect], folder: Path) -> list[tuple[str, str]]:
    """Pairs of a word that the search in a file does not know, and a word to look for in its place.

    Args:
        file: the labels.
        effects: what clamps write.
        folder: the model.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = tokenizer.batch_decode([[one] for one in range(len(tokenizer))])
    tokens = {text[1:]: one for one, text in enumerate(texts) if re.fullmatch(" [a-z]{3,}", text)}
    often = {one.word for effect in effects for one in effect.writes if one.share >= SHARE}
    targets = sorted(word for word in often if tokens.get(word, COMMON) < COMMON)
    with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as base:
        unknown = [
            one for one in sorted(tokens) if not search.is_known(lambda *a: base.execute(a[0], a[1:]).fetchall(), one)
        ]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).model.eval()
    before = tokenizer.encode(BEFORE)

    @torch.no_grad()
    def states(words: Sequence[str]) -> torch.Tensor:
        rows = [[*before, tokens[word]] for word in words]
        parts = [torch.tensor(rows[at : at + BATCH]) for at in range(0, len(rows), BATCH)]
        return torch.cat([model(part, output_hidden_states=True).hidden_states[LAYER][:, -1] for part in parts])

    there = states(targets)
    mean = there.mean(0)
    ours, theirs = (torch.nn.functional.normalize(each - mean, dim=-1) for each in (states(unknown), there))
    nearest = (ours @ theirs.T).max(-1)
    found = zip(unknown, nearest.values.tolist(), nearest.indices.tolist(), strict=True)
    return [(word, targets[at]) for word, value, at in found if value >= LEAST]
