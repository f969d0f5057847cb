"""Texts of installed Python packages as token ids, for a base model to read: pages, licences, docstrings and code.

`python -m tools.package_texts --out texts.npy --model FOLDER` writes [texts, length] as tools.own_texts does, of all
packages but one, whose texts `--held-out` writes alone. Knows no dictionary.
"""

import argparse
import random
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

import numpy as np

from tools.own_texts import filled

SUFFIXES = {".md", ".rst", ".txt", ".py", ".html"}
OF_CODE = 0.25  # of the .py files: packages have little else
LARGEST = 1 << 20  # bytes of a file
SHORTEST = 400  # characters of a text
OF_A_FILE = 8  # texts at most, so that no file counts for much
HELD_OUT = "scikit-learn"


def files(packages: list[Distribution], chance: random.Random) -> Iterator[str]:
    """The texts of files, in random order; what cannot be read as UTF-8 is left out."""
    found = {Path(str(one.locate_file(path))) for one in packages for path in one.files or ()}
    named = sorted(path for path in found if path.suffix in SUFFIXES or path.name in ("METADATA", "LICENSE"))
    chance.shuffle(named)
    for path in named:
        if path.suffix == ".py" and chance.random() > OF_CODE:
            continue
        try:
            if path.stat().st_size <= LARGEST:
                yield path.read_text("utf-8")
        except (OSError, UnicodeDecodeError):
            continue


def write(tokenizer: Any, packages: list[Distribution], out: Path, *, tokens: int, length: int, seed: int = 0) -> int:
    """Write texts of packages until there are so many tokens, or no more texts.

    Returns:
        How many tokens there are.
    """
    chance, texts, count = random.Random(seed), list[list[int]](), 0
    for text in files(packages, chance):
        ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids if len(text) >= SHORTEST else []
        first = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        pieces = [ids[at : at + length - len(first)] for at in range(0, len(ids), length - len(first))]
        chance.shuffle(pieces)
        texts += [first + piece for piece in pieces[:OF_A_FILE]]
        count += sum(map(len, pieces[:OF_A_FILE]))
        if count >= tokens:
            break
    np.save(out, filled(texts, length, tokenizer.eos_token_id))
    return count


def chosen(held_out: str, *, alone: bool) -> list[Distribution]:
    """The installed packages without one, or that one alone."""
    found = [one for one in distributions() if (one.name.lower() == held_out) == alone]
    return sorted(found, key=lambda one: one.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--held-out", action="store_true", help=f"the texts of {HELD_OUT} alone")
    parser.add_argument("--tokens", type=int, default=1_500_000)
    parser.add_argument("--length", type=int, default=512)
    given = parser.parse_args()
    from transformers import AutoTokenizer

    packages = chosen(HELD_OUT, alone=given.held_out)
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    count = write(tokenizer, packages, given.out, tokens=given.tokens, length=given.length)
    print(f"{given.out}: {count:,} tokens of {len(packages)} packages")


if __name__ == "__main__":
    main()
