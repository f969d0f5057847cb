"""Loads a real server for as long as it is told, and says what of it did not last (`make soak`). Knows no engine.

The requests, the aborts and the changes of names are those of tests/plugin/soaking.py, with reads on top. They come
in rounds, 16 at once. After each round nobody asks for anything: then the worker holds nothing, a plain and a steered
answer are the first ones to the bit, and what is read by a handle is there and goes. It runs by hand, before a
release: an hour shows growth that a test of minutes cannot tell from what libraries keep in the beginning.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from saesteer.commands.embedded import ensure_model
from saesteer.errors import SpecError
from saesteer.language.spec import from_json
from saesteer.planning.plan import Catalog
from saesteer.planning.planner import plan
from tests.plugin import soaking as storm
from tests.plugin.conftest import BRIDGE, PROMPTS, flags_of, write_dictionaries
from tests.plugin.serving import Served, served

ROUND = 100  # requests
LONG = 1 << 10  # tokens of a prompt that has all positions which a storm names
READS: list[dict[str, Any]] = [
    {"features": [{"dictionary": "demo", "top_k": 4}]},
    {"activations": [{"site": "resid_post.15", "scope": {"generated": True}, "reduce": "mean"}]},
    {"probes": ["probe"], "hidden": True},
]
BY_HANDLE = {"return": {"activations": [{"site": "resid_post.15", "as": "handle"}]}}
# Bytes, of the last third of the rounds against the third before it. A row that stays behind has 16 KB, and a request
# some in each process; libraries still grow in the first third, and by less than this later.
GROWTH = 12 * storm.MIB
FEWEST = 30  # rounds in which growth can be told: one of them may hold 40 MiB more than its neighbours


def with_reads(draw: random.Random, asked: storm.Asked, catalog: Catalog) -> storm.Asked:
    """A third of the right requests, reading something as well, unless the server cannot read it beside their edits."""
    if asked.kind != "right" or draw.random() > 1 / 3:
        return asked
    body = json.loads(asked.body)
    spec = body.get("saesteer")
    if spec is None:  # it stands in vllm_xargs, as text
        return asked
    body["saesteer"] = {**spec, "return": {**spec.get("return", {}), **draw.choice(READS)}}
    try:
        plan(from_json(body["saesteer"]), catalog, LONG)
    except SpecError as error:  # before edits of a sum and after those of one of its parts, where there is no op
        if error.code != "not_served":
            raise
        return asked
    return replace(asked, body=json.dumps(body).encode())


def fetch(server: Served) -> None:
    """Read by a handle, take the file, and delete it."""
    asked = {"model": "base", "prompt": PROMPTS[1], "max_tokens": 4, "temperature": 0, "saesteer": BY_HANDLE}
    made = server.post("/v1/completions", json=asked)
    assert made.status_code == 200, made.text
    [entry] = made.json()["saesteer"]["activations"]
    path = f"/v1/saesteer/results/{entry['handle']}"
    held = server.get(path)
    assert held.status_code == 200 and len(held.content) > 4 * entry["shape"][0] * entry["shape"][1]
    assert server.delete(path).status_code == 200
    assert server.get(path).status_code == 404


def growth(kept: Sequence[Mapping[str, int]]) -> float:
    """Bytes by which the median of the last third of the rounds lies above that of the third before, all processes."""
    totals, third = [sum(one.values()) for one in kept], len(kept) // 3
    return statistics.median(totals[-third:]) - statistics.median(totals[-2 * third : -third])


def soak(server: Served, log: Path, catalog: Catalog, minutes: float, seed: int) -> None:
    """Rounds until the time is over.

    Raises:
        AssertionError: something did not last; the message says what.
    """
    draw, kept, counts = random.Random(seed), [], Counter[str]()
    storm.fill_cache(server)
    first = [storm.answer(server, edits) for edits in ([], [BRIDGE])]
    before, said = storm.settled(server), len(log.read_text())
    begun = time.monotonic()
    while time.monotonic() < begun + 60 * minutes:
        asked = [with_reads(draw, one, catalog) for one in storm.requests(draw, catalog, ROUND)]
        counts += storm.storm(server, asked, draw)
        fetch(server)
        held = storm.settled(server)
        kept.append(storm.memory(server))
        total = sum(kept[-1].values()) / storm.MIB
        print(f"{time.monotonic() - begun:6.0f} s  {total:8.1f} MiB  {dict(counts)}", flush=True)
        assert held == before, f"the worker holds {held}, at first {before}"
        assert kept[-1].keys() == kept[0].keys(), f"processes are {list(kept[-1])}, at first {list(kept[0])}"
        last = [storm.answer(server, edits) for edits in ([], [BRIDGE])]
        assert last == first, f"a plain and a steered answer are {last}, at first {first}"
    failed = storm.failures(log.read_text()[said:])
    assert not failed, f"the server's log has {len(failed)} failures: {failed[:3]}"
    assert counts.keys() >= {"right", "plain", "cut off", "refused", "changes of names"}, counts
    if len(kept) < FEWEST:
        print(f"{len(kept)} rounds are too few to tell growth; {FEWEST} tell it")
        return
    grown = growth(kept)
    print(f"memory of all processes: {grown / storm.MIB:+.1f} MiB from the second third of the rounds to the last")
    assert grown < GROWTH, f"memory has grown by {grown / storm.MIB:.1f} MiB, more than {GROWTH / storm.MIB:.0f}"


def main() -> None:
    """Read the command line, start a server, and load it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=storm.SEED)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        dictionaries, log = write_dictionaries(folder), folder / "log"
        flags = flags_of(str(ensure_model()), dictionaries, folder)
        with served([*flags, *storm.FLAGS], log, environment=storm.ENVIRONMENT) as server:
            try:
                soak(server, log, storm.catalog_of(dictionaries), chosen.minutes, chosen.seed)
            except AssertionError as error:
                print(f"the server's last words:\n{log.read_text()[-4000:]}")
                raise SystemExit(f"soak, seed {chosen.seed}: {error}") from None
    print(f"soak, seed {chosen.seed}: everything lasted")


if __name__ == "__main__":
    main()
