"""The names of sites, such as ``resid_post.20``: which exist, and which two are one place. Knows no model and no layer.

A site is a kind and a layer, counted from 0. What a layer calls resid_pre is what the layer before it calls resid_post.
"""

import re
from collections.abc import Iterable
from functools import lru_cache

from saesteer.errors import ConfigError

KINDS = (
    "resid_pre",
    "attn_in",
    "z",
    "attn_out",
    "resid_mid",
    "mlp_in_pregain",
    "mlp_in",
    "mlp_out",
    "resid_post",
)
MAX_LAYER = 9999

_SITE = re.compile(r"([a-z_]+)\.(0|[1-9][0-9]{0,3})")


@lru_cache(4096)
def parse(name: str) -> tuple[str, int]:
    """``"resid_post.20"`` → ``("resid_post", 20)``.

    Raises:
        ConfigError: it is no name of a site.
    """
    found = _SITE.fullmatch(name)
    if found is None or found[1] not in KINDS:
        shown = repr(name[:64])
        raise ConfigError(
            f"{shown} is not a site, expected a layer of a kind, such as 'resid_post.20'; kinds are {', '.join(KINDS)}"
        )
    return found[1], int(found[2])


def canonical(name: str) -> str:
    """The one name of a place: ``resid_pre.16`` is ``resid_post.15``; ``resid_pre.0`` has no layer before it and stays.

    Raises:
        ConfigError: it is no name of a site.
    """
    kind, layer = parse(name)
    return f"resid_post.{layer - 1}" if kind == "resid_pre" and layer > 0 else name


def order(name: str) -> tuple[int, int]:
    """A key that sorts sites as a forward pass comes to them.

    Raises:
        ConfigError: it is no name of a site.
    """
    kind, layer = parse(canonical(name))
    return layer, KINDS.index(kind)


def expand_sites(sites: Iterable[str], layers: int) -> tuple[str, ...]:
    """The sites of a list in which ``resid_post.all`` stands for that kind at every layer.

    Args:
        sites: names, as an operator writes them.
        layers: of the model.

    Raises:
        ConfigError: one is no name of a site.
    """
    found: list[str] = []
    for name in sites:
        kind, _, layer = name.partition(".")
        if layer == "all" and kind in KINDS:
            found += [f"{kind}.{one}" for one in range(layers)]
        else:
            parse(name)
            found.append(name)
    return tuple(found)
