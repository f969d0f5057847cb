"""The files of deploy/ fit each other and the code: flags, metrics, settings, paths. Starts no container."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from packaging.requirements import Requirement

from saesteer.commands.cli import app
from saesteer.config.config import SaesteerConfig
from saesteer.config.settings import read_settings
from tools import tables

# What the wheels are made of, which is all that a builder gets.
MADE_OF = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "NOTICE", "saesteer", "loaders", "kernels", "packages")
ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
INSTRUCTIONS = [
    (word, rest.replace("\\\n", " "))
    for word, rest in re.findall(r"^([A-Z]+) ((?:.*\\\n)*.*)$", DOCKERFILE, re.MULTILINE)
]
BOARD = json.loads((DEPLOY / "grafana/boards/saesteer.json").read_text())
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
# Of the chart, as its values.yaml has them: https://github.com/vllm-project/production-stack, helm/values.yaml.
CHART = {
    "servingEngineSpec": {"runtimeClassName", "securityContext", "containerSecurityContext", "modelSpec"}
    | {"serviceMonitor", "vllmApiKey"},
    "modelSpec": {"name", "repository", "tag", "modelURL", "replicaCount", "requestCPU", "requestMemory", "requestGPU"}
    | {"pvcStorage", "vllmConfig", "hf_token", "env"},
    "vllmConfig": {"enablePrefixCaching", "maxModelLen", "extraArgs"},
    "routerSpec": {"enableRouter", "routingLogic"},
}


def read(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text())


COMPOSE = read("compose.yaml")


def words(instruction: str) -> list[str]:
    """What follows an instruction, in all places where it stands."""
    return [rest for word, rest in INSTRUCTIONS if word == instruction]


def linter(name: str) -> str:
    """A program of the extra `dev`."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed; pip install '.[dev]' installs it")
    return found


def lint(*command: str) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_hadolint_finds_nothing() -> None:
    lint(linter("hadolint"), "--failure-threshold", "style", "deploy/Dockerfile")


def test_the_compose_file_follows_the_specification() -> None:
    lint(linter("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", "deploy/compose.yaml")


def test_the_image_is_stock_vllm_without_root_and_without_keys() -> None:
    versions = re.search(r"vllm>=([\d.]+),<([\d.]+)", (ROOT / "pyproject.toml").read_text())
    assert versions is not None
    [argument] = words("ARG")
    assert words("FROM") == ["vllm/vllm-openai:${VLLM}"]
    low, high, chosen = ([int(n) for n in re.findall(r"\d+", one)[:2]] for one in (*versions.groups(), argument))
    assert low <= chosen < high
    assert COMPOSE["services"]["saesteer"]["build"]["args"] == {"VLLM": "${VLLM:-" + argument.partition("=")[2] + "}"}
    [user] = words("USER")
    assert re.fullmatch(r"(\d+):\1", user) and f"--uid {user.partition(':')[0]} " in " ".join(words("RUN"))
    assert not words("COPY") and not words("ADD"), "layers hold what is installed, and nothing that lay beside it"
    stored = " ".join(words("ENV") + words("ARG"))
    assert not re.search("KEY|TOKEN|SECRET|PASSWORD", stored)
    [checked] = words("HEALTHCHECK")
    assert "/health" in checked and f"'{words('EXPOSE')[0]}'" in checked
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().split("\n")
    sent = {line[1:] for line in ignored if line.startswith("!")}
    assert "*" in ignored
    sent.remove("deploy/constraints.txt")
    assert sent == {*MADE_OF}


@pytest.mark.parametrize(
    ("words_of_1", "port"),
    [("saesteer serve demo", 8000), ("tini -- saesteer serve m --port 9001", 9001), ("python3 x --port=9002 -q", 9002)],
)
def test_the_health_check_asks_the_port_that_the_container_serves(words_of_1: str, port: int, tmp_path: Path) -> None:
    [checked] = words("HEALTHCHECK")
    [code] = [one for one in json.loads(checked[checked.index("[") :]) if "urlopen" in one]
    (tmp_path / "cmdline").write_bytes("\0".join(words_of_1.split()).encode() + b"\0")
    asked = code.replace("/proc/1/cmdline", str(tmp_path / "cmdline")).replace("r.urlopen", "print")
    done = subprocess.run([sys.executable, "-c", asked.replace(", timeout=4", "")], capture_output=True, text=True)
    assert done.stdout.strip() == f"http://127.0.0.1:{port}/health", done.stderr


def test_the_image_serves_under_any_user_of_group_0() -> None:
    """Some clusters run containers so: with a user id that has no name, in the group root."""
    made = " ".join(words("RUN"))
    assert re.search(r"--group=root --mode=2775 /cache /dictionaries\b", made)
    known = dict(one.split("=") for one in " ".join(words("ENV")).split())
    [home] = words("WORKDIR")
    assert f"chgrp root {home} && chmod 2775 {home}" in made
    assert known["HOME"] == home and known["USER"]


def test_what_a_build_adds_is_pinned() -> None:
    """The image by its tag or digest, and what the extra brings that it lacks; the page says how."""
    pins = dict(line.split("==") for line in (DEPLOY / "constraints.txt").read_text().splitlines() if "==" in line)
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["convert"]
    wanted = {Requirement(one).name: Requirement(one).specifier for one in extra}
    assert pins.keys() == wanted.keys() and all(version in wanted[name] for name, version in pins.items())
    assert "--constraint /src/deploy/constraints.txt" in " ".join(words("RUN"))
    assert "@sha256:" in DOCKERFILE and "@sha256:" in (ROOT / "docs/operating.md").read_text()


def test_services_write_to_their_volumes_alone() -> None:
    for name in ("saesteer", "prometheus"):
        service = COMPOSE["services"][name]
        assert service["read_only"] and service["cap_drop"] == ["ALL"]
    places = {one.partition(":")[0] for one in COMPOSE["services"]["saesteer"]["tmpfs"]}
    assert places == {"/tmp", *words("WORKDIR")}


def test_the_image_starts_our_command() -> None:
    [entry], [command] = map(json.loads, words("ENTRYPOINT")), map(json.loads, words("CMD"))
    assert entry == ["saesteer", "serve"] and command == ["--help"]
    made: Any = typer.main.get_command(app)
    model, *flags = COMPOSE["services"]["saesteer"]["command"]
    assert model.startswith("${MODEL:-")
    context = made.commands["serve"].make_context("serve", ["model", *flags])
    assert context.args == [], "each flag is ours, so none goes to vLLM unseen"
    file = context.params["saesteer_config"]
    mounts = dict(one.rsplit(":", 2)[:2] for one in COMPOSE["services"]["saesteer"]["volumes"] if one.count(":") == 2)
    assert mounts["./saesteer.yaml"] == str(file)
    assert set(read_settings(file=DEPLOY / "saesteer.yaml").dictionaries) == {"gs20"}


def vllm_series() -> Iterator[str]:
    """The names that the installed vLLM exports, as its source has them; importing it takes longer."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    source = (Path(spec.origin).parent / "v1/metrics/loggers.py").read_text()
    for kind, name in re.findall(r'_(counter|gauge|histogram)_cls\(\s*name="(vllm:\w+)"', source):
        yield name + {"counter": "_total", "gauge": "", "histogram": "_bucket"}[kind]


def ours() -> dict[str, set[str]]:
    """Our series, each with its labels."""
    found = re.findall(r"^\| `(\w+)(?:\{([\w,]+)\})?`", tables.metric_table(), re.MULTILINE)
    return {name: set(filter(None, labels.split(","))) for name, labels in found}


def asked() -> dict[str, set[str]]:
    """The series that the board asks for, each with the labels by which it is summed and shown."""
    found: dict[str, set[str]] = {}
    for target in (target for panel in PANELS for target in panel["targets"]):
        labels = {name for group in re.findall(r"by \((.*?)\)", target["expr"]) for name in group.split(", ")}
        assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= labels
        for name in re.findall(r"(?:vllm:|saesteer_)\w+", target["expr"]):
            found.setdefault(name, set()).update(labels)
    return found


def test_the_board_asks_for_what_is_exported() -> None:
    wanted, exported = asked(), ours()
    assert exported and {name for name in wanted if name.startswith("saesteer_")} == exported.keys(), "all of ours"
    assert all(wanted[name] == labels or not wanted[name] for name, labels in exported.items())
    assert {name for name in wanted if name.startswith("vllm:")} <= set(vllm_series())


def test_the_boards_queries_are_queries() -> None:
    parser = pytest.importorskip("promql_parser", reason="pip install '.[dev]' installs it")
    for panel in PANELS:
        for target in panel["targets"]:
            parser.parse(target["expr"].replace("$__rate_interval", "1m"))


def test_the_values_of_the_production_stack() -> None:
    values = read("production-stack.yaml")
    [model] = values["servingEngineSpec"]["modelSpec"]
    parts = {**values, "modelSpec": model, "vllmConfig": model["vllmConfig"]}
    assert parts.keys() == CHART.keys()
    for name, part in parts.items():
        assert part.keys() <= CHART[name], name
    flag, wire = model["vllmConfig"]["extraArgs"]
    assert flag == "--additional-config"
    assert SaesteerConfig.from_json(json.loads(wire)["saesteer"]).dictionaries
    assert model["vllmConfig"]["enablePrefixCaching"], "the chart's default switches it off"
    assert model["repository"].endswith("/saesteer") and values["servingEngineSpec"]["securityContext"]["runAsUser"]
    assert all("value" not in one or "KEY" not in one["name"] for one in model["env"]), "keys come from a secret"
    secret = values["servingEngineSpec"]["vllmApiKey"]
    assert secret["secretKey"] != model["env"][0]["valueFrom"]["secretKeyRef"]["key"], "clients have no admin key"
    made = (DEPLOY / "production-stack.yaml").read_text()
    assert all(f"--from-literal={one}=" in made for one in (secret["secretKey"], "admin-key", "hf-token"))
    [user] = words("USER")
    assert str(values["servingEngineSpec"]["securityContext"]["runAsUser"]) == user.partition(":")[0]


def test_what_the_page_starts_reaches_its_port_and_has_shared_memory() -> None:
    """Docker gives 64 MB, and an executor of several processes wants 160; the demo listens to the container alone."""
    page = (ROOT / "docs/operating.md").read_text().replace("\\\n", " ")
    [command] = re.findall(r"^docker run .*$", page, re.MULTILINE)
    size = COMPOSE["services"]["saesteer"]["shm_size"]
    assert f"--shm-size {size.removesuffix('b')} " in command
    assert f"-p 127.0.0.1:{words('EXPOSE')[0]}:{words('EXPOSE')[0]} " in command
    assert "-v saesteer:/cache " in command, "or each start fetches and compiles again"
    assert "`demo --host 0.0.0.0`" in page
