"""What modes cost: what requests bring, and both ways for real on a tiny model."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer
from threading import Thread
from typing import Any

import pytest
import torch

from bench import modes, streams
from bench.asks import MODES, USUAL, VARIED, VECTOR, Load, Shape, answers, prompts, specs
from bench.deltas import METRICS, table
from bench.dummy import cache_bytes, tokenizer_folder, vector_file, weight_bytes
from bench.engines import SEATS, memory, on_gpu, options, settings
from bench.offline import Times, drive
from saesteer.config.assets import Assets
from saesteer.config.config import SaesteerConfig
from saesteer.language.spec import from_json
from saesteer.planning.planner import plan

ROOT = Path(__file__).parents[2]
TINY = Shape.of("tiny")


@pytest.mark.parametrize("share", ["1", "2", "4"])
def test_no_prompt_comes_twice_to_an_engine(share: str) -> None:
    """Modes that only read leave the prompt's blocks as they are without them: the next one would find them cached."""
    had: dict[str, list[int]] = {}

    class Fake:
        def __init__(self, kind: str) -> None:
            self.seeds = had.setdefault(kind, [])

        def run(self, load: Load) -> Times:
            self.seeds.append(load.seed)
            return Times([0.1], [1.1], 0)

    given = modes.arguments(["--modes", "idle", "features", "captures", "disabled", "--share", share])
    bench = modes.Bench(given, {kind: Fake(kind) for kind in modes.kinds(given.modes)})  # type: ignore[misc]
    bench.warm_up()
    for turn in range(3):
        bench.round(turn)
    for kind, seeds in had.items():
        assert len(seeds) == len(set(seeds)), kind


def test_every_mode_stands_between_two_runs_of_stock() -> None:
    rounds = [list(modes.order(["a", "b", "c"], share, turn)) for share, turn in ((1, 0), (2, 1), (3, 2))]
    assert [" ".join(names) for names in rounds] == ["a stock b stock c stock", "c b stock a stock", "a b c stock"]
    asked: list[Load] = []

    class Fake:
        def run(self, load: Load) -> Times:
            asked.append(load)
            return Times([0.1], [1.1], 0)

    given = modes.arguments(["--modes", "idle", "clamp", "disabled", "--concurrency", "2", "8", "--rounds", "2"])
    engines: Any = {kind: Fake() for kind in modes.kinds(given.modes)}
    assert list(engines) == ["stock", "saesteer", "disabled"]
    bench = modes.Bench(given, engines)
    bench.warm_up()
    bench.round(0)
    bench.round(1)
    timed = [load.mode for load in asked if load.at_once == 8 and load.tokens == 256]
    assert " ".join(timed) == ("stock idle stock clamp stock disabled stock disabled stock clamp stock idle stock")
    rows = bench.rows()
    assert [(row["mode"], row["at_once"], row["runs"]) for row in rows] == [
        (name, at_once, 2) for at_once in (2, 8) for name in ("idle", "clamp", "disabled")
    ]
    for mode in ("stock", "idle", "clamp"):
        seeds = [load.seed for load in asked if load.mode == mode]
        assert len(seeds) == len(set(seeds)), "a seed again: its prompts would be in the prefix cache"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "gpt-2"], "--model"),
        (["--modes", "idle", "idle"], "names one twice"),
        (["--modes", "stock"], "stock"),
        (["--tokens", "1"], "expected at least 2"),
        (["--rounds", "0"], "expected at least 1"),
        (["--whole", "--way", "http"], "expected llm"),
        (["--concurrency", "1", "16", "--prompts", "8"], "expected at least 16"),
    ],
)
def test_a_wrong_command_says_what_is_wrong(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        modes.arguments(words)
    assert message in capsys.readouterr().err


def test_engines_that_do_not_fit_are_refused_before_they_start() -> None:
    h200 = 143771 << 20
    assert weight_bytes("gemma-3-27b") == pytest.approx(54.0e9, rel=0.01)
    assert cache_bytes("gemma-3-4b") == 139264
    modes.refuse_crowd(modes.arguments([]), h200)
    modes.refuse_crowd(modes.arguments(["--model", "gemma-3-27b", "--modes", "disabled"]), h200)
    modes.refuse_crowd(modes.arguments(["--model", "gemma-3-27b", "--modes", "idle", "clamp"]), h200)
    with pytest.raises(SystemExit, match="3 engines of 62 GiB"):
        modes.refuse_crowd(modes.arguments(["--model", "gemma-3-27b"]), h200)
    modes.refuse_crowd(modes.arguments(["--model", "gemma-3-27b"]), None)
    assert memory("tiny", at_once=4, length=32) > 0


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


def test_sets_are_as_many_as_the_mode_says_and_no_mode_has_anothers() -> None:
    def brought(name: str, seed: int) -> list[str]:
        found = specs(Load(name, seed, 48, 16, 16, 8), TINY)
        return [json.dumps(spec, sort_keys=True) for spec in found]

    count = {name: len(set(brought(name, 1))) for name in MODES}
    assert count == {"disabled": 1, "idle": 1, "named": 1, "shared": 1, "inline-4": 4, "inline-16": 16, "clamp": 64,
                     "fresh": 64, "features": 1, "probes": 1, "capture": 1, "captures": 1}  # fmt: skip
    inline = [set(brought(name, 1)) for name in ("shared", "inline-4", "inline-16", "fresh")]
    assert len(set.union(*inline)) == sum(map(len, inline))
    assert brought("inline-16", 1) == brought("inline-16", 2), "sets come again from run to run"
    assert not set(brought("fresh", 1)) & set(brought("fresh", 2)), "and fresh ones never do"


@pytest.mark.parametrize("name", VARIED)
def test_a_varied_mode_has_as_many_edits_as_it_says(name: str, tmp_path: Path) -> None:
    what, number = name.split("-")
    shape = Shape(34, TINY.width, TINY.vocabulary)
    config = settings("tiny", tmp_path)
    bits = torch.zeros(shape.layers, shape.width, dtype=torch.bfloat16)
    catalog = Assets.open(
        SaesteerConfig.from_json(config | {"vectors": {VECTOR: str(vector_file(bits + 1, tmp_path))}})
    ).catalog(width=shape.width, layers=shape.layers)
    for spec in specs(Load(name, 3, 0, 16, 16, 8), shape):
        found = plan(from_json(json.loads(json.dumps(spec))), catalog, 16)
        sites = {group.site for group in found.groups}
        assert len(spec["edits"]) == int(number)  # type: ignore[index]
        assert len(sites) == (int(number) if what == "vectors" else 1)
        if what == "clamps":
            assert len({edit["feature"] for edit in spec["edits"]}) == int(number)  # type: ignore[index]


def test_lengths_of_answers_have_rows_of_their_own_and_may_be_eager(tmp_path: Path) -> None:
    class Fake:
        def run(self, load: Load) -> Times:
            return Times([0.1] * load.requests, [0.1 + 0.01 * (load.tokens - 1)] * load.requests, 0)

    given = modes.arguments(["--modes", "idle", "--tokens", "8", "64", "--rounds", "1", "--eager"])
    engines: Any = {kind: Fake() for kind in modes.kinds(given.modes)}
    bench = modes.Bench(given, engines)
    bench.warm_up()
    bench.round(0)
    rows = bench.rows()
    assert [(row["tokens"], row["eager"]) for row in rows] == [(8, True), (64, True)]
    assert all(row["per_token"]["ms"] == pytest.approx(10) for row in rows)
    assert [line.split()[2] for line in table(rows).splitlines()[2:4]] == ["8", "64"]
    assert options("tiny", tmp_path, at_once=4, length=24, eager=True)["enforce_eager"]


def test_prompts_are_alike_for_one_seed_and_share_nothing_else() -> None:
    load = Load("idle", 5, 8, 4, 64, 8)
    found = prompts(load, TINY)
    assert found == prompts(Load("stock", 5, 8, 4, 64, 8), TINY)
    other = prompts(Load("idle", 6, 8, 4, 64, 8), TINY)
    beginnings = {tuple(ids[:16]) for ids in [*found, *other]}  # a block of the prefix cache
    assert len(beginnings) == 2 * (4 + 8)
    assert all(len(ids) == 64 and max(ids) < TINY.vocabulary for ids in found)


def test_the_tokenizer_has_every_token_of_the_model(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder(512, tmp_path))
    assert len(tokenizer) == 512
    assert "t511" in tokenizer.decode([3, 511])
    assert options("tiny", tmp_path, at_once=4, length=24)["max_num_seqs"] == (SEATS if on_gpu() else 4)


class Engine:
    """Stands for an LLMEngine: a token for everybody a step, two of them; keeps how many run at once."""

    def __init__(self) -> None:
        self.running: dict[str, int] = {}
        self.most = 0

    def add_request(self, request: str, prompt: Any, params: Any) -> None:
        self.running[request] = 0
        self.most = max(self.most, len(self.running))

    def has_unfinished_requests(self) -> bool:
        return bool(self.running)

    def step(self) -> list[Any]:
        made = []
        for request in list(self.running):
            self.running[request] += 1
            ended = self.running[request] == 2
            said = {"applied": [{"tokens_edited": 0 if request == "3" else 5}]}
            one = type("Completion", (), {"token_ids": [1], "saesteer": said})
            fields = {"request_id": request, "outputs": [one], "finished": ended, "num_cached_tokens": 0}
            made.append(type("Output", (), fields))
            if ended:
                del self.running[request]
        return made


@pytest.mark.parametrize("run_in", [0, 2, 4])
def test_offline_keeps_so_many_requests_going(run_in: int) -> None:
    engine = Engine()
    times = drive(engine, [("prompt", "params")] * 10, 4, run_in)
    assert engine.most == 4
    assert len(times.first) == len(times.whole) == 10 - run_in
    assert all(0 <= first <= whole for first, whole in zip(times.first, times.whole, strict=True))
    assert times.served == 9 - run_in + (run_in > 3), "an edit that changed nothing does not count"


def test_a_run_in_has_a_request_for_each_place_and_they_end_apart() -> None:
    assert answers(Load("idle", 1, 3, 4, 16, 256)) == [2, 6, 10, 14, 256, 256, 256]
    assert answers(Load("idle", 1, 1, 4, 16, 8)) == [2, 6, 8, 8, 8]


def test_a_burst_has_no_run_in() -> None:
    load = Load("clamps-32", 1, 4, 4, 16, 8, burst=True)
    assert answers(load) == [8] * 4 and load.run_in == 0
    assert len(prompts(load, TINY)) == len(specs(load, TINY)) == 4


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


def test_a_client_does_not_keep_in_step_with_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "PAUSE", 0.2)
    requests, came = [streams.prepared([2, 3], 3, None)] * 6, []

    def answer(_: int) -> bytes:
        came.append(time.monotonic())
        return OK + stream_of(3)

    times = served(answer, lambda port: streams.drive(port, requests, 1))
    apart = [later - one for one, later in pairwise(came)]
    assert max(apart) - min(apart) > 0.05, "the pauses differ"
    assert max(times.whole) < 0.1, "and belong to no request"


@pytest.mark.parametrize("wrong", [OK + stream_of(2), b"HTTP/1.1 400 Bad Request\r\ncontent-length: 2\r\n\r\n{}", b""])
def test_a_stream_that_is_cut_short_or_refused_is_no_time(wrong: bytes) -> None:
    requests = [streams.prepared([2, 3], 3, None)] * 2
    with pytest.raises(RuntimeError, match="expected 3 tokens"):
        served(lambda n: wrong if n == 2 else OK + stream_of(3), lambda port: streams.drive(port, requests, 1))


def test_lines_of_earlier_commands_stay(tmp_path: Path) -> None:
    earlier = tmp_path / "modes.jsonl"
    earlier.write_text('{"mode": "old"}\n')
    results = modes.Results(tmp_path, {"gpu": "none"})
    for rows in ([{"mode": "a"}], [{"mode": "a"}, {"mode": "b"}]):
        results.write(rows)
    assert [json.loads(line) for line in earlier.read_text().splitlines()] == [
        {"mode": "old"},
        {"mode": "a", "gpu": "none"},
        {"mode": "b", "gpu": "none"},
    ]
    modes.Results(None, {}).write([{"mode": "a"}])


def test_modes_that_read_are_not_usual() -> None:
    assert "fresh" not in USUAL and not any(MODES[name].reads for name in USUAL)


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


def test_what_repeats_a_run_names_no_place_of_one_machine() -> None:
    words = ["--out", "/there", "--modes", "idle", "clamp", "--keep", "/k", "--budget", "90", "--share", "3"]
    assert modes.command(words) == "python -m bench.modes --modes idle clamp --share 3"
