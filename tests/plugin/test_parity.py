"""Steered answers agree with the Hugging Face backend under the same spec, teacher-forced, in float32."""

import json
import random
from typing import Any

import numpy as np
import pytest

from saesteer import hf
from saesteer.errors import SpecError
from saesteer.language.sites import canonical, order, reading_site
from saesteer.language.spec import OPS
from tests.formulas import Dict, Token, World
from tests.plugin.conftest import (
    BRIDGE,
    CUDA,
    LONG_PROMPT,
    MODULES,
    OCEAN,
    PROMPTS,
    VECTORS,
    WIDTH,
    Answer,
    generate,
)
from tests.rows import row_of

pytestmark = pytest.mark.slow

# Of a logprob: two float32 implementations of the same 30 layers; a GPU's products of float32 are rounded to tf32.
TOLERANCE = 5e-2 if CUDA else 1e-4

SPECS: dict[str, Any] = {
    "bridge": {"edits": [BRIDGE]},
    "two features": {"edits": [BRIDGE, OCEAN]},
    "generated only": {"edits": [{**OCEAN, "scope": {"generated": True}}]},
    "prompt only": {"edits": [{**OCEAN, "scope": {"prompt": True}}]},
    "last prompt token": {"edits": [{**BRIDGE, "scope": {"positions": [[-1, None]]}}]},
    "position zero": {"edits": [{**OCEAN, "scope": {"positions": [[0, 3]]}}]},
    "band": {
        "edits": [
            {**OCEAN, "mode": "min", "value": 5.0, "unit": "raw"},
            {**OCEAN, "mode": "max", "value": 9.0, "unit": "raw"},
        ]
    },
    "add": {"edits": [{**BRIDGE, "mode": "add", "value": 12.0, "unit": "raw"}]},
    "scale if active": {  # two features that fire on many tokens of the prompts
        "edits": [
            {**OCEAN, "feature": n, "mode": "scale", "value": 3.0, "unit": "raw", "only_if_active": True}
            for n in (2526, 5501)
        ]
    },
    "two dictionaries at one site": {
        "edits": [OCEAN, {"op": "clamp", "dictionary": "second", "feature": 5, "value": 20.0}, BRIDGE]
    },
    "exact topk": {
        "edits": [
            {"op": "clamp", "dictionary": "topk", "feature": n, "value": 4.0, "mode": "scale", "only_if_active": True}
            for n in (17, 18)
        ]
    },
    "resid_mid": {"edits": [{"op": "clamp", "dictionary": "mid", "feature": 17, "value": 30.0}]},
    "reconstruction by a transcoder": {
        "edits": [
            {"op": "clamp", "dictionary": "skip", "feature": 3, "value": 9.0},
            {"op": "reconstruct", "dictionary": "skip"},
        ]
    },
    "transcoder": {
        "edits": [{"op": "clamp", "dictionary": "cross", "feature": n, "value": 20.0, "mode": "add"} for n in (3, 4)]
    },
    "part of the stream": {
        "edits": [
            {"op": "clamp", "dictionary": "mlp", "feature": 17, "value": 20.0},
            {"op": "clamp", "dictionary": "attn", "feature": 18, "value": 10.0},
            {"op": "add", "vector": "any", "site": ["mlp_out.18", "attn_out.9", "mlp_in.18", "mlp_out.15"]},
        ]
    },
    "a set": {
        "edits": [
            {"op": "clamp", "dictionary": "deep", "layer": 15, "feature": 17, "value": 20.0},
            {"op": "clamp", "dictionary": "deep", "layer": 20, "feature": 17, "value": 5.0}
            | {"when": {"dictionary": "deep", "layer": 15, "feature": 3, "above": 0.2}},
            {"op": "add", "vector": "any", "site": "resid_post.20"}
            | {"scale": {"dictionary": "deep", "layer": 20, "feature": 4, "max": 2.0}},
        ]
    },
    "embedding": {"edits": [{"op": "clamp", "dictionary": "embed", "feature": 3, "value": 4.0}]},
    "last layer": {"edits": [{"op": "clamp", "dictionary": "last", "feature": 17, "value": 40.0}]},
    "several sites": {
        "edits": [
            {"op": "clamp", "dictionary": "last", "feature": 1, "value": 10.0},
            {"op": "clamp", "dictionary": "mid", "feature": 2, "value": 10.0},
            BRIDGE,
        ]
    },
}


def compare(oracle: hf.Model, prompt: str, made: Answer, spec: Any) -> tuple[float, int]:
    """Largest difference of the chosen tokens' logprobs, and how many tokens were left out as near a bound."""
    return compare_ids(oracle, oracle.encode(prompt), made, spec)


def compare_ids(oracle: hf.Model, ids: list[int], made: Answer, spec: Any) -> tuple[float, int]:
    """The same for a prompt of tokens."""
    tokens = [token for token, _ in made]
    whole = ids + tokens[:-1]
    logprobs = oracle.logits(whole, steer=spec, prompt_len=len(ids)).log_softmax(-1)
    near = near_a_bound(oracle, whole, len(ids), spec)
    # A token near a bound changes all that come after it.
    first = near.index(True) if True in near else len(whole)
    kept = [step for step in range(len(made)) if len(ids) - 1 + step < first]
    differences = [abs(float(logprobs[len(ids) - 1 + step, tokens[step]]) - made[step][1]) for step in kept]
    return max(differences, default=0.0), len(made) - len(kept)


def near_a_bound(oracle: hf.Model, ids: list[int], prompt_len: int, spec: Any) -> list[bool]:
    """Tokens on which a feature, a rank or a condition of the spec stands within 1e-3 of where it turns over."""
    streams = oracle.streams(ids, steer=spec, prompt_len=prompt_len)
    spec = keyed(spec)
    wide = {site: found.double().cpu().numpy() for site, found in streams.items()}
    here = world(oracle, spec)
    near = []
    for t in range(len(ids)):
        token = Token(here, t, prompt_len)
        for site in here.sites:
            # A transcoder's clamp reads elsewhere, and needs no tensor at a site without an op.
            token.visit(site, spec["edits"], wide[site][t] if site in wide else np.zeros(WIDTH))
        near.append(not token.sure)
    return near


def keyed(value: Any) -> Any:
    """The same spec, in which each dictionary of a set goes by its own key."""
    if isinstance(value, dict):
        found = {key: keyed(one) for key, one in value.items()}
        layer = found.pop("layer", None)
        return found if layer is None else found | {"dictionary": f"{found['dictionary']}@{layer}"}
    return [keyed(one) for one in value] if isinstance(value, list) else value


def world(oracle: hf.Model, spec: Any) -> World:
    """What the oracle has, as tests/formulas.py takes it; of dictionaries those that the spec names."""
    infos = oracle.engine.catalog.dictionaries
    said = json.dumps([spec, MODULES])
    dictionaries = {}
    for name in (name for name in infos if f'"{name}"' in said):
        coder = oracle.coder(*oracle.engine.catalog.named(name))
        arrays: dict[str, Any] = {
            key: None if (value := getattr(coder, key)) is None else value.double().cpu().numpy()
            for key in ("w_enc", "b_enc", "w_dec", "b_dec", "threshold", "max_act", "w_skip")
        }
        dictionaries[name] = Dict(
            site=canonical(str(infos[name].site_out)),
            reads=reading_site(canonical(str(infos[name].site_in))),
            activation=coder.info.activation,
            k=coder.info.k or 0,
            in_norm="l2_sqrt_d" if coder.info.reads_pregain else coder.info.in_norm,
            skip_first=coder.info.skip_first,
            **arrays,
        )
    vectors = {name: {layer: row.astype(np.float64) for layer, row in rows.items()} for name, rows in VECTORS.items()}
    sites = sorted({*oracle.engine.sites, *(one.site for one in dictionaries.values())}, key=order)
    return World(sites, dictionaries, vectors, {"any": 0.0, "each": 0.0, "probe": 1.5}, MODULES)


def drawn(oracle: hf.Model, count: int) -> list[Any]:
    """Random specs of all kinds that the plan accepts."""
    draw = random.Random(11)
    found: list[Any] = []
    while len(found) < count:
        spec = {"edits": [random_edit(draw) for _ in range(draw.randint(1, 5))]}
        try:
            row_of(oracle.engine, spec, 5)
        except SpecError:
            continue
        found.append(spec)
    return found


def random_edit(draw: random.Random) -> Any:
    """One edit of any kind, of a size that the small model's stream feels."""
    op = draw.choice(["clamp", "clamp", "clamp", "add", "cap", "ablate", "reconstruct", "use"])
    edit: dict[str, Any] = {"op": op}
    if op == "use":
        return edit | {"module": draw.choice(list(MODULES)), "scale": round(draw.uniform(-1, 1), 2)}
    if op in ("clamp", "reconstruct"):
        # A random dictionary's reconstruction in the first layers leaves so little of the model that its float32
        # noise, 1e-6 of the stream, moves logprobs by 3e-4.
        early = ["mid", "embed", "group"] if op == "clamp" else ["demo"]
        parts = ["mlp", "attn", "cross"] if op == "clamp" else ["skip"]
        edit["dictionary"] = draw.choice(["second", "topk", "last", "norm", *early, *parts])
    else:
        edit["vector"] = draw.choice(["any", "each", "probe", [round(draw.gauss(0, 1), 3) for _ in range(576)]])
        edit["site"] = draw.choice(["resid_post.15", "resid_mid.7", "resid_post", ["resid_post.20", "mlp_out.15"]])
    if op == "clamp":
        mode = draw.choice(["set", "add", "scale", "min", "max"])
        edit |= {"feature": draw.randrange(96), "mode": mode, "only_if_active": draw.random() < 0.3}
        edit["value"] = round(draw.uniform(-2, 3) if mode == "scale" else draw.uniform(-20, 30), 2)
    elif op == "add":
        edit |= draw.choice([{"scale": 1.5}, {"scale": -0.3, "norm": "match"}])
    elif op == "cap":
        edit |= draw.choice([{"max": 2.0}, {"min": -1.0, "strength": 0.5}, {"min": -3.0, "max": 3.0}])
    elif op == "ablate":
        edit["strength"] = draw.choice([1.0, 2.0, -1.0])
    elif op == "reconstruct":
        edit["error"] = draw.choice(["keep", "drop", "drop"])
    if draw.random() < 0.3:
        above = round(draw.uniform(-2, 2), 2)
        gate: dict[str, Any] = {"dictionary": draw.choice(["mid", "second", "embed"]), "feature": draw.randrange(96)}
        edit["when"] = draw.choice([{"probe": draw.choice(list(VECTORS))}, gate]) | {"above": above}
    if draw.random() < 0.3:
        edit["scope"] = draw.choice([{"generated": True}, {"prompt": True}, {"positions": [[0, 3], [-1, None]]}])
    return edit


def test_random_specs_of_every_kind_agree_with_the_oracle(make_engine: Any, oracle: hf.Model, capsys: Any) -> None:
    """Sixty requests in one batch, each steered in its own way."""
    specs = drawn(oracle, 60)
    assert {edit["op"] for spec in specs for edit in spec["edits"]} == set(OPS)
    prompts = [PROMPTS[n % len(PROMPTS)] for n in range(len(specs))]
    made = generate(make_engine(dtype="float32"), prompts, specs, tokens=12)
    compared, worst = 0, []
    for n, (prompt, one, spec) in enumerate(zip(prompts, made, specs, strict=True)):
        difference, skipped = compare(oracle, prompt, one, spec)
        compared += len(one) - skipped
        worst.append((difference, n))
    with capsys.disabled():
        print(f"\n{compared} of {12 * len(specs)} tokens compared, largest difference {max(worst)[0]:.2g}")
    wrong = [json.dumps([difference, specs[n]]) for difference, n in worst if difference >= TOLERANCE]
    assert not wrong, "\n".join(wrong)
    assert compared > 6 * len(specs), "most tokens were compared"


@pytest.mark.parametrize("name", SPECS)
def test_float32_agrees_with_the_oracle(make_engine: Any, oracle: hf.Model, name: str) -> None:
    llm = make_engine(dtype="float32")
    prompts = [PROMPTS[0], LONG_PROMPT]
    made = generate(llm, prompts, SPECS[name], tokens=16)
    plain = generate(llm, prompts, tokens=8)
    assert [one[:8] for one in made] != plain, "the spec does something"
    left_out = 0
    for prompt, one in zip(prompts, made, strict=True):
        difference, skipped = compare(oracle, prompt, one, SPECS[name])
        left_out += skipped
        assert difference < TOLERANCE
    # Where a GPU rounds to tf32, one of the 8 strongest of 96 random features is near its rank on most tokens, or all.
    assert left_out < 24 or (CUDA and ("transcoder" in name or name == "a set")), "most tokens were compared"


def test_plain_float32_agrees_with_the_oracle(make_engine: Any, oracle: hf.Model) -> None:
    made = generate(make_engine(dtype="float32"), PROMPTS, tokens=16)
    for prompt, one in zip(PROMPTS, made, strict=True):
        assert compare(oracle, prompt, one, {"edits": []})[0] < TOLERANCE


@pytest.mark.long  # it reports, and asserts little
def test_bfloat16_difference_is_reported(make_engine: Any, oracle: hf.Model, capsys: Any) -> None:
    spec = SPECS["bridge"]
    made = generate(make_engine(), PROMPTS, spec, tokens=32)
    differences = [compare(oracle, prompt, one, spec)[0] for prompt, one in zip(PROMPTS, made, strict=True)]
    with capsys.disabled():
        shown = ", ".join(f"{one:.2g}" for one in differences)
        print(f"\nbf16 engine against float32 oracle, largest logprob difference per prompt: {shown}")
    assert max(differences) < 1.0  # reported, not judged: bf16 rounds at every one of 30 layers
