"""What the clients' admin methods send, and make of the answers; the real routes are in plugin/test_admin.py."""

import json
from typing import Any

import httpx
import numpy as np
import pytest

import saesteer
from saesteer.errors import RequestRefused, SpecError
from saesteer.language.spec import InlineVector
from tests.client.both import both_clients, call

ADD = saesteer.add("a/b", "resid_post.3", 2.0)
CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any], str, str, Any]] = [
    ("vectors", (), {}, "GET", "vectors", None),
    ("modules", (), {}, "GET", "modules", None),
    ("register_vector", ("v", [1, 2.5]), {}, "POST", "vectors", {"name": "v", "vector": [1.0, 2.5], "bias": 0.0}),
    (
        "register_vector",
        ("v", InlineVector("float32", (1, 1), b"\0\0\x80?", (3,))),
        {"bias": -1.0},
        "POST",
        "vectors",
        {
            "name": "v",
            "vector": {"dtype": "float32", "shape": [1, 1], "data": "AACAPw==", "layers": [3]},
            "bias": -1.0,
        },
    ),
    ("register_module", ("m", ADD), {}, "POST", "modules", {"name": "m", "spec": {"edits": [ADD.to_json()]}}),
    ("delete_vector", ("a/b ü",), {}, "DELETE", "vectors/a%2Fb%20%C3%BC", None),
    ("delete_module", ("m",), {}, "DELETE", "modules/m", None),
    ("set_default", ("m",), {}, "PUT", "default", {"module": "m"}),
    ("clear_default", (), {}, "DELETE", "default", None),
]


@both_clients
@pytest.mark.parametrize(("method", "words", "fields", "verb", "path", "body"), CALLS, ids=[one[0] for one in CALLS])
def test_each_sends_its_words_with_the_admins_key(
    method: str, words: Any, fields: Any, verb: str, path: str, body: Any, asynchronous: bool
) -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json={"vectors": [{"name": "v"}], "modules": [{"name": "m"}], "replaced": True})

    found = call(answer, method, *words, asynchronous=asynchronous, **fields)
    [request] = seen
    assert (request.method, request.url.raw_path.decode()) == (verb, f"/v1/saesteer/{path}")
    assert request.headers["Authorization"] == "Bearer admin"
    assert (json.loads(request.content) if request.content else None) == body
    if path == "default":
        assert found is None
    elif verb == "GET":
        assert found == [{"name": method[0]}]
    elif verb == "POST":
        assert found["replaced"] is True


@both_clients
def test_refusals(asynchronous: bool) -> None:
    told = {"error": {"message": "no room", "type": "ConflictError", "param": None, "code": "no_room"}}
    with pytest.raises(RequestRefused, match="no room") as caught:
        call(lambda _: httpx.Response(409, json=told), "register_vector", "v", [1.0], asynchronous=asynchronous)
    assert (caught.value.status, caught.value.code, caught.value.field) == (409, "no_room", None)
    with pytest.raises(SpecError):
        call(lambda _: httpx.Response(500), "register_module", "m", {"op": "ad"}, asynchronous=asynchronous)


@pytest.mark.parametrize(
    ("vector", "told"),
    [
        ([1.0, float("nan")], r"^vector\[1\]: got nan, expected a finite number$"),
        (np.array([np.inf, 1.0]), r"^vector\[0\]: got inf, expected a finite number$"),
        (np.ones((2, 4)), r"^vector: got the shape \[2, 4\], expected one dimension, or an InlineVector$"),
        ([[1.0, 2.0]], r"^vector\[0\]: got a list of 2, expected a number$"),
    ],
)
def test_a_wrong_vector_is_refused_before_it_is_sent(vector: Any, told: str) -> None:
    with pytest.raises(SpecError, match=told):
        call(lambda _: httpx.Response(500), "register_vector", "v", vector, asynchronous=False)


@pytest.mark.parametrize("kind", [np.float32, np.int64])
def test_vectors_and_prompts_may_have_numbers_of_numpy(kind: Any) -> None:
    seen: list[Any] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(json.loads(request.content))
        return httpx.Response(200, json={"choices": [{"text": "x"}]})

    call(answer, "register_vector", "v", np.array([1, 2], dtype=kind), asynchronous=False)
    ids = np.array([3, 4])
    for prompt in (ids, list(ids), [ids]):
        call(answer, "complete", prompt, model="m", temperature=kind(0), asynchronous=False)
    assert seen[0]["vector"] == [1.0, 2.0]
    assert [one["prompt"] for one in seen[1:]] == [[3, 4], [3, 4], [[3, 4]]]
