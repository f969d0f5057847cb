"""A server under hundreds of requests that read, a third cut off, some with a failing consumer: nothing stays behind.

Neither rows, slots and results, nor open files and threads of its processes; in the long run, nor their memory.
Requests return features, probes, activations in the answer and by a handle, hidden states, and hand them to consumers.
Then what a full disk and an expired handle do. Knows what soaking.py asks and counts.
"""

import json
import os
import random
import re
import resource
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.plugin.conftest import ADMIN_KEY, BRIDGE, LONG_PROMPT, OCEAN, Dictionaries
from tests.plugin.judge import install
from tests.plugin.serving import Served, events_of, served
from tests.plugin.soaking import (
    AT_ONCE,
    MIB,
    SEED,
    Asked,
    answer,
    body_of,
    fill_cache,
    memory,
    processes,
    settled,
    status,
    storm,
)

pytestmark = pytest.mark.slow

SECONDS = 8  # that a result is kept
# By how much a process may grow: the engine's opens a ZMQ context of 7 files while requests run, no other process one.
FILES = 8
# Two pools of the front end, asyncio's and that for files, grow with what is asked at once; others end up with 3 and 4.
THREADS = 2 * AT_ONCE
WRITING = ".writing-"  # how a shard is called until it is whole
GENERATED = {"generated": True}
EVERYWHERE = {"positions": [[0, None]]}
HIDDEN: list[Any] = [True, {"scope": EVERYWHERE}, {"scope": GENERATED}]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reads")


@pytest.fixture(scope="module")
def server(model_dir: str, dictionaries: Dictionaries, place: Path) -> Iterator[Served]:
    install(place)
    (place / "temporary").mkdir()
    settings = place / "saesteer.yaml"
    reads = ["resid_post.20", "mlp_out.12"]
    settings.write_text(json.dumps({**dictionaries.options, "inline_rows": 2, "reads": reads}))
    flags = [model_dir, "--saesteer-config", str(settings), "--max-model-len", "1024", "--max-num-seqs", "16"]
    flags += ["--served-model-name", "base", "--kv-cache-memory-bytes", str(400 << 20), "--dtype", "float32"]
    flags += ["--consumer", f"filesystem={json.dumps({'folder': str(place / 'asked')})}", "--consumer", "judge"]
    flags += ["--result-seconds", str(SECONDS), "--pool-rows", "8", "--block-size", "32"]
    flags += ["--saesteer-admin-key", ADMIN_KEY, "--worker-extension-cls", "tests.plugin.held.Held"]
    environment = {"PYTHONPATH": os.pathsep.join([str(place), os.environ.get("PYTHONPATH", "")])}
    environment |= {"VLLM_SERVER_DEV_MODE": "1", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32"}  # as in soaking.py
    # The C library gives back what is freed. By itself it keeps some for each thread, which goes up and down by 90 MiB.
    environment |= {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "131072"}
    with served(
        flags, place / "log", environment=environment | {"TMPDIR": str(place / "temporary")}, fork=False
    ) as client:
        yield client


def returns(draw: random.Random) -> dict[str, Any]:
    """One to three kinds of reads, now and then for consumers."""
    scope = draw.choice([GENERATED, GENERATED, EVERYWHERE, {"positions": [[-3, None]]}])
    kinds: dict[str, Any] = {
        "features": [{"dictionary": "demo", "top_k": 4, "features": [99], "scope": scope}],
        "probes": ["probe", {"probe": "probe", "at": "after", "scope": scope}],
        "activations": [
            {"site": "resid_post.20", "as": draw.choice(["inline", "handle", "handle"]), "scope": scope},
            {"site": "mlp_out.12", "reduce": draw.choice(["mean", "max", "last"])},
        ],
        "hidden": draw.choice(HIDDEN),
    }
    wanted = draw.sample([*kinds], draw.choice([1, 2, 3]))
    found: dict[str, Any] = {kind: kinds[kind] for kind in wanted}
    if draw.random() < 0.4:
        tagged = {"filesystem": {"tag": "soak"}}
        found["consumers"] = draw.choice([tagged, {"judge": {}}, {"filesystem": {}, "judge": {}}])
    return found


def requests(draw: random.Random, count: int) -> list[Asked]:
    """A third cut off, half of them streams, a twelfth with a consumer that raises, a tenth plain."""
    made = []
    for number in range(count):
        path = draw.choice(["chat/completions", "chat/completions", "completions", "responses"])
        stream, cut = number % 2 == 0, "" if number % 3 else draw.choice(["first", "at once"])
        kind = "ill" if number % 12 == 5 else "plain" if number % 10 == 1 else "right"
        spec: Any = {"edits": draw.choice([[], [BRIDGE], [OCEAN]]), "return": returns(draw)}
        if kind == "plain":
            spec = None
        if kind == "ill":
            spec["return"]["consumers"] = {"judge": {"fail": draw.choice(["take", "end"])}}
        body = json.dumps({**body_of(draw, path, spec), "stream": stream}).encode()
        made.append(Asked(path, body, stream, kind, cut if stream or cut != "first" else "at once"))
    draw.shuffle(made)
    return made


def files(place: Path) -> list[Path]:
    """Results that are kept, and rooms for others."""
    return [path for path in place.glob("temporary/saesteer-*/**/*") if re.match("[0-9a-f]{32}", path.name)]


def opened(server: Served) -> dict[str, tuple[int, int]]:
    """Open files and threads of each process of the server, by its place among them; of none where it is not Linux."""
    told = [(status(one), len(os.listdir(one / "fd"))) for one in processes(server)]
    return {f"{at} {one['Name']}": (number, int(one["Threads"])) for at, (one, number) in enumerate(told)}


def check(server: Served, place: Path, count: int, parts: int) -> list[dict[str, int]]:
    """A storm in parts, and what is left; the server's memory after each of them."""
    draw, handles, kept = random.Random(SEED), list[str](), list[dict[str, int]]()

    def ended(asked: Asked, status: int, text: str) -> str:
        told = (status, text[-2000:], asked)
        at_rows = re.search(rb'fail\\*": \\*"take', asked.body)
        if asked.kind == "ill" and at_rows and '"positions":[],"kinds":[]' in text:
            return "ill"  # it has read no row that it could fail at
        if asked.kind == "ill":
            assert "the judge is ill" in text and status == (200 if asked.stream else 500), told
            return "ill"
        assert status == 200 and '"error"' not in text.replace('"error":null', ""), told
        body = json.loads(asked.body)
        spec = body.get("saesteer") or json.loads(body.get("vllm_xargs", {}).get("saesteer", "{}"))
        for kind in spec.get("return", {}):
            assert f'"{kind}":' in text, (kind, told)
        handles.extend(re.findall(r'"handle": ?"([0-9a-f]{32})"', text))
        return asked.kind

    logged = len((place / "log").read_text())  # another test's 507 may stand there
    alone = [answer(server, edits) for edits in ([], [BRIDGE])]
    before, at_first = settled(server), opened(server)
    ill = 0
    print(f"\nopen files and threads: {at_first}")
    for part in range(parts):
        asked = requests(draw, count // parts)
        ill += sum(one.kind == "ill" for one in asked)
        counts = storm(server, asked, draw, ended)
        fetched = [server.get(f"/v1/saesteer/results/{handle}") for handle in handles[-3:]]
        assert any(one.status_code == 200 and len(one.content) > 100 for one in fetched)
        time.sleep(SECONDS + 3)  # the server looks each second
        gone = server.get(f"/v1/saesteer/results/{handles[-1]}")
        assert gone.status_code == 404 and f"has expired {SECONDS} seconds after its answer" in gone.text
        assert files(place) == [], "no result, and no room for one"
        held = settled(server)
        now = opened(server)
        kept.append(memory(server))
        print(f"\nseed {SEED}, part {part + 1}: {dict(counts)}, {len(handles)} handles, {held}, {now}")
        assert held == before
        assert now.keys() == at_first.keys(), "the same processes"
        for name, (number, threads) in at_first.items():
            assert now[name][0] <= number + FILES and now[name][1] <= threads + THREADS, (name, at_first, now)
        assert set(counts) >= {"right", "plain", "cut off", "ill"}
        assert counts["cut off"] > count // parts // 6, "most of those that were to be cut off were"
    assert held["requests"] == held["with a row"] == held["slots of requests"] == 0
    assert [*(place / "asked").rglob(f"{WRITING}*")] == [], "no shard is half written"
    assert [answer(server, edits) for edits in ([], [BRIDGE])] == alone
    failed = re.findall(r'" (5\d\d)\b', (place / "log").read_text()[logged:])
    assert set(failed) <= {"500"} and len(failed) <= ill, "of nobody but those whose consumer failed"
    return kept


def read_by_handle(server: Served, letters: int, **more: Any) -> Any:
    prompt = (LONG_PROMPT * 4)[:letters]
    body = {"model": "base", "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True, **more}
    return server.post("/v1/completions", json={**body, "saesteer": {"return": READ_ALL}})


READ_ALL = {"activations": [{"site": "resid_post.20", "as": "handle", "scope": EVERYWHERE}]}


def test_a_disk_without_room_fails_who_asked_for_a_handle(server: Served, place: Path) -> None:
    """No file of the server's first process may become longer than a limit, above what its log has."""
    alone = answer(server, [BRIDGE])
    usual = resource.prlimit(server.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (MIB, usual[1]))
    try:
        refused = read_by_handle(server, 4000)
        assert refused.status_code == 507 and "[no_space]" in refused.text, refused.text
        assert str(place) not in refused.text, "the server's folder is nobody's business"
        stream = read_by_handle(server, 4000, stream=True)
        assert stream.status_code == 507 or "[no_space]" in str(events_of(stream)[-1])
        assert read_by_handle(server, 200).status_code == 200, "what fits is kept"
        assert answer(server, [BRIDGE]) == alone
    finally:
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, usual)
    made = read_by_handle(server, 4000)
    assert made.status_code == 200
    [entry] = made.json()["saesteer"]["activations"]
    assert len(server.get(f"/v1/saesteer/results/{entry['handle']}").content) > 2 * MIB


def test_hundreds_of_reads_leave_nothing_behind(server: Served, place: Path, capsys: Any) -> None:
    """Not their memory: what libraries keep still grows, and all that a hundred requests read is less."""
    with capsys.disabled():
        check(server, place, 200, 2)


@pytest.mark.long
def test_thousands_of_reads_leave_nothing_behind(server: Served, place: Path, capsys: Any) -> None:
    fill_cache(server)
    with capsys.disabled():
        kept = check(server, place, 2000, 4)
    assert len({tuple(one) for one in kept}) == 1, "the same processes"
    totals = [sum(one.values()) for one in kept]
    grown = [round((later - sooner) / MIB, 1) for sooner, later in pairwise(totals)]
    print(*({name: f"{size / MIB:.1f} MiB" for name, size in one.items()} for one in kept), grown, sep="\n")
    # Libraries begin to keep 20 MiB at some time. 4 KB that stay of each request would show in every part.
    assert min(grown[1:]) < 2 and sum(grown) < 64
