"""`saesteer inspect --measure`: how well a dictionary fits its model on a text. Does not know vLLM.

    L0   active features of a token, on average
    FVU  sum |y - y_hat|^2 / sum |y - mean(y)|^2: the fraction of the variance that the reconstruction leaves
    loss recovered  (loss with 0 for y - loss with y_hat) / (loss with 0 for y - loss), cross-entropies

y is what the dictionary writes to, without each token's mean where the dictionary reads that, or what a transcoder's
MLP adds. A dictionary at a wrong site, of a wrong model or read in a wrong orientation has another L0 than its files
say, and an FVU near 1 or above.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor
from torch.nn.functional import cross_entropy

from saesteer.commands.serve import check, resolve
from saesteer.commands.waiting import load_model
from saesteer.config.assets import Assets
from saesteer.config.settings import read_settings
from saesteer.dictionaries.coder import SparseCoder, inputs
from saesteer.errors import ConfigError
from saesteer.language.sites import canonical, parse
from saesteer.loaders import later
from saesteer.models.families import find_trunk
from saesteer.workbench.reads import read_text, windows_of
from saesteer.workbench.windows import blocks, first_counted, need_tokens
from saesteer.workbench.written import rounded

_NAME = "PLACE"


@dataclass(slots=True, eq=False)
class Figures:
    """What has been counted of one dictionary so far, in float64."""

    tokens: int = 0
    active: int = 0
    left: float = 0.0  # sum |y - y_hat|^2
    squares: float = 0.0  # sum |y|^2
    total: Tensor | float = 0.0  # sum y [d_out]
    recovered: float | None = None  # of the loss

    @property
    def l0(self) -> float:
        """Active features of a token, on average."""
        return self.active / self.tokens

    @property
    def fvu(self) -> float:
        """The fraction of the variance that is left."""
        mean_squares = float(torch.as_tensor(self.total).square().sum()) / self.tokens
        return self.left / (self.squares - mean_squares)

    def add(self, coder: SparseCoder, x: Tensor, y: Tensor, others: Tensor | float = 0.0) -> Tensor:
        """Count tokens, and return their features.

        Args:
            coder: the dictionary.
            x: [tokens, d_in], what it reads.
            y: [tokens, d_out], what the reconstruction is compared with.
            others: what a cross-layer transcoder's earlier layers add to the reconstruction.
        """
        f, wide = coder.encode(x), y.double()
        if coder.info.centred:
            wide -= wide.mean(1, keepdim=True)
        self.tokens += len(x)
        self.active += int((f != 0).sum())
        self.left += float((coder.decode(f, like=x).double() + others - wide).square().sum())
        self.squares += float(wide.square().sum())
        self.total = self.total + wide.sum(0)
        return f


def run(console: Console, model: str, place: str, file: Path | None, *, max_tokens: int) -> dict[str, Figures]:
    """Measure a dictionary, or each of a set, and print a table.

    Args:
        console: where to print.
        model: a folder, a hub id or `demo`; it is loaded in float32.
        place: as ``--dictionary`` takes it behind the name.
        file: plain text in UTF-8.
        max_tokens: how many tokens of the text to read.

    Raises:
        SaesteerError: the model, the dictionary or the text is invalid, or they do not fit each other.
    """
    if file is None:
        raise ConfigError("--measure needs a text that the model reads: --text-file FILE")
    text = read_text(file, max_tokens)
    config = read_settings([f"{_NAME}={place}"])
    assets = Assets.open(config)
    folder, _, _ = resolve(model, config)
    check(folder, config)
    written = sorted({info.written for info in assets.infos.values()})
    oracle = load_model(folder, config.dictionaries, written)
    windows = windows_of(oracle, text, max_tokens)
    found = measure(oracle, oracle.layers_of(_NAME), windows, console)
    table = rounded("dictionary", "tokens", "L0", "published", "FVU", "loss recovered")
    for layer, figures in found.items():
        info = oracle.info(_NAME, layer)
        l0 = "-" if info.l0 is None else f"{info.l0:g}"
        fvu = f"{figures.fvu:.3f}" if info.can_reconstruct or info.targets else "-"
        if info.can_reconstruct:
            figures.recovered = loss_recovered(
                oracle, layer, track(windows, "Reading", console=console, transient=True)
            )
        recovered = "-" if figures.recovered is None else f"{figures.recovered:.3f}"
        table.add_row(str(info.site_in), f"{figures.tokens:,}", f"{figures.l0:.1f}", l0, fvu, recovered)
    console.print(table)
    return {str(oracle.info(_NAME, layer).site_in): figures for layer, figures in found.items()}


def measure(
    oracle: Any, layers: Sequence[int | None], windows: Sequence[Sequence[int]], console: Console
) -> dict[int | None, Figures]:
    """The figures of each layer's dictionary, over windows of tokens, without the first positions of each window.

    Args:
        oracle: a ``saesteer.hf.Model`` with an op at each site that a dictionary reads or writes.
        layers: of the set; None alone for one dictionary.
        windows: token ids.
        console: where a bar shows how much of the text has been read.

    Raises:
        ConfigError: the text is too short.
    """
    found = {layer: Figures() for layer in layers}
    infos = {layer: oracle.info(_NAME, layer) for layer in layers}
    coders = {layer: (oracle.coder(_NAME, layer), info, later(info)) for layer, info in infos.items()}
    need_tokens("the text", windows, [*infos.values()], least=2)  # one alone has no variance
    for window in track(windows, "Reading", console=console, transient=True):
        streams = oracle.streams(window)
        across: defaultdict[str, Tensor] = defaultdict(lambda: torch.zeros(1))  # what layers before a site add there
        for layer, (coder, info, rows) in coders.items():
            x, y = inputs(info, streams), streams[info.written]
            others = across[info.written].expand_as(y)
            added = [torch.zeros_like(y, dtype=torch.float32) for _ in rows]
            for part in blocks(info, len(x)):
                f = found[layer].add(coder, x[part], y[part], others[part])
                for one, decoder in zip(added, rows, strict=True):
                    one[part] = f @ decoder.float()
            for site, one in zip(info.writes[1:], added, strict=True):
                across[canonical(site)] = across[canonical(site)] + one
    return found


def loss_recovered(oracle: Any, layer: int | None, windows: Iterable[Sequence[int]]) -> float:
    """The fraction of the model's loss that the reconstruction recovers, beside zeros in its place.

    Args:
        oracle: as for ``measure``.
        layer: of a set.
        windows: token ids; the first positions of each stay as they are.
    """
    info = oracle.info(_NAME, layer)
    first, which = first_counted(info), {} if layer is None else {"layer": layer}
    spec = {"op": "reconstruct", "dictionary": _NAME, **which}
    trunk, family = find_trunk(oracle.model, "transformers")
    module, side = family.find(trunk, "transformers", *parse(info.written))

    def loss(window: Sequence[int], steer: Any = None) -> float:
        logits = oracle.logits(window, steer=steer)[first:-1]
        return float(cross_entropy(logits, torch.tensor(window[first + 1 :], device=logits.device), reduction="sum"))

    def zero(_: Any, *passed: Any) -> Any:
        whole = passed[-1]  # a module's arguments, or what it returns
        found = (whole[0] if isinstance(whole, tuple) else whole).clone()
        found[:, first:] = 0
        return (found, *whole[1:]) if isinstance(whole, tuple) else found

    plain = steered = without = 0.0
    for window in windows:
        plain += loss(window)
        steered += loss(window, spec)
        hook = module.register_forward_pre_hook(zero) if side == "in" else module.register_forward_hook(zero)
        without += loss(window)
        hook.remove()
    return (without - steered) / (without - plain)
