"""The admin routes of a server whose model is on two ranks, or on two stages: what names stand for is on both."""

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from saesteer.client import Client, numbers
from tests.plugin.asked import CLAMP, FEATURES, HEADS, KINDS, PROMPTS, ROWS, WIDTH, add, tiny_llama
from tests.plugin.asked_http import forget_names
from tests.plugin.conftest import ADMIN, ADMIN_KEY
from tests.plugin.ranks import WAYS
from tests.plugin.serving import CUDA, events_of, served

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,  # a server for each; test_ranks.py has names without HTTP
    pytest.mark.skipif(torch.cuda.device_count() == 1, reason="two ranks need two GPUs, or none"),
]

PLACES = [site for site in KINDS if not site.startswith("z")]


# A server cannot be told of devices for Ray (test_ranks.py).
@pytest.fixture(scope="module", params=[way for way in [*WAYS][1:] if CUDA or way != "ray"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    from bench.dummy import dictionary_file, tokenizer_folder

    folder = tmp_path_factory.mktemp("ranks")
    words = [f"--{name.replace('_', '-')}={size}" for name, size in WAYS[request.param].items()]
    words += ["--dictionary", f"random={dictionary_file(WIDTH, FEATURES, folder)}@resid_post.1"]
    words += ["--tokenizer", str(tokenizer_folder(512, folder)), "--served-model-name", "base", "--dtype", "float32"]
    words += ["--sites", ",".join(["resid_post.all", "resid_mid.1", *KINDS]), "--reads", ",".join(KINDS)]
    words += ["--pool-rows", "3", "--max-model-len", "256", "--max-num-seqs", "8", "--saesteer-admin-key", ADMIN_KEY]
    words += ["--kv-cache-memory-bytes", str(64 << 20)]
    environment = {} if CUDA else {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    with served([tiny_llama(folder), *words], folder / "log", environment=environment) as client:
        yield client


@pytest.fixture(autouse=True)
def nothing_left(server: httpx.Client) -> Iterator[None]:
    yield
    forget_names(server)


def put(server: httpx.Client, kind: str, **body: Any) -> dict[str, Any]:
    response = server.post(f"/v1/saesteer/{kind}", headers=ADMIN, json=body)
    assert response.status_code == 200, response.text
    return dict(response.json())


def ask(server: httpx.Client, spec: Any, prompt: Any = PROMPTS[0], **more: Any) -> dict[str, Any]:
    body = {"model": "base", "prompt": prompt, "max_tokens": 10, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    response = server.post("/v1/completions", json={**body, "return_token_ids": True, "saesteer": spec, **more})
    assert response.status_code == 200, response.text
    return dict(response.json())


class Told:
    """Tokens and logprobs of an answer, which is equal to another one but for noise."""

    def __init__(self, answer: dict[str, Any]) -> None:
        [choice] = answer["choices"]
        self.tokens, self.logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Told)
        return self.tokens == other.tokens and self.logprobs == pytest.approx(other.logprobs, abs=1e-4)

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("site", KINDS)
def test_a_name_is_what_it_stands_for_at_every_kind_of_site(server: httpx.Client, site: str) -> None:
    rows = [HEADS, [-2 * one for one in HEADS]] if site.startswith("z") else ROWS
    plain = Told(ask(server, {"edits": []}))
    for row in rows:
        inline = Told(ask(server, {"edits": [add(row, site)]}))
        made = put(server, "vectors", name="v", vector=row)
        named = ask(server, {"edits": [add("v", site)]})
        assert Told(named) == inline != plain
        [applied] = named["saesteer"]["applied"]
        assert applied["version"] == made["version"]
        assert applied["tokens_edited"] + applied["tokens_cached"] == len(PROMPTS[0]) - 1 + 9
        put(server, "modules", name="m", spec={"edits": [add("v", site), CLAMP]})
        by_module = Told(ask(server, {"edits": [{"op": "use", "module": "m"}]}))
        assert by_module == Told(ask(server, {"edits": [add(row, site), CLAMP]})) != inline


def test_what_runs_keeps_its_name_and_what_comes_has_the_new_one(server: httpx.Client) -> None:
    expected = [ask(server, {"edits": [add(row, site) for site in PLACES]}, max_tokens=60) for row in ROWS]
    put(server, "vectors", name="v", vector=ROWS[0])
    spec = {"edits": [add("v", site) for site in PLACES]}
    body = {"model": "base", "prompt": PROMPTS[0], "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "return_token_ids": True, "saesteer": spec}
    with server.stream("POST", "/v1/completions", json=body) as response:
        put(server, "vectors", name="v", vector=ROWS[1])
        events = events_of(response)
    tokens = [token for event in events for choice in event["choices"] for token in choice["token_ids"] or ()]
    assert tokens == expected[0]["choices"][0]["token_ids"]
    assert Told(ask(server, spec, max_tokens=60)) == Told(expected[1])


def test_a_full_pool_is_full_on_both(server: httpx.Client) -> None:
    for number in range(3):
        put(server, "vectors", name=f"v{number}", vector=[*ROWS[0][:-1], float(number)])
    body = {"name": "more", "vector": ROWS[1]}
    refused = server.post("/v1/saesteer/vectors", headers=ADMIN, json=body)
    assert refused.status_code == 409 and refused.json()["error"]["code"] == "no_room"
    for number in range(3):
        row = [*ROWS[0][:-1], float(number)]
        for site in PLACES[:2]:
            named, inline = (Told(ask(server, {"edits": [add(one, site)]})) for one in (f"v{number}", row))
            assert named == inline


def test_a_probe_reads_the_whole_tensor_of_each_site(server: httpx.Client) -> None:
    put(server, "vectors", name="p", vector=ROWS[1], bias=0.25, function="tanh")
    put(server, "vectors", name="heads", vector=HEADS, bias=-0.5)
    everywhere = {"positions": [[0, None]]}
    probes = [{"probe": "heads" if site[0] == "z" else "p", "site": site, "scope": everywhere} for site in KINDS]
    reads = {"probes": probes, "activations": [{"site": site} for site in KINDS]}
    said = ask(server, {"return": reads})["saesteer"]
    for one, other in zip(said["probes"], said["activations"], strict=True):
        assert one["site"] == other["site"] and one["positions"] == other["positions"]
        x = numbers(other).astype(np.float64)
        wanted = x @ np.array(HEADS) - 0.5 if one["probe"] == "heads" else np.tanh(x @ np.array(ROWS[1]) + 0.25)
        assert one["scores"] == pytest.approx(wanted.tolist(), rel=1e-4, abs=1e-4)
    handled = {"activations": [{"site": site, "as": "handle"} for site in KINDS]}
    kept = ask(server, {"return": handled})["saesteer"]["activations"]
    with Client(str(server.base_url)) as client:
        for entry, other in zip(kept, said["activations"], strict=True):
            [rows] = client.fetch([entry["handle"]])
            assert entry["positions"] == other["positions"]
            np.testing.assert_allclose(rows, numbers(other), rtol=0, atol=1e-4 * abs(rows).max())
            client.delete_result(entry["handle"])
