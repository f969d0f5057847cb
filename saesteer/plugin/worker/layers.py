"""Where the layers of a vLLM model offer the sites, and how the op gets there. Knows norms and streams, not requests.

A vLLM decoder layer passes (hidden, residual) on, and the norm that consumes them returns (normed, stream). So the op
goes around modules, whose class is swapped on the instance: names of parameters, LoRA and draft models stay untouched.

    resid_post.L   after the norm that consumes it (layer L+1's input norm, or the final norm): there the stream is one
                   tensor that stock vLLM has already rounded, and vLLM's own fusions do not change
    resid_mid.L    before the norm that consumes it: the stream is still the sum of two tensors
    resid_pre.0    before layer 0's input norm: the embedding
    other kinds    the first tensor that goes into the module of the site or comes out of it
"""

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

from saesteer.engine.engine import Engine, Site
from saesteer.errors import UnsupportedError
from saesteer.kernels import layout, ops
from saesteer.language.sites import parse
from saesteer.models.families import find_trunk


class Op(nn.Module):
    """The op of one site. Its tensors are buffers, so compiled graphs take them as inputs with fixed addresses.

    Args:
        site: what it edits.
        engine: the engine of the site.
        norm: the norm that has consumed the stream, where the op comes behind it.
    """

    index: Tensor
    counts: Tensor
    steps: Tensor
    published: Tensor

    def __init__(self, site: Site, engine: Engine, norm: Any = None) -> None:
        super().__init__()
        # The graph reads four of them. vLLM's sleep mode, at level 2, restores only buffers.
        held = {field.name: getattr(site, field.name) for field in fields(site)}
        held |= {"counts": engine.counts, "steps": engine.steps, "published": engine.published}
        for name, tensor in held.items():
            if isinstance(tensor, Tensor):
                self.register_buffer(name, tensor, persistent=False)
        self.of_stream = parse(site.name)[0].startswith("resid")
        self.normed = norm is not None
        self.eps = norm.variance_epsilon if self.normed else 0.0
        self.offset = 1.0 if isinstance(norm, GemmaRMSNorm) else 0.0
        self.last = site is list(engine.sites.values())[-1]

    def forward(self, stream: Tensor, second: Tensor | None = None, weight: Tensor | None = None) -> None:
        """Edit one tensor, a stream that is the sum of two, or a stream and its norm; after the last site, publish."""
        form = layout.NORMED if self.normed else layout.BARE if second is None else layout.PAIR
        torch.ops.saesteer.edit_(stream, second, weight, self.counts, self.index, form, self.eps, self.offset)
        if self.last:
            torch.ops.saesteer.publish_(self.counts, self.index, self.steps, self.published)


class _Tapped(nn.Module):
    """Mixin of a swapped module: the ops in front of it and behind it, in the order of their sites."""

    saesteer_before: nn.ModuleList
    saesteer_after: nn.ModuleList
    weight: Tensor

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for op in self.saesteer_before:
            addend = args[1] if op.of_stream and len(args) > 1 else None
            op(*((args[0], None) if addend is None else (addend, args[0])))
        out = super().forward(*args, **kwargs)
        for op in self.saesteer_after:
            if op.normed:
                op(out[1], out[0], self.weight.data)
            else:
                op(out[0] if isinstance(out, tuple) else out)
        return out


def attach(model: nn.Module, engine: Engine) -> None:
    """Put the op at every site of the engine.

    Raises:
        UnsupportedError: the model's family or a norm is not known.
    """
    trunk, family = find_trunk(model, "vllm")
    for site in engine.sites.values():
        kind, layer = parse(site.name)
        module, side = family.find(trunk, "vllm", kind, layer)
        cls, of_stream, after = type(module), kind.startswith("resid"), side == "out"
        if not issubclass(cls, _Tapped):
            if of_stream and cls not in (RMSNorm, GemmaRMSNorm):
                found = f"the norm at {site.name} is a {cls.__name__}"
                raise UnsupportedError(f"{found}, expected RMSNorm or GemmaRMSNorm")
            module.__class__ = type(f"Tapped{cls.__name__}", (_Tapped, cls), {})
            module.saesteer_before, module.saesteer_after = nn.ModuleList(), nn.ModuleList()
        op = Op(site, engine, module if of_stream and after else None)
        (module.saesteer_after if after else module.saesteer_before).append(op)


def warm_up(model: nn.Module, engine: Engine) -> None:
    """Compile every kernel that a step can launch, before a step does; there is nothing to do on a CPU."""
    if engine.device.type != "cuda":
        return
    with engine.warming() as sizes:
        for module in (one for one in model.modules() if isinstance(one, _Tapped)):
            for op in (*module.saesteer_before, *module.saesteer_after):
                for tokens in sizes:
                    stream = torch.zeros(tokens, engine.width, dtype=engine.dtype, device=engine.device)
                    if op.normed:
                        op(stream, stream.clone(), module.weight.data)
                        continue
                    op(stream)
                    if op in module.saesteer_before and op.of_stream:
                        op(stream, stream.clone())
                # These calls are ours: only the model's own forward pass counts.
                ops.hits.pop(op.index.data_ptr(), None)
        ops.hits.pop(engine.published.data_ptr(), None)
