"""Trains a cross-layer transcoder: features of each layer read its MLP's input and write the outputs from there on.

Like tools/train_dictionary.py it keeps all tensors in memory, and trains with batch top-k over the features of all
layers together. Knows no file and no language model.
"""

import time
from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from tools.train_dictionary import BLOCK, CALIBRATION, Recipe, Scale, batches, cut


class Layer(NamedTuple):
    """The features of one layer."""

    w_enc: Tensor  # [F, d]
    b_enc: Tensor  # [F]
    w_dec: Tensor  # [targets, F, d], for this layer and each one behind it
    b_dec: Tensor  # [d], of this layer's output


class Quality(NamedTuple):
    """How good a cross-layer transcoder is on some tokens, layer by layer."""

    l0: list[float]
    fvu: list[float]
    max_act: list[Tensor]  # [F]


def started(x: Sequence[Tensor], y: Sequence[Tensor], recipe: Recipe) -> list[Layer]:
    """The layers before training, from scaled values: each feature begins as one token, and writes its own layer."""
    made = []
    for layer, (reads, writes) in enumerate(zip(x, y, strict=True)):
        chosen = torch.randint(len(reads), (recipe.features,), device=reads.device)
        w_enc, own = normalize(reads[chosen], dim=-1), normalize(writes[chosen], dim=-1)
        pre = reads[:BLOCK] @ w_enc.T
        wrote = torch.where(pre > cut(pre, recipe.k), pre, 0.0) @ own
        w_enc *= (wrote * writes[:BLOCK]).sum() / wrote.square().sum()
        w_dec = torch.zeros(len(x) - layer, *own.shape, device=own.device)
        w_dec[0] = own
        made.append(Layer(w_enc, reads.new_zeros(recipe.features), w_dec, writes.new_zeros(writes.shape[1])))
    return made


def activations(made: Sequence[Layer], x: Sequence[Tensor]) -> list[Tensor]:
    """The pre-activations [tokens, F] of each layer."""
    return [torch.addmm(one.b_enc, reads, one.w_enc.T) for one, reads in zip(made, x, strict=True)]


def written(made: Sequence[Layer], acts: Sequence[Tensor]) -> list[Tensor]:
    """What each layer's MLP should add: the sum over the layers up to it."""
    found = [one.b_dec.expand(len(acts[0]), -1) for one in made]
    for layer, (one, active) in enumerate(zip(made, acts, strict=True)):
        for behind, rows in enumerate(one.w_dec):
            found[layer + behind] = found[layer + behind] + active @ rows
    return found


def train(
    x: Sequence[Tensor], y: Sequence[Tensor], recipe: Recipe, say: Callable[[str], object] = print
) -> list[Layer]:
    """Train a transcoder of raw values, whose features have activations as long as what they write, scaled.

    Args:
        x: what each layer reads [tokens, d], float32 or bfloat16, consecutive layers.
        y: what its MLP adds.
        recipe: how; ``features`` and ``k`` are for each layer.
        say: called with lines on the progress.
    """
    torch.manual_seed(recipe.seed)
    device, tokens = x[0].device, len(x[0])
    some = torch.randint(tokens, (min(tokens, 1 << 18),), device=device)
    scales = [[Scale.of(one[some].float()) for one in side] for side in (x, y)]

    def scaled(rows: Tensor) -> list[list[Tensor]]:
        sides = zip((x, y), scales, strict=True)
        return [[scale.scaled(one[rows].float()) for one, scale in zip(side, of, strict=True)] for side, of in sides]

    reads, writes = scaled(some)
    made = started(reads, writes, recipe)
    weights = [one.requires_grad_() for one in chain.from_iterable(made)]
    adam = torch.optim.Adam(weights, lr=recipe.rate, fused=device.type == "cuda")
    falling = max(1.0, recipe.decay * recipe.steps)
    rate = torch.optim.lr_scheduler.LambdaLR(
        adam, lambda step: min(1.0, (step + 1) / recipe.warm_up, (recipe.steps - step) / falling)
    )
    start = time.monotonic()
    for step, rows in zip(range(1, recipe.steps + 1), batches(tokens, recipe.batch, device), strict=False):
        reads, writes = scaled(rows)
        pre = torch.cat(activations(made, reads), dim=1)
        acts = torch.split(torch.where(pre > cut(pre, recipe.k * len(made)), pre, 0.0), recipe.features, dim=1)
        errors = [one - other for one, other in zip(written(made, acts), writes, strict=True)]
        loss = torch.stack([error.square().mean() for error in errors]).mean()
        adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        with torch.no_grad():
            adam.step()
            rate.step()
            for one in made:
                one.w_dec.div_(one.w_dec.square().sum((0, 2), keepdim=True).sqrt())
        if step % max(1, recipe.steps // 40) == 0:
            say(f"step {step:,}: FVU {loss.item():.4f}, {time.monotonic() - start:.0f} s")
    return [_raw(one, layer, *scales) for layer, one in enumerate(made)]


@torch.no_grad()
def _raw(one: Layer, layer: int, reads: Sequence[Scale], writes: Sequence[Scale]) -> Layer:
    """A layer of raw values, its matrices rounded to bf16: the biases take away the means exactly."""
    w_enc = (one.w_enc / reads[layer].length).bfloat16().float()
    lengths = torch.stack([scale.length for scale in writes[layer:]])
    w_dec = (one.w_dec * lengths[:, None, None]).bfloat16().float()
    b_dec = writes[layer].mean + writes[layer].length * one.b_dec
    return Layer(w_enc, one.b_enc - w_enc @ reads[layer].mean, w_dec, b_dec)


@torch.no_grad()
def threshold(made: Sequence[Layer], x: Sequence[Tensor], k: int) -> float:
    """The threshold at which a token has k active features in each layer, on average."""
    some = torch.randperm(len(x[0]), device=x[0].device)[: CALIBRATION // 4]
    parts = [torch.cat(activations(made, [one[part].float() for one in x]), 1) for part in torch.split(some, BLOCK)]
    return float(torch.stack([cut(part, k * len(made)) for part in parts]).mean())


@torch.no_grad()
def measure(made: Sequence[Layer], above: float, x: Sequence[Tensor], y: Sequence[Tensor]) -> Quality:
    """L0, FVU and the largest activations of each layer."""
    means = [one.float().mean(0) for one in y]
    active, left, whole = torch.zeros(3, len(made), dtype=torch.float64)
    largest = [torch.zeros_like(one.b_enc) for one in made]
    for part in torch.split(torch.arange(len(x[0]), device=x[0].device), BLOCK):
        pre = activations(made, [one[part].float() for one in x])
        acts = [torch.where(one > above, one, 0.0) for one in pre]
        for layer, (out, raw) in enumerate(zip(written(made, acts), y, strict=True)):
            largest[layer] = torch.maximum(largest[layer], acts[layer].amax(0))
            active[layer] += int((acts[layer] > 0).sum())
            left[layer] += float((out - raw[part].float()).square().sum(dtype=torch.float64))
            whole[layer] += float((raw[part].float() - means[layer]).square().sum(dtype=torch.float64))
    return Quality((active / len(x[0])).tolist(), (left / whole).tolist(), largest)
