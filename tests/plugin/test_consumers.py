"""Consumers on a real engine: they get what answers have, whole and once, and one that fails harms nobody else."""

import json
import os
import shutil
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from saesteer.client import numbers
from saesteer.consumers import register
from saesteer.errors import PromptsFailed, SpecError
from tests.plugin.conftest import CUDA, LONG_PROMPT, Dictionaries, engine_options, preemptions
from tests.plugin.judge import Judge, install
from tests.plugin.read_requests import BLOCK, CROWDED, ask, text
from tests.plugin.results import fill_the_disk
from tests.plugin.serving import events_of, served
from tests.plugin.stored import SITE, Rows, captured, tensors_in, written
from tests.shared import Shared

pytestmark = pytest.mark.slow

READ: dict[str, Any] = {"activations": [{"site": SITE}], "probes": ["probe"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("consumers")


@pytest.fixture
def llm(served_dir: str, dictionaries: Dictionaries, folder: Path, shared: Shared) -> Any:
    from contextlib import contextmanager

    from saesteer import LLM

    register("judge", Judge)
    consumers = {"filesystem": {"folder": str(folder / "asked")}, "judge": {}, "logging": {"all": True}}

    @contextmanager
    def started() -> Iterator[Any]:
        made = LLM(
            served_dir,
            **dictionaries.options,
            reads=[SITE],
            consumers=consumers,
            capture=[SITE, "resid_pre.21", "resid_post.7"],
            capture_folder=str(folder / "captured"),
            **engine_options(**CROWDED),
        )
        try:
            yield made
        finally:
            made.llm_engine.engine_core.shutdown()

    found = shared.get(f"consumers {folder}", started)
    assert found.reset_prefix_cache()
    return found


def told(output: Any, choice: Any) -> Rows:
    """The same from an answer."""
    [entry] = choice.saesteer["activations"]
    ids = [*output.prompt_token_ids, *choice.token_ids]
    numbers = np.frombuffer(b64decode(entry["data"]), "<f4").reshape(entry["shape"])
    return {at: (ids[at], row.tobytes()) for at, row in zip(entry["positions"], numbers, strict=True)}


def test_files_hold_what_answers_have(llm: Any, folder: Path) -> None:
    spec = {"return": READ | {"consumers": {"filesystem": {"tag": "run7"}, "judge": {}}}}
    (output,) = ask(llm, [text("files", 700)], spec, n=2, temperature=1.2)
    for choice in output.outputs:
        said = choice.saesteer["consumers"]
        rows = told(output, choice)
        assert (
            said["filesystem"]["tag"] == "run7" and said["filesystem"]["rows"] == len(rows) + len(choice.token_ids) - 1
        )
        there: dict[tuple[str, int], Rows] = {}
        for shard in said["filesystem"]["shards"]:
            there |= written(folder / "asked" / shard)
        assert [*there.values()] == [rows] and [number for _, number in there] == [choice.index]
        ids = [*output.prompt_token_ids, *choice.token_ids]
        assert (said["judge"]["tokens"], said["judge"]["finish"]) == (ids, "length")
        every = [*range(len(ids) - 1), *range(len(output.prompt_token_ids), len(ids) - 1)]
        assert said["judge"]["positions"] == sorted(every)
        assert said["judge"]["kinds"] == ["activation", "probe"]


MANY: dict[str, Any] = {
    "activations": [
        {"site": SITE, "reduce": "mean", "as": "handle"},
        {"site": SITE, "at": "after", "as": "handle"},
        {"site": "resid_post.15", "reduce": "max", "scope": {"generated": True}, "as": "handle"},
        {"site": "resid_post.15", "at": "after", "reduce": "last"},
    ],
    "probes": ["probe"],
    "hidden": True,
}


def test_consumers_get_what_is_reduced_and_what_is_kept_for_handles(llm: Any, folder: Path) -> None:
    """Each to the bit, of each choice, next to edits; and all is what the same tokens give as a prompt."""
    edit = {"op": "add", "vector": "any", "site": SITE, "scale": 2.0}
    spec = {"edits": [edit], "return": MANY | {"consumers": {"filesystem": {"tag": "many"}, "judge": {}}}}
    (handled,) = ask(llm, [text("many", 500)], spec, n=2, temperature=1.2)
    results = llm.llm_engine.input_processor.saesteer_door.results
    assert len(results.sweep()) == 2 * 3
    start = len(handled.prompt_token_ids)
    generated = {"scope": {"positions": [[start, None]]}}
    inline = [{**one, "as": "inline"} | (generated if "scope" in one else {}) for one in MANY["activations"]]
    again = {"edits": [edit], "return": {"activations": inline, "hidden": True}}
    for choice in handled.outputs:
        ids = [*handled.prompt_token_ids, *choice.token_ids[:-1]]
        (other,) = ask(llm, [{"prompt_token_ids": ids}], again, 1)
        [shard] = choice.saesteer["consumers"]["filesystem"]["shards"]
        there = tensors_in(folder / "asked" / shard)
        for entry, wanted in zip(choice.saesteer["activations"], other.saesteer["activations"], strict=True):
            handle = entry.pop("handle", None)
            found = numbers(entry) if handle is None else handle.numbers()
            assert {**entry, "data": 0} == {**wanted, "data": 0}
            np.testing.assert_allclose(found, numbers(wanted), rtol=0, atol=(1e-3 if CUDA else 1e-4) * abs(found).max())
            name = ".".join([entry["site"], entry["at"], *[entry[word] for word in ("reduce",) if word in entry]])
            assert there[f"activation.{name}"] == (entry["positions"], found.tobytes())
            if handle is not None:
                handle.delete()
        assert there["hidden"][0] == other.saesteer["hidden"][0]["positions"]
        judged = choice.saesteer["consumers"]["judge"]
        assert judged["kinds"] == ["activation", "hidden", "probe"]
        assert judged["tokens"] == [*handled.prompt_token_ids, *choice.token_ids]
    assert results.sweep() == []


@pytest.mark.parametrize("why", ["take", "end", "disk"])
def test_a_prompt_that_fails_leaves_the_others_their_answers(llm: Any, why: str, monkeypatch: Any) -> None:
    """In the middle of a call, next to some that read the same by handles."""
    results = llm.llm_engine.input_processor.saesteer_door.results
    prompts = [text(f"beside {n}", 300) for n in range(4)]
    alone = [ask(llm, [prompt], {"return": MANY})[0] for prompt in prompts]
    assert len(results.sweep()) == 4 * 3
    judge = {"consumers": {"judge": {} if why == "disk" else {"fail": why}}}
    rooms: list[Any] = []
    promise = results.promise

    def promised(wanted: Any) -> Any:
        rooms.append(promise(wanted))
        if why == "disk" and len(rooms) in (2, 4):
            fill_the_disk(rooms[-1][0])
        return rooms[-1]

    monkeypatch.setattr(results, "promise", promised)
    told = "No space left on device.*no_space" if why == "disk" else "the judge is ill.*consumer"
    with pytest.raises(
        PromptsFailed, match=rf"^2 of 4 prompts failed, .*prompts\[1\], prompts\[3\]: .*{told}\]$"
    ) as caught:
        ask(llm, prompts, [{"return": MANY | (judge if n % 2 else {})} for n in range(4)])
    failed = caught.value
    assert set(failed.errors) == {1, 3} and {str(one) for one in failed.errors.values()} == {str(failed.errors[1])}
    assert (failed.field, failed.code) == (failed.errors[1].field, failed.errors[1].code)
    assert [output is None for output in failed.outputs] == [False, True, False, True]
    for before, output in zip(alone[::2], failed.outputs[::2], strict=True):
        assert output.saesteer is output.outputs[0].saesteer
        assert output.outputs[0].token_ids == before.outputs[0].token_ids
        for one, other in zip(before.saesteer["activations"], output.saesteer["activations"], strict=True):
            found, wanted = (numbers(x) if "data" in x else x["handle"].numbers() for x in (other, one))
            np.testing.assert_allclose(found, wanted, rtol=0, atol=(1e-3 if CUDA else 1e-4) * abs(wanted).max())
    for output in (*alone, *failed.outputs[::2]):
        for entry in output.saesteer["activations"]:
            if "handle" in entry:
                entry["handle"].delete()
    assert results.sweep() == [], "those that failed keep none"


def test_one_that_raises_fails_its_request_alone(llm: Any) -> None:
    for where in ("take", "end"):
        with pytest.raises(SpecError, match=r"consumer 'judge' failed for this request .*the judge is ill") as caught:
            ask(llm, [text(f"ill {where}")], {"return": READ | {"consumers": {"judge": {"fail": where}}}})
        assert (caught.value.field, caught.value.code) == ("saesteer.return.consumers.judge", "consumer")
    (output,) = ask(llm, [text("well")], {"return": READ | {"consumers": {"judge": {}}}})
    assert output.saesteer["consumers"]["judge"]["finish"] == "length"


def test_a_crowd_is_captured_row_for_row(llm: Any, folder: Path) -> None:
    """Requests that ask for nothing, next to some that read the same rows and some that edit, while many preempt."""
    edit = {"op": "add", "vector": "any", "site": SITE, "scale": 5.0}
    everything = {"activations": [{"site": SITE}]}
    kinds: list[Any] = [None, {"return": everything}, {"edits": [edit], "return": everything}, {"edits": [edit]}]
    specs = [kinds[n % 4] for n in range(12)]
    before, known = preemptions(llm), {*captured(llm, folder)}
    outputs = ask(
        llm, [text(f"crowd {n}", 120 + 70 * (n % 5)) for n in range(12)], specs, [30 + 9 * (n % 7) for n in range(12)]
    )
    assert preemptions(llm) > before, "the cache was small enough to preempt"
    there = {one: rows for one, rows in captured(llm, folder).items() if one not in known}
    assert len(there) == 12
    for output, spec in zip(outputs, specs, strict=True):
        (choice,) = output.outputs
        rows = there[output.request_id, 0]
        ids = [*output.prompt_token_ids, *choice.token_ids]
        assert sorted(rows) == [*range(len(ids) - 1)] and all(token == ids[at] for at, (token, _) in rows.items())
        if spec is None:
            assert not hasattr(output, "saesteer") and not hasattr(choice, "saesteer")
        else:
            assert "consumers" not in output.saesteer
        if spec is not None and "return" in spec:
            assert rows == told(output, choice), "the same rows, to the bit"
        else:
            assert "activations" not in getattr(output, "saesteer", {})


def test_cached_prompt_tokens_are_not_captured_again(llm: Any, folder: Path) -> None:
    (first,) = ask(llm, [text("again", 500)], None)
    (second,) = ask(llm, [text("again", 500)], None)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids and first.num_cached_tokens == 0
    assert second.num_cached_tokens > BLOCK, "capture leaves the cache as it is"
    for site in (SITE, "resid_post.7"):
        there = captured(llm, folder, site)
        whole, rest = there[first.request_id, 0], there[second.request_id, 0]
        assert sorted(rest) == [*range(second.num_cached_tokens, len(whole))]


@pytest.fixture(scope="module")
def server(
    model_dir: str, dictionaries: Dictionaries, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[httpx.Client, Path]]:
    place = tmp_path_factory.mktemp("served")
    install(place)
    settings = place / "saesteer.yaml"
    settings.write_text(json.dumps({**dictionaries.options, "reads": [SITE]}))
    flags = [model_dir, "--saesteer-config", str(settings), "--max-model-len", "512", "--max-num-seqs", "8"]
    flags += ["--served-model-name", "base", "--kv-cache-memory-bytes", str(200 << 20), "--dtype", "float32"]
    flags += ["--consumer", f"filesystem={json.dumps({'folder': str(place / 'asked')})}", "--consumer", "judge"]
    flags += ["--capture", SITE, "--capture-folder", str(place / "captured")]
    environment = {"PYTHONPATH": os.pathsep.join([str(place), os.environ.get("PYTHONPATH", "")])}
    with served(flags, place / "log", environment=environment) as client:
        yield client, place
    assert written(place / "captured"), "what was captured is written when the server stops"
    assert not [*(place / "captured").glob(".*")]


def post(client: httpx.Client, consumers: Any, **more: Any) -> httpx.Response:
    body = {"model": "base", "prompt": LONG_PROMPT[:200], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    spec = {"return": {"activations": [{"site": SITE}], "consumers": consumers}}
    return client.post("/v1/completions", json={**body, "saesteer": spec, **more})


def test_over_http(server: tuple[httpx.Client, Path]) -> None:
    client, place = server
    made = post(client, {"filesystem": {"tag": "http"}, "judge": {"seconds": 0.3}}).json()
    said = made["saesteer"]["consumers"]
    assert said["judge"]["positions"] == [*range(made["usage"]["total_tokens"] - 1)]
    [there] = written(place / "asked" / "requests" / "http").values()
    assert len(there) == said["filesystem"]["rows"] == len(said["judge"]["positions"])
    response = post(client, {"judge": {}}, stream=True)
    *_, last = [event for event in events_of(response) if event.get("choices")]
    assert last["saesteer"]["consumers"]["judge"]["finish"] == "length"

    chat = {"model": "base", "messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 4}
    chat["saesteer"] = {"return": {"probes": ["probe"], "consumers": {"judge": {}}}}
    answer = client.post("/v1/chat/completions", json=chat).json()
    assert answer["saesteer"]["consumers"]["judge"]["kinds"] == ["probe"]

    for where in ("take", "end"):
        refused = post(client, {"judge": {"fail": where}})
        assert refused.status_code == 500 and "the judge is ill" in refused.text and "[consumer]" in refused.text
        *_, last = events_of(post(client, {"judge": {"fail": where}}, stream=True))
        assert "the judge is ill" in last["error"]["message"]
        assert post(client, {"judge": {}}).status_code == 200
    refused = post(client, {"judge": {"fail": "never"}})
    assert refused.status_code == 400 and "saesteer.return.consumers.judge.fail" in refused.text

    plain = {"model": "base", "prompt": "Water is", "max_tokens": 4}
    assert "saesteer" not in client.post("/v1/completions", json=plain).json()
    numbers = client.get("/metrics").text
    assert 'saesteer_consumer_failures_total{consumer="judge"} 4.0' in numbers
    assert 'saesteer_consumer_rows_total{consumer="capture"}' in numbers


def test_a_folder_that_is_gone_fails_who_asked_for_it(server: tuple[httpx.Client, Path]) -> None:
    client, place = server
    shutil.move(place / "asked", place / "away")
    try:
        refused = post(client, {"filesystem": {"tag": "lost"}})
        assert refused.status_code == 507 and "could not be written" in refused.text and "[no_space]" in refused.text
        assert str(place) not in refused.text, "the operator's folder is nobody's business"
        assert post(client, {"judge": {}}).status_code == 200
    finally:
        shutil.move(place / "away", place / "asked")
    assert post(client, {"filesystem": {"tag": "lost"}}).status_code == 200
