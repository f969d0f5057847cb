"""The names of sites, such as ``resid_post.20``: which names exist and which mean the same place. Knows no model.

A site is a kind and a layer, counted from 0. A layer's resid_pre is the resid_post of the layer before it.
"""

import re
from collections.abc import Collection, Iterable, Mapping
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
PREGAIN = "mlp_in_pregain"
NO_PREGAIN = "reads {}, an RMS norm's result before its gain, and this model's MLPs read no such norm"
MAX_LAYER = 9999
# What adds to the stream, and the place of the stream that is the first to hold the sum.
SUMS = {"attn_out": "resid_mid", "mlp_out": "resid_post"}

_HOOK = re.compile(r"blocks\.(\d{1,4})\.(?:attn\.)?hook_(resid_(?:pre|mid|post)|attn_out|mlp_out|z)")  # TransformerLens
_SITE = re.compile(r"([a-z_]+)\.(0|[1-9][0-9]{0,3})")


@lru_cache(4096)
def parse(name: str) -> tuple[str, int]:
    """``"resid_post.20"`` → ``("resid_post", 20)``.

    Raises:
        ConfigError: it is not a site.
    """
    found = _SITE.fullmatch(name)
    if found is None or found[1] not in KINDS:
        hook = _HOOK.fullmatch(name)
        meant = f" (did you mean '{hook[2]}.{hook[1]}'?)" if hook else ""
        expected = f"expected a layer of a kind, such as 'resid_post.20'; kinds are {', '.join(KINDS)}"
        raise ConfigError(f"{name[:64]!r} is not a site{meant}, {expected}")
    return found[1], int(found[2])


@lru_cache(4096)
def canonical(name: str) -> str:
    """The one name of a place: ``resid_pre.16`` becomes ``resid_post.15``; ``resid_pre.0`` stays.

    Raises:
        ConfigError: it is not a site.
    """
    kind, layer = parse(name)
    return f"resid_post.{layer - 1}" if kind == "resid_pre" and layer > 0 else name


def split_site(place: str) -> tuple[str, str | None]:
    """A place and the site behind its last @, as in ``FILE@resid_post.20``; an @@ is in front of a revision."""
    path, at, site = place.rpartition("@")
    return (place, None) if not at or "/" in site or path.endswith("@") else (path, site or None)


@lru_cache(4096)
def order(name: str) -> tuple[int, int]:
    """A key that sorts sites in the order of the forward pass.

    Raises:
        ConfigError: it is not a site.
    """
    kind, layer = parse(canonical(name))
    return layer, KINDS.index(kind)


def op_site(name: str, sites: Collection[str], sums: Mapping[str, str] = SUMS) -> str:
    """The site whose op makes an edit of a canonical site: its own, or else that of the sum that it adds to.

    Args:
        name: the site of the edit.
        sites: the sites with an op; what is returned may be none of them.
        sums: the kinds of sites that hold what is added at others, as in ``SUMS``.
    """
    kind, layer = parse(name)
    return name if name in sites or kind not in sums else f"{sums[kind]}.{layer}"


def is_pregain(name: str) -> bool:
    """Whether a site is an mlp_in_pregain."""
    return name.startswith(f"{PREGAIN}.")


@lru_cache(4096)
def reading_site(name: str) -> str:
    """The site whose op reads a canonical site: its own, but for mlp_in_pregain.

    x / rms(x), the norm before its gain, is x · sqrt(d) / |x| up to the norm's epsilon: the op of resid_mid reads that.
    """
    kind, layer = parse(name)
    return f"resid_mid.{layer}" if kind == PREGAIN else name


def onward(name: str, targets: int | None) -> tuple[str, ...]:
    """The sites that a feature writes: this one, and of a cross-layer transcoder also this kind at the next layers.

    Args:
        name: the first site.
        targets: how many; None: it is no cross-layer transcoder, and writes this one.
    """
    if targets is None:
        return (name,)
    kind, layer = parse(name)
    return tuple(f"{kind}.{layer + one}" for one in range(targets))


def expand_sites(sites: Iterable[str], layers: int) -> tuple[str, ...]:
    """The sites of a list, in which ``resid_post.all`` means resid_post at every layer.

    Args:
        sites: names, as an operator writes them.
        layers: of the model.

    Raises:
        ConfigError: one of them is not a site.
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
