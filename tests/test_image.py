"""The image of deploy/Dockerfile, built and asked where Docker and vLLM's image are. Knows no other file of deploy/."""

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from saesteer.commands.embedded import BRIDGE
from tests.plugin.serving import CUDA

pytestmark = [pytest.mark.slow, pytest.mark.long]  # minutes, and only where vLLM's image has been pulled

ROOT = Path(__file__).parents[1]
SERVICE = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())["services"]["saesteer"]
NAME = "saesteer-test"
CLAMP = {"op": "clamp", "dictionary": "demo", "feature": BRIDGE, "value": 2.0, "unit": "max_act"}


def docker(*arguments: str) -> str:
    done = subprocess.run(["docker", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return (done.stdout or done.stderr).strip()  # what a server has said is on stderr


def answers(*arguments: str) -> bool:
    return subprocess.run(["docker", *arguments], capture_output=True, check=False).returncode == 0


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    """Its name; ``VLLM`` is the tag of vLLM's image, as for the compose file."""
    [default] = re.findall(r"^ARG VLLM=(\S+)$", (ROOT / "deploy/Dockerfile").read_text(), re.MULTILINE)
    tag = os.environ.get("VLLM", default)
    if shutil.which("docker") is None or not answers("info"):
        pytest.skip("no Docker daemon answers")
    if not answers("image", "inspect", f"vllm/vllm-openai:{tag}"):
        pytest.skip(f"vllm/vllm-openai:{tag} has not been pulled; VLLM may name another tag")
    docker("build", "--file", "deploy/Dockerfile", "--build-arg", f"VLLM={tag}", "--tag", NAME, ".")
    yield NAME
    docker("image", "rm", NAME)


@pytest.fixture(scope="module")
def container(image: str) -> Iterator[str]:
    """The id of one that serves the embedded model, as confined as the compose file's, and that is healthy."""
    confined = [f"--cap-drop={one}" for one in SERVICE["cap_drop"]]
    confined += [f"--security-opt={one}" for one in SERVICE["security_opt"]]
    confined += [f"--shm-size={SERVICE['shm_size']}", "--read-only", *(f"--tmpfs={one}" for one in SERVICE["tmpfs"])]
    here = ["--gpus=all"] if CUDA else ["--env=VLLM_CPU_KVCACHE_SPACE=1"]
    options = [*confined, *here, "--init", "--health-interval=5s", "--publish=127.0.0.1::8000"]
    made = docker("run", "--detach", *options, image, "demo", "--host=0.0.0.0", "--enforce-eager")
    try:
        deadline = time.monotonic() + 600  # the model is fetched and converted first
        while (health := docker("inspect", "--format", "{{.State.Status}} {{.State.Health.Status}}", made)) != (
            "running healthy"
        ):
            assert health == "running starting" and time.monotonic() < deadline, docker("logs", "--tail=50", made)
            time.sleep(2)
        yield made
    finally:
        docker("rm", "--force", "--volumes", made)


def test_the_image_steers_as_a_user_without_rights(container: str) -> None:
    status = docker("exec", container, "cat", "/proc/1/status")
    assert re.search(r"^Uid:\t10001\t", status, re.MULTILINE)
    assert re.search(r"^CapBnd:\t0+$", status, re.MULTILINE) and "NoNewPrivs:\t1" in status
    body = {"model": "demo", "messages": [{"role": "user", "content": "Who are you?"}], "temperature": 0}
    body |= {"max_tokens": 16, "repetition_penalty": 1.1}
    with httpx.Client(base_url=f"http://{docker('port', container, '8000/tcp')}", timeout=120) as client:
        plain, steered = (
            client.post("/v1/chat/completions", json=one).raise_for_status().json()
            for one in (body, {**body, "saesteer": {"edits": [CLAMP]}})
        )
        assert "Bridge" in steered["choices"][0]["message"]["content"], json.dumps(steered)
        assert "Bridge" not in plain["choices"][0]["message"]["content"] and "saesteer" not in plain
        [applied] = steered["saesteer"]["applied"]
        assert f"saesteer_edited_tokens_total {float(applied['tokens_edited'])}" in client.get("/metrics").text


def test_any_user_of_group_0_can_write_where_the_image_writes(image: str) -> None:
    look = "for one in /cache /dictionaries ~; do touch $one/x || exit 1; done; "
    look += "python3 -c 'import getpass; getpass.getuser()'"
    docker("run", "--rm", "--user=123456:0", "--entrypoint=sh", image, "-c", look)


def test_the_image_holds_neither_sources_nor_the_builders_files(image: str) -> None:
    """`vllm serve` finds the plugin, too: the production stack starts it."""
    code = "from importlib.metadata import entry_points as e; print(*e(group='vllm.general_plugins').names)"
    look = f'command -v vllm && test ! -e /src && test ! -e /root/.cache/uv && python3 -c "{code}"'
    assert "saesteer" in docker("run", "--rm", "--entrypoint=sh", image, "-c", look).split()
