"""What modes cost: what requests bring, and both ways for real on a tiny model."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer
from threading import Thread
from typing import Any

import pytest
import torch

from bench import modes, streams
from bench.asks import MODES, Load, Shape, specs
from bench.deltas import METRICS
from bench.engines import settings
from bench.offline import Times
from saesteer.config.assets import Assets
from saesteer.config.config import SaesteerConfig
from saesteer.language.spec import from_json
from saesteer.planning.planner import plan

ROOT = Path(__file__).parents[2]


def test_every_mode_stands_between_two_runs_of_stock() -> None:
    rounds = [list(modes.order(["a", "b", "c"], share, turn)) for share, turn in ((1, 0), (2, 1), (3, 2))]
    assert [" ".join(names) for names in rounds] == ["a stock b stock c stock", "c b stock a stock", "a b c stock"]
    asked: list[Load] = []

    class Fake:
        def run(self, load: Load) -> Times:
            asked.append(load)
            return Times([0.1], [1.1], 0)

    words = "--modes idle clamp disabled --concurrency 2 8 --tokens 256 64 --prompts 16 --rounds 2"
    given = modes.arguments(words.split())
    engines: Any = {kind: Fake() for kind in modes.kinds(given.modes)}
    assert list(engines) == ["stock", "saesteer", "disabled"]
    bench = modes.Bench(given, engines)
    bench.warm_up()
    bench.round(0)
    bench.round(1)
    timed = [load.mode for load in asked if load.at_once == 8 and load.tokens == 256]
    assert " ".join(timed) == ("stock idle stock clamp stock disabled stock disabled stock clamp stock idle stock")
    rows = bench.rows()
    sizes = ((2, 8, 256), (2, 8, 64), (8, 16, 256))  # the first of either list with all of the other
    assert [(row["mode"], row["at_once"], row["requests"], row["tokens"], row["runs"]) for row in rows] == [
        (name, *size, 2) for size in sizes for name in ("idle", "clamp", "disabled")
    ]
    for mode in ("stock", "idle", "clamp"):
        seeds = [load.seed for load in asked if load.mode == mode]
        assert len(seeds) == len(set(seeds)), "a seed again: its prompts would be in the prefix cache"


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("model", ["tiny", "gemma-3-4b"])
def test_what_requests_bring_is_served_by_what_the_engine_is_started_with(
    name: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.engines.FEATURES", 128 if model != "tiny" else 16384)
    shape = Shape.of(model)
    mode = MODES[name]
    assets = Assets.open(SaesteerConfig.from_json(settings(model, tmp_path, modes=[name])))
    catalog = assets.catalog(width=shape.width, layers=shape.layers)
    asked = specs(Load(name, 3, 6, 2, 16, 8), shape)
    if name in ("disabled", "idle"):
        assert asked == [None] * (2 + 6)
        return
    for spec in asked:
        if name == "clamp" and model != "tiny":
            spec["edits"][0]["feature"] %= 128  # type: ignore[index]
        found = plan(from_json(json.loads(json.dumps(spec))), catalog, 16)
        if mode.reads:
            count = {"features": 1, "probes": 100, "capture": 1, "captures": shape.layers}[name]
            sites = {"probes": min(10, shape.layers)}.get(name, count)
            assert (len(found.readouts), len({one.site for one in found.readouts})) == (count, sites)
            assert not found.groups and all(one.windows[0][0] == 16 for one in found.readouts), "generated tokens alone"
            continue
        assert len(found.groups) == (1 if name == "clamp" else shape.layers)


def stream_of(tokens: int) -> bytes:
    """What a server sends, a chunk for each event."""
    events = [json.dumps({"choices": [{"text": "t1"}]})] * tokens
    events[-1] = events[-1][:-1] + ',"saesteer":{"applied":[{"tokens_edited":7}]}}'
    events += [json.dumps({"usage": {"completion_tokens": tokens}}, separators=(",", ":")), "[DONE]"]
    chunks = [f"data: {event}\n\n".encode() for event in events]
    return b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"


def served(answers: Callable[[int], bytes], ask: Callable[[int], Times]) -> Times:
    """What a client takes from a server that answers its n-th request so; b"" hangs up."""
    count = 0

    class Handler(StreamRequestHandler):
        def handle(self) -> None:
            nonlocal count
            while self.rfile.readline().startswith(b"POST /v1/completions"):
                head = list(iter(self.rfile.readline, b"\r\n"))
                [length] = [int(line.split()[1]) for line in head if line.startswith(b"Content-Length")]
                assert json.loads(self.rfile.read(length))["stream"]
                count += 1
                answer = answers(count)
                if not answer:
                    return
                self.wfile.write(answer)

    with ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, args=(0.01,)).start()
        try:
            return ask(server.server_address[1])
        finally:
            server.shutdown()


OK = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def test_streams_are_read_to_their_end() -> None:
    requests = [streams.prepared([2, 3], tokens, None) for tokens in (2, 3, 3, 3, 3)]
    times = served(lambda n: OK + stream_of(2 if n == 1 else 3), lambda port: streams.drive(port, requests, 1, 1))
    assert len(times.first) == 4 and times.served == 4
    times = served(lambda _: OK + stream_of(3), lambda port: streams.drive(port, requests[1:], 2))
    assert len(times.first) == 4 and times.served == 4
    assert all(0 < first <= whole for first, whole in zip(times.first, times.whole, strict=True))


@pytest.mark.parametrize("wrong", [OK + stream_of(2), b"HTTP/1.1 400 Bad Request\r\ncontent-length: 2\r\n\r\n{}", b""])
def test_a_stream_that_is_cut_short_or_refused_is_no_time(wrong: bytes) -> None:
    requests = [streams.prepared([2, 3], 3, None)] * 2
    with pytest.raises(RuntimeError, match="expected 3 tokens"):
        served(lambda n: wrong if n == 2 else OK + stream_of(3), lambda port: streams.drive(port, requests, 1))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("way", ["llm", "http"])
def test_every_mode_runs_on_a_tiny_model(way: str, tmp_path: Path) -> None:
    """Every steered answer has to say that all its edits changed tokens, and each engine what it makes of a spec."""
    command = ["--model", "tiny", "--way", way, "--prompt-tokens", "16", "--tokens", "8", "--out", str(tmp_path)]
    command += ["--concurrency", "4", "--prompts", "8", "--rounds", "2", "--budget", "600", "--modes", *MODES]
    done = subprocess.run(
        [sys.executable, "-m", "bench.modes", *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in (tmp_path / "modes_read.jsonl").read_text().splitlines()]
    assert [row["mode"] for row in rows] == list(MODES)
    assert all(row["runs"] == 2 and row[metric]["ms"] > 0 for row in rows for metric in METRICS)
    assert torch.tensor([row[metric]["each_percent"] for row in rows for metric in METRICS]).isfinite().all()
    assert all(name in done.stdout for name in MODES)
