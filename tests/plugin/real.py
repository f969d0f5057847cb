"""One table of cases on models with real weights, each held against hooks on Transformers. Both models run all of them.

A case is a spec at one site and the way in which its rows were computed. Prompt logprobs skip the prefix cache, so rows
that were cached are compared through requests of one token, each one token longer than the one before.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from saesteer import hf
from saesteer.commands.embedded import DEMO, GEMMA, ensure_model
from saesteer.language.sites import canonical, parse
from saesteer.loaders.formats import own
from saesteer.models.families import find_trunk, other_widths
from tests.plugin.conftest import CUDA, Answer, answer, engine_options, random_coder

MODELS = (DEMO, GEMMA)
TOKENS = 16
# Of a logprob: two float32 implementations; a GPU's products of float32 are rounded to tf32.
TOLERANCE = 5e-2 if CUDA else 2e-4
# A step takes so many tokens of a prompt: longer ones are computed in pieces.
CHUNK = 256
STRENGTH = 0.15  # of the stream's length at a site: how far an edit pushes
TEXT = Path(__file__).parents[2] / "LICENSE"
BLOCK = 16 if CUDA else 32  # tokens


@dataclass(frozen=True)
class Real:
    """A model with a dictionary at each of some sites, on Transformers and, in ``engine``, in vLLM."""

    name: str
    folder: Path  # of the dictionaries
    sites: tuple[str, ...] = ()  # none: all that its family offers

    @cached_property
    def place(self) -> str:
        return str(ensure_model(name=self.name))

    @cached_property
    def dictionaries(self) -> dict[str, str]:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(self.place)
        found = {}
        for seed, site in enumerate(self.sites or self._offered(config)):
            width = other_widths(config).get(parse(site)[0], config.hidden_size)
            own.write(file := self.folder / f"{self.name}-{site}.safetensors", random_coder("relu", seed, width=width))
            found[site] = f"{file}@{site}"
        return found

    def _offered(self, config: Any) -> Sequence[str]:
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            _, family = find_trunk(AutoModelForCausalLM.from_config(config), "transformers")
        layers = range(config.num_hidden_layers)
        return list(dict.fromkeys(canonical(f"{kind}.{layer}") for layer in layers for kind in family.sites))

    @cached_property
    def oracle(self) -> hf.Model:
        return hf.Model(self.place, dictionaries=self.dictionaries, max_tokens=2304)

    @cached_property
    def ids(self) -> list[int]:
        """A text of 2,100 tokens."""
        return (self.oracle.encode(TEXT.read_text()) * 2)[:2100]

    @cached_property
    def specs(self) -> dict[str, Any]:
        """At each site a vector that is added and a feature that is set, as large as the stream there asks for."""
        draw = torch.Generator().manual_seed(1)
        found = {}
        for site, stream in self.oracle.streams(self.ids[:64]).items():
            size = STRENGTH * float(stream[1:].norm(dim=1).median())
            push = torch.randn(stream.shape[1], generator=draw)
            add = {"op": "add", "vector": (push / push.norm()).tolist(), "site": site, "scale": size}
            found[site] = {"edits": [add, {"op": "clamp", "dictionary": site, "feature": 17, "value": size}]}
        return found

    @contextmanager
    def engine(self, **changes: Any) -> Iterator[Any]:
        from saesteer import LLM

        options: dict[str, Any] = {
            "dtype": "float32",
            "max_model_len": 2304,
            "max_num_batched_tokens": CHUNK,
            "block_size": BLOCK,
        }
        options |= {"kv_cache_memory_bytes": 1 << 30, "disable_log_stats": False}
        llm = LLM(self.place, dictionaries=self.dictionaries, **engine_options(**options | changes))
        try:
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown(timeout=1)

    def logprobs(self, ids: Sequence[int], tokens: Sequence[int], spec: Any) -> list[float]:
        """What Transformers gives each token of an answer."""
        logits = self.oracle.logits([*ids, *tokens[:-1]], steer=spec, prompt_len=len(ids))[len(ids) - 1 :]
        return [float(row[token]) for row, token in zip(logits.log_softmax(-1), tokens, strict=True)]


def ask(llm: Any, prompts: Sequence[Sequence[int]], specs: Sequence[Any], tokens: int = TOKENS, **sampling: Any) -> Any:
    """The outputs of vLLM, one for each prompt, greedy unless ``sampling`` differs."""
    from vllm import SamplingParams

    params = SamplingParams(**{"temperature": 0, "max_tokens": tokens, "logprobs": 0, "ignore_eos": True} | sampling)
    given = [{"prompt_token_ids": list(ids)} for ids in prompts]
    return llm.generate(given, params, steer=list(specs), use_tqdm=False)


def cold(llm: Any, ids: Sequence[int], specs: Sequence[Any]) -> list[Answer]:
    """Answers to one prompt under each spec, of which nothing is cached."""
    llm.reset_prefix_cache()
    outputs = ask(llm, [ids] * len(specs), specs)
    assert not any(one.num_cached_tokens for one in outputs), "each spec's blocks are its own"
    return [answer(one.outputs[0]) for one in outputs]


def again(llm: Any, ids: Sequence[int], made: Sequence[Answer], specs: Sequence[Any]) -> list[Answer]:
    """The same answers, of which each token is a request's only one, behind a prompt that is cached."""
    prompts = [[*ids, *(token for token, _ in one[:step])] for one in made for step in range(TOKENS)]
    asked = [spec for spec in specs for _ in range(TOKENS)]
    outputs = ask(llm, prompts, asked, tokens=1)
    for prompt, one in zip(prompts, outputs, strict=True):
        assert len(prompt) - one.num_cached_tokens <= BLOCK + 1, "all but the last tokens come from the cache"
    rows = [answer(one.outputs[0])[0] for one in outputs]
    return [rows[TOKENS * n : TOKENS * (n + 1)] for n in range(len(specs))]
