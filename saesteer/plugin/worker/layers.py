"""Where the layers of a vLLM model offer the sites, and how the op gets there. Knows norms and streams, not requests.

In most families a vLLM decoder layer passes (hidden, residual) on, and the norm that consumes them returns (normed,
stream). So the op goes around norms, whose class is swapped on the instance: names of parameters, LoRA and draft models
stay untouched.

    resid_post.L   after the norm that consumes it (layer L+1's input norm, or the final norm): there the stream is one
                   tensor that stock vLLM has already rounded, and vLLM's own fusions do not change
    resid_mid.L    before the norm that consumes it: the stream is still the sum of two tensors
    resid_pre.0    before layer 0's input norm: the embedding

In the others the stream is one tensor everywhere. The op goes before the first module that reads it at a site: all that
comes behind, the addition of the layer's part included, reads the same tensor.
"""

import inspect
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
    """Mixin of a swapped module. Its tensors are buffers: compiled graphs take them as inputs with fixed addresses."""

    saesteer_index: Tensor
    saesteer_counts: Tensor
    saesteer_steps: Tensor
    saesteer_published: Tensor
    saesteer_weight_offset: float
    saesteer_last: bool
    saesteer_argument: int
    weight: Tensor
    variance_epsilon: float

    def edit(self, stream: Tensor, second: Tensor | None, form: int) -> None:
        """Call the op on the stream of this module's site; after the last site, publish the counts."""
        counts, site = self.saesteer_counts, self.saesteer_index
        weight, eps = (self.weight.data, self.variance_epsilon) if form == layout.NORMED else (None, 0.0)
        torch.ops.saesteer.edit_(stream, second, weight, counts, site, form, eps, self.saesteer_weight_offset)
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


class _BeforeModule(_Edited):
    """Not by ``forward``: vLLM puts another one on instances of Transformers' modules."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stream = kwargs["hidden_states"] if "hidden_states" in kwargs else args[self.saesteer_argument]
        self.edit(stream.view(-1, stream.shape[-1]), None, layout.BARE)
        return super().__call__(*args, **kwargs)


_FORMS: dict[type[_Edited], tuple[int, ...]] = {
    _AfterNorm: (layout.NORMED,),
    _BeforeNorm: (layout.PAIR, layout.BARE),
    _BeforeModule: (layout.BARE,),
}


def attach(model: nn.Module, engine: Engine) -> None:
    """Put the op at every site of the engine.

    Raises:
        UnsupportedError: the model's family or a norm is not known, the family has no such site, or an option of vLLM
            makes its layers others.
    """
    trunk, family = find_trunk(model, "vllm")
    for layer in getattr(trunk, family.layers):
        _refuse(layer, family)
    for site in engine.sites.values():
        module, mixin = _place(trunk, family, site)
        _swap(module, mixin, site, engine)


def _refuse(layer: nn.Module, family: Family) -> None:
    found = {
        "Transformers' layers (--model-impl transformers)": family.fused
        and type(layer).__module__.startswith("transformers."),
        # Each rank has its own part of the stream's tokens, and the work list counts all.
        "sequence-parallel experts": getattr(layer, "use_attn_reduce_scatter_for_moe", False),
    }
    for option, on in found.items():
        if on:
            raise UnsupportedError(f"saesteer cannot serve {family.name} with {option} in this version; switch it off")


def warm_up(model: nn.Module, engine: Engine) -> None:
    """Compile every kernel that a step can launch, before a step does; there is nothing to do on a CPU."""
    if engine.device.type != "cuda":
        return
    trunk, family = find_trunk(model, "vllm")
    with engine.warming() as sizes:
        for site in engine.sites.values():
            module: Any
            module, mixin = _place(trunk, family, site)
            for tokens in sizes:
                stream = torch.zeros(tokens, engine.width, dtype=site.w_enc.dtype, device=engine.device)
                for form in _FORMS[mixin]:
                    module.edit(stream, None if form == layout.BARE else stream.clone(), form)
            # These calls are ours: only the model's own forward pass counts.
            ops.hits.pop(site.index.data_ptr(), None)
        ops.hits.pop(engine.published.data_ptr(), None)


def _place(trunk: Any, family: Family, site: Site) -> tuple[nn.Module, type[_Edited]]:
    module, side = family.find(trunk, "vllm", *parse(site.name))
    return module, (_AfterNorm if side == "out" else _BeforeNorm) if family.fused else _BeforeModule


def _swap(module: nn.Module, mixin: type[_Edited], site: Site, engine: Engine) -> None:
    cls = type(module)
    if mixin is not _BeforeModule and cls not in (RMSNorm, GemmaRMSNorm):
        raise UnsupportedError(f"the norm at {site.name} is a {cls.__name__}, expected RMSNorm or GemmaRMSNorm")
    # The graph reads four of them. vLLM's sleep mode, at level 2, restores only buffers.
    held = {field.name: getattr(site, field.name) for field in fields(site)}
    held |= {"counts": engine.counts, "steps": engine.steps, "published": engine.published}
    for name, tensor in held.items():
        if isinstance(tensor, Tensor):
            module.register_buffer(f"saesteer_{name}", tensor, persistent=False)
    names = list(inspect.signature(module.forward).parameters)
    module.__class__ = type(f"Edited{cls.__name__}", (mixin, cls), {})
    edited: Any = module
    edited.saesteer_weight_offset = 1.0 if cls is GemmaRMSNorm else 0.0
    edited.saesteer_last = site is list(engine.sites.values())[-1]
    edited.saesteer_argument = names.index("hidden_states") if "hidden_states" in names else 0
