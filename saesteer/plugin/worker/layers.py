"""Where the layers of a vLLM model offer the sites, and how the op gets there. Knows norms and streams, not requests.

A vLLM decoder layer passes (hidden, residual) on, and the norm that consumes them returns (normed, stream). So the op
goes around norms, whose class is swapped on the instance: names of parameters, LoRA and draft models stay untouched.

    resid_post.L   after the norm that consumes it (layer L+1's input norm, or the final norm): there the stream is one
                   tensor that stock vLLM has already rounded, and vLLM's own fusions do not change
    resid_mid.L    before the norm that consumes it: the stream is still the sum of two tensors
    resid_pre.0    before layer 0's input norm: the embedding
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
from saesteer.models.families import Family, find_trunk


class _Edited(nn.Module):
    """Mixin of a swapped norm. Its tensors are buffers, so compiled graphs take them as inputs with fixed addresses."""

    saesteer_index: Tensor
    saesteer_counts: Tensor
    saesteer_steps: Tensor
    saesteer_published: Tensor
    saesteer_weight_offset: float
    saesteer_last: bool
    weight: Tensor
    variance_epsilon: float

    def edit(self, stream: Tensor, second: Tensor | None, form: int) -> None:
        """Call the op on the stream of this norm's site; after the last site, publish the counts."""
        weight = self.weight.data if form == layout.NORMED else None
        counts, site = self.saesteer_counts, self.saesteer_index
        eps, offset = self.variance_epsilon, self.saesteer_weight_offset
        torch.ops.saesteer.edit_(stream, second, weight, counts, site, form, eps, offset)
        if self.saesteer_last:
            torch.ops.saesteer.publish_(counts, site, self.saesteer_steps, self.saesteer_published)


class _AfterNorm(_Edited):
    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        normed, stream = super().forward(x, residual)
        self.edit(stream, normed, layout.NORMED)
        return normed, stream


class _BeforeNorm(_Edited):
    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        if residual is None:
            self.edit(x, None, layout.BARE)
        else:
            self.edit(residual, x, layout.PAIR)
        return super().forward(x, residual)


def attach(model: nn.Module, engine: Engine) -> None:
    """Put the op at every site of the engine.

    Raises:
        UnsupportedError: the model's family or a norm is not known.
    """
    trunk, family = find_trunk(model, "vllm")
    for site in engine.sites.values():
        norm, mixin = _place(trunk, family, site)
        _swap(norm, mixin, site, engine)


def warm_up(model: nn.Module, engine: Engine) -> None:
    """Compile every kernel that a step can launch, before a step does; there is nothing to do on a CPU."""
    if engine.device.type != "cuda":
        return
    trunk, family = find_trunk(model, "vllm")
    with engine.warming() as sizes:
        for site in engine.sites.values():
            norm: Any = _place(trunk, family, site)[0]
            for tokens in sizes:
                stream = torch.zeros(tokens, engine.width, dtype=site.w_enc.dtype, device=engine.device)
                forms = (layout.NORMED,) if isinstance(norm, _AfterNorm) else (layout.PAIR, layout.BARE)
                for form in forms:
                    norm.edit(stream, None if form == layout.BARE else stream.clone(), form)
            # These calls are ours: only the model's own forward pass counts.
            ops.hits.pop(site.index.data_ptr(), None)
        ops.hits.pop(engine.published.data_ptr(), None)


def _place(trunk: Any, family: Family, site: Site) -> tuple[nn.Module, type[_Edited]]:
    norm, side = family.find(trunk, "vllm", *parse(site.name))
    return norm, _AfterNorm if side == "out" else _BeforeNorm


def _swap(norm: nn.Module, mixin: type[_Edited], site: Site, engine: Engine) -> None:
    if type(norm) not in (RMSNorm, GemmaRMSNorm):
        raise UnsupportedError(f"the norm at {site.name} is a {type(norm).__name__}, expected RMSNorm or GemmaRMSNorm")
    # The graph reads four of them. vLLM's sleep mode, at level 2, restores only buffers.
    held = {field.name: getattr(site, field.name) for field in fields(site)}
    held |= {"counts": engine.counts, "steps": engine.steps, "published": engine.published}
    for name, tensor in held.items():
        if isinstance(tensor, Tensor):
            norm.register_buffer(f"saesteer_{name}", tensor, persistent=False)
    cls = type(norm)
    norm.__class__ = type(f"Edited{cls.__name__}", (mixin, cls), {})
    edited: Any = norm
    edited.saesteer_weight_offset = 1.0 if cls is GemmaRMSNorm else 0.0
    edited.saesteer_last = site is list(engine.sites.values())[-1]
