"""What requests should read, by one pass of Transformers over their tokens with hooks. Knows no plan and no engine."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saesteer import hf
from saesteer.dictionaries.coder import SparseCoder, inputs
from saesteer.language.sites import canonical, parse, reading_site
from saesteer.models.families import find_trunk
from tests.entries import tensor
from tests.plugin.conftest import CUDA, VECTORS

CLOSE = 2e-2 if CUDA else 1e-4  # of the largest number of a row; a GPU's products of float32 are rounded to tf32
BIASES = {"any": 0.0, "each": 0.0, "probe": 1.5}


@dataclass(frozen=True)
class Pass:
    """The tensors of one pass over a sequence, [tokens, d] each."""

    before: dict[str, Tensor]  # by site, as its edits find them
    after: dict[str, Tensor]  # as they leave them
    hidden: Tensor  # what lm_head multiplies


def passed(oracle: hf.Model, ids: Sequence[int], edits: Any, prompt_len: int) -> Pass:
    """One pass, teacher-forced. The oracle edits in hooks of its own, around which these stand."""
    trunk, family = find_trunk(oracle.model, "transformers")
    kept: dict[tuple[str, bool], Tensor] = {}
    hooks = []
    for site in oracle.engine.sites:
        module, side = family.find(trunk, "transformers", *parse(site))
        for last in (False, True):

            def keep(_module: Any, args: Any, out: Any = None, *, at: Any = (site, last)) -> None:
                found = args if out is None else out
                x = found[0] if isinstance(found, tuple) else found
                kept[at] = x.reshape(-1, x.shape[-1]).clone()

            register = module.register_forward_pre_hook if side == "in" else module.register_forward_hook
            hooks.append(register(keep, prepend=not last))

    def keep_hidden(_module: Any, args: Any) -> None:
        kept["", True] = args[0][0].clone()

    hooks.append(oracle.model.lm_head.register_forward_pre_hook(keep_hidden))
    try:
        oracle.logits(ids, steer={"edits": edits}, prompt_len=prompt_len)
    finally:
        for hook in hooks:
            hook.remove()
    hidden = kept.pop(("", True))
    before, after = ({site: x for (site, last), x in kept.items() if last == wanted} for wanted in (False, True))
    return Pass(before, after, hidden)


def positions_of(scope: Any, prompt_len: int, end: int) -> list[int]:
    """The positions below ``end`` of a scope, in its words."""
    scope = scope or {}
    found = set(range(end))
    if "positions" in scope:
        found = set()
        for lo, hi in scope["positions"]:
            first = lo + prompt_len if lo < 0 else lo
            last = (prompt_len if lo < 0 else end) if hi is None else hi + prompt_len if hi < 0 else hi
            found.update(range(max(0, first), min(last, end)))
    either = "prompt" in scope or "generated" in scope
    prompt = scope.get("prompt", not scope.get("generated")) if either else True
    generated = scope.get("generated", not scope.get("prompt")) if either else True
    return [
        at for at in sorted(found) if at >= scope.get("skip_first", 0) and (prompt if at < prompt_len else generated)
    ]


def check_reads(
    oracle: hf.Model, prompt: Sequence[int], choice: Any, returns: Any, edits: Any = (), cached: int = 0
) -> None:
    """A choice has read what Transformers computes: each position of each scope once, and no other.

    Args:
        oracle: Transformers' model.
        prompt: its tokens.
        choice: vLLM's CompletionOutput.
        returns: ``return`` of the request.
        edits: of the request.
        cached: tokens from the prefix cache, which reads with ``skip`` leave out and name.
    """
    ids = [*prompt, *choice.token_ids[:-1]]
    made = passed(oracle, ids, [*edits], len(prompt))

    def expected(one: Any, default: Any) -> list[int]:
        found = positions_of(one.get("scope", default), len(prompt), len(ids))
        return [at for at in found if one.get("cached") != "skip" or at >= cached]

    def told(word: str, count: int) -> Iterator[Any]:
        entries = choice.saesteer[word]
        assert len(entries) == count, (word, len(entries))
        asked = [returns[word]] if word == "hidden" else returns[word]
        for one, entry in zip(asked, entries, strict=True):
            one = one if isinstance(one, dict) else {}
            own = positions_of(one.get("scope", {} if word == "activations" else generated), len(prompt), len(ids))
            left_out = {at for at in own if at < cached} if one.get("cached") == "skip" else set()
            assert {at for lo, hi in entry.get("cached", ()) for at in range(lo, hi)} == left_out, (word, one)
        return iter(entries)

    generated = {"generated": True}
    found = told("features", len(returns["features"])) if "features" in returns else iter(())
    for one in returns.get("features", ()):
        entry = next(found)
        name, layer = one["dictionary"], one.get("layer")
        assert (entry["dictionary"], entry.get("layer"), entry["at"]) == (name, layer, one.get("at", "before"))
        coder, info = oracle.coder(name, layer), oracle.info(name, layer)
        assert entry["site"] == canonical(str(info.site_in))
        x = inputs(info, getattr(made, entry["at"]))
        at = expected(one, generated)
        assert [row["position"] for row in entry["rows"]] == at, name
        named, top_k = one.get("features", ()), one.get("top_k", 0 if "features" in one else 8)
        for row, here in zip(entry["rows"], at, strict=True):
            assert row.keys() == {"position"} | ({"top"} if top_k else set()) | ({"features"} if named else set())
            check_features(coder, x[here], row, named, top_k)

    found = told("probes", len(returns["probes"])) if "probes" in returns else iter(())
    for one in returns.get("probes", ()):
        entry = next(found)
        one = {"probe": one} if isinstance(one, str) else one
        name = one["probe"]
        (only, *others) = VECTORS[name]
        site = one.get("site", f"resid_post.{only}")
        assert (entry["probe"], entry["site"], entry["at"]) == (name, site, one.get("at", "before"))
        assert entry["positions"] == expected(one, generated)
        vector = VECTORS[name][parse(site)[1] if others else only].astype(np.float64)
        for at, score in zip(entry["positions"], entry["scores"], strict=True):
            x = getattr(made, entry["at"])[site][at].double().cpu().numpy()
            size = float(np.linalg.norm(x) * np.linalg.norm(vector))
            assert abs(score - (x @ vector + BIASES[name])) < CLOSE / 10 * size, (entry["probe"], at)

    found = told("activations", len(returns["activations"])) if "activations" in returns else iter(())
    for one in returns.get("activations", ()):
        entry = next(found)
        site, how = one["site"], one.get("reduce", "none")
        assert (entry["site"], entry["at"]) == (site, one.get("at", "before"))
        at = expected(one, {})
        rows = getattr(made, entry["at"])[reading_site(site)][at]
        if how == "none":
            check_rows(entry, at, rows)
        elif not at:
            assert (entry["tokens"], entry["positions"], entry["shape"]) == (0, [], [0, 0])
        else:
            got = entry["tokens"], entry["positions"]
            assert got == (len(at), [at[0], at[-1] + 1]), (site, how, got, len(prompt), len(ids), at[0], at[-1])
            reduced = {"mean": rows.mean(0), "max": rows.amax(0), "last": rows[-1]}[how]
            off = (torch.from_numpy(tensor(entry)[0].copy()) - reduced.cpu()).abs().max()
            assert float(off) < CLOSE * float(rows.abs().max()), (site, how)

    hidden = returns.get("hidden")
    if hidden:
        (entry,) = told("hidden", 1)
        at = [len(ids) - 1] if hidden is True else expected(hidden, {})
        check_rows(entry, at, made.hidden[at])


def check_rows(entry: Any, at: list[int], rows: Tensor) -> None:
    """A tensor of these positions."""
    assert entry["positions"] == at
    if not at:
        assert entry["shape"] == [0, 0]
        return
    for here, got, row in zip(at, tensor(entry), rows, strict=True):
        off = float((torch.from_numpy(got.copy()) - row.cpu()).abs().max())
        assert off < CLOSE * float(row.abs().max()), (entry.get("site"), here, off)


def check_features(coder: SparseCoder, x: Tensor, row: Any, named: Sequence[int], top_k: int) -> None:
    """One token's features: equal values, and those listed that are strongest, but for ties."""
    f, pre = coder.encode(x[None])[0].cpu(), coder.pre(x[None])[0].cpu()
    bound = CLOSE * max(1.0, float(pre.abs().max()))
    edge = torch.zeros_like(pre) if coder.threshold is None else coder.threshold.cpu()
    k = coder.info.k
    magnitude = coder.info.activation == "abstopk"
    key = pre.abs() if magnitude else pre
    if coder.info.activation == "groupmax":
        assert k is not None
        best = key.view(k, -1).topk(2).values  # of each group, the strongest and its rival
        edge = best[:, :1].expand(k, len(key) // k).reshape(-1)
        near = (best[:, 0] - best[:, 1]).repeat_interleave(len(key) // k).abs() < 2 * bound
        unsure = (near & ((key - edge).abs() < 2 * bound)) | (pre.abs() < bound)
    else:
        unsure = torch.zeros_like(pre, dtype=torch.bool) if magnitude else (pre - edge).abs() < bound
        if k is not None:  # the last that has a rank, and the first that has none
            last, first = key.topk(k + 1).values[-2:].tolist()
            if last - first < bound:
                unsure |= ((key - last).abs() < 2 * bound) | ((key - first).abs() < 2 * bound)
    rows = {feature: coder.info.row_of(feature) if coder.info.feature_ids else feature for feature in named}
    for feature, at in rows.items():
        off = abs(row["features"][str(feature)] - float(f[at]))
        assert off < bound or bool(unsure[at]), (feature, off)
    if not top_k:
        return
    listed = row["top"]
    of = {coder.info.row_of(i) if coder.info.feature_ids else i: value for i, value in listed}
    assert len(of) == len(listed) <= top_k, "none twice"
    size = {at: abs(value) if magnitude else value for at, value in of.items()}
    assert [*size.values()] == sorted(size.values(), reverse=True)
    for at, value in of.items():
        assert abs(value - float(pre[at])) < bound and (f[at] != 0 or bool(unsure[at])), (at, value)
    sure = ((f != 0) & ~unsure).nonzero()[:, 0].tolist()
    least = min(size.values(), default=0.0) if len(of) == top_k else float("-inf")
    missing = [at for at in sure if at not in of and float(key[at]) > least + bound]
    assert not missing, missing
