"""Reads where worker and scheduler are one process: what is kept for aborted requests, and rows in files.

Here nothing is sent between the two, so only who ends waits for files. The engine runs in a process of its own: this
file is the test and that process.
"""

import json
import os
import signal
import sys
import threading
from base64 import b64decode
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.apart import hear, tell
from tests.plugin.conftest import Dictionaries, engine_options, preemptions
from tests.plugin.filers import children
from tests.plugin.read_requests import OPTIONS, READS, add, ask, text

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def told(model_dir: str, dictionaries: Dictionaries) -> Any:
    """What an engine tells that has done all of it."""
    options = {**dictionaries.options, "inline_rows": 2, **engine_options(**OPTIONS)}
    options["distributed_executor_backend"] = "uni"
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    job = json.dumps({"model": model_dir, "options": options})
    return hear("-m", "tests.plugin.test_reads_inside", job, environment=environment, fork=True)


def test_nothing_stays_behind_a_request_that_was_aborted(told: Any) -> None:
    """In mid-prompt, where what was read waits for an output, although nobody else runs; and in mid-answer."""
    assert told["aborts"] == {"waits": 1, "in mid-prompt": [0, False], "in mid-answer": [0, False], "told": 9}


def test_files_have_the_rows_that_answers_have_inline(told: Any) -> None:
    """Of a crowd whose prompts come in chunks, that preempts, and whose answers end one by one, two by stop strings."""
    found = told["files"]
    assert found["preempted"] and found["stopped"] == 2 and found["rows"] > 500
    assert found["apart"] < 1e-4, "of the largest number of a row; batches differ, and so do last bits"


def test_an_answer_waits_for_its_rows_and_no_other_one_does(told: Any) -> None:
    """Of two that read by handle, one ends early, and nothing is written until the other has gone on."""
    found = told["held"]
    assert found["ended"] == ["one", "two"] and found["meanwhile"] >= 8, "the other one got tokens"
    assert found["before"] < found["tokens"], "it did not wait for the other one's end"
    assert found["rows"] == [11, 59] and found["apart"] < 1e-4


def test_an_answer_that_waits_for_its_rows_comes_though_the_engine_is_paused(told: Any) -> None:
    assert told["paused"] == {"held": 1, "ended": ["one"], "meanwhile": 0, "afterwards": ["two"]}


def main() -> None:
    """Do one after the other, and tell what came out."""
    from saesteer import LLM

    job = json.loads(sys.argv[1])
    llm = LLM(job["model"], **job["options"])
    tell({what.__name__: what(llm) for what in (aborts, files, held, paused)})


def aborts(llm: Any) -> dict[str, Any]:
    """Abort one request in each way; how many requests the scheduler keeps something for."""
    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler

    def kept() -> int:
        return len(vars(scheduler).get("saesteer_read", ()))

    def abort(name: str) -> list[Any]:
        engine.abort_request([name])
        engine.step()
        return [kept(), engine.has_unfinished_requests()]

    found: dict[str, Any] = {}
    add(llm, "one", text("one", 900), READS["all"], 8)
    while not kept():
        engine.step()
    found["waits"] = kept()
    found["in mid-prompt"] = abort("one")
    add(llm, "two", text("two", 100), READS["all"], 300)
    for _ in range(6):
        engine.step()
    found["in mid-answer"] = abort("two")
    add(llm, "three", text("three", 100), {"probes": ["probe"]}, 10)
    told: list[int] = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            told = [at for entry in output.outputs[0].saesteer["probes"] for at in entry["positions"]]
    return found | {"told": len(told)}


def files(llm: Any) -> dict[str, Any]:
    """Ask for the same rows by handle and inline; how far they are apart."""
    scopes = [{"positions": [[0, None]]}, {"generated": True}, {"positions": [[3, 9], [-2, None]]}]
    prompts = [text(f"inside {n}", 120 + 90 * (n % 5)) for n in range(9)]
    tokens = [40 + 12 * (n % 5) for n in range(9)]

    def rows(place: str) -> list[tuple[list[int], Any]]:
        returns = [
            [{"site": site, "scope": scopes[n % 3], "as": place} for site in ("resid_post.7", "resid_post.18")]
            for n in range(9)
        ]
        steer = [{"return": {"activations": one}} for one in returns]
        llm.reset_prefix_cache()
        outputs = ask(llm, prompts, steer, tokens)
        for n in (1, 2):
            stop = llm.get_tokenizer().decode(list(outputs[n].outputs[0].token_ids[5:7]))
            outputs += ask(llm, [prompts[n]], [steer[n]], 40, stop=[stop])
        stopped.extend(one for one in outputs if one.outputs[0].finish_reason == "stop")
        entries = [entry for output in outputs for entry in output.outputs[0].saesteer["activations"]]
        if place == "handle":
            return [(entry["positions"], entry["handle"].numbers()) for entry in entries]
        data = (np.frombuffer(b64decode(entry["data"]), np.float32).reshape(entry["shape"]) for entry in entries)
        return [(entry["positions"], one) for entry, one in zip(entries, data, strict=True)]

    stopped: list[Any] = []
    before = preemptions(llm)
    handled, preempted = rows("handle"), preemptions(llm) > before
    apart = 0.0
    for (positions, one), (expected, other) in zip(handled, rows("inline"), strict=True):
        assert positions == expected
        apart = max(apart, float((np.abs(np.asarray(one) - other).max(axis=1) / np.abs(other).max(axis=1)).max()))
    total = sum(len(positions) for positions, _ in handled)
    return {"preempted": preempted, "stopped": len(stopped) // 2, "rows": total, "apart": apart}


def held(llm: Any) -> dict[str, Any]:
    """Let nothing be written while the first of two answers ends; when each ended, and how far its rows are apart."""
    gate, lengths = Still(), {"one": 12, "two": 60}
    engine, read = llm.llm_engine, {"site": "resid_post.7", "scope": {"generated": True}}
    for name, tokens in lengths.items():
        add(llm, name, text(name, 100), {"activations": [read | {"as": "handle"}]}, tokens)
    requests, ended = engine.engine_core.engine_core.scheduler.requests, dict[str, Any]()
    so_far = at_end = before = 0
    while engine.has_unfinished_requests():
        for output in [one for one in engine.step() if one.finished]:
            ended[output.request_id] = output.outputs[0]
            before = before or so_far
        running = {name[:3]: one for name, one in requests.items()}
        so_far = running["two"].num_output_tokens if "two" in running else so_far
        at_end = at_end or ("one" not in running and so_far)
        if at_end and so_far >= at_end + 8:
            gate.set()
    apart, rows = 0.0, []
    for name, tokens in lengths.items():
        [entry] = ended[name].saesteer["activations"]
        steer = {"return": {"activations": [read | {"as": "inline"}]}}
        [alone] = ask(llm, [text(name, 100)], [steer], [tokens])
        [expected] = alone.outputs[0].saesteer["activations"]
        other = np.frombuffer(b64decode(expected["data"]), np.float32).reshape(expected["shape"])
        assert entry["positions"] == expected["positions"]
        apart = max(apart, float((np.abs(entry["handle"].numbers() - other) / np.abs(other).max()).max()))
        rows.append(len(entry["positions"]))
    meanwhile = before - at_end
    return {"ended": [*ended], "meanwhile": meanwhile, "before": before, "tokens": 60, "rows": rows, "apart": apart}


def paused(llm: Any) -> dict[str, Any]:
    """Pause an engine whose scheduler holds an answer; what ends before it goes on, and behind that."""
    from vllm.v1.core.sched.interface import PauseState

    gate, engine = Still(), llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    read = {"site": "resid_post.7", "scope": {"generated": True}, "as": "handle"}
    for name, tokens in {"one": 12, "two": 60}.items():
        add(llm, name, text(name, 100), {"activations": [read]}, tokens)

    def ends(steps: int) -> list[str]:
        return [one.request_id for _ in range(steps) for one in engine.step() if one.finished]

    def so_far() -> int:
        return next(one.num_output_tokens for name, one in scheduler.requests.items() if name.startswith("two"))

    while not vars(scheduler).get("saesteer_held"):
        assert not ends(1)
    ends(3)  # no word of requests that have ended is left, for which there would be a step
    found: dict[str, Any] = {"held": len(scheduler.saesteer_held)}
    scheduler.set_pause_state(PauseState.PAUSED_ALL)
    threading.Timer(0.5, gate.set).start()
    ends_now, before = ends(1), so_far()
    found["ended"] = ends_now + ends(4)
    found["meanwhile"] = so_far() - before
    scheduler.set_pause_state(PauseState.UNPAUSED)
    return found | {"afterwards": ends(80)}


class Still:
    """From now on no row is written, until this is set: the process that writes is stopped."""

    def __init__(self) -> None:
        # Its own child: engines beside this one have such a process, too.
        names = {one: Path(f"/proc/{one}/cmdline").read_bytes() for one in children()}
        [self._process] = [number for number, name in names.items() if b"saesteer.engine.filer" in name]
        os.kill(self._process, signal.SIGSTOP)

    def set(self) -> None:
        """Let it go on."""
        os.kill(self._process, signal.SIGCONT)


if __name__ == "__main__":
    main()
