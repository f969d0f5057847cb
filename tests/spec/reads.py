"""A catalog of what a spec may read, and what the reads of a spec become in a plan."""

from dataclasses import dataclass
from typing import Any

from saesteer.consumers.lines import Logging
from saesteer.language.spec import from_json
from saesteer.planning.plan import END, Catalog, Readout
from saesteer.planning.planner import plan
from tests.spec.catalogs import Info, Set
from tests.spec.plans import P

GENERATED = ((P, END),)  # positions


@dataclass(frozen=True)
class Stored(Info):
    """A dictionary that is served by rows."""

    by_rows: bool = True


INFOS = {
    "gs15": Info("resid_post.15"),
    "gs20": Info("resid_post.20", skip_first=3),
    "coder": Info("mlp_out.15", site_in="mlp_in.15"),
    "pregain": Info("mlp_out.15", site_in="mlp_in_pregain.15"),
    "few": Info("resid_post.15", features=3, feature_ids=(5, 900, 40_000)),
    "top15": Info("resid_post.15", activation="topk", k=4),
    "rows": Stored("resid_post.15"),
    "clt@5": Stored("mlp_out.15", site_in="mlp_in.15", targets=3),
    "set@15": Info("resid_post.15"),
    "set@20": Info("resid_post.20"),
    "away": Info("resid_post.3"),
    "unkept": Info("resid_post.16"),
}
VECTORS = {"any": Set(), "each": Set((15, 16, 20)), "one": Set((15,)), "wide": Set(width=7), "early": Set((3,))}
SITES = frozenset({"resid_post.15", "resid_post.20", "resid_mid.15", "mlp_in.15", "z.15", "resid_post.16"})
KEPT = SITES - {"resid_post.16"}
MORE: dict[str, Any] = {"sets": {"clt": (5,), "set": (15, 20)}, "consumers": {"logging": Logging({}).check}}
CATALOG = Catalog(INFOS, SITES, 64, VECTORS, width=4, other_widths={"z": 7}, reads=KEPT, **MORE)


def planned(catalog: Catalog = CATALOG, prompt_len: int = P, **wanted: Any) -> tuple[Readout, ...]:
    """What is read where a spec returns this."""
    return plan(from_json({"return": wanted}), catalog, prompt_len).readouts


def features(**more: Any) -> dict[str, Any]:
    """A return of the features of one dictionary."""
    return {"features": [{"dictionary": "gs15", **more}]}
