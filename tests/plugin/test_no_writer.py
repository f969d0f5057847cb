"""The process that writes rows is killed: a request that reads by handle fails, all others and later ones go on."""

import threading
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.plugin.asked_http import metric
from tests.plugin.conftest import LONG_PROMPT, Dictionaries, flags_of
from tests.plugin.serving import events_of, served

pytestmark = pytest.mark.slow

READ = {"return": {"activations": [{"site": "resid_post.15", "as": "handle"}]}}
BODY: dict[str, Any] = {"model": "base", "prompt": LONG_PROMPT[:300], "temperature": 0, "ignore_eos": True}


def ask(client: httpx.Client, **more: Any) -> httpx.Response:
    return client.post("/v1/completions", json={**BODY, "max_tokens": 8, **more})


def test_its_end_ends_the_requests_that_wait_for_it_alone(
    model_dir: str, dictionaries: Dictionaries, tmp_path: Path
) -> None:
    with served(flags_of(model_dir, dictionaries, tmp_path), tmp_path / "log", fork=False) as client:
        kept = ask(client, saesteer=READ).json()
        [entry] = kept["saesteer"]["activations"]
        plain = ask(client, max_tokens=300).json()["choices"][0]["text"]
        assert ask(client).status_code == 200
        foreign = client.get("/v1/models", headers={"Host": "evil.example"})
        assert (foreign.status_code, foreign.json()["error"]["code"]) == (403, "wrong_host")
        found: dict[str, Any] = {}

        def stream() -> None:
            with client.stream("POST", "/v1/completions", json={**BODY, "max_tokens": 300, "stream": True}) as response:
                found["stream"] = "".join(event["choices"][0]["text"] for event in events_of(response))

        def reading() -> None:
            found["read"] = ask(client, max_tokens=200, saesteer=READ)

        begun = [threading.Thread(target=one) for one in (stream, reading)]
        for thread in begun:
            thread.start()
        while metric(client, "vllm:num_requests_running") < 2:
            pass
        ours = psutil.Process(client.pid).children(recursive=True)
        [writer] = [one for one in ours if "saesteer.engine.filer" in one.cmdline()]
        writer.suspend()
        time.sleep(1)  # by then it has been sent rows
        writer.kill()
        for thread in begun:
            thread.join()
        error = found["read"].json()["error"]
        assert found["read"].status_code == 507 and error["message"].endswith("[no_space]"), error
        assert "some of its rows could not be written" in error["message"]
        assert found["stream"] == plain, "who never asked for a handle"
        time.sleep(1)  # by then it is begun again
        entries = ask(client, saesteer=READ).json()["saesteer"]["activations"]
        assert client.get(f"/v1/saesteer/results/{entries[0]['handle']}").status_code == 200
        assert client.get(f"/v1/saesteer/results/{entry['handle']}").status_code == 200, "it was written before"
        assert client.get("/health").status_code == 200
        assert metric(client, 'saesteer_refusals_total{code="no_space"}') == 1
    assert (tmp_path / "log").read_text().count("the process that writes the rows of handles has ended") == 1
