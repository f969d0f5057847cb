"""The rotation of contenders on made-up engines, what they must show, and the fork's arguments; no engine, no GPU."""

import json
import re
import subprocess
from collections.abc import Sequence
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch

from bench import contenders, fork, rivals
from bench.asks import SCALE, Shape
from bench.contend import KINDS, Answer, Burst, Told
from bench.contenders import ASKS, CONTENDERS, STOCK
from bench.engines import Options, stop
from bench.modes import Results
from bench.rotation import CHECK_SCALE, CHECK_TOKENS, Failed, Rotation, Turn, wrong

TINY = Shape.of("tiny")


def told(burst: Burst, answers: Sequence[Answer] = (), slow: float = 1.0) -> Told:
    begin = [0.1 * slow] * burst.requests
    return Told(begin, [one + 0.01 * slow * (burst.tokens - 1) for one in begin], list(answers))


class Engines:
    """Contenders that do what they are asked; ``bad`` says which do not."""

    def __init__(self, bad: dict[tuple[str, str], str] | None = None) -> None:
        self.bad = bad or {}
        self.asked: list[tuple[str, Burst]] = []

    def __call__(self, name: str, burst: Burst) -> Told:
        self.asked.append((name, burst))
        how = self.bad.get((name, burst.ask))
        if how == "dies":
            raise Failed("died with exit code -9")
        layers = TINY.layers if burst.ask == "captures" else 1
        rows = [layers, burst.prompt + burst.tokens - (2 if how == "short" else 1), TINY.width]
        text = "plain" if burst.ask in ("nothing", "capture", "captures") or how == "idle" else "steered"
        one = Answer(text, edited=True, captured=rows if burst.ask in ("capture", "captures") else None)
        return told(burst, [one] * burst.requests, slow=1.0 if name == STOCK else 1.1)


def rotate(ask: Engines, plans: dict[str, list[str]], requests: Sequence[int] = (1, 4)) -> Rotation:
    return Rotation(plans, requests, ask, TINY, prompt=16, tokens=8)


def test_stock_stands_before_and_after_each_contender_and_the_order_turns() -> None:
    made = rotate(Engines(), {"hotwire": ["nothing", "vector"], "saesteer": ["clamp"]}, [4])
    stock = Turn(STOCK, "nothing", 4)
    first = [Turn("hotwire", "nothing", 4), Turn("hotwire", "vector", 4)]
    assert list(made.order(0)) == [stock, *first, stock, stock, Turn("saesteer", "clamp", 4), stock]
    assert list(made.order(1)) == [stock, Turn("saesteer", "clamp", 4), stock, stock, *first, stock]


def test_rows_compare_with_stock_and_no_prompt_comes_twice() -> None:
    engines = Engines()
    made = rotate(engines, {"hotwire": ["nothing", "vectors"], "vllm-lens": ["captures"]})
    made.check()
    assert all(made.round(turn, left=60) for turn in range(3))
    rows = list(made.rows())
    assert [(row["contender"], row["ask"], row["requests"]) for row in rows] == [
        (*place, requests)
        for requests in (1, 4)
        for place in (("hotwire", "nothing"), ("hotwire", "vectors"), ("vllm-lens", "captures"))
    ]
    for row in rows:
        assert row["runs"] == 3
        assert row["per_token"]["delta_percent"] == pytest.approx(10.0)
        assert row["per_token"]["min_percent"] <= row["per_token"]["max_percent"]
    for name in (STOCK, "hotwire", "vllm-lens"):
        seeds = [burst.seed for who, burst in engines.asked if who == name and burst.tokens != CHECK_TOKENS]
        assert len(seeds) == len(set(seeds)), "a prompt would be in the prefix cache"


@pytest.mark.parametrize(
    ("ask", "how", "why"),
    [
        ("vector", "idle", "the answers are those without the vector"),
        ("capture", "short", r"captures are \[1, 22, 64\], expected \[1, 23, 64\]"),
        ("vectors", "dies", "died with exit code -9"),
    ],
)
def test_who_does_not_do_what_it_is_asked_is_not_timed_and_the_others_are(ask: str, how: str, why: str) -> None:
    engines = Engines({("hotwire", ask): how})
    made = rotate(engines, {"hotwire": ["nothing", ask], "saesteer": ["nothing"]}, [4])
    made.check()
    count = len(engines.asked)
    made.round(0, left=60)
    assert not [burst for name, burst in engines.asked[count:] if (name, burst.ask) == ("hotwire", ask)]
    rows = {(row["contender"], row["ask"]): row for row in made.rows()}
    assert "per_token" in rows["hotwire", "nothing"] and "per_token" in rows["saesteer", "nothing"]
    assert re.search(why, rows["hotwire", ask]["not_run"])


def test_a_clamp_has_to_say_that_it_changed_tokens() -> None:
    burst = Burst("clamp", 1, 2, 16, 8, 1.0)
    assert wrong(burst, told(burst, [Answer(edited=True)] * 2), TINY) is None
    assert "clamp" in str(wrong(burst, told(burst, [Answer(edited=True), Answer()]), TINY))


def test_stock_that_fails_ends_the_benchmark() -> None:
    with pytest.raises(SystemExit, match="died"):
        rotate(Engines({(STOCK, "nothing"): "dies"}), {"hotwire": ["nothing"]}).check()


def test_a_round_that_is_late_ends_behind_a_run_of_stock() -> None:
    made = rotate(Engines(), {"hotwire": ["nothing", "vector"], "saesteer": ["nothing"]}, [1])
    made.took = {Turn("hotwire", "vector", 1): 100.0}
    assert not made.round(0, left=50)
    assert [run.mode for run in made.runs[1]] == [STOCK, "hotwire nothing", STOCK, STOCK, "saesteer nothing", STOCK]
    made = rotate(Engines(), {"hotwire": ["nothing"]}, [1])
    assert not made.round(0, left=-1)
    assert made.runs[1] == [] and list(made.rows()) == []


def test_a_pinned_vllm_that_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    lens = CONTENDERS["vllm-lens"]
    monkeypatch.setattr(contenders, "version", lambda name: "1.3.0")
    monkeypatch.setattr(contenders, "requires", lambda name: ["torch>=2", 'vllm==0.30.0; extra == "vllm"'])
    monkeypatch.setattr(contenders, "vllm_version", lambda: "0.32.0")
    assert lens.pin == "==0.30.0"
    assert lens.missing() == "vllm-lens 1.3.0 pins vllm==0.30.0, and vLLM 0.32.0 is installed"
    assert lens.missing(any_vllm=True) is None
    monkeypatch.setattr(contenders, "vllm_version", lambda: "0.30.0")
    assert lens.missing() is None
    monkeypatch.setattr(contenders, "requires", lambda name: ["torch>=2"])
    assert CONTENDERS["vllm-lens"].pin is None
    assert lens.missing() is None


def test_what_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(contenders, "version", absent)
    hotwire = CONTENDERS["hotwire"]
    assert (hotwire.pin, hotwire.missing()) == (None, "hotwire-vllm is not installed")


def test_every_contender_has_a_process_and_asks_that_exist() -> None:
    assert KINDS.keys() == CONTENDERS.keys()
    assert all(set(one.asks) <= ASKS.keys() and one.asks[0] == "nothing" for one in CONTENDERS.values())
    assert {ask for one in CONTENDERS.values() for ask in one.asks} == ASKS.keys()


def test_lines_say_what_was_asked_and_stand_behind_earlier_ones(tmp_path: Path) -> None:
    given = rivals.arguments(["--contenders", "hotwire", "--requests", "4"])
    made = rotate(Engines(), {"hotwire": ["nothing"]}, [4])
    made.round(0, left=60)
    rows = [rivals.described(row, given) for row in (*made.rows(), {"contender": "vllm-lens", "not_run": "no reason"})]
    Results(tmp_path, {"gpu": "none"}, "rivals.jsonl").write(rows)
    timed, absent = map(json.loads, (tmp_path / "rivals.jsonl").read_text().splitlines())
    assert timed["asked_for"] == ASKS["nothing"] and timed["tokens"] == 64 and timed["per_token"]["ms"] > 0
    assert absent["not_run"] == "no reason" and absent["settings"]
    assert "not run: no reason" in rivals.table(rows) and "+10.0 %" in rivals.table(rows)
    assert CHECK_SCALE > SCALE


def test_the_file_of_vectors_holds_a_row_for_each_layer(tmp_path: Path) -> None:
    rivals.write_vectors(TINY, tmp_path)
    [file] = rivals.vector_folder(tmp_path).iterdir()
    found = torch.load(file, weights_only=True)
    assert found.shape == (TINY.layers, TINY.width) and found.dtype == torch.bfloat16


class Script(rivals.Process):
    """A contender's process that runs this instead."""

    def __init__(self, script: str, folder: Path) -> None:
        self.script = script
        super().__init__("hotwire", "tiny", {}, {}, folder)

    def _command(self, given: Options, own: Options | None, folder: Path) -> list[str]:
        return ["timeit", "-n1", "-r1", self.script]


@pytest.mark.parametrize(
    ("script", "seconds", "why"),
    [
        ("print('\"serves\"', flush=True); input()", 60, None),
        ("input()", 0.1, "did not start in time"),
        ("import os; os._exit(3)", 60, "died with exit code 3"),
    ],
)
def test_who_does_not_start_in_time_is_left_out(tmp_path: Path, script: str, seconds: float, why: str | None) -> None:
    process = Script(script, tmp_path)
    try:
        with pytest.raises(Failed, match=why) if why else nullcontext():
            process.wait(seconds)
    finally:
        stop([process])
        for pipe in (process.process.stdin, process.process.stdout):
            assert pipe is not None
            pipe.close()


def test_the_commit_of_a_fork_is_not_that_of_the_folders_around_it(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(tmp_path), *who, "commit", "-q", "--allow-empty", "-m", "a"], check=True)
    (tmp_path / "fork").mkdir()
    assert len(fork.commit_of(tmp_path)) == 40
    assert fork.commit_of(tmp_path / "fork") == ""


FORK = """
import torch

def apply_steering_triton(hidden_states, steering_table, steering_index, any_active, steering_scales):
    added = steering_table[steering_index] * steering_scales[steering_index][:, None]
    return hidden_states + added * any_active

def apply_sae_delta_indexed_triton(hidden_states, encoder_weight, sae_index, decoder_weight, newer=0):
    return hidden_states
"""


def test_a_forks_functions_get_their_arguments_by_name_and_are_checked(tmp_path: Path) -> None:
    folder = tmp_path / fork.LAYERS
    folder.mkdir(parents=True)
    (folder / "steering_kernel.py").write_text(FORK)
    for active in (False, True):
        given = fork.arguments(4, 8, 1, active=active, device="cpu", dtype=torch.float32)
        add = fork.bound(fork.load(tmp_path, "steering_kernel.py", "apply_steering_triton"), given)
        assert fork.wrong(add, given, 0) is None
        assert active == (fork.wrong(add, given, 1) is not None), "a clamp is not a vector"
    clamp = fork.load(tmp_path, "steering_kernel.py", "apply_sae_delta_indexed_triton")
    with pytest.raises(TypeError, match="argument 'newer', which this benchmark does not know"):
        fork.bound(clamp, given)
    with pytest.raises(OSError, match="sae_steering_kernel"):
        fork.load(tmp_path, *fork.CLAMP)
