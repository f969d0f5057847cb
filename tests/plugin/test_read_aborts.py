"""What a scheduler keeps for requests that read and are aborted: nothing. In a process of its own, step by step.

This file is the test and that process. It knows no results.
"""

import json
import os
import sys
from typing import Any

import pytest

from tests.apart import hear, tell
from tests.plugin.conftest import Dictionaries, engine_options
from tests.plugin.test_reads import OPTIONS, READS, add, text

pytestmark = pytest.mark.slow


def test_nothing_stays_behind_a_request_that_was_aborted(model_dir: str, dictionaries: Dictionaries) -> None:
    """In mid-prompt, where what was read waits for an output, although nobody else runs; and in mid-answer."""
    options = {**dictionaries.options, "inline_rows": 2, **engine_options(**OPTIONS)}
    options["distributed_executor_backend"] = "uni"
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    job = json.dumps({"model": model_dir, "options": options})
    found = hear("-m", "tests.plugin.test_read_aborts", job, environment=environment)
    assert found == {"waits": 1, "in mid-prompt": [0, False], "in mid-answer": [0, False], "told": 9}


def main() -> None:
    """Abort one request in each way; tell how many requests the scheduler keeps something for."""
    from saesteer import LLM

    job = json.loads(sys.argv[1])
    llm = LLM(job["model"], **job["options"])
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
    tell(found | {"told": len(told)})


if __name__ == "__main__":
    main()
