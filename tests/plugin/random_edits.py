"""Random edits of every kind for the embedded model, each of a size that it feels."""

import random
from typing import Any

from saesteer import hf
from saesteer.errors import SpecError
from tests.plugin.conftest import MODULES, VECTORS
from tests.rows import row_of


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
