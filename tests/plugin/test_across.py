"""Cross-layer transcoders in a real engine: the Hugging Face backend's numbers, and requests beside it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from saesteer import LLM, hf
from saesteer.errors import SpecError
from tests.loaders import across
from tests.plugin.conftest import CUDA, LONG_PROMPT, PROMPTS, WIDTH, engine_options, generate
from tests.plugin.parity import difference

pytestmark = pytest.mark.slow

TOLERANCE = 5e-2 if CUDA else 2e-4  # of a logprob, as in parity.py
FIRST, COUNT, FEATURES = 26, 4, 96  # the last layers of the embedded model


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With relu, the clamps below are continuous: no token is near a bound."""
    found = across.layers(COUNT, FEATURES, WIDTH, seed=90)
    folder = tmp_path_factory.mktemp("files") / "clt"
    return across.circuit_tracer(folder, found, first=FIRST, act="relu", model_name="SmolLM2-135M")


@pytest.fixture(scope="module")
def oracle(model_dir: str, place: Path) -> hf.Model:
    return hf.Model(model_dir, dictionaries={"clt": str(place)}, dtype=torch.float32)


@pytest.fixture(scope="module")
def llm(served_dir: str, place: Path) -> Iterator[Any]:
    made = LLM(served_dir, dictionaries={"clt": str(place)}, inline_rows=4, **engine_options(dtype="float32"))
    try:
        yield made
    finally:
        made.llm_engine.engine_core.shutdown()


def of(layer: int, feature: int, value: Any, **more: Any) -> dict[str, Any]:
    return {"op": "clamp", "dictionary": "clt", "layer": layer, "feature": feature, "value": value, **more}


READ = {"dictionary": "clt", "layer": FIRST, "feature": 9, "slope": 0.5, "max": 2.0}
SPECS: dict[str, Any] = {
    "one, which writes at four layers": [of(FIRST, 3, 4.0)],
    "the last layer": [of(FIRST + 3, 3, 4.0)],
    "of two layers": [of(FIRST, 3, 2.0), of(FIRST + 1, 5, 1.5, mode="scale")],
    "generated tokens alone": [of(FIRST, 3, 4.0, scope={"generated": True})],
    "a strength that is read": [of(FIRST + 1, 7, READ, mode="add")],
}


@pytest.mark.parametrize("name", SPECS)
def test_float32_agrees_with_the_oracle(llm: Any, oracle: hf.Model, name: str) -> None:
    prompts = [PROMPTS[0], LONG_PROMPT]
    made = generate(llm, prompts, {"edits": SPECS[name]}, tokens=16)
    assert made != generate(llm, prompts, tokens=16), "the spec does something"
    for prompt, one in zip(prompts, made, strict=True):
        assert difference(oracle, oracle.encode(prompt), one, {"edits": SPECS[name]}) < TOLERANCE


def test_requests_beside_it_are_left_alone(llm: Any) -> None:
    """In one batch, and after it from the cache."""
    steers = [{"edits": SPECS["one, which writes at four layers"]}, None, {"edits": SPECS["of two layers"]}, None]
    alone = [generate(llm, [LONG_PROMPT], [steer])[0] for steer in steers]
    together = generate(llm, [LONG_PROMPT] * 4, steers)
    assert alone[1] == alone[3]
    for one, other in zip(alone, together, strict=True):
        assert [token for token, _ in one] == [token for token, _ in other]
        assert [said for _, said in one] == pytest.approx([said for _, said in other], abs=TOLERANCE)
    noise = _far(alone[1], together[1])  # of a GPU's arithmetic in batches of two shapes
    for steered in (together[0], together[2]):
        assert _far(steered, together[1]) > 3 * max(noise, 1e-3), "it is steered"


def _far(one: Any, other: Any) -> float:
    return max(abs(said - found) for (_, said), (_, found) in zip(one, other, strict=True))


def test_an_answer_names_every_site(llm: Any) -> None:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    [output] = llm.generate([PROMPTS[0]], params, steer={"edits": [of(FIRST, 3, 4.0)]}, use_tqdm=False)
    applied = output.saesteer["applied"]
    assert [one["site"] for one in applied] == [f"mlp_out.{layer}" for layer in range(FIRST, FIRST + COUNT)]
    assert {(one["dictionary"], one["layer"], one["feature"]) for one in applied} == {("clt", FIRST, 3)}
    assert len({one["tokens_edited"] for one in applied}) == 1 and applied[0]["tokens_edited"] > 0


def test_what_it_cannot_do_is_refused(llm: Any) -> None:
    with pytest.raises(SpecError, match="is a cross-layer transcoder, which makes no layer's output alone"):
        generate(llm, PROMPTS[:1], {"edits": [{"op": "reconstruct", "dictionary": "clt", "layer": FIRST}]})
    with pytest.raises(SpecError, match="with a higher --inline-rows"):
        generate(llm, PROMPTS[:1], {"edits": [of(FIRST, n, 1.0) for n in range(5)]})


def test_named_features_are_read_and_watched(llm: Any, oracle: hf.Model) -> None:
    """Their rows come with the request; two layers in one answer."""
    from vllm import SamplingParams

    whole, ids = {"scope": {"prompt": True}}, oracle.encode(LONG_PROMPT)
    named = [{"dictionary": "clt", "layer": FIRST + at, "features": [9, 3], **whole} for at in (0, 2)]
    values = oracle.activations(ids, "clt", layer=FIRST)[:, 9]
    above = float(values[1:].max()) * 0.99
    rule = {"op": "flag", "when": {"dictionary": "clt", "layer": FIRST, "feature": 9, "above": above}, **whole}
    steer = {"return": {"features": named}, "edits": [rule]}
    params = SamplingParams(temperature=0, max_tokens=1)
    [output] = llm.generate([LONG_PROMPT], params, steer=steer, use_tqdm=False)
    expected = oracle.read(ids, steer=steer)
    assert output.saesteer["flags"] == expected["flags"] != []
    for ours, theirs in zip(output.saesteer["features"], expected["features"], strict=True):
        assert [row["position"] for row in ours["rows"]] == [row["position"] for row in theirs["rows"]]
        for one, other in zip(ours["rows"], theirs["rows"], strict=True):
            assert one["features"] == pytest.approx(other["features"], rel=1e-2 if CUDA else 1e-3, abs=1e-3)
    assert any(row["features"]["9"] > 0.1 for row in expected["features"][0]["rows"])
