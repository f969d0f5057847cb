"""How far answers are from those of the Hugging Face backend, or from others of the same engine."""

import json
from typing import Any

import numpy as np

from saesteer import hf
from saesteer.language.sites import canonical, order, reading_site
from tests.formulas import Dict, Token, World
from tests.plugin.conftest import CUDA, MODULES, VECTORS, WIDTH, Answer

# Of a logprob: two float32 implementations of the same 30 layers; a GPU's products of float32 are rounded to tf32.
TOLERANCE = 5e-2 if CUDA else 1e-4
# Of a logprob, between batches of different size: float32 on a CPU; on a GPU its products are rounded to tf32.
NOISE = 2e-2 if CUDA else 2e-4


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


def same(one: Answer, other: Answer, tolerance: float = NOISE) -> bool:
    """Equal tokens, logprobs within the noise of another batch size."""
    tokens = [token for token, _ in one] == [token for token, _ in other]
    return tokens and all(abs(a - b) < tolerance for (_, a), (_, b) in zip(one, other, strict=True))


def difference(oracle: hf.Model, ids: list[int], made: Answer, spec: Any = None) -> float:
    """Largest difference of the chosen tokens' logprobs, whether or not a token is near a bound."""
    tokens = [token for token, _ in made]
    logprobs = oracle.logits(ids + tokens[:-1], steer=spec, prompt_len=len(ids)).log_softmax(-1)[len(ids) - 1 :]
    return max(abs(float(logprobs[step, token]) - logprob) for step, (token, logprob) in enumerate(made))
