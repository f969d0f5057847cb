"""Where the op goes in layers whose stream is one tensor in vLLM: found among the arguments, and kept by a compiler."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("vllm", reason="vLLM is not installed")

from saesteer import hf
from saesteer.engine.encode import encode
from saesteer.engine.engine import Engine
from saesteer.language.spec import Spec, as_spec
from saesteer.planning.planner import plan
from saesteer.plugin.worker import layers
from tests import tiny

IDS = torch.tensor([[3, 1, 4, 1, 5, 9]])
SITES = ["resid_pre.0", "resid_mid.0", "resid_post.0", "resid_post.1"]


class Attention(nn.Module):
    """As in the OLMo 3 of vLLM 0.26, whose attention has another argument before the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(tiny.WIDTH, tiny.WIDTH)

    def forward(self, positions: Tensor | None, hidden_states: Tensor) -> Tensor:
        return self.linear(hidden_states)


class Olmo3DecoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(), nn.Linear(tiny.WIDTH, tiny.WIDTH)

    def forward(self, stream: Tensor) -> Tensor:
        middle = stream + torch.tanh(self.self_attn(positions=None, hidden_states=stream))
        return middle + torch.tanh(self.mlp(middle))


class Olmo3Model(nn.Module):
    """[1, T] → [1, T, d], with a batch in front as Transformers' layers have."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(tiny.VOCABULARY, tiny.WIDTH)
        self.layers = nn.ModuleList([Olmo3DecoderLayer() for _ in range(2)])
        self.norm = nn.LayerNorm(tiny.WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        stream: Tensor = self.embed(ids)
        for layer in self.layers:
            stream = layer(stream)
        return self.norm(stream)


@pytest.fixture
def engine() -> Engine:
    return hf.Model(tiny.made("OLMo 3"), sites=SITES).engine


def steer(engine: Engine, spec: Any) -> None:
    """All tokens of IDS belong to one request."""
    count = IDS.numel()
    found = plan(as_spec(spec) or Spec(), engine.catalog, count)
    row = engine.make_row(encode(found, engine.catalog, dose=False))
    assert row is not None
    engine.fill(1, row)
    engine.positions[:count] = torch.arange(count)
    starts = torch.tensor([0, count], dtype=torch.int32)
    engine.schedule(torch.tensor([1], dtype=torch.int32), 0, starts, 1, count, np.asarray(row.kinds))


def test_the_stream_is_found_among_the_arguments_of_a_module(engine: Engine) -> None:
    model = Olmo3Model()
    layers.attach(model, engine)
    attention: Any = model.layers[0].self_attn
    mlp: Any = model.layers[0].mlp
    seen: list[tuple[tuple[int, ...], int]] = []
    norm: Any = model.norm
    for module in (attention, mlp, norm):
        (op,) = module.saesteer_before
        op.forward = lambda x, *_: seen.append((tuple(x.shape), x.data_ptr()))
    stream = torch.ones(1, 4, tiny.WIDTH)
    attention(torch.arange(4), stream[0])
    attention(positions=None, hidden_states=stream)
    mlp.forward = lambda x: x * 3  # vLLM puts one on instances
    assert (mlp(stream) == 3).all()
    model.norm(stream)
    shapes = [(4, tiny.WIDTH), *[tuple(stream.shape)] * 3]
    assert seen == [(shape, stream.data_ptr()) for shape in shapes]


@torch.no_grad()
def test_a_compiled_model_is_edited_at_every_site_as_an_eager_one(engine: Engine) -> None:
    """An edit reaches what the site's module reads, and what the layer's part is added to."""
    plain: Any = Olmo3Model()
    edited = Olmo3Model()
    layers.attach(edited, engine)
    compiled = torch.compile(edited, fullgraph=True, backend="aot_eager", dynamic=True)
    torch.testing.assert_close(compiled(IDS), plain(IDS))
    push = torch.randn(tiny.WIDTH, generator=torch.Generator().manual_seed(1))

    def expected(site: str) -> Tensor:
        pushed = torch.zeros(1, IDS.numel(), tiny.WIDTH)
        pushed[:, 1:] = push  # position 0 is left alone
        stream = plain.embed(IDS) + (pushed if site == "resid_pre.0" else 0)
        for number, layer in enumerate(plain.layers):
            stream = stream + torch.tanh(layer.self_attn(None, stream))
            stream = stream + (pushed if site == f"resid_mid.{number}" else 0)
            stream = stream + torch.tanh(layer.mlp(stream))
            stream = stream + (pushed if site == f"resid_post.{number}" else 0)
        normed: Tensor = plain.norm(stream)
        return normed

    for site in SITES:
        edit = {"op": "add", "vector": push.tolist(), "site": site, "scale": 1.0}
        for run in (edited, compiled):
            steer(engine, edit)
            torch.testing.assert_close(run(IDS), expected(site))
