"""A storm of random requests to one server while names change, and what the server holds when it is over."""

import asyncio
import json
import os
import random
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx

from saesteer.config.assets import Assets
from saesteer.config.config import SaesteerConfig
from saesteer.errors import SpecError
from saesteer.language.spec import Spec, as_spec
from saesteer.planning.plan import Catalog
from saesteer.planning.planner import plan
from tests.plugin.asked_http import metric
from tests.plugin.conftest import ADMIN, BRIDGE, LONG_PROMPT, OCEAN, PROMPTS, WIDTH, Dictionaries
from tests.plugin.random_edits import random_edit
from tests.plugin.serving import Served
from tests.plugin.turns import TURNS

SEED = int(os.environ.get("SAESTEER_TEST_SEED", "13"))
AT_ONCE = 16
PATIENCE = 300.0  # seconds without a word of an answer, on a machine that is busy with others
MIB = 2**20
FLEETING = {"op": "add", "vector": "fleeting", "site": "resid_post.20", "scale": 0.5}
BY_MODULE = {"op": "use", "module": "passing", "scale": 0.5}
SCOPES = [{"messages": ["user", 0]}, {"messages": [-1], "positions": [[0, -2]]}]  # of chats alone


@dataclass(frozen=True)
class Asked:
    """A request, and what is to become of it."""

    path: str
    body: bytes
    stream: bool
    kind: str  # "right", "wrong", "fleeting" (right while its names are there)
    cut: str  # "" to read it all, "at once", "first": after its first piece


# What lets a worker be asked also has vLLM print a traceback for every body that is no JSON.
FLAGS = ["--dtype", "float32", "--pool-rows", "8", "--block-size", "32"]
FLAGS += ["--worker-extension-cls", "tests.plugin.held.Held", "--no-log-error-stack"]
# By default oneDNN keeps what it made for 1,024 shapes. That grows by 35 MiB over the second thousand of requests
# even when none of them is steered, which would hide a leak; with 32 shapes it grows by less than 1 MiB.
ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32"}


def catalog_of(dictionaries: Dictionaries) -> Catalog:
    """What requests may name there."""
    config = SaesteerConfig.from_json({**dictionaries.options, "inline_rows": 2})
    return Assets.open(config).catalog(width=WIDTH, layers=30)


def right_spec(draw: random.Random, catalog: Catalog) -> dict[str, Any]:
    """One to four edits of any kind that the server takes."""
    while True:
        spec: dict[str, Any] = {"edits": [random_edit(draw) for _ in range(draw.choice([1, 1, 2, 4]))]}
        spec |= {"return": {"dose": True}} if draw.random() < 0.2 else {}
        try:
            plan(as_spec(spec) or Spec(), catalog, 5)
        except SpecError:
            continue
        return spec


def wrong_spec(draw: random.Random) -> Any:
    """What no route takes."""
    add = {"op": "add", "vector": "any", "site": "resid_post.15"}
    return draw.choice(
        [
            {"edits": [{**BRIDGE, "dictionary": "demon"}]},
            {"edits": [{**BRIDGE, "feature": 9216}]},
            {"edits": [{**BRIDGE, "value": float("nan")}]},
            {"edits": [{**BRIDGE, "value": "much"}]},
            {"edits": [{**OCEAN, "scope": {"positions": [[3, 3]]}}]},
            {"edits": [{**OCEAN, "scope": {"messages": ["nobody"]}}]},
            {"edits": [OCEAN, {**BRIDGE, "when": {"probe": "nobody", "above": 0.0}}]},
            {"edits": [{**add, "vector": "nobody"}]},
            {"edits": [{**add, "vector": [1.0, 2.0]}]},
            {"edits": [{**add, "site": "resid_post.14"}]},
            {"edits": [{"op": "use", "module": "nobody"}]},
            {"edits": [{"op": "blend"}]},
            {"edits": [{**BRIDGE, "feature": n} for n in range(65)]},
            {"edits": 3},
            [],
            "{",
        ]
    )


def body_of(draw: random.Random, path: str, spec: Any) -> dict[str, Any]:
    """A short request, greedy or sampled."""
    tokens = draw.randint(1, 12)
    body: dict[str, Any] = {"model": "base", "temperature": draw.choice([0, 0, 0.8])}
    prompt = LONG_PROMPT[: draw.randint(0, 400)] + draw.choice(PROMPTS)
    if path == "responses":
        body |= {"input": prompt, "max_output_tokens": tokens}
    elif path == "chat/completions":
        body |= {"messages": [*TURNS[: draw.choice([0, 1, 3])], {"role": "user", "content": prompt}]}
        body |= {"max_tokens": tokens, "n": draw.choice([1, 1, 1, 2])}
    else:
        body |= {"prompt": draw.choice([prompt, [prompt, PROMPTS[0]]]), "max_tokens": tokens}
        body |= draw.choice([{}, {"stop": [" the", "."]}, {"logprobs": 2}, {"n": 2}])
    if body.get("n", 1) > 1:
        body["temperature"] = 0.8  # some versions refuse two greedy ones
    if spec is None:
        return body
    return body | draw.choice([{"saesteer": spec}, {"saesteer": spec}, {"vllm_xargs": {"saesteer": json.dumps(spec)}}])


def requests(draw: random.Random, catalog: Catalog, count: int) -> list[Asked]:
    """A tenth wrong, a fifth of all cut off, half of them streams; an eighth of the right ones unsteered."""
    made = []
    for number in range(count):
        path = draw.choice(["chat/completions", "chat/completions", "completions", "responses"])
        kind = "wrong" if number % 10 == 0 else draw.choice(["right"] * 6 + ["fleeting", "plain"])
        stream, cut = number % 20 < 10, ("first" if number % 20 < 10 else "at once") if number % 5 == 1 else ""
        if kind == "wrong":
            spec = wrong_spec(draw)
        elif kind == "fleeting":
            spec = {"edits": [draw.choice([FLEETING, BY_MODULE])]}
        else:
            spec = right_spec(draw, catalog) if kind == "right" else None
        if kind == "right" and path == "chat/completions" and draw.random() < 0.2:
            spec = {"edits": [{**BRIDGE, "value": draw.random(), "scope": draw.choice(SCOPES)}]}
        body = json.dumps({**body_of(draw, path, spec), "stream": stream}).encode()
        if kind == "wrong" and draw.random() < 0.1:
            body = body[: len(body) // 2]
        made.append(Asked(path, body, stream, kind, cut))
    draw.shuffle(made)
    return made


Ended = Callable[[Asked, int, str], str]  # of a request, the status and the text of its answer


async def send(client: httpx.AsyncClient, asked: Asked, wait: float, ended: Ended) -> str:
    """How it ended, in a word; `wait` is how long a request that is cut off at once stays, in seconds."""
    call: dict[str, Any] = {"content": asked.body, "headers": {"content-type": "application/json"}}
    if asked.cut == "at once":
        try:
            response = await asyncio.wait_for(client.post(asked.path, **call), wait)
        except TimeoutError:
            return "cut off"
        return ended(asked, response.status_code, response.text)
    async with client.stream("POST", asked.path, **call) as response:
        pieces = response.aiter_lines()
        if asked.cut and response.status_code == 200:
            await anext(pieces)
            return "cut off"
        return ended(asked, response.status_code, "\n".join([piece async for piece in pieces]))


def ended(asked: Asked, status: int, text: str) -> str:
    """The same of an answer that was read to its end, which is checked."""
    told = (status, text, asked)
    if asked.kind == "wrong":
        assert status == 400, told
        return "refused"
    if asked.kind == "fleeting" and status == 400:
        assert "[unknown_name]" in text, told
        return "gone"
    assert status == 200 and '"error"' not in text.replace('"error":null', ""), told
    assert ('"applied"' in text) == (asked.kind != "plain"), told
    return asked.kind


async def change_names(client: httpx.AsyncClient, draw: random.Random, over: asyncio.Event) -> int:
    """Register, replace and delete until it is over; how many changes there were."""
    done = 0
    while not over.is_set():
        row = [round(draw.gauss(0, 1), 2) for _ in range(WIDTH)]
        module = {"name": "passing", "spec": {"edits": [{**FLEETING, "vector": row}]}}
        calls: list[Any] = [
            ("POST", "vectors", {"name": "fleeting", "vector": row}),
            ("POST", "modules", module),
            ("DELETE", "modules/passing", None),
            ("DELETE", "vectors/fleeting", None),
        ]
        for method, path, body in calls:
            response = await client.request(method, f"saesteer/{path}", headers=ADMIN, json=body)
            # A slot is free again only when those who hold an older version have ended.
            assert response.status_code == 200 or (response.status_code, path[-1]) == (409, "s"), response.text
            done += response.status_code == 200
            if response.status_code != 200:
                break
            await asyncio.sleep(0.3)
        await client.request("DELETE", "saesteer/modules/passing", headers=ADMIN)
        await client.request("DELETE", "saesteer/vectors/fleeting", headers=ADMIN)
    return done


def storm(server: Served, asked: list[Asked], draw: random.Random, ended: Ended = ended) -> Counter[str]:
    """Send them all, some at once; how they ended, in the words of what looks at an answer that is read to its end."""
    counts: Counter[str] = Counter()

    async def run() -> None:
        over, waiting = asyncio.Event(), iter(asked)
        async with httpx.AsyncClient(base_url=f"{server.base_url}/v1/", timeout=PATIENCE) as client:

            async def work() -> None:
                for one in waiting:
                    try:
                        counts[await send(client, one, draw.choice([0.001, 0.02, 0.2]), ended)] += 1
                    except httpx.TimeoutException as error:
                        raise AssertionError(f"no answer in {PATIENCE:.0f} s: {one}") from error

            changing = asyncio.create_task(change_names(client, draw, over))
            try:
                await asyncio.gather(*(work() for _ in range(AT_ONCE)))
            finally:
                over.set()
                counts["changes of names"] = await changing

    asyncio.run(run())
    return counts


def answer(server: Served, edits: list[Any]) -> Any:
    """Tokens and logprobs on a cold cache."""
    asked = {"model": "base", "prompt": PROMPTS[0], "max_tokens": 12, "temperature": 0, "logprobs": 3}
    asked |= {"ignore_eos": True, "return_token_ids": True, "cache_salt": uuid4().hex}
    response = server.post("/v1/completions", json={**asked, **({"saesteer": {"edits": edits}} if edits else {})})
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    return choice["token_ids"], choice["logprobs"]


def settled(server: Served) -> dict[str, Any]:
    """What the worker holds when nobody asks for anything any more.

    A row keeps its words until somebody needs it, a worker hears of those that have ended with the next step, and what
    names stood for goes with a change. So all rows are filled with one clamp, and a name comes and goes.
    """
    deadline = time.monotonic() + 60
    busy = ("vllm:num_requests_running", "vllm:num_requests_waiting{", "vllm:kv_cache_usage_perc")
    while time.monotonic() < deadline and any(metric(server, name) for name in busy):
        time.sleep(0.2)
    row = [1.0] * WIDTH
    for _ in range(2):
        made = server.post("/v1/saesteer/vectors", headers=ADMIN, json={"name": "last", "vector": row})
        assert made.status_code == 200, made.text
        assert server.delete("/v1/saesteer/vectors/last", headers=ADMIN).status_code == 200
    crowd = {"model": "base", "prompt": [PROMPTS[0]] * AT_ONCE, "max_tokens": 32, "ignore_eos": True}
    assert server.post("/v1/completions", json={**crowd, "saesteer": {"edits": [BRIDGE]}}).status_code == 200
    answer(server, [])
    (held,) = server.post("/collective_rpc", json={"method": "saesteer_held"}).json()["results"]
    return {**held, **{name: metric(server, name) for name in busy}}


def fill_cache(server: Served) -> None:
    """Write to every block of the KV cache: a page that is first touched later would look like growth."""
    (told,) = re.findall(r"vllm:cache_config_info\{(.*?)\} ", server.get("/metrics").text)
    blocks, size = (int(re.findall(rf'\b{name}="(\d+)"', told)[0]) for name in ("num_gpu_blocks", "block_size"))
    prompts = [[100 + n, *[200] * 899] for n in range(blocks * size // 900 + 1)]
    body = {"model": "base", "prompt": prompts, "max_tokens": 1}
    assert server.post("/v1/completions", json=body, timeout=PATIENCE).status_code == 200


def processes(server: Served) -> list[Path]:
    """Where Linux tells of the server's first process, and of all that have come from it; none on other systems."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        children.setdefault(int(words[1]), []).append(int(stat.parent.name))
    found = [server.pid]
    for pid in found:
        found += sorted(children.get(pid, []))
    return [place for pid in found if (place := Path(f"/proc/{pid}")).exists()]


def status(process: Path) -> dict[str, str]:
    """What Linux tells of a process, by its words: ``Name``, ``RssAnon``, ``Threads``."""
    lines = (process / "status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def memory(server: Served) -> dict[str, int]:
    """Bytes that each process of the server has for itself, by its place among them."""
    told = map(status, processes(server))
    return {f"{place} {one['Name']}": int(one["RssAnon"].split()[0]) * 1024 for place, one in enumerate(told)}


def failures(said: str) -> list[str]:
    """The lines of a log that tell of an error of the server's own."""
    return [line for line in said.splitlines() if "Traceback" in line or re.search(r'" 5\d\d\b', line)]
