"""Rules next to reads on every route: an answer that a rule ends, even without a token, has all that was read of it."""

import json
from typing import Any

import httpx
import pytest

from tests.plugin.asked_http import ALWAYS
from tests.plugin.said import plain, same
from tests.plugin.serving import CUDA, events_of
from tests.plugin.turns import TURNS

pytestmark = pytest.mark.slow

# Of numbers that batches of other sizes have computed; a GPU's products are then other kernels', 1.03e-3 apart.
NOISE = 5e-3 if CUDA else 1e-3
EVERYWHERE = {"positions": [[0, None]]}
READS: dict[str, Any] = {
    "features": [{"dictionary": "demo", "top_k": 3, "features": [3497], "scope": EVERYWHERE}],
    "probes": [{"probe": "probe", "scope": EVERYWHERE}],
    "activations": [{"site": "resid_post.20", "scope": EVERYWHERE}, {"site": "resid_post.15", "reduce": "max"}],
    "hidden": True,
}
OTHER = [{"role": "user", "content": "Name a river."}]

# By route: what asks for an answer to TURNS, how long it may be, and where its choices' fields stand.
ROUTES: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat": ("/v1/chat/completions", {"messages": TURNS, "logprobs": True, "top_logprobs": 1}, "max_tokens"),
    "completions": ("/v1/completions", {"logprobs": 1}, "max_tokens"),
    "responses": ("/v1/responses", {"input": TURNS}, "max_output_tokens"),
    "messages": ("/v1/messages", {"messages": TURNS}, "max_tokens"),
    "batch": ("/v1/chat/completions/batch", {"messages": [TURNS, OTHER], "logprobs": True}, "max_tokens"),
    "invocations": ("/invocations", {"messages": TURNS}, "max_tokens"),
}


@pytest.fixture(scope="module")
def known() -> dict[str, Any]:
    """What a prompt without rules has read: asked once."""
    return {}


def stop(at: int | None) -> dict[str, Any]:
    """One that fires at a position of the prompt, counted from its end; None: at the third token that is generated."""
    if at is None:
        return {"op": "stop", "when": ALWAYS, "for": 3}
    return {"op": "stop", "when": ALWAYS, "scope": {"positions": [[at, None]]}}


def asked(route: str, spec: Any, ids: Any, tokens: int = 9) -> tuple[str, dict[str, Any]]:
    """Path and body of a request."""
    path, body, limit = ROUTES[route]
    body = {"model": "base", "temperature": 0, "ignore_eos": True, **body, limit: tokens, "saesteer": spec}
    return path, body | ({"prompt": ids} if route == "completions" else {})


def post(server: httpx.Client, path: str, body: Any) -> dict[str, Any]:
    response = server.post(path, json=body)
    assert response.status_code == 200, response.text
    return dict(response.json())


def reference(server: httpx.Client, known: dict[str, Any]) -> tuple[list[int], dict[str, Any], dict[str, Any]]:
    """The prompt's ids, and what is read of it and of an answer of ten tokens, without rules."""
    if not known:
        body = {"model": "base", "temperature": 0, "ignore_eos": True, "return_token_ids": True, "messages": TURNS}
        found = []
        for tokens in (1, 10):
            whole = {**body, "max_tokens": tokens, "saesteer": {"return": READS}}
            found.append(post(server, "/v1/chat/completions", whole))
        known["ids"], known["said"] = found[0]["prompt_token_ids"], [one["saesteer"] for one in found]
    return known["ids"], *known["said"]


def what_is_read(said: Any) -> dict[str, Any]:
    """What an answer has read."""
    found = plain({word: [dict(one) for one in said[word]] for word in READS})
    return found | {"probes": [[at, score] for at, score in found["probes"]]}


def expected(said: Any, ids: list[int], *, ended: bool) -> dict[str, Any]:
    """What an answer says that a rule ended: of the prompt alone nothing was sampled, so no row has sampled it."""
    found = what_is_read(said)
    if ended:
        found["hidden"] = [{"positions": [], "shape": [0, 0], "dtype": "float32", "data": []}]
        return found
    upto = len(ids) + 3  # the rule fires at the third token
    found["features"] = [row for row in found["features"] if row["position"] < upto]
    found["probes"] = [row for row in found["probes"] if row[0] < upto]
    return found


def check(said: Any, wanted: dict[str, Any], position: int, *, upto: int) -> None:
    """An answer's field, with tensors of another length left out of the comparison."""
    assert said["flags"] == [{"edit": "saesteer.edits[0]", "position": position}]
    assert said["applied"] == [] and len(said["features"]) and len(said["probes"])
    found = what_is_read(said)
    assert [row["position"] for row in found["features"]] == [at for at, _ in found["probes"]] == [*range(upto)]
    for word in ("features", "probes"):
        same(found[word], wanted[word][:upto], NOISE, word)
    rows = [one for one in found["activations"] if "reduce" not in one]
    assert [at for one in rows for at in one["positions"]] == [*range(upto)]
    numbers = [number for one in rows for number in one["data"]]
    whole = [number for one in wanted["activations"] if "reduce" not in one for number in one["data"]]
    same(numbers, whole[: len(numbers)], NOISE, "activations")
    [largest] = [one for one in found["activations"] if "reduce" in one]
    assert (largest["positions"], largest["tokens"]) == ([0, upto], upto)
    [hidden] = found["hidden"]
    if position < upto and not wanted["hidden"][0]["positions"]:
        same(hidden, {**hidden, "positions": [], "shape": [0, 0], "data": []}, 0.0)
    else:
        assert hidden["positions"] == [upto - 1]


def pieces_of(events: list[Any]) -> dict[int, list[Any]]:
    """The fields of a stream's events, by choice; one that has another form has one choice."""
    found: dict[int, list[Any]] = {}
    for event in events:
        field = event.get("saesteer") or event.get("response", {}).get("saesteer")
        if field:
            choices = event.get("choices") or [{"index": 0}]
            found.setdefault(choices[0]["index"], []).append(field)
    return found


def joined(pieces: list[Any]) -> dict[str, Any]:
    """What a stream has said in pieces."""
    found = {word: value for piece in pieces for word, value in piece.items()}
    return found | {word: [one for piece in pieces for one in piece.get(word, ())] for word in READS}


def as_it_is_read(pieces: list[Any], ids: list[int], *, several: bool) -> None:
    """The first piece of a stream has the prompt's rows, and what comes at the end alone is in the last one."""
    assert (len(pieces) > 1) is several
    assert [row["position"] for one in pieces[0]["features"] for row in one["rows"]][: len(ids)] == [*range(len(ids))]
    assert "flags" in pieces[-1] and "applied" in pieces[-1] and pieces[-1]["hidden"]
    for piece in pieces[:-1]:
        assert piece and piece.keys() <= {"features", "probes", "activations"}
        assert not any("reduce" in one for one in piece.get("activations", ()))


@pytest.mark.parametrize("at", [-20, None], ids=["in the prompt", "generated"])
@pytest.mark.parametrize("route", ROUTES)
def test_an_answer_has_what_was_read_up_to_where_a_rule_ended_it(
    any_server: httpx.Client, known: dict[str, Any], route: str, at: int | None
) -> None:
    ids, short, long = reference(any_server, known)
    wanted = expected(short if at is not None else long, ids, ended=at is not None)
    position, upto = (len(ids) + 2, len(ids) + 3) if at is None else (len(ids) + at, len(ids))
    path, body = asked(route, {"edits": [stop(at)], "return": READS}, ids)
    made = post(any_server, path, body)
    check(made["saesteer"], wanted, position, upto=upto)
    assert tokens_of(made) == (4 if at is None else 0) * (2 if route == "batch" else 1)
    if route == "batch":
        first, second = made["choices"]
        assert first["saesteer"] == made["saesteer"]
        [flag] = second["saesteer"]["flags"]
        assert flag["position"] != position and len(second["saesteer"]["probes"][0]["positions"]) > 5
        assert all(
            (one["finish_reason"], one["stop_reason"]) == ("stop", "saesteer.edits[0]") for one in (first, second)
        )
        return
    with any_server.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        events = events_of(response)
    assert not any("error" in str(event.get("type", "")) or event.get("error") for event in events), events
    [pieces] = pieces_of(events).values()
    check(joined(pieces), wanted, position, upto=upto)
    as_it_is_read(pieces, ids, several=at is None)


@pytest.mark.parametrize("route", ["responses", "messages"])
def test_official_clients_find_it_on_their_events(any_server: httpx.Client, known: dict[str, Any], route: str) -> None:
    from anthropic import Anthropic
    from openai import OpenAI

    ids, _, long = reference(any_server, known)
    _, body = asked(route, {"edits": [stop(None)], "return": READS}, ids)
    body["extra_body"] = {name: body.pop(name) for name in ("saesteer", "ignore_eos", "temperature")}
    url = str(any_server.base_url).rstrip("/")
    with OpenAI(base_url=f"{url}/v1", api_key="none") as one, Anthropic(base_url=url, api_key="none") as other:
        create: Any = one.responses.create if route == "responses" else other.messages.create
        told = [event.model_dump() for event in create(**body, stream=True)]
    [pieces] = pieces_of(told).values()
    as_it_is_read(pieces, ids, several=True)
    check(joined(pieces), expected(long, ids, ended=False), len(ids) + 2, upto=len(ids) + 3)
    kinds = {one["type"] for one in told if "saesteer" in one}
    assert kinds == (
        {"response.output_text.delta"} if route == "responses" else {"content_block_delta", "message_delta"}
    )


def tokens_of(made: Any) -> int:
    """How many tokens an answer says it has."""
    usage = made["usage"]
    return int(usage["completion_tokens"] if "completion_tokens" in usage else usage["output_tokens"])


@pytest.mark.parametrize("stream", [False, True], ids=["body", "stream"])
def test_the_prompt_is_echoed_with_its_logprobs(any_server: httpx.Client, known: dict[str, Any], stream: bool) -> None:
    ids, *_ = reference(any_server, known)
    path, body = asked("completions", {"edits": [stop(-1)], "return": READS}, ids)
    body |= {"echo": True, "return_token_ids": True, "stream": stream}
    with any_server.stream("POST", path, json=body) as response:
        assert response.status_code == 200
        event = events_of(response)[-1] if stream else json.loads(response.read())
    [choice] = event["choices"]
    assert (choice["finish_reason"], choice["token_ids"]) == ("stop", [])
    told = choice["logprobs"]["token_logprobs"]
    assert len(told) == len(ids) and told[0] is None and all(one <= 0 for one in told[1:])


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CHOICES: dict[str, Any] = {
    "auto": "auto",
    "required": "required",
    "named": {"type": "function", "function": {"name": "look"}},
}


@pytest.mark.parametrize("stream", [False, True], ids=["body", "stream"])
@pytest.mark.parametrize("choice", CHOICES)
def test_a_call_that_never_came_is_no_error(any_server: httpx.Client, choice: str, stream: bool) -> None:
    """vLLM looks for a tool call in what a rule has ended before it began."""
    body = {"model": "base", "messages": TURNS, "tools": [TOOL], "tool_choice": CHOICES[choice], "max_tokens": 9}
    body |= {"temperature": 0, "saesteer": {"edits": [stop(-1)], "return": {"probes": READS["probes"]}}}
    if not stream:
        made = post(any_server, "/v1/chat/completions", body)
        assert made["saesteer"]["flags"] and len(made["saesteer"]["probes"][0]["scores"]) > 20
        assert made["usage"]["completion_tokens"] == 0
        return
    with any_server.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
        assert response.status_code == 200
        events = events_of(response)
    assert not any("error" in event for event in events)
    [pieces] = pieces_of(events).values()
    assert joined(pieces)["flags"] and len(joined(pieces)["probes"][0]["scores"]) > 20
