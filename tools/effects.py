"""Measures what each feature of an embedded dictionary makes the embedded model write, and stores it with the labels.

    python -m tools.effects --dictionary demo --answers demo.jsonl.gz
    python -m tools.effects --dictionary demo --answers demo.jsonl.gz --features 914 6511 8515
    python -m tools.effects --dictionary demo --from-answers demo.jsonl.gz

The first asks an engine for everything: each feature at five doses, four questions each. On an H200 an engine takes two
minutes to start and answers some 170 requests a second, and engines with some of the features each can share the GPU. A
run that was cut short goes on where it ended. The second asks for a few features, which a CPU does, too. The
third needs no engine: it stores what the answers say of each feature with the labels, and which words are alike.

A file of answers is gzipped JSON lines. The first line says what was asked; each other one holds a dose `d`, a feature
`f`, and as `a` the token ids of the answers. The answers without a clamp have dose 0 and feature -1.
"""

import argparse
import gzip
import json
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from saesteer.commands.embedded import DICTIONARIES, clamp, engine_options
from saesteer.labels.places import beside
from saesteer.labels.writing import keep
from saesteer.loaders import describe
from saesteer.model import ensure_model
from saesteer.workbench.effects import PENALTY, QUESTIONS, TOKENS, Answers, doses_of, effects
from saesteer.workbench.reading import tokenizer_of, tokens_of
from tools.alike import alike

CHUNK = 512  # features that are asked for at once
Line = dict[str, Any]


def read(file: Path) -> Iterator[Line]:
    """The whole lines of a file, which may end in the middle of one."""
    with suppress(EOFError, zlib.error, gzip.BadGzipFile), gzip.open(file, "rt") as stream:
        for text in stream:
            if text.endswith("\n"):
                yield json.loads(text)


def begun(file: Path, head: Line) -> set[tuple[float, int]]:
    """The doses and features that a file has already; it holds whole lines afterwards."""
    lines = list(read(file)) if file.is_file() else []
    if lines and lines[0] != head:
        raise SystemExit(f"{file} answers something else ({lines[0]}); expected {head}")
    part = file.with_name(f"{file.name}.part")
    part.write_bytes(packed([head, *lines[1:]]))
    part.replace(file)
    return {(one["d"], one["f"]) for one in lines[1:]}


def packed(lines: Sequence[Line]) -> bytes:
    """Lines as one member of a gzip file."""
    return gzip.compress("".join(json.dumps(one, separators=(",", ":")) + "\n" for one in lines).encode(), mtime=0)


class Engine:
    """Answers the questions under clamps."""

    def __init__(self, folder: Path, dictionary: str, running: int) -> None:
        from saesteer import LLM

        options = engine_options() | {"max_num_seqs": running, "max_model_len": 128}
        if torch.cuda.is_available():
            options |= {"kv_cache_memory_bytes": 12 << 30, "gpu_memory_utilization": 0.5}
            options["cudagraph_capture_sizes"] = [running // 4, running // 2, running]
        self._dictionary = dictionary
        place = str(DICTIONARIES[dictionary])
        self._llm = LLM(str(folder), dictionaries={dictionary: place}, max_edits=2, **options)
        tokenizer = tokenizer_of(str(folder))
        self._prompts = [tokens_of(tokenizer, text, chat=True) for text in QUESTIONS]

    def ask(self, features: Sequence[int], dose: float) -> list[Line]:
        """A line for each feature."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=TOKENS, repetition_penalty=PENALTY, detokenize=False)
        specs = [clamp(self._dictionary, one, dose) if dose else None for one in features for _ in self._prompts]
        prompts = [{"prompt_token_ids": ids} for _ in features for ids in self._prompts]
        done = self._llm.generate(prompts, params, steer=specs, use_tqdm=False)
        answers = iter([list(one.outputs[0].token_ids) for one in done])
        return [{"d": dose, "f": one, "a": [next(answers) for _ in self._prompts]} for one in features]


def ask(given: argparse.Namespace) -> None:
    """Write the answers that a file lacks."""
    info = describe(str(DICTIONARIES[given.dictionary]))
    head = {"dictionary": info.fingerprint, "questions": list(QUESTIONS), "tokens": TOKENS, "penalty": PENALTY}
    done = begun(given.answers, head)
    features = given.features or range(info.features)
    work = [(0.0, [-1])] * ((0.0, -1) not in done)
    for dose in given.doses or doses_of(info):
        left = [one for one in features if (dose, one) not in done]
        work += [(dose, left[at : at + CHUNK]) for at in range(0, len(left), CHUNK)]
    if not work:
        return
    engine = Engine(ensure_model(print), given.dictionary, given.running)
    start, answered, total = time.monotonic(), 0, sum(len(part) for _, part in work)
    with given.answers.open("ab") as stream:
        for dose, part in work:
            stream.write(packed(engine.ask(part, dose)))
            stream.flush()
            answered += len(part)
            print(f"{answered:,} of {total:,} clamps in {time.monotonic() - start:.0f} s, {dose:g} max_act", flush=True)


def told(file: Path) -> list[Answers]:
    """The answers in a file, as texts."""
    tokenizer = tokenizer_of(str(ensure_model(print)))
    lines = [one for one in read(file) if "a" in one]
    texts = iter(tokenizer.batch_decode([ids for one in lines for ids in one["a"]], skip_special_tokens=True))
    return [Answers(one["f"], one["d"], [next(texts) for _ in one["a"]]) for one in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dictionary", choices=DICTIONARIES, required=True)
    files = parser.add_mutually_exclusive_group(required=True)
    files.add_argument("--answers", type=Path, help="the file of answers, which is made or continued")
    files.add_argument("--from-answers", type=Path, help="such a file, from which effects are stored")
    parser.add_argument("--features", type=int, nargs="+", help="some features; by default all")
    parser.add_argument("--doses", type=float, nargs="+", help="in max_act; by default those of saesteer.workbench")
    fast = torch.cuda.is_available()
    parser.add_argument("--running", type=int, default=1024 if fast else 16, help="requests at once in the engine")
    given = parser.parse_args()
    if given.answers:
        ask(given)
    else:
        file, found = beside(DICTIONARIES[given.dictionary]), effects(told(given.from_answers))
        keep(file, found)
        keep(file, (), alike(file, found, ensure_model(print)))


if __name__ == "__main__":
    main()
