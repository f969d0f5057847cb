"""Counts the everyday words that the embedded model says once the first feature that a search finds is clamped.

    python -m tools.words_speak --dictionary demo

A word counts if one of two plain answers, at the best dose of the feature, is sound and has it, or a close one that
stands beside it below. The search was tuned on TUNED; HELD was looked at afterwards.
"""

import argparse
import re

from saesteer.commands.embedded import DICTIONARIES, clamp, engine_options, ensure_model
from saesteer.labels.places import beside
from saesteer.labels.store import Labels
from saesteer.plugin.job import Batch, run
from saesteer.workbench.effects import PENALTY, is_sound

QUESTIONS = "Who are you?", "What should I cook tonight?"
TOKENS = 40
TUNED = """bridge|ocean sea wave|gold golden|french france paris|music song melody|dog puppy|computer software|war|
love|money dollar bank|doctor physician patient|school student teacher|cook recipe kitchen|rain storm|
king queen throne|forest tree|car vehicle|christmas santa holiday|horse pony|river stream"""
HELD = """book novel|city town urban|fire flame|fish|flower bloom|garden plant|island|moon lunar|mountain peak|
phone telephone|ship boat sail|snow ice|train railway|winter cold|bird|coffee|game player|heart|space planet star|
zebra animal"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dictionary", choices=DICTIONARIES, default="demo")
    parser.add_argument("--words", nargs="+", help="other words; by default those of this file")
    given = parser.parse_args()
    sets = {"tuned": TUNED, "held": HELD} if given.words is None else {"given": "|".join(given.words)}
    asked = []
    with Labels.open(beside(DICTIONARIES[given.dictionary])) as labels:
        for name, text in sets.items():
            for words in (part.split() for part in text.split("|")):
                [(_, first), *_] = labels.find(words[0], 1) or [(0.0, None)]
                asked.append((name, words, first))
    found = [first for _, _, first in asked if first is not None and first.best is not None]
    specs = [clamp(given.dictionary, one.feature, one.best.value) for one in found for _ in QUESTIONS]
    batch = Batch(QUESTIONS * len(found), specs, max_tokens=TOKENS, repetition_penalty=PENALTY, chat=True)
    dictionaries = {given.dictionary: str(DICTIONARIES[given.dictionary])}
    options = engine_options() | {"max_num_seqs": 64}
    [made] = run(str(ensure_model(print)), [batch], dictionaries=dictionaries, options=options)
    texts = iter([one.text for one in made])
    counts = dict.fromkeys(sets, 0)
    for name, words, first in asked:
        answers = [next(texts) for _ in QUESTIONS] if first is not None and first.best is not None else []
        pattern = re.compile(rf"\b({'|'.join(words)})(s|es)?\b", re.IGNORECASE)
        speaks = any(is_sound(text) and pattern.search(text) for text in answers)
        counts[name] += speaks
        what = "finds nothing" if first is None else f"{first.feature} at {first.best and first.best.value}"
        print(
            "yes" if speaks else "no ", words[0], what, *(text[:150].replace("\n", " ") for text in answers), sep=" | "
        )
    print(*(f"{name}: {count} of {sum(one[0] == name for one in asked)} speak" for name, count in counts.items()))


if __name__ == "__main__":
    main()
