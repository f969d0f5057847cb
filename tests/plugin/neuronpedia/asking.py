"""What the tests of Neuronpedia's routes ask, and the check that an answer is one of the published schema.

published.json is that schema, openapi 1.9.0 of hijohnnylin/neuronpedia at ebb8426, without its texts.
"""

import json
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
from fastapi.testclient import TestClient
from pybase64 import b64decode

from saesteer.commands.embedded import DEMO_SAE
from saesteer.loaders import load

SCHEMA = json.loads((Path(__file__).parent / "published.json").read_text())
KEY = {"X-SECRET-KEY": "usual"}
TEXT = "The Golden Gate Bridge"
STEER: dict[str, Any] = {
    "model": "smollm2",
    "steerMethod": "SIMPLE_ADDITIVE",
    "normalizeSteering": False,
    "types": ["STEERED", "DEFAULT"],
    "features": [{"model": "smollm2", "source": "demo", "index": 3497, "strength": 2}],
    "nCompletionTokens": 4,
    "temperature": 0,
    "strengthMultiplier": 1.5,
    "freqPenalty": 0,
    "seed": 16,
}
COMPLETION: dict[str, Any] = {**STEER, "prompt": TEXT}
CHAT: dict[str, Any] = {**STEER, "prompt": [{"role": "user", "content": "Who are you?"}], "steerSpecialTokens": False}
SINGLE: dict[str, Any] = {"prompt": TEXT, "model": "m", "source": "15-demo-res", "index": "5"}
ALL: dict[str, Any] = {
    "prompt": TEXT,
    "model": "m",
    "sourceSet": "demo-res",
    "selectedSources": [],
    "sortByTokenIndexes": [],
    "ignoreBos": True,
}
TOPK: dict[str, Any] = {"prompt": TEXT, "model": "m", "source": "demo", "ignoreBos": True, "topK": 3}


def ask(client: TestClient, path: str, body: Any, status: int = 200) -> Any:
    response = client.post(f"/v1/{path}", json=body)
    assert response.status_code == status, response.text
    found = response.json()
    if status == 200:
        check(f"/v1/{path}", found)
    return found


def check(path: str, found: Any, method: str = "post", status: str = "200") -> None:
    """The answer is one of the published schema."""
    schema = SCHEMA["paths"][path][method]["responses"][status]["content"]["application/json"]["schema"]
    jsonschema.validate(found, {**schema, "components": SCHEMA["components"]})


def refusal(client: TestClient, path: str, body: Any) -> str:
    found = ask(client, path, body, 400)
    assert list(found) == ["error"] and isinstance(found["error"], str)
    return str(found["error"])


def row_of(feature: int) -> Any:
    return load(DEMO_SAE).w_dec[feature].float().numpy()


def given_vector(edit: Any) -> Any:
    return np.frombuffer(b64decode(edit["vector"]["data"]), "<f4")


def prompt_of(engine: Any) -> tuple[list[int], list[str]]:
    ids = engine.tokenizer.encode(engine.tokenizer.bos_token + TEXT, add_special_tokens=False)
    return ids, [engine.tokenizer.decode([one]) for one in ids]
