"""What several tests ask a server over HTTP, and what they take of its answers. Knows no test."""

from typing import Any

import httpx

from tests.plugin.conftest import ADMIN, BRIDGE, PROMPTS

STEERED = {"edits": [BRIDGE]}
ALWAYS = {"dictionary": "demo", "feature": 3497, "above": -1}  # a condition that every token meets


def complete(server: httpx.Client, model: str, prompt: Any = PROMPTS[0], **body: Any) -> httpx.Response:
    """A greedy completion of 12 tokens, unless said otherwise."""
    body = {"model": model, "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True, **body}
    return server.post("/v1/completions", json=body)


def text(response: httpx.Response) -> str:
    """Of a completion's first choice."""
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


def metric(server: httpx.Client, name: str) -> float:
    """The sum of all samples whose name and labels begin like this."""
    lines = server.get("/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def forget_names(server: httpx.Client) -> None:
    """Delete every module and every vector that was registered."""
    for kind in ("modules", "vectors"):
        for one in server.get(f"/v1/saesteer/{kind}", headers=ADMIN).json()[kind]:
            assert server.delete(f"/v1/saesteer/{kind}/{one['name']}", headers=ADMIN).status_code == 200
