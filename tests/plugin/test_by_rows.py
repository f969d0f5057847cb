"""Dictionaries that stay in their files on a real server: the same answers as from memory, and files that change."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from saesteer.commands.embedded import DEMO_SAE
from saesteer.loaders.formats import own
from tests.plugin.conftest import BRIDGE, OCEAN, PROMPTS, WIDTH, random_coder
from tests.plugin.serving import served

pytestmark = pytest.mark.slow

NEAR = 2e-4  # of a logprob, in float32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("stored")
    for name in ("demo", "spare"):
        shutil.copy(DEMO_SAE, found / f"{name}.safetensors")
    for seed, (name, in_norm) in enumerate([("norm", "layer_norm"), ("across", "none")]):
        own.write(found / f"{name}.safetensors", random_coder("jumprelu", seed, in_norm=in_norm))
    return found


@pytest.fixture(scope="module")
def server(folder: Path, model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Each dictionary twice, in memory and by rows; and once more, below a folder."""
    places = {
        "demo": DEMO_SAE,
        "norm": f"{folder}/norm.safetensors@resid_post.20",
        "across": f"{folder}/across.safetensors@mlp_in.18:mlp_out.18",
    }
    stored = {**places, "demo": folder / "demo.safetensors", "spare": folder / "spare.safetensors"}
    words = [f"{name}={place}" for name, place in places.items()]
    words += [f"stored-{name}=rows:{place}" for name, place in stored.items()]
    flags = [word for one in words for word in ("--dictionary", one)]
    flags += ["--dictionary-folder", str(folder), "--inline-rows", "2", "--served-model-name", "base"]
    flags += ["--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "8"]
    flags += ["--kv-cache-memory-bytes", str(200 << 20)]
    with served([model_dir, *flags], tmp_path_factory.mktemp("log") / "log") as client:
        yield client


def ask(server: httpx.Client, edits: Any, prompt: str = PROMPTS[1]) -> httpx.Response:
    body = {"model": "base", "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    return server.post("/v1/completions", json={**body, **({"saesteer": {"edits": edits}} if edits else {})})


def told(server: httpx.Client, edits: Any) -> tuple[list[str], list[float], Any]:
    """Tokens, logprobs, and what was applied."""
    response = ask(server, edits)
    assert response.status_code == 200, response.text
    body = response.json()
    [choice] = body["choices"]
    applied = body["saesteer"]["applied"] if edits else None
    return choice["logprobs"]["tokens"], choice["logprobs"]["token_logprobs"], applied


def by_rows(edits: Any) -> Any:
    """The same edits, with every dictionary in its file."""
    if isinstance(edits, list):
        return [by_rows(one) for one in edits]
    if not isinstance(edits, dict):
        return edits
    return {key: f"stored-{one}" if key == "dictionary" else by_rows(one) for key, one in edits.items()}


NORM = {"op": "clamp", "dictionary": "norm", "feature": 5, "value": 20.0, "mode": "add"}
ACROSS = {"op": "clamp", "dictionary": "across", "feature": 7, "value": 9.0, "only_if_active": False}
SPECS: dict[str, Any] = {
    "one clamp, in max_act": [BRIDGE],
    "two at a site": [BRIDGE, {**OCEAN, "mode": "max", "value": 0.2}],
    "a layer norm": [NORM],
    "a transcoder": [ACROSS],
    "a gate": [{**NORM, "when": {"dictionary": "demo", "feature": 3497, "below": 1e6}}],
    "several sites": [BRIDGE, NORM, ACROSS],
}


@pytest.mark.parametrize("name", SPECS)
def test_rows_do_the_same_as_the_whole(server: httpx.Client, name: str) -> None:
    plain = told(server, None)
    tokens, logprobs, applied = told(server, SPECS[name])
    ours = told(server, by_rows(SPECS[name]))
    assert (tokens, logprobs) != plain[:2]
    assert ours[0] == tokens
    assert ours[1] == pytest.approx(logprobs, abs=NEAR)
    hidden = ("dictionary", "version", "tokens_cached")
    assert [{k: v for k, v in one.items() if k not in hidden} for one in ours[2]] == [
        {k: v for k, v in one.items() if k not in hidden} for one in applied
    ]


def test_a_dictionary_below_the_folder_needs_no_name(server: httpx.Client) -> None:
    first = told(server, [{**BRIDGE, "dictionary": "demo.safetensors"}])
    assert first[:2] == told(server, by_rows([BRIDGE]))[:2]
    there = told(server, [{**NORM, "dictionary": "norm.safetensors@resid_post.20"}])
    assert there[0] == told(server, [NORM])[0]
    refused = ask(server, [{**NORM, "dictionary": "norm.safetensors@resid_post.7"}])
    assert refused.status_code == 400
    assert "start it with --sites resid_post.7 to have one there" in refused.json()["error"]["message"]


def test_a_full_pool_names_its_flag(server: httpx.Client) -> None:
    refused = ask(server, by_rows([{**BRIDGE, "feature": n, "unit": "raw"} for n in range(3)]))
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == "saesteer.edits[2].feature"
    assert "higher --inline-rows" in error["message"]


def test_a_reconstruction_needs_the_whole(server: httpx.Client) -> None:
    refused = ask(server, by_rows([{"op": "reconstruct", "dictionary": "demo"}]))
    assert refused.status_code == 400
    assert "start it with --dictionary NAME=PLACE, without rows:, to reconstruct" in refused.json()["error"]["message"]


def test_a_file_that_changes_ends_its_requests_and_nothing_else(server: httpx.Client, folder: Path) -> None:
    edits = [{**BRIDGE, "dictionary": "stored-spare"}]
    before = told(server, edits)
    own.write(folder / "new.safetensors", random_coder("jumprelu", 9, features=9216, width=WIDTH))
    os.replace(folder / "new.safetensors", folder / "spare.safetensors")
    for again in (edits, [{**edits[0], "feature": 9}]):
        refused = ask(server, again)
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert error["param"] == "saesteer.edits[0].dictionary"
        assert "the file of 'stored-spare' gives no rows: " in error["message"]  # vLLM hides paths
        assert "has changed since the server opened it" in error["message"]
        assert error["message"].endswith("[unreadable]")
    (folder / "spare.safetensors").unlink()
    refused = ask(server, edits)
    assert "cannot be read any more (No such file or directory)" in refused.json()["error"]["message"]
    assert told(server, by_rows([BRIDGE]))[0] == before[0]
