"""Catalogs of what a spec may name, with as much of a dictionary and of a set of vectors as a plan asks for."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from saesteer.planning.plan import Catalog


@dataclass(frozen=True)
class _Info:
    """As much of a dictionary as the plan asks for."""

    site_out: str | None = "resid_post.15"
    site_in: str | None = None
    features: int = 100
    activation: str = "relu"
    k: int | None = None
    has_max_act: bool = True
    skip_first: int = 1
    can_reconstruct: bool = True
    feature_ids: tuple[int, ...] | None = None
    targets: int | None = None
    in_norm: str = "none"
    by_rows = False
    fingerprint: str = ""
    unknown: tuple[int, ...] = ()  # features without a maximum activation

    def knows_max_act(self, feature: int) -> bool:
        return self.has_max_act and feature not in self.unknown


Info: Any = _Info  # stands for a CoderInfo
INFOS = {
    "gs15": Info("resid_post.15"),
    "pre16": Info("resid_pre.16"),
    "gs20": Info("resid_post.20", has_max_act=False, skip_first=3),
    "few": Info("resid_post.7", features=3, feature_ids=(5, 900, 40_000), unknown=(900,)),
}
CATALOG = Catalog(INFOS, frozenset({"resid_post.15", "resid_post.20", "resid_post.7"}), 64)


class _Everything(dict[str, Any]):
    """A mapping that holds every name; a stand-in, so that random names are known."""

    def __init__(self, value: Any) -> None:
        super().__init__(gs20=value)
        self.value = value

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> Any:
        return self.value

    def get(self, name: str, default: Any = None) -> Any:
        return self.value


@dataclass(frozen=True)
class _Set:
    """As much of a set of vectors as the plan asks for."""

    layers: tuple[int, ...] | None = None
    width: int = 4
    digests: Mapping[int | None, str] = field(default_factory=dict)
    bias: float = 0.0
    function: Any = "linear"
    fingerprint: str = ""
    kind: str | None = None


Set: Any = _Set  # stands for a VectorSet
OPEN = Catalog(_Everything(Info(features=2**31 - 1)), None, 64, _Everything(Set()), {})
