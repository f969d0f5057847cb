"""`saesteer doctor`: does steering work on this machine, and does it leave all other requests alone?

Three witnesses answer the same prompts: stock vLLM without the plugin, vLLM with saesteer, and the Transformers backend
in float32. This file asks and compares; it does not know how an engine is steered.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from saesteer.commands.embedded import DEMO_DICTIONARY, bridge
from saesteer.commands.serve import check, resolve
from saesteer.commands.waiting import load_model, steps
from saesteer.config.config import SaesteerConfig
from saesteer.errors import ConfigError
from saesteer.plugin.job import Batch, Completion
from saesteer.plugin.job import run as run_engine

PROMPTS = ("Who are you?", "The capital of France is")
# Several blocks of the KV cache, which are 16 tokens on a GPU and 128 on a CPU.
LONG = "The old town lies between the hills and the sea, and every road in it leads down to the harbour. " * 20
TOKENS = 24


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the table."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Distances:
    """Mean absolute difference of the tokens' logprobs between engine and Transformers, in nats."""

    plain: float  # neither is steered
    steered: float  # both are
    unlike: float  # only the engine is: how far off a clamp without effect would be


def run(console: Console, model: str, config: SaesteerConfig, feature: int | None, *, verbose: bool = False) -> bool:
    """Run all checks and print them; True if all passed.

    Args:
        console: where the table goes.
        model: a folder, a hub id or `demo`. It is also loaded in float32 in memory, as the oracle.
        config: its dictionaries; a feature of the first one is clamped.
        feature: the feature to clamp; None: the most active one in a test prompt (for `demo`, the bridge).
        verbose: show vLLM's output.

    Raises:
        SaesteerError: an engine cannot be started, or the model or a dictionary is invalid.
    """
    place, config, options = resolve(model, config)
    if not config.dictionaries:
        raise ConfigError(f"doctor needs a dictionary for {model!r}: --dictionary NAME=PATH_OR_REPO[@SITE]")
    check(place, config)
    options = options or _options()
    dictionaries = config.to_json()["dictionaries"]
    with steps(console, hidden=verbose) as show:
        show("1/4 The Transformers backend")
        oracle = load_model(place, dictionaries)
        own = model == DEMO_DICTIONARY and feature is None
        spec = bridge() if own else _choose(oracle, next(iter(dictionaries)), feature)
        show("2/4 Stock vLLM")
        stock = run_engine(place, batches(None), dictionaries=None, options=options, verbose=verbose)
        show("3/4 vLLM with saesteer")
        ours = run_engine(place, batches(spec), dictionaries=dictionaries, options=options, verbose=verbose)
        show("4/4 Comparing")
        found = compare(stock, ours, _distances(oracle, ours[0], spec))
    _show(console, spec, found)
    return all(one.passed for one in found)


def batches(spec: dict[str, Any] | None) -> list[Batch]:
    """What both engines generate; with None, the same batches without steering."""

    def batch(prompts: Sequence[str], steer: Sequence[dict[str, Any] | None], *, fresh: bool = True) -> Batch:
        return Batch(prompts, steer, max_tokens=TOKENS, ignore_eos=True, fresh=fresh)

    return [
        batch(PROMPTS, [None, spec]),
        batch(PROMPTS, [None, None]),
        batch([LONG], [spec]),
        batch([LONG], [None], fresh=False),
        batch([LONG], [None], fresh=False),
        batch([LONG], [None]),
        batch([LONG], [spec], fresh=False),
    ]


def compare(stock: list[list[Completion]], ours: list[list[Completion]], distances: Distances) -> list[Check]:
    """The checks, from the answers to ``batches`` of both engines."""
    [plain, steered], after = ours[0], ours[1]
    long_steered, long_after, again, cold, long_steered_after = (answers[0] for answers in ours[2:])
    logprobs = [value for answers in ours for one in answers for value in one.logprobs]
    changed = sum(a != b for a, b in zip(steered.ids, stock[0][1].ids, strict=True))
    # A clamp can be larger than the stream, and bf16 rounds it in proportion: allow several times the plain error.
    bound = min(4 * distances.plain + 0.02, distances.unlike / 4)
    # Bit-equal only where as much came from the cache: sums over a different number of tokens may round differently.
    stock_cached, stock_cold = stock[4], stock[5]
    return [
        Check(
            "unsteered = stock",
            _same([plain], stock[0][:1]),
            "in a batch with a clamped request: tokens and logprobs, to the bit",
        ),
        Check("steered ≠ stock", changed > 0, f"{changed} of {TOKENS} tokens differ"),
        Check("the next batch is clean", _same(after, stock[1]), "the same requests unsteered = stock, to the bit"),
        Check("finite", all(map(math.isfinite, logprobs)), f"{len(logprobs)} logprobs"),
        Check(
            "Transformers agrees",
            distances.steered <= bound,
            f"steered {distances.steered:.1e} apart, plain {distances.plain:.1e}, "
            f"without the clamp {distances.unlike:.2f} (mean logprob)",
        ),
        Check(
            "prefix cache, steered first",
            _same([long_after], stock_cold) and long_after.cached == 0,
            f"the plain request took {long_after.cached} cached tokens, the next one {again.cached}",
        ),
        Check(
            "prefix cache, plain first",
            _same([cold], stock_cold)
            and _same([long_steered_after], [long_steered])
            and long_steered_after.cached == 0,
            f"the steered request took {long_steered_after.cached} cached tokens",
        ),
        Check(
            "prefix caching is on",
            _same([again], stock_cached) and again.cached > 0,
            f"{again.cached} of {len(again.prompt_ids)} prompt tokens reused",
        ),
    ]


def _same(ours: list[Completion], others: list[Completion]) -> bool:
    return [(one.ids, one.logprobs) for one in ours] == [(one.ids, one.logprobs) for one in others]


def _options() -> dict[str, Any]:
    import torch

    return {"max_model_len": 2048, "max_num_seqs": 16} | ({} if torch.cuda.is_available() else {"enforce_eager": True})


def _choose(oracle: Any, dictionary: str, feature: int | None) -> dict[str, Any]:
    """A clamp to twice a strong activation: max_act where the file has it, otherwise the strongest in a prompt."""
    layer = oracle.layers_of(dictionary)[0]
    active = oracle.activations(PROMPTS[0], dictionary, layer=layer)[1:]  # position 0 is an outlier
    chosen = int(active.amax(dim=0).argmax()) if feature is None else feature
    known = oracle.info(dictionary, layer).has_max_act
    value = 2.0 if known else 2 * float(active.max())
    unit = "max_act" if known else "raw"
    where = {"dictionary": dictionary} if layer is None else {"dictionary": dictionary, "layer": layer}
    return {"edits": [{"op": "clamp", **where, "feature": chosen, "value": value, "unit": unit}]}


def _distances(oracle: Any, answers: list[Completion], spec: dict[str, Any]) -> Distances:
    plain, steered = answers
    return Distances(_distance(oracle, plain, None), _distance(oracle, steered, spec), _distance(oracle, steered, None))


def _distance(oracle: Any, answer: Completion, spec: dict[str, Any] | None) -> float:
    """Teacher-forced: the oracle reads the engine's tokens, so one early difference does not cause later ones."""
    import torch

    start = len(answer.prompt_ids)
    logits = oracle.logits([*answer.prompt_ids, *answer.ids], steer=spec, prompt_len=start)
    scores = logits[start - 1 : -1].log_softmax(dim=-1)
    theirs = scores.gather(1, torch.tensor(answer.ids)[:, None])[:, 0]
    return float((theirs - torch.tensor(answer.logprobs)).abs().mean())


def _show(console: Console, spec: dict[str, Any], found: list[Check]) -> None:
    edit = spec["edits"][0]
    title = f"{edit['dictionary']} feature {edit['feature']} set to {edit['value']:g} ({edit['unit']})"
    table = Table("check", "", "seen", title=title, box=box.ROUNDED)
    for one in found:
        table.add_row(one.name, "[green]ok[/]" if one.passed else "[bold red]FAILED[/]", one.detail)
    console.print(table)
