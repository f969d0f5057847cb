"""Where the layers of a vLLM model offer the sites, and how the op gets there. Knows norms and streams, not requests.

In most families a vLLM decoder layer passes (hidden, residual) on, and the norm that consumes them returns (normed,
stream). The op goes around modules, whose class is swapped on the instance: names of parameters, LoRA and draft models
stay untouched.

    resid_post.L   after the norm that consumes it (layer L+1's input norm, or the final norm): there the stream is one
                   tensor that stock vLLM has already rounded, and vLLM's own fusions do not change
    resid_mid.L    before the norm that consumes it: the stream is still the sum of two tensors
    resid_pre.0    before layer 0's input norm: the embedding
    other kinds    the tensor that goes into the module of the site or comes out of it; where each rank of tensor
                   parallelism has a part of that tensor, all ranks gather it, edit it alike, and keep their part

In the others the stream is one tensor everywhere. The op goes before the first module that reads it at a site: all that
comes behind, the addition of the layer's part included, reads the same tensor.
"""

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed.communication_op import tensor_model_parallel_all_gather
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

from saesteer.engine.engine import Engine, Site
from saesteer.errors import UnsupportedError
from saesteer.kernels import layout, ops
from saesteer.kernels.bound import Spread, spread
from saesteer.language.sites import parse
from saesteer.models.families import Family, find_trunk
from saesteer.plugin import unservable


class Op(nn.Module):
    """The op of one site. Its tensors are buffers, so compiled graphs take them as inputs with fixed addresses.

    Args:
        site: what it edits.
        engine: the engine of the site.
        norm: the norm that has consumed the stream, where the op comes behind it.
        paired: whether the stream may still be the sum of two tensors.
    """

    index: Tensor
    counts: Tensor
    steps: Tensor
    published: Tensor

    def __init__(self, site: Site, engine: Engine, norm: Any, *, paired: bool) -> None:
        super().__init__()
        # The graph reads four of them. vLLM's sleep mode, at level 2, restores only buffers.
        held = {field.name: getattr(site, field.name) for field in fields(site)}
        held |= {"counts": engine.counts, "steps": engine.steps, "published": engine.published}
        for name, tensor in held.items():
            if isinstance(tensor, Tensor):
                self.register_buffer(name, tensor, persistent=False)
        self.name, self.width = site.name, site.width
        self.paired, self.normed = paired, norm is not None
        self.eps = norm.variance_epsilon if self.normed else 0.0
        self.offset = 1.0 if isinstance(norm, GemmaRMSNorm) else 0.0
        self.last = site is list(engine.sites.values())[-1]
        # Inside of the op, so that graphs that lack the op do not gather either.
        spread(site, Spread(tensor_model_parallel_all_gather, get_tensor_model_parallel_rank))

    def forward(self, stream: Tensor, second: Tensor | None = None, weight: Tensor | None = None) -> None:
        """Edit one tensor, a stream that is the sum of two, or a stream and its norm; after the last site, publish."""
        form = layout.NORMED if self.normed else layout.BARE if second is None else layout.PAIR
        stream = stream.view(-1, stream.shape[-1])  # Transformers' modules have a batch in front
        torch.ops.saesteer.edit_(stream, second, weight, self.counts, self.index, form, self.eps, self.offset)
        if self.last:
            torch.ops.saesteer.publish_(self.counts, self.index, self.steps, self.published)


class _Tapped(nn.Module):
    """Mixin of a swapped module: the ops in front of it and behind it, in the order of their sites."""

    saesteer_before: nn.ModuleList
    saesteer_after: nn.ModuleList
    saesteer_argument: int  # place of the tensor among the arguments
    weight: Tensor

    def between(self, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the module itself between its ops."""
        for op in self.saesteer_before:
            x = kwargs["hidden_states"] if "hidden_states" in kwargs else args[self.saesteer_argument]
            if op.paired and len(args) > 1 and args[1] is not None:
                op(args[1], x)
            else:
                op(x)
        out = inner(*args, **kwargs)
        for op in self.saesteer_after:
            if op.normed:
                op(out[1], out[0], self.weight.data)
            else:
                op(out[0] if isinstance(out, tuple) else out)
        return out


class _ByForward(_Tapped):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.between(super().forward, args, kwargs)


class _ByCall(_Tapped):
    """Not by ``forward``: vLLM puts another one on instances of Transformers' modules."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.between(super().__call__, args, kwargs)


def attach(model: nn.Module, engine: Engine) -> None:
    """Put the op at every site of the engine.

    Raises:
        UnsupportedError: the model's family or a norm is not known, the family has no such site, or an option of vLLM
            makes its layers others.
    """
    trunk, family = find_trunk(model, "vllm")
    for layer in getattr(trunk, family.layers):
        _refuse(layer, family)
    if family.vllm == "DeepseekV2DecoderLayer" and engine.dtype == torch.float16:
        raise unservable.DIVIDED.error(where=f"{family.name} ")
    for site in engine.sites.values():
        kind, number = parse(site.name)
        module, side = family.find(trunk, "vllm", kind, number)
        fused, after = family.fused and kind.startswith("resid"), side == "out"
        if not isinstance(module, _Tapped):
            _swap(module, family, site.name if fused else None)
        op = Op(site, engine, module if fused and after else None, paired=fused and not after)
        (module.saesteer_after if after else module.saesteer_before).append(op)


def _refuse(layer: nn.Module, family: Family) -> None:
    if family.fused and type(layer).__module__.startswith("transformers."):
        raise unservable.FOREIGN_LAYERS.error(where=f"{family.name} ")
    shared = ("use_attn_reduce_scatter_for_moe", "use_sequence_parallel_moe")
    if any(getattr(layer, name, False) for name in shared):
        raise unservable.SHARED_EXPERTS.error(where=f"{family.name} ")


def _swap(module: Any, family: Family, norm_of: str | None) -> None:
    cls = type(module)
    if norm_of and cls not in (RMSNorm, GemmaRMSNorm):
        raise UnsupportedError(f"the norm at {norm_of} is a {cls.__name__}, expected RMSNorm or GemmaRMSNorm")
    names = list(inspect.signature(module.forward).parameters)
    module.__class__ = type(f"Tapped{cls.__name__}", (_ByForward if family.fused else _ByCall, cls), {})
    module.saesteer_before, module.saesteer_after = nn.ModuleList(), nn.ModuleList()
    module.saesteer_argument = names.index("hidden_states") if "hidden_states" in names else 0


def warm_up(model: nn.Module, engine: Engine) -> None:
    """Compile every kernel that a step can launch, before a step does; there is nothing to do on a CPU."""
    if engine.device.type != "cuda":
        return
    tapped = [module for module in model.modules() if isinstance(module, _Tapped)]
    several = [(module, op) for module in tapped for op in (*module.saesteer_before, *module.saesteer_after)]
    with engine.warming() as sizes_of:
        for module, op in several:
            for tokens in sizes_of(op.name):
                stream = torch.zeros(tokens, op.width, dtype=engine.dtype, device=engine.device)
                if op.normed:
                    op(stream, stream.clone(), module.weight.data)
                    continue
                op(stream)
                if op.paired:
                    op(stream, stream.clone())
            # These calls are ours: only the model's own forward pass counts.
            ops.hits.pop(op.index.data_ptr(), None)
        ops.hits.pop(engine.published.data_ptr(), None)
