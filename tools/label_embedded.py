"""Writes the label files of the embedded dictionaries (saesteer/data), from texts that the embedded model has written.

    python -m tools.own_texts --out texts.npy --by transformers --device cpu --tokens 64000 --length 160 --batch 256 \\
        --seconds 300
    python -m tools.label_embedded --texts texts.npy

On one thread of a Xeon the first takes 8 minutes, the second 6. Knows no label.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from transformers import AutoTokenizer

from saesteer.commands.embedded import DICTIONARIES
from saesteer.config.config import SaesteerConfig
from saesteer.model import ensure_model
from saesteer.workbench import label

EXAMPLES = 3  # of each feature: the two files may have 5 MB in a wheel


def plain(texts: np.ndarray, tokenizer: Any) -> str:
    """Token ids [texts, length] as one text, without what each of them was filled up with."""
    end = tokenizer.eos_token_id
    rows = [row[: len(row) - int(np.argmax(row[::-1] != end))] for row in texts.astype(np.int64)]
    return "\n\n".join(tokenizer.decode(row[row != tokenizer.convert_tokens_to_ids("<|endoftext|>")]) for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, required=True, help="token ids that tools.own_texts has written")
    parser.add_argument("--max-tokens", type=int, default=100_000)
    given = parser.parse_args()
    text = plain(np.load(given.texts), AutoTokenizer.from_pretrained(ensure_model(print)))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "texts of the model's own"
        file.write_text(text, encoding="utf-8")
        config = SaesteerConfig.from_json({"dictionaries": DICTIONARIES})
        label.run(Console(), "demo", config, file, max_tokens=given.max_tokens, examples=EXAMPLES)


if __name__ == "__main__":
    main()
