"""Doses of the Hugging Face backend, against hooks of the test's own around its edits, on a tiny random model."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from saesteer import hf
from saesteer.errors import SpecError

WIDTH, LAYERS = 32, 3
IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
_DRAW = torch.Generator().manual_seed(0)
V, W = (torch.randn(WIDTH, generator=_DRAW).tolist() for _ in range(2))

Doses = dict[str, Tensor]  # [tokens] of each site, as the hooks see them


class Around:
    """A model with a hook of the test's before and one behind those of the backend, at every resid_post."""

    def __init__(self, **options: Any) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(1)
        sizes = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 2, "vocab_size": 64}
        model = LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=48, max_position_embeddings=64))
        self.seen: list[dict[int, Tensor]] = [{}, {}]
        self._watch(model, self.seen[0])
        self.model = hf.Model(model, sites=["resid_post.all"], **options)
        self._watch(model, self.seen[1])

    def _watch(self, model: Any, seen: dict[int, Tensor]) -> None:
        def hook(layer: int) -> Callable[..., None]:
            def look(_module: Any, _inputs: Any, out: Any) -> None:
                seen[layer] = (out[0] if isinstance(out, tuple) else out).reshape(-1, WIDTH).clone()

            return look

        for layer, block in enumerate(model.model.layers):
            block.register_forward_hook(hook(layer))

    def run(self, steer: Any, **how: Any) -> tuple[list[dict[str, Any]], Doses]:
        """What is told of a pass over all tokens, and what the hooks saw."""
        told = self.model.doses(IDS, steer=steer, **how)
        before, after = self.seen
        return told, {
            f"resid_post.{layer}": (after[layer] - before[layer]).norm(dim=1) / before[layer].norm(dim=1)
            for layer in range(LAYERS)
        }


@pytest.fixture(scope="module")
def around() -> Iterator[Callable[..., Around]]:
    made: dict[str, Around] = {}
    yield lambda **options: made.setdefault(str(options), Around(**options))
    made.clear()


def add(site: str, scale: float, vector: Any = V, **more: Any) -> dict[str, Any]:
    return {"op": "add", "vector": vector, "site": site, "scale": scale, **more}


STEERS: dict[str, Any] = {
    "one": [add("resid_post.1", 0.3)],
    "as long as the stream": [add("resid_post.1", 0.25, norm="match")],
    "several at a site are one dose": [
        add("resid_post.1", 2.0),
        add("resid_post.1", -1.5),
        {"op": "ablate", "vector": W, "site": "resid_post.1"},
    ],
    "several sites": [add("resid_post.2", 0.1, W), add("resid_post.0", 1.0), add("resid_post.2", 0.2)],
    "some tokens": [add("resid_post.0", 0.5, scope={"positions": [[2, 5], [-2, None]]})],
    "what nothing reaches": [{"op": "cap", "vector": V, "site": "resid_post.1", "max": 1e6}],
    "undone at its own site": [add("resid_post.1", 1e3, norm="match"), add("resid_post.1", -1.0)],
}


@pytest.mark.parametrize("steer", STEERS.values(), ids=STEERS)
def test_what_is_told_is_what_hooks_see(around: Callable[..., Around], steer: Any) -> None:
    told, seen = around().run(steer)
    assert [one["site"] for one in told] == sorted({edit["site"] for edit in steer})
    for one in told:
        doses = seen.pop(one["site"])
        changed = doses[doses > 0]
        assert one["tokens"] == len(changed)
        if len(changed):
            # 4 digits; and the hooks see the stream after it was rounded to float32 once more.
            assert one["max"] == pytest.approx(float(changed.max()), rel=6e-4)
            assert one["mean"] == pytest.approx(float(changed.mean()), rel=6e-4)
        else:
            assert (one["max"], one["mean"]) == (None, None)
    assert all(not doses.any() for doses in seen.values()), "a site that is not told of was changed"


@pytest.mark.parametrize("scale", [0.2, 0.5, 4.0])
def test_a_limit_bounds_the_change_and_what_is_told_is_what_was_asked(
    around: Callable[..., Around], scale: float
) -> None:
    steer = [add("resid_post.1", scale, norm="match")]
    told, seen = around(max_dose=0.4).run(steer)
    over = scale > 0.4
    tokens = len(IDS) - 1
    assert told == [
        {"site": "resid_post.1", "max": pytest.approx(scale, rel=6e-4), "mean": pytest.approx(scale, rel=6e-4),
         "tokens": tokens, "tokens_limited": tokens * over},
    ]  # fmt: skip
    torch.testing.assert_close(seen["resid_post.1"][1:], torch.full((tokens,), min(scale, 0.4)), rtol=1e-5, atol=0)


def test_generated_tokens_are_those_behind_the_prompt(around: Callable[..., Around]) -> None:
    steer = [add("resid_post.1", 0.5, scope={"generated": True})]
    assert around().run(steer, prompt_len=8)[0][0]["tokens"] == 4
    with pytest.raises(SpecError):
        around().run([add("resid_post.1", 0.5, scope={"positions": [[9, 10]]})][0] | {"scale": "x"})


def test_a_read_tells_the_dose_that_its_spec_asks_for(around: Callable[..., Around]) -> None:
    one = around(reads=["resid_post.1"])
    for edits, more in ((STEERS["one"], {}), (STEERS["several sites"], {"activations": [{"site": "resid_post.1"}]})):
        found = one.model.read(IDS, steer={"edits": edits, "return": {"dose": True, **more}})
        assert found.keys() == {"dose", *more}
        assert found["dose"] == one.run(edits)[0] != []
    assert one.model.read(IDS, steer={"return": {"dose": True}}) == {"dose": []}
    assert "dose" not in one.model.read(IDS, steer={"edits": STEERS["one"]})
