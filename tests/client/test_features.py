"""What the clients' `features` sends, and makes of the answer; the real route is in plugin/test_features.py."""

from typing import Any

import httpx
import pytest

from tests.client.both import both_clients, call


@both_clients
@pytest.mark.parametrize(
    ("words", "fields", "query"),
    [
        (("demo", "golden gate"), {}, {"dictionary": "demo", "q": "golden gate", "limit": "10"}),
        (("a/b",), {"feature": 0, "layer": 0}, {"dictionary": "a/b", "feature": "0", "layer": "0", "limit": "10"}),
        ((), {"q": "bridge"}, {"q": "bridge", "limit": "10"}),
        (("demo", "x&y=z"), {"limit": 1}, {"dictionary": "demo", "q": "x&y=z", "limit": "1"}),
    ],
)
def test_it_sends_its_words_with_the_usual_key(words: Any, fields: Any, query: Any, asynchronous: bool) -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json={"dictionary": "demo", "features": [{"feature": 3497}]})

    assert call(answer, "features", *words, asynchronous=asynchronous, **fields) == [{"feature": 3497}]
    [request] = seen
    assert (request.method, request.url.path, dict(request.url.params)) == ("GET", "/v1/saesteer/features", query)
    assert request.headers["Authorization"] == "Bearer usual"
