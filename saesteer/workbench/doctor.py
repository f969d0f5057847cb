"""`saesteer doctor`: does steering work on this machine, and does it leave all other requests alone?

Witnesses answer the same prompts, one after the other: the Transformers backend in float32, stock vLLM without the
plugin, vLLM with saesteer, stock vLLM without compilation, and an engine that captures what dictionaries read. This
file asks and compares; it does not know how an engine is steered. paths.py has the rule for the first token, fits.py
what is asked of dictionaries.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape

from saesteer.commands.embedded import DEMO_DICTIONARY, bridge
from saesteer.commands.serve import check, resolve
from saesteer.commands.waiting import load_model, steps
from saesteer.config.config import SaesteerConfig
from saesteer.errors import ConfigError
from saesteer.language.fields import Json
from saesteer.plugin.job import Batch, Completion
from saesteer.plugin.job import run as run_engine
from saesteer.workbench import fits, paths
from saesteer.workbench.paths import TOP, Candidate, Paths, Top
from saesteer.workbench.reading import captured
from saesteer.workbench.written import rounded

PROMPTS = ("Who are you?", "The capital of France is")
# Several blocks of the KV cache, which are 16 tokens on a GPU and 128 on a CPU.
LONG = "The old town lies between the hills and the sea, and every road in it leads down to the harbour. " * 20
TOKENS = 24
TURNS = (LONG * 2 + "What is this text about?", "Say it in other words.", "Which place would you visit first?")
ROUNDS = 2  # of the conversation with a cache: the faster one counts
ENDED = ("[non_finite]", "[collapsed]")  # how errors of fail_fast end


class Check(NamedTuple):
    """One line of the table."""

    name: str
    passed: bool
    detail: str


class Distances(NamedTuple):
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
        raise ConfigError(f"doctor needs a dictionary for {model!r}: --dictionary NAME=PLACE[@SITE]")
    check(place, config)
    dictionaries = config.to_json()["dictionaries"]
    with steps(console, hidden=verbose) as show:
        show("1/6 The Transformers backend")
        oracle = load_model(place, dictionaries)
        options = options or _options(oracle)
        own = model == DEMO_DICTIONARY and feature is None
        spec = bridge() if own else _choose(oracle, next(iter(dictionaries)), feature)
        asked, chat = batches(spec), bool(getattr(oracle.tokenizer, "chat_template", None))
        show("2/6 Stock vLLM")
        ask = partial(run_engine, place, verbose=verbose)
        stock = ask([*batches(None), FIRST], dictionaries=None, options=options)
        show("3/6 vLLM with saesteer")
        # Small models repeat a line when they are not let end; a broken one repeats a token or two, and nothing else.
        watched = {**options, "fail_fast": True, "fail_fast_after": TOKENS - 2, "disable_log_stats": False}
        whole = [*asked, FIRST, *conversation(spec, chat=chat)]
        ours, found = _unless_ended(partial(ask, whole, dictionaries=dictionaries, options=watched))
        eager = options.get("enforce_eager") is True
        show("4/6 Stock vLLM, eager")
        slow = {**options, "enforce_eager": True}
        last = stock[-1:] if eager else ask([FIRST], dictionaries=None, options=slow)
        show("5/6 What dictionaries read")
        found += dictionaries_fit(oracle, dictionaries, place, options)
        show("6/6 Comparing")
        seen, largest = _reference(oracle, last[0])
        allowed = paths.tolerance(str(options.get("dtype")), largest)
        three = Paths(seen, [_top(one) for one in ours[len(asked)]] if ours else (), [_top(one) for one in last[0]])
        agreed, said = paths.verdict(three, allowed)
        found.append(Check("three paths agree", agreed, said))
        if ours:
            plain, steered = ours[0]
            pairs = (plain, None), (steered, spec), (steered, None)
            distances = Distances(*(_distance(oracle, *pair) for pair in pairs))
            found += compare(stock, ours[: len(asked)], distances)
            found += turns(ours[len(asked) + 1 :], allowed)
    console.print(paths.table(PROMPTS, three, "eager" if eager else "compiled"))
    _show(console, spec, found)
    return all(one.passed for one in found)


def _unless_ended(ask: Callable[[], list[list[Completion]]]) -> tuple[list[list[Completion]], list[Check]]:
    """The answers; none if the engine has ended a request as not sound."""
    try:
        return ask(), []
    except ConfigError as error:
        if not str(error).endswith(ENDED):
            raise
        return [], [Check("every request is sound", False, str(error))]


# What the three paths are compared by.
FIRST = Batch(PROMPTS, max_tokens=1, fresh=True, top=TOP)


def batches(spec: Json | None) -> list[Batch]:
    """What both engines generate; with None, the same batches without steering."""

    batch = partial(Batch, max_tokens=TOKENS, ignore_eos=True)
    return [
        batch(PROMPTS, [None, spec], fresh=True),
        batch(PROMPTS, [None, None], fresh=True),
        batch([LONG], [spec], fresh=True),
        batch([LONG], [None]),
        batch([LONG], [None]),
        batch([LONG], [None], fresh=True),
        batch([LONG], [spec]),
    ]


def conversation(spec: Json, *, chat: bool) -> list[Batch]:
    """Several rounds of the same steered conversation; in the last one, nothing is cached before any turn."""
    return [
        Batch([text], [spec], max_tokens=TOKENS, ignore_eos=True, chat=chat, fresh=not turn or cold, follows=turn > 0)
        for cold in [False] * ROUNDS + [True]
        for turn, text in enumerate(TURNS)
    ]


def turns(answers: Sequence[Sequence[Completion]], allowed: float) -> list[Check]:
    """The checks of a conversation, from the answers to ``conversation``.

    Args:
        answers: of its batches.
        allowed: by how many nats like logprobs may differ.
    """
    rounds = [[batch[0] for batch in answers[at : at + len(TURNS)]] for at in range(0, len(answers), len(TURNS))]
    *warm, cold = rounds
    times = [min(one.seconds for one in turn) for turn in zip(*warm, strict=True)]
    first = min(times[0], cold[0].seconds)
    cached = [one.cached for one in warm[0][1:]]
    # A turn behind another answer is another one.
    pairs = zip(warm[0], cold, strict=True)
    same = [_alike(one, other, allowed) for one, other in pairs if one.prompt_ids == other.prompt_ids]
    seconds = ", ".join(f"{1000 * one:.0f}" for one in (first, *times[1:]))
    return [
        Check(
            "later turns are faster",
            all(cached) and all(one < first for one in times[1:]),
            f"{seconds} ms to the first token of turns 1, 2 and 3; {cached[0]} and {cached[1]} tokens cached",
        ),
        Check(
            "later turns = cold",
            all(same),
            f"{sum(same)} of {len(same)} turns have the tokens of a conversation without a cache",
        ),
    ]


def _alike(one: Completion, other: Completion, allowed: float) -> bool:
    """Whether two answers are the same, up to rounding: of two tokens that are as likely, either may come."""
    for mine, its, theirs, other_its in zip(one.ids, one.logprobs, other.ids, other.logprobs, strict=True):
        if not abs(its - other_its) <= allowed:
            return False
        if mine != theirs:
            break  # what comes behind has another prompt
    return True


def dictionaries_fit(oracle: Any, names: Iterable[str], place: str, options: Json) -> list[Check]:
    """A check for each dictionary, of what an engine computes on some texts."""
    named = [(name, layer) for name in names for layer in oracle.layers_of(name)]
    infos = {one: oracle.info(*one) for one in named}
    found = []
    prompts = [oracle.encode(text) for text in fits.TEXTS]
    with captured(place, fits.sites_of(infos.values()), options, prompts) as texts:
        streams = [*texts]
    for one, info in infos.items():
        coder = oracle.coder(*one)
        figures = fits.figures(coder, info, streams)
        name = "dictionary {}@{}".format(*one).removesuffix("@None")
        wrong = [*fits.oddities(coder, info, figures)]
        found.append(
            Check(
                name,
                not wrong,
                "; ".join([*wrong, fits.in_words(info, figures)]),
            )
        )
    return found


def _top(answer: Completion) -> Top:
    return sorted((Candidate(*one) for one in answer.first), key=lambda one: -one.logprob)


def _reference(oracle: Any, answers: Sequence[Completion]) -> tuple[list[Top], float]:
    """The likeliest first tokens of Transformers, for the prompts of some answers, and the largest logit among them."""
    tops: list[Top] = []
    largest = 0.0
    for answer in answers:
        logits = oracle.logits(answer.prompt_ids)[-1]
        values, ids = logits.topk(TOP)
        largest = max(largest, float(values.abs().max()))
        logprobs = logits.log_softmax(dim=-1)[ids].tolist()
        words = [oracle.tokenizer.decode([token]) for token in ids.tolist()]
        tops.append([Candidate(*one) for one in zip(ids.tolist(), words, logprobs, strict=True)])
    return tops, largest


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


def _options(oracle: Any) -> Json:
    import torch

    context = oracle.model.config.get_text_config().max_position_embeddings
    eager = {} if torch.cuda.is_available() else {"enforce_eager": True}
    return {"max_model_len": min(2048, context), "max_num_seqs": 16} | eager


def _choose(oracle: Any, dictionary: str, feature: int | None) -> Json:
    """A clamp to twice a strong activation: max_act where the file has it, otherwise the strongest in a prompt."""
    layer = oracle.layers_of(dictionary)[0]
    info = oracle.info(dictionary, layer)
    if feature is not None and info.row_of(feature) is None:
        raise ConfigError(f"--feature {feature}: dictionary {dictionary!r} has no such feature")
    active = oracle.activations(PROMPTS[0], dictionary, layer=layer)[1:]  # position 0 is an outlier
    row = int(active.amax(dim=0).argmax())
    chosen = info.ids[row] if feature is None else feature
    known = info.knows_max_act(chosen)
    value, unit = (2.0, "max_act") if known else (2 * float(active.max()), "raw")
    where = {"dictionary": dictionary} if layer is None else {"dictionary": dictionary, "layer": layer}
    return {"edits": [{"op": "clamp", **where, "feature": chosen, "value": value, "unit": unit}]}


def _distance(oracle: Any, answer: Completion, spec: Json | None) -> float:
    """Teacher-forced: the oracle reads the engine's tokens, so one early difference does not cause later ones."""
    import torch

    start = len(answer.prompt_ids)
    logits = oracle.logits([*answer.prompt_ids, *answer.ids], steer=spec, prompt_len=start)
    scores = logits[start - 1 : -1].log_softmax(dim=-1)
    theirs = scores.gather(1, torch.tensor(answer.ids)[:, None])[:, 0]
    return float((theirs - torch.tensor(answer.logprobs)).abs().mean())


def _show(console: Console, spec: Json, found: list[Check]) -> None:
    edit = spec["edits"][0]
    title = f"{edit['dictionary']} feature {edit['feature']} set to {edit['value']:g} ({edit['unit']})"
    table = rounded("check", "", "seen", title=escape(title))
    for one in found:
        passed = "[green]ok[/]" if one.passed else "[bold red]FAILED[/]"
        table.add_row(escape(one.name), passed, escape(one.detail))
    console.print(table)
