"""Trains an SAE or a skip transcoder on a language model's own texts, on one GPU in minutes. Knows no engine.

`python -m tools.train_dictionary --kind transcoder --layer 12 --texts texts.npy --out FILE.safetensors` reads the input
and output of an MLP (for an SAE, resid_post) on all texts, keeps them in GPU memory, and trains with batch top-k: of a
batch, the k strongest activations a token on average count. What is saved has one threshold instead, which gives the
same number of active features, the project's own format, and how good it is on texts that it was not trained on.
"""

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from saesteer.dictionaries.coder import CoderInfo, SparseCoder
from saesteer.language.sites import parse
from saesteer.loaders.formats import own
from saesteer.model import ensure_model
from saesteer.models.families import find_trunk
from tools.feature_report import report
from tools.own_texts import kept

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
SITES = {"transcoder": ("mlp_in", "mlp_out"), "sae": ("resid_post", "resid_post")}
BLOCK = 4096  # tokens encoded at a time, where nothing is trained
HELD_OUT = 50  # one text of so many
CALIBRATION = 1 << 18  # tokens that the threshold is measured on
SAMPLE = 8  # one token of so many tells where a batch's k-th activation lies
LOOK_FOR_DEAD = 64  # steps


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a dictionary is trained."""

    features: int = 9216
    k: int = 32  # active features of a token, on average
    skip: bool = True
    steps: int = 24_000
    batch: int = 8192  # tokens
    rate: float = 3e-4  # of Adam
    warm_up: int = 500  # steps
    decay: float = 0.7  # of the steps, at the end, in which the rate falls to 0
    dead_after: int = 1 << 20  # tokens on which a feature was not active
    aux: float = 1 / 32  # weight of the loss that revives dead features
    aux_k: int = 256  # dead features that are active in it
    seed: int = 0


class Pairs(NamedTuple):
    """What a dictionary reads and what it should write, token by token."""

    x: Tensor  # [tokens, d_in] float32
    y: Tensor  # [tokens, d_out] float32; of an SAE, x itself


class Scale(NamedTuple):
    """Raw values are ``mean + length * scaled``; scaled ones have mean 0 and, over all dimensions, variance 1."""

    mean: Tensor  # [d]
    length: Tensor  # []

    @classmethod
    def of(cls, raw: Tensor) -> "Scale":
        mean = raw.mean(0)
        return cls(mean, (raw - mean).square().mean().sqrt())

    def scaled(self, raw: Tensor) -> Tensor:
        return (raw - self.mean) / self.length


class Trained(NamedTuple):
    """A dictionary of scaled values."""

    w_enc: Tensor  # [F, d_in]
    b_enc: Tensor  # [F]
    w_dec: Tensor  # [F, d_out], rows of length 1
    b_dec: Tensor  # [d_out]
    w_skip: Tensor | None  # [d_out, d_in]


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """How good a dictionary is on some tokens."""

    tokens: int
    l0: float  # active features of a token
    fvu: float  # fraction of variance unexplained: |y - y_hat|² / |y - mean(y)|², each summed over the tokens
    density: Tensor  # [F] fraction of the tokens on which a feature is active
    max_act: Tensor  # [F]

    @property
    def dead(self) -> int:
        return int((self.max_act == 0).sum())


@torch.no_grad()
def harvest(model: Any, tokens: Tensor, keep: Tensor, sites: Sequence[str]) -> dict[str, Tensor]:
    """The model's tensors at some sites, float32, at the tokens that count.

    Args:
        model: a Transformers causal language model, which loses the layers behind the sites.
        tokens: [texts, length] int64, on the CPU.
        keep: [texts, length] bool: the tokens that count, in this order.
        sites: where dictionaries read and write, such as ``("mlp_in.12", "mlp_out.12")``.
    """
    trunk, family = find_trunk(model, "transformers")
    caught: dict[str, Tensor] = {}
    for site in set(sites):
        module, side = family.find(trunk, "transformers", *parse(site))
        if side == "in":
            module.register_forward_pre_hook(lambda _m, args, site=site: caught.update({site: args[0]}))
        else:
            module.register_forward_hook(
                lambda _m, _i, out, site=site: caught.update({site: out[0] if isinstance(out, tuple) else out})
            )
    layers = getattr(trunk, family.layers)
    setattr(trunk, family.layers, layers[: max(parse(site)[1] for site in sites) + 1])
    width, device = model.config.get_text_config().hidden_size, model.device
    made = {site: torch.empty(int(keep.sum()), width, device=device) for site in sites}
    rows, done = max(1, 65_536 // tokens.shape[1]), 0
    for start in range(0, len(tokens), rows):
        part = slice(start, start + rows)
        trunk(tokens[part].to(device), use_cache=False)
        mask = keep[part].to(device)
        count = int(mask.sum())
        for site in made:
            made[site][done : done + count] = caught[site][mask].float()
        done += count
    return made


def cut(pre: Tensor, k: int) -> Tensor:
    """The value above which a token has k of the pre-activations [tokens, F], on average; not below 0.

    A sample of the tokens tells it, in a tenth of the time.
    """
    sample = pre.detach()[::SAMPLE]
    count = k * len(sample)
    if count >= sample.numel():
        return pre.new_zeros(())
    return sample.flatten().topk(count, sorted=False).values.min().clamp_min(0)


def started(x: Tensor, y: Tensor, recipe: Recipe) -> Trained:
    """The dictionary before training, from scaled values of many tokens.

    The skip connection is the linear map with the least squared error. Each feature begins as one token: it reads that
    token's direction and writes the direction that is missing there. So features begin where the tokens are, and few
    of them die. An SAE's encoder is thereby the transpose of its decoder, times the one number that gives the least
    error: many features are alike, and what they write adds up.
    """
    w_skip = None
    if recipe.skip:
        ridge = 1e-3 * len(x) * torch.eye(x.shape[1], device=x.device)
        w_skip = torch.linalg.solve(x.T @ x + ridge, x.T @ y).T.contiguous()
        y = y - x @ w_skip.T
    chosen = torch.randint(len(x), (recipe.features,), device=x.device)
    w_enc, w_dec = (torch.nn.functional.normalize(part[chosen], dim=-1) for part in (x, y))
    pre = x[:BLOCK] @ w_enc.T
    wrote = torch.where(pre > cut(pre, recipe.k), pre, 0.0) @ w_dec
    w_enc *= (wrote * y[:BLOCK]).sum() / wrote.square().sum()
    return Trained(w_enc, x.new_zeros(recipe.features), w_dec, y.new_zeros(y.shape[1]), w_skip)


def batches(tokens: int, size: int, device: torch.device) -> Iterator[Tensor]:
    """Without end, the numbers of a batch's tokens, all tokens once in each round."""
    while True:
        yield from torch.split(torch.randperm(tokens, device=device)[: max(1, tokens // size) * size], size)


def train(pairs: Pairs, recipe: Recipe, say: Callable[[str], object] = print) -> tuple[Trained, Scale, Scale]:
    """Train a dictionary.

    Args:
        pairs: what it is trained on.
        recipe: how.
        say: called with lines on the progress: the loss, which is the FVU of the batch, and the dead features.

    Returns:
        The dictionary, and the scales of its input and its output.
    """
    torch.manual_seed(recipe.seed)
    device = pairs.x.device
    some = torch.randint(len(pairs.x), (min(len(pairs.x), 1 << 20),), device=device)
    scale_in, scale_out = Scale.of(pairs.x[some]), Scale.of(pairs.y[some])
    made = started(scale_in.scaled(pairs.x[some]), scale_out.scaled(pairs.y[some]), recipe)
    weights = [one.requires_grad_() for one in made if one is not None]
    adam = torch.optim.Adam(weights, lr=recipe.rate, fused=device.type == "cuda")
    falling = max(1.0, recipe.decay * recipe.steps)
    rate = torch.optim.lr_scheduler.LambdaLR(
        adam, lambda step: min(1.0, (step + 1) / recipe.warm_up, (recipe.steps - step) / falling)
    )
    active_at = torch.zeros(recipe.features, dtype=torch.int64, device=device)  # step
    dead = active_at[:0]
    start = time.monotonic()
    for step, rows in zip(range(1, recipe.steps + 1), batches(len(pairs.x), recipe.batch, device), strict=False):
        x, y = scale_in.scaled(pairs.x[rows]), scale_out.scaled(pairs.y[rows])
        pre = torch.addmm(made.b_enc, x, made.w_enc.T)
        acts = torch.where(pre > cut(pre, recipe.k), pre, 0.0)
        error = y - made.b_dec - acts @ made.w_dec
        if made.w_skip is not None:
            error = error - x @ made.w_skip.T
        fvu = error.square().mean()
        loss = fvu + recipe.aux * revival(made, x, error.detach(), dead, recipe.aux_k) if len(dead) else fvu
        adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            grad, w_dec = made.w_dec.grad, made.w_dec
            assert grad is not None
            grad -= (grad * w_dec).sum(-1, keepdim=True) * w_dec  # a change of length would be undone below
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            adam.step()
            rate.step()
            w_dec /= w_dec.norm(dim=-1, keepdim=True)
            active_at[(acts > 0).any(0)] = step
            if step % LOOK_FOR_DEAD == 0:
                dead = (active_at <= step - math.ceil(recipe.dead_after / recipe.batch)).nonzero().flatten()
        if step % max(1, recipe.steps // 40) == 0:
            say(f"step {step:,}: FVU {fvu.item():.4f}, {len(dead):,} dead, {time.monotonic() - start:.0f} s")
    done = made._replace(**{name: one.detach() for name, one in made._asdict().items() if one is not None})
    return done, scale_in, scale_out


def revival(made: Trained, x: Tensor, error: Tensor, dead: Tensor, k: int) -> Tensor:
    """How much of the error [tokens, d_out] the dead features alone leave, if the k strongest of a token are active."""
    pre = torch.addmm(made.b_enc[dead], x, made.w_enc[dead].T)
    acts = torch.where(pre > cut(pre, k), pre, 0.0)
    return (error - acts @ made.w_dec[dead]).square().mean() / error.square().mean()


@torch.no_grad()
def finished(made: Trained, scale_in: Scale, scale_out: Scale, info: CoderInfo, x: Tensor, k: int) -> SparseCoder:
    """The dictionary of raw values, in bf16, with the threshold at which a token of x has k active features.

    Decoder rows keep length 1, so a feature's activation is the length of what it writes. The biases belong to the
    rounded weights: they take away the means exactly.
    """
    gain = scale_out.length / scale_in.length
    w_enc = (made.w_enc * gain).bfloat16()
    b_enc = made.b_enc * scale_out.length - w_enc.float() @ scale_in.mean
    b_dec = scale_out.mean + scale_out.length * made.b_dec
    w_skip = None
    if made.w_skip is not None:
        w_skip = (made.w_skip * gain).bfloat16()
        b_dec = b_dec - w_skip.float() @ scale_in.mean
    none = torch.zeros_like(b_enc)
    info = replace(info, skip=w_skip is not None)
    coder = SparseCoder(
        w_enc=w_enc, b_enc=b_enc, w_dec=made.w_dec.bfloat16(), b_dec=b_dec, info=info, threshold=none, w_skip=w_skip
    )
    some = x[torch.randperm(len(x), device=x.device)[:CALIBRATION]]
    threshold = torch.stack([cut(coder.pre(part), k) for part in torch.split(some, BLOCK)]).mean()
    return replace(coder, threshold=threshold.expand(info.features).clone())


@torch.no_grad()
def measure(coder: SparseCoder, pairs: Pairs) -> Measured:
    """L0, FVU and the features' densities and largest activations on these tokens."""
    tokens, features = len(pairs.x), coder.info.features
    mean = pairs.y.mean(0)
    active, largest = torch.zeros(2, features, device=pairs.x.device)
    unexplained = variance = 0.0
    for x, y in zip(torch.split(pairs.x, BLOCK), torch.split(pairs.y, BLOCK), strict=True):
        acts = coder.encode(x)
        active += (acts > 0).sum(0)
        largest = torch.maximum(largest, acts.amax(0))
        unexplained += (y - coder.decode(acts, like=x)).square().sum(dtype=torch.float64).item()
        variance += (y - mean).square().sum(dtype=torch.float64).item()
    return Measured(tokens, active.sum().item() / tokens, unexplained / variance, active / tokens, largest)


def on(coder: SparseCoder, device: str, info: CoderInfo, max_act: Tensor) -> SparseCoder:
    """The dictionary on a device, with its largest activations."""
    names = ("w_enc", "b_enc", "w_dec", "b_dec", "threshold", "w_skip")
    held = {name: getattr(coder, name) for name in names}
    moved: dict[str, Any] = {name: None if one is None else one.to(device) for name, one in held.items()}
    return SparseCoder(**moved, info=info, max_act=max_act.to(device))


def make(
    model: Any, tokenizer: Any, tokens: Tensor, kind: str, layer: int, recipe: Recipe, out: Path, *,
    name: str | None = None, say: Callable[[str], object] = print,
) -> Measured:  # fmt: skip
    """Train a dictionary, save it and say how good it is. Next to it stands `.features.json`: contexts of each feature.

    Args:
        model: as in ``harvest``.
        tokenizer: the model's.
        tokens: [texts, length] int64, as ``tools.own_texts`` writes them.
        kind: of SITES.
        layer: of the model.
        recipe: how to train; whether there is a skip connection follows from the kind.
        out: the file.
        name: the model's name, which the file states.
        say: called with lines on the progress.

    Returns:
        What was measured on the texts held out; but max_act, which the file has as well, is over all texts.
    """
    torch.set_float32_matmul_precision("high")  # TF32: the weights are rounded more in the end
    site_in, site_out = (f"{site}.{layer}" for site in SITES[kind])
    keep = kept(tokens, tokenizer.eos_token_id)
    begun = time.monotonic()
    streams = harvest(model, tokens, keep, (site_in, site_out))
    pairs = Pairs(streams[site_in], streams[site_out])
    # The texts held out are the last, so that they are one slice of the tokens.
    fresh = int(keep[-max(1, len(tokens) // HELD_OUT) :].sum())
    say(f"{len(pairs.x):,} tokens at {site_in}, of which {fresh:,} are held out: {time.monotonic() - begun:.0f} s")
    old, new = Pairs(*(part[:-fresh] for part in pairs)), Pairs(*(part[-fresh:] for part in pairs))
    d_in, d_out = pairs.x.shape[1], pairs.y.shape[1]
    info = CoderInfo(
        format=own.NAME, d_in=d_in, d_out=d_out, features=recipe.features, activation="jumprelu", site_in=site_in,
        site_out=site_out, model=name,
    )  # fmt: skip
    recipe = replace(recipe, skip=kind == "transcoder")
    coder = finished(*train(old, recipe, say), info, old.x, recipe.k)
    torch.set_float32_matmul_precision("highest")
    everything, found = measure(coder, pairs), measure(coder, new)
    told = {
        "l0": round(found.l0, 2), "fvu": round(found.fvu, 4), "dead": everything.dead, "held_out_tokens": found.tokens,
        "tokens": everything.tokens, "seconds": round(time.monotonic() - begun),
    }  # fmt: skip
    info = replace(coder.info, has_max_act=True)
    own.write(out, on(coder, "cpu", info, everything.max_act), measured=told | {"recipe": asdict(recipe)})
    say(f"{out}: {json.dumps(told)}")
    lines = report(coder, pairs.x, everything, model, tokenizer, tokens, keep, out.with_suffix(".features.json"))
    say(lines)
    return replace(found, max_act=everything.max_act)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=SITES, default="transcoder")
    parser.add_argument("--layer", type=int, default=12)
    parser.add_argument("--texts", type=Path, default=Path("texts.npy"), help="made by tools.own_texts if missing")
    parser.add_argument("--out", type=Path, required=True, help="the .safetensors file")
    parser.add_argument("--model", type=Path, help="a Hugging Face folder; by default the embedded model")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for field in ("features", "k", "steps", "batch", "rate", "warm_up", "decay", "dead_after", "aux", "aux_k"):
        default = getattr(Recipe(), field)
        parser.add_argument(f"--{field.replace('_', '-')}", type=type(default), default=default)
    given = vars(parser.parse_args())
    kind, layer, texts, out, folder, device = map(given.pop, ("kind", "layer", "texts", "out", "model", "device"))
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = folder or ensure_model(print)
    if not texts.is_file():  # in a process of its own, which gives the GPU's memory back
        command = [sys.executable, "-m", "tools.own_texts", "--out", str(texts), "--model", str(path)]
        subprocess.run([*command, "--device", device], check=True)
    tokens = torch.from_numpy(np.load(texts).astype(np.int64))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    name = str(path) if folder else MODEL
    make(model, tokenizer, tokens, kind, layer, Recipe(**given), out, name=name)


if __name__ == "__main__":
    main()
