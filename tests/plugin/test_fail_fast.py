"""--fail-fast on a real server: what a broken weight and a huge clamp do to their requests, and not to others."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import torch
import transformers

from saesteer.client.client import Client
from saesteer.commands.embedded import DEMO_SAE
from saesteer.errors import RequestRefused
from tests.plugin.conftest import BRIDGE, PROMPTS
from tests.plugin.serving import events_of, served

pytestmark = [pytest.mark.slow, pytest.mark.long]  # a server of its own; test_health.py needs none

# Files of dictionaries with NaN are refused, and edits are limited to finite numbers, so the model is broken: all that
# is computed behind this word is NaN. It is one token.
WORD = " zebra"
HUGE = {"edits": [{**BRIDGE, "value": 300.0, "unit": "raw"}]}
TOLD = {"non_finite": "the hidden states held NaN", "collapsed": "the answer repeats itself (period in tokens: "}


def asked(text: str, **more: Any) -> dict[str, dict[str, Any]]:
    """What to send to each route."""
    turns = [{"role": "user", "content": text}]
    return {
        "chat/completions": {"messages": turns, "max_tokens": 40, **more},
        "completions": {"prompt": text, "max_tokens": 40, **more},
        "responses": {"input": text, "max_output_tokens": 40, **more},
        "messages": {"messages": turns, "max_tokens": 40, **more},
    }


WRONG = {
    "non_finite": asked(f"A{WORD} is"),
    "non_finite, steered": asked(f"A{WORD} is", saesteer={"edits": [BRIDGE]}),
    "collapsed": asked("Who are you?", saesteer=HUGE),
}


@pytest.fixture(scope="module")
def server(model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("failing")
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir)
    (number,) = tokenizer(WORD, add_special_tokens=False).input_ids
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.config.tie_word_embeddings = False
    with torch.no_grad():
        model.get_input_embeddings().weight[number] = float("nan")
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    words = ["--dictionary", f"demo={DEMO_SAE}", "--served-model-name", "demo", "--dtype", "float32"]
    words += ["--max-model-len", "512", "--max-num-seqs", "16", "--kv-cache-memory-bytes", str(400 << 20)]
    with served([f"{folder}/model", *words, "--fail-fast", "--memory-guard", "1"], folder / "log") as client:
        yield client


def ask(server: httpx.Client, path: str, body: dict[str, Any]) -> httpx.Response:
    return server.post(f"/v1/{path}", json={"model": "demo", "temperature": 0, **body})


def plain(server: httpx.Client) -> str:
    body = {"model": "demo", "temperature": 0, "prompt": PROMPTS[1], "max_tokens": 48, "ignore_eos": True}
    response = server.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses", "messages"])
@pytest.mark.parametrize("what", WRONG)
def test_the_request_ends_with_an_error_that_names_it(server: httpx.Client, path: str, what: str) -> None:
    code, _, _ = what.partition(",")
    response = ask(server, path, WRONG[what][path])
    assert response.status_code == 422, response.text
    message = response.json()["error"]["message"]
    assert TOLD[code] in message and message.endswith(f"[{code}]") and "--fail-fast" in message


def test_other_requests_go_on(server: httpx.Client) -> None:
    before = plain(server)
    with ThreadPoolExecutor(9) as pool:
        own = [pool.submit(plain, server) for _ in range(3)]
        failing = [pool.submit(ask, server, "completions", WRONG[what]["completions"]) for what in WRONG for _ in "ab"]
        assert [one.result().status_code for one in failing] == [422] * 6
        assert {one.result() for one in own} == {before}
    assert plain(server) == before, "nothing is left in the cache"


@pytest.mark.parametrize("what", WRONG)
def test_a_stream_ends_with_the_error(server: httpx.Client, what: str) -> None:
    body = {"model": "demo", "temperature": 0, **WRONG[what]["completions"], "stream": True}
    with server.stream("POST", "/v1/completions", json=body) as response:
        if "steered" in what:
            assert response.status_code == 422, "the prompt has been waited for"
            return
        assert response.status_code == 200
        *pieces, last = events_of(response)
    code = last["error"]["message"].rpartition("[")[2]
    assert code == f"{what}]" and len(pieces) <= 40 and bool(pieces) == (what == "collapsed")


def test_a_period_of_several_tokens_is_found_behind_a_sound_beginning(server: httpx.Client) -> None:
    """A grammar makes the model repeat itself, and a shorter one does not."""
    for times, status in ((2, 200), (30, 422)):
        grammar = {"regex": f"Well, these are the words: (red green blue ){{{times}}}"}
        body = {"prompt": "Say it.", "max_tokens": 160, "structured_outputs": grammar}
        response = ask(server, "completions", body)
        assert response.status_code == status, response.text
        if status == 422:
            [period] = re.findall(r"period in tokens: (\d+)", response.json()["error"]["message"])
            assert 3 <= int(period) <= 16
        else:
            assert response.json()["choices"][0]["text"].count("green") == times


def test_our_client_understands(server: httpx.Client) -> None:
    with Client(str(server.base_url), model="demo") as client, pytest.raises(RequestRefused) as error:
        client.complete(f"A{WORD} is", steer={"edits": [BRIDGE]})
    assert (error.value.status, error.value.code) == (422, "non_finite")


def test_metrics_count_both_and_the_memory(server: httpx.Client) -> None:
    text = server.get("/metrics").text
    for code in TOLD:
        assert f'saesteer_refusals_total{{code="{code}"}}' in text
    (share,) = [float(line.split()[-1]) for line in text.splitlines() if line.startswith("saesteer_memory_used")]
    assert 0 < share < 1
