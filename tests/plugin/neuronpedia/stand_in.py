"""A stand-in for vLLM's client of its engine, with a real tokenizer and catalog: it plans specs, and runs no model.

What it reads is a formula of position and feature, so a test knows what an answer must say. What it says are the words
of WORDS, one after the other. It remembers every spec and every sampling parameter.
"""

from argparse import Namespace
from base64 import b64encode
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

from saesteer.errors import SpecError
from saesteer.language.spec import from_json
from saesteer.planning.plan import END, Catalog
from saesteer.planning.planner import plan
from saesteer.plugin.results.errors import SpecRefused

WORDS = " a quiet harbour at night"
LONGEST = 256
WIDTH = 576


def act(position: int, features: int) -> Any:
    """What all features of a dictionary are worth at a position, [features]: few of them are active."""
    found = (np.arange(features) * 31 + position * 17) % 101 - 95
    return np.where(found > 0, found + position / 64, 0.0).astype(np.float32)


def stream(site: str, position: int) -> Any:
    """The tensor at a site, [WIDTH]."""
    return (np.arange(WIDTH, dtype=np.float32) % 7 - 3 + position + int(site.partition(".")[2])) / 4


class StandIn:
    """What Neuronpedia's routes call of ``AsyncLLM``."""

    def __init__(self, catalog: Catalog, tokenizer: Any, fetching: Any) -> None:
        self.catalog, self.tokenizer = catalog, tokenizer
        self.input_processor = Namespace(saesteer_door=Namespace(fetching=fetching))
        self.asked: list[Namespace] = []
        self.closed = 0
        self.spoilt: float | None = None  # what the tensors and feature 5 of the last position, and logprobs, become
        self.model_config = Namespace(
            max_model_len=LONGEST,
            model="base",
            dtype="torch.float32",
            hf_text_config=Namespace(num_hidden_layers=30),
        )
        self.vllm_config = Namespace(device_config=Namespace(device_type="cpu"))

    def get_tokenizer(self) -> Any:
        return self.tokenizer

    async def check_health(self) -> None:
        return None

    async def generate(self, prompt: Any, params: Any, request_id: str) -> AsyncIterator[Any]:
        spec, ids = params.extra_args["saesteer"], prompt["prompt_token_ids"]
        self.asked.append(Namespace(spec=spec, ids=ids, params=params, name=request_id))
        try:
            readouts = plan(from_json(spec), self.catalog, len(ids)).readouts
        except SpecError as error:
            raise SpecRefused(error) from None
        report: dict[str, Any] = {"features": [], "activations": []}
        for one in readouts:
            positions = [at for lo, hi in one.windows for at in range(lo, len(ids) if hi == END else hi)]
            if one.kind == "activation":
                rows = np.stack([stream(str(one.site), at) for at in positions])
                rows[-1] = rows[-1] if self.spoilt is None else self.spoilt
                data = b64encode(rows.astype("<f4").tobytes()).decode()
                entry = {"positions": positions, "dtype": "float32", "shape": [*rows.shape], "data": data}
                report["activations"].append({"site": one.site, "at": "before", **entry})
            else:
                report["features"].append(self._features(one, positions))
        said = self.tokenizer.encode(WORDS, add_special_tokens=False)[: params.max_tokens]
        every = range(1, len(said) + 1) if params.output_kind.name == "CUMULATIVE" else [len(said)]
        try:
            for count in every:
                yield Namespace(outputs=[self._choice(said[:count], params, report)])
        finally:
            self.closed += 1

    def _features(self, one: Any, positions: list[int]) -> Any:
        name, layer = self.catalog.named(one.dictionary)
        rows = []
        for at in positions:
            values = act(at, self.catalog.dictionaries[one.dictionary].features)
            if self.spoilt is not None and at == positions[-1]:
                values[5] = self.spoilt
            row: dict[str, Any] = {"position": at}
            if one.top_k:
                order = np.argsort(np.where(np.isnan(values), -np.inf, -values), kind="stable")[: one.top_k].tolist()
                row["top"] = [[index, float(values[index])] for index in order if not values[index] <= 0]
            if one.features:
                row["features"] = {str(index): float(values[index]) for index in one.features}
            rows.append(row)
        return {"dictionary": name, **({} if layer is None else {"layer": layer}), "rows": rows}

    def _choice(self, ids: list[int], params: Any, report: Any) -> Any:
        rival = Namespace(logprob=-np.inf, decoded_token="x")
        own = -0.5 if self.spoilt is None else self.spoilt
        held = [{one: Namespace(logprob=own, decoded_token=None), 7: rival} for one in ids]
        logprobs = held if params.logprobs else None
        text = self.tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens)
        return Namespace(text=text, token_ids=ids, logprobs=logprobs, saesteer=report)
