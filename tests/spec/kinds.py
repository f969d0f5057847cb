"""Dictionaries, vectors and sites for edits of every kind."""

from tests.spec.catalogs import Info, Set

INFOS = {
    "gs15": Info("resid_post.15"),
    "other15": Info("resid_post.15"),
    "top15": Info("resid_post.15", activation="topk", k=4),
    "group15": Info("resid_post.15", activation="groupmax", k=4),
    "part15": Info("resid_post.15", can_reconstruct=False),
    "mid16": Info("resid_mid.16"),
    "norm16": Info("resid_post.16", site_in="mlp_in_pregain.16"),
    "gs20": Info("resid_post.20"),
    "pre16": Info("resid_pre.16"),
}
VECTORS = {"any": Set(), "each": Set((15, 16, 20)), "one": Set((15,)), "early": Set((3,))}
SITES = frozenset({"resid_post.14", "resid_post.15", "resid_mid.16", "resid_post.16", "resid_post.20", "resid_pre.0"})
