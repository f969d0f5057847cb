"""One contender in a process of its own, asked over its standard input: a burst of requests, each one's times back.

    python -m bench.contend '{"name": "stock", "options": {...}, "settings": {...}, "shape": {...}}'

Each line in is a ``Burst``, each line out ``Told``, or ``{"failed": why}``. All contenders are asked through
asynchronous engines, as their servers are: a request begins when it is handed to the system, has its first token when
that comes out, and ends when all that it asked for is there. Knows how each system is asked; compares nothing.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from time import perf_counter
from typing import Any, ClassVar

import torch

from bench.asks import DICTIONARY, VECTOR, Load, Shape, prompts, vectors


@dataclass(frozen=True, slots=True)
class Burst:
    """Requests that begin together.

    Attributes:
        ask: a key of ``bench.contenders.ASKS``, what each of them brings.
        seed: of the prompts; no two bursts of one engine may share it, or the second finds them in the prefix cache.
        requests: how many.
        prompt: tokens of each.
        tokens: that come out of each.
        scale: factor of the vectors.
    """

    ask: str
    seed: int
    requests: int
    prompt: int
    tokens: int
    scale: float


@dataclass(slots=True)
class Answer:
    """Of one request."""

    text: str = ""
    edited: bool = False  # it says that every edit has changed tokens
    captured: list[int] | None = None  # shape of what came back: layers, tokens, width


@dataclass(frozen=True, slots=True)
class Told:
    """Of a burst, request by request."""

    first: list[float]  # seconds to the first token
    whole: list[float]  # seconds to the end
    answers: list[Answer] = field(default_factory=list)


class Contender(ABC):
    """A running system.

    Args:
        options: what vLLM's engine is started with.
        settings: those of saesteer; read by it alone.
        shape: of the model.
    """

    def __init__(self, options: Mapping[str, Any], settings: Mapping[str, Any], shape: Shape) -> None:
        self.options, self.settings, self.shape = dict(options), settings, shape

    @abstractmethod
    async def start(self) -> None:
        """Serve, from now on."""

    @abstractmethod
    def steps(self, ids: list[int], burst: Burst, name: str, answer: Answer) -> AsyncIterator[None]:
        """Send a request, yield whenever there are new tokens, and fill its answer."""

    @cached_property
    def vectors(self) -> torch.Tensor:
        """One for each layer: [layers, width] in bfloat16."""
        bits = torch.from_numpy(vectors(self.shape, 1).astype("<i2", casting="unsafe"))
        return bits.view(torch.bfloat16)

    def layers(self, ask: str) -> list[int]:
        """That are steered or captured."""
        several = ask in ("vectors", "captures")
        return list(range(self.shape.layers)) if several else [self.shape.layers // 2]

    async def burst(self, burst: Burst) -> Told:
        """Run one."""
        drawn = prompts(Load("stock", burst.seed, burst.requests, 0, burst.prompt, burst.tokens), self.shape)

        async def one(number: int) -> tuple[float, float, Answer]:
            answer, first, begin = Answer(), 0.0, perf_counter()
            async for _ in self.steps(drawn[number], burst, f"{burst.seed}-{burst.ask}-{number}", answer):
                first = first or perf_counter() - begin
            return first, perf_counter() - begin, answer

        found = await asyncio.gather(*map(one, range(burst.requests)))
        return Told(*(list(column) for column in zip(*found, strict=True)))


class Stock(Contender):
    """vLLM itself, and the systems whose requests bring what they want as ``extra_args``."""

    async def start(self) -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.engine: Any = AsyncLLM.from_engine_args(AsyncEngineArgs(**self.options))

    def extra(self, burst: Burst) -> dict[str, Any] | None:
        """What a request brings."""
        return None

    def take(self, output: Any, answer: Answer) -> None:
        """Fill the answer from the last output."""

    async def steps(self, ids: list[int], burst: Burst, name: str, answer: Answer) -> AsyncIterator[None]:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=burst.tokens, ignore_eos=True, extra_args=self.extra(burst))
        output: Any = None
        async for output in self.engine.generate({"prompt_token_ids": ids}, params, name):  # noqa: B007
            yield
        answer.text = output.outputs[0].text
        self.take(output, answer)


class Saesteer(Stock):
    """This project."""

    async def start(self) -> None:
        from saesteer.config.config import KEY, SaesteerConfig

        self.options["additional_config"] = {KEY: SaesteerConfig.from_json(self.settings).to_json()}
        await super().start()

    def extra(self, burst: Burst) -> dict[str, Any] | None:
        sites = [f"resid_post.{layer}" for layer in self.layers(burst.ask)]
        spec: dict[str, Any]
        if burst.ask in ("vector", "vectors"):
            site = sites[0] if burst.ask == "vector" else "resid_post"
            spec = {"edits": [{"op": "add", "vector": VECTOR, "site": site, "scale": burst.scale}]}
        elif burst.ask == "clamp":
            spec = {"edits": [{"op": "clamp", "dictionary": DICTIONARY, "feature": 7, "value": 30.0}]}
        elif burst.ask in ("capture", "captures"):
            spec = {"return": {"activations": [{"site": site} for site in sites]}}
        else:
            return None
        return {"saesteer": spec}

    def take(self, output: Any, answer: Answer) -> None:
        said = getattr(output.outputs[0], "saesteer", None) or {}
        applied = said.get("applied") or []
        answer.edited = bool(applied) and all(one["tokens_edited"] > 0 for one in applied)
        rows: Counter[str] = Counter()  # of a site; while tokens come out, each step has an entry of its own
        for one in said.get("activations") or []:
            rows[one["site"]] += one["shape"][0]
        if rows:
            answer.captured = [len(rows), min(rows.values()), one["shape"][1]]


class Hotwire(Stock):
    """hotwire-vllm: vectors of the server, one for a layer and token."""

    def extra(self, burst: Burst) -> dict[str, Any] | None:
        if burst.ask == "nothing":
            return None
        entries = [{"id": VECTOR, "layer": layer, "scale": burst.scale} for layer in self.layers(burst.ask)]
        return {"hotwire": json.dumps(entries)}


class Lens(Stock):
    """vllm-lens: forward hooks; vectors travel with the request."""

    def extra(self, burst: Burst) -> dict[str, Any] | None:
        if burst.ask == "nothing":
            return None
        layers = self.layers(burst.ask)
        if burst.ask in ("capture", "captures"):
            return {"output_residual_stream": layers}
        from vllm_lens import SteeringVector

        rows = self.vectors[layers]
        return {"apply_steering_vectors": [SteeringVector(activations=rows, layer_indices=layers, scale=burst.scale)]}

    def take(self, output: Any, answer: Answer) -> None:
        found = getattr(output, "activations", None)
        answer.captured = None if found is None else list(found["residual_stream"].shape)


class Interp(Contender):
    """interp-engine: its own front end over vLLM's engine; vectors travel with the request."""

    own: ClassVar[Mapping[str, Any]] = {}  # of its arguments

    async def start(self) -> None:
        from interp_engine import VLLMModel

        options = dict(self.options)
        for key in ("tokenizer", "enforce_eager"):  # it takes the one beside the model, and chooses the other itself
            options.pop(key, None)
        taken = {key: options.pop(key) for key in ("max_model_len", "gpu_memory_utilization")}
        self.model: Any = VLLMModel(options.pop("model"), **taken, **self.own, extra_vllm_kwargs=options)
        await self.model.warmup()

    async def steps(self, ids: list[int], burst: Burst, name: str, answer: Answer) -> AsyncIterator[None]:
        from interp_engine import AddSpec, LayerSteeringSpec, SteeringSpec
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=burst.tokens, ignore_eos=True)
        layers, more = self.layers(burst.ask), dict[str, Any]()
        captured: dict[Any, torch.Tensor] = {}
        if burst.ask in ("vector", "vectors"):
            adds = {one: LayerSteeringSpec([AddSpec(self.vectors[one].float(), burst.scale)]) for one in layers}
            more["steering_spec"] = SteeringSpec(layers=adds)
        elif burst.ask != "nothing":
            more = {"capture_points": [f"resid_post.{one}" for one in layers], "capture_out": captured}
        parts = []
        async for part in await self.model.generate_steered(ids, params, stream=True, **more):
            parts.append(part)
            yield
        answer.text = "".join(parts)
        if captured:
            answer.captured = [len(captured), *min(list(rows.shape) for rows in captured.values())]


class InterpStatic(Interp):
    """interp-engine with taps in CUDA graphs."""

    own: ClassVar[Mapping[str, Any]] = {"static_points": "auto", "enforce_eager": False}


KINDS: Mapping[str, type[Contender]] = {
    "stock": Stock,
    "saesteer": Saesteer,
    "saesteer-reads": Saesteer,
    "hotwire": Hotwire,
    "vllm-lens": Lens,
    "interp-engine": Interp,
    "interp-engine-static": InterpStatic,
}


async def serve(job: Mapping[str, Any], out: Any) -> None:
    """Start, say so, then answer lines."""
    contender = KINDS[job["name"]](job["options"], job["settings"], Shape(**job["shape"]))
    await contender.start()
    print(json.dumps("serves"), file=out, flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        said: dict[str, Any]
        try:
            said = asdict(await contender.burst(Burst(**json.loads(line))))
        except Exception as error:  # noqa: BLE001  another system may raise any, and the others go on
            said = {"failed": f"{type(error).__name__}: {error}"[:500]}
        print(json.dumps(said), file=out, flush=True)


def main() -> None:
    """Start, then serve."""
    out = os.fdopen(os.dup(1), "w")  # what libraries print goes to the log
    os.dup2(2, 1)
    asyncio.run(serve(json.loads(sys.argv[1]), out))


if __name__ == "__main__":
    main()
