"""`saesteer serve` with a settings file: vectors of every kind of file and modules, asked by name over a socket."""

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from saesteer.client.client import Client
from saesteer.commands.embedded import BRIDGE, DEMO_SAE
from saesteer.errors import RequestRefused, ServerError
from saesteer.loaders import load
from tests.loaders.control_vectors import control_vector

pytestmark = pytest.mark.slow

TURN = "Who are you?"
ASK: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "repetition_penalty": 1.1}
ADD = {"op": "add", "site": "resid_post.15"}


def write(folder: Path) -> Path:
    """The bridge's direction at twice its strongest activation, in every kind of file; and modules that use it."""
    coder = load(DEMO_SAE)
    assert coder.max_act is not None
    row = (coder.w_dec[BRIDGE].float() * 2 * coder.max_act[BRIDGE]).numpy()
    control_vector(folder / "bridge.gguf", {15: row})
    np.save(folder / "bridge.npy", row)
    torch.save({15: torch.from_numpy(row)}, folder / "bridge.pt")
    save_file({"layer.15": row}, folder / "bridge.safetensors")
    (folder / "gate.json").write_text(json.dumps({"edits": [{**ADD, "vector": "npy"}]}))
    (folder / "settings.yaml").write_text(
        """
        vectors: {gguf: bridge.gguf, npy: bridge.npy, pt: bridge.pt, safetensors: bridge.safetensors}
        modules:
          gate: gate.json
          half: {edits: [{op: use, module: gate, scale: 0.5}]}
        sites: [resid_post.all]
        """
    )
    return folder / "settings.yaml"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    settings = write(tmp_path_factory.mktemp("settings"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = settings.with_name("log")
    words = ["serve", "demo", "--saesteer-config", str(settings), "--port", str(port), "--host", "127.0.0.1"]
    with log.open("w") as out:
        process = subprocess.Popen([sys.executable, "-m", "saesteer", *words], stdout=out, stderr=subprocess.STDOUT)
    client = Client(f"http://127.0.0.1:{port}", timeout=120)
    try:
        for _ in range(1200):
            assert process.poll() is None, log.read_text()[-4000:]
            try:
                client.models()
                break
            except ServerError:
                time.sleep(0.5)
        yield client
    finally:
        client.close()
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def test_one_vector_in_every_kind_of_file_is_one_vector(client: Client) -> None:
    plain = client.chat(TURN, **ASK).text
    answers = {name: client.chat(TURN, steer={**ADD, "vector": name}, **ASK).text for name in ("gguf", "npy", "pt")}
    answers["layered"] = client.chat(TURN, steer={**ADD, "vector": "safetensors", "site": "resid_post"}, **ASK).text
    assert len(set(answers.values())) == 1
    assert "ridge" in answers["gguf"]
    assert "ridge" not in plain


def test_modules_are_what_they_hold(client: Client) -> None:
    whole = client.chat(TURN, steer={"op": "use", "module": "gate"}, **ASK).text
    assert whole == client.chat(TURN, steer={**ADD, "vector": "npy"}, **ASK).text
    half = client.chat(TURN, steer={"op": "use", "module": "half"}, **ASK).text
    assert half == client.chat(TURN, steer={**ADD, "vector": "npy", "scale": 0.5}, **ASK).text
    assert half != whole


def test_every_layer_takes_a_vector(client: Client) -> None:
    plain = client.chat(TURN, **ASK).text
    for layer in (0, 7, 29):
        edit = {"op": "add", "vector": "npy", "site": f"resid_post.{layer}", "scale": 2.0}
        assert client.chat(TURN, steer=edit, **ASK).text != plain


@pytest.mark.parametrize(
    ("edit", "field"),
    [
        ({**ADD, "vector": "sad"}, "saesteer.edits[0].vector"),
        ({**ADD, "vector": "gguf", "site": "resid_post.3"}, "saesteer.edits[0]"),
        ({"op": "use", "module": "gates"}, "saesteer.edits[0].module"),
        ({**ADD, "vector": [1.0, 2.0]}, "saesteer.edits[0].vector"),
    ],
)
def test_unknown_names_are_refused(client: Client, edit: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        client.chat(TURN, steer=edit)
    assert caught.value.status == 400
    assert str(caught.value.field).startswith(field)
    assert caught.value.code
