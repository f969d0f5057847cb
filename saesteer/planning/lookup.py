"""Names in a request → what the server has: dictionaries, features, vectors, and the sites where they stand.

Every refusal names the field, the value and what is available. Knows no prompt and no order of edits.
"""

import logging
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from saesteer.dictionaries.vectors import VectorSet
from saesteer.errors import ConfigError, LoadError
from saesteer.language import sites
from saesteer.language.address import PREFIX
from saesteer.language.fields import closest, fail, listing, show
from saesteer.language.inline import InlineVector, Vector
from saesteer.language.sites import canonical, parse
from saesteer.planning.plan import Catalog, Direction, Feature, layer_of

if TYPE_CHECKING:
    from saesteer.dictionaries.coder import CoderInfo

logger = logging.getLogger("vllm.saesteer")

_PATH = re.compile(r"(?<![\w.~/-])~?/[^\s:;,()'\"]+")
_LONGEST = 500  # characters of a reason that clients are told


def without_path(error: ConfigError | LoadError) -> str:
    """Why a dictionary's files cannot be used, for clients, who need not know where the operator has them.

    The log gets all of it. The message of a LoadError begins with a path, of which the file's name stays.
    """
    logger.warning("a request names a dictionary whose files cannot be used: %s", error)
    text = str(error)
    if isinstance(error, LoadError):
        place, found, rest = text.partition(": ")
        text = place.rpartition("/")[2] + found + rest
    return _PATH.sub("<path>", text)[:_LONGEST]


def dictionary_of(
    catalog: Catalog, name: str, layer: int | None, at: str, *, address: str = "feature"
) -> "tuple[str, CoderInfo]":
    """The key of a dictionary in the catalog, and the dictionary.

    Args:
        catalog: what the server has.
        name: the dictionary's name or address.
        layer: of a set.
        at: the path of the object that names it.
        address: the field of the object that holds an address, if the name is one.

    Raises:
        SpecError: there is no such dictionary, its file, opened now, cannot be served, a set is named without a layer,
            it has no dictionary of this layer, or an address is of a model that may not be the served one.
    """
    if name.startswith(PREFIX):
        _check_address(catalog, name, f"{at}.{address}")
    key, layers = catalog.key(name, layer), catalog.sets.get(name)
    try:
        info = catalog.dictionaries.get(key)
    except (ConfigError, LoadError) as exc:
        fail(f"{at}.dictionary", "not_served", f"{show(name)} cannot be opened: {without_path(exc)}")
    if layers is not None and layer is None:
        message = f"is missing: {name!r} has a dictionary for each of several layers"
        fail(f"{at}.layer", "missing_field", f"{message}, expected one of {listing(layers)}")
    if layers is not None and layer not in layers:
        fail(f"{at}.layer", "out_of_range", f"got {layer}, expected a layer of {name!r}: {listing(layers)}")
    if info is None or (layers is None and catalog.named(name) != (name, None)):
        known = {catalog.named(one)[0] for one in catalog.dictionaries} | catalog.sets.keys()
        found = f"got {show(name)}{closest(name, known)}, expected one of: {listing(known)}"
        fail(f"{at}.dictionary", "unknown_name", found)
    if layers is None and layer not in (None, layer_of(info)):
        message = f"got {layer}, but dictionary {name!r} is of layer {layer_of(info)}"
        fail(f"{at}.layer", "out_of_range", f"{message}, expected that or no layer")
    return key, info


def feature_of(catalog: Catalog, name: str, layer: int | None, feature: int, at: str) -> "tuple[Feature, CoderInfo]":
    """A feature, after a check that its dictionary has it, and the dictionary.

    Raises:
        SpecError: there is no such dictionary, or it has no such feature.
    """
    key, info = dictionary_of(catalog, name, layer, at)
    check_feature(key, info, feature, f"{at}.feature")
    return Feature(key, feature), info


def _check_address(catalog: Catalog, name: str, path: str) -> None:
    """Refuse an address that no dictionary has, or one of a model that this server may not serve."""
    key, known = catalog.key(name, None), catalog.addresses
    if key not in catalog.dictionaries:
        names = {catalog.named(one)[0] for one in catalog.dictionaries} - known.keys()
        loaded = f"{listing(known)}; dictionaries by name: {listing(names)}"
        found = f"got {show(name)}{closest(name, known)}, which no dictionary of this server has, expected"
        fail(path, "unknown_name", f"{found} one of the addresses {loaded}")
    origin = catalog.origin(key)
    if origin is not None and origin.fit in ("other", "unknown"):
        what = "is not" if origin.fit == "other" else "is not known to be"
        found = f"got {show(name)}, but this server's model {what} {origin.model}"
        hint = f"start it with --dictionaries-of {origin.model} if it fits"
        fail(path, "not_served", f"{found}, expected dictionary and feature by name and number; {hint}")


def check_feature(key: str, info: "CoderInfo", feature: int, path: str) -> None:
    """Refuse a feature that a dictionary does not have.

    Raises:
        SpecError: it does not.
    """
    held = getattr(info, "feature_ids", None)  # set if a file holds only some features, by their original index
    if held is not None and feature not in held:
        expected = f"one of the {len(held)} features that its file holds: {listing(held)}"
        fail(path, "out_of_range", f"got {feature} for dictionary {key!r}, expected {expected}")
    if held is None and feature >= info.features:
        expected = f"a feature of dictionary {key!r}, 0 to {info.features - 1}"
        fail(path, "out_of_range", f"got {feature}, expected {expected}")


def reading_site(catalog: Catalog, name: str, info: "CoderInfo", at: str) -> str:
    """The canonical site where a dictionary reads: where it writes, unless its files name another.

    Raises:
        SpecError: it has no such site, the site is not instrumented, or the model has no such tensor.
    """
    named = info.site_in or info.site_out
    if named is not None and not catalog.pregain and sites.is_pregain(named):
        fail(f"{at}.dictionary", "not_served", f"dictionary {name!r} {sites.NO_PREGAIN.format(named)}")
    site = None if named is None else sites.reading_site(canonical(named))
    return _with_op(catalog, name, "reads", site, site, at)


def writing_sites(catalog: Catalog, name: str, info: "CoderInfo", at: str) -> tuple[str, ...]:
    """The canonical sites where a dictionary writes: one, or those of all layers that a cross-layer transcoder writes.

    Raises:
        SpecError: it has no such site, or no op that writes there.
    """
    places = (None,) if info.site_out is None else sites.onward(canonical(info.site_out), info.targets)
    return (*[_with_op(catalog, name, "writes", site, site and catalog.op_site(site), at) for site in places],)


def _with_op(catalog: Catalog, name: str, does: str, site: str | None, op: str | None, at: str) -> str:
    """The site, after a check that the server has the op that reads or writes there."""
    if site is None or op is None or not catalog.has_op(op):
        place = f"dictionary {name!r} {does} {site}, where this server has no op"
        hint = "" if op is None else f"; {hint_of(catalog, op)}"
        fail(f"{at}.dictionary", "not_served", f"{place}, expected {_sites(catalog)}{hint}")
    return site


def places_of(
    catalog: Catalog, vector: Vector, written: Sequence[str], at: str
) -> Iterator[tuple[str, Direction, str]]:
    """The canonical sites of an edit with a vector, the vector's row at each, and the site as written.

    Raises:
        SpecError: the vector is unknown, has another width than a site or no row for a layer, or a site has no op.
    """
    layers, kind, width, field = _facts(catalog, vector, f"{at}.vector")
    if len(written) == 1 and "." not in written[0]:
        if layers is None:
            message = f"got {written[0]} alone, which stands for every layer that the vector has"
            fail(f"{at}.site", "conflict", f"{message}, but it has one row for any site; expected sites by name")
        written = [f"{written[0]}.{layer}" for layer in layers]
        paths = [f"{at}.site"] * len(written)
    else:
        paths = [f"{at}.site"] if len(written) == 1 else [f"{at}.site[{i}]" for i in range(len(written))]
    for name, path in zip(written, paths, strict=True):
        site = canonical(name)
        own, layer = parse(site if kind else name)
        if kind not in (None, own):
            fail(path, "conflict", f"got {name}, but the vector's file says that it is for {kind}, expected that")
        fit(catalog, site, width, field)
        if layers is not None and layer not in layers:
            message = f"got {name}, but the vector has no row for layer {layer}"
            fail(path, "out_of_range", f"{message}, expected one of its layers: {listing(layers)}")
        if not catalog.has_op(catalog.op_site(site)):
            message = f"got {name}, where this server has no op, expected {_sites(catalog)}"
            fail(path, "not_served", f"{message}; {hint_of(catalog, site)}")
        yield site, Direction(vector, None if layers is None else layer), name


def probe_of(catalog: Catalog, name: str, written: str, at: str) -> tuple[str, Direction]:
    """The site where a probe is read for an edit at a site as written, and the probe's row there.

    A vector with one row for any site, or with a row for the layer of the edit, is read where the edit stands.
    Otherwise, a vector with a single layer is read at that layer, at resid_post if its file does not name a site.

    Raises:
        SpecError: the vector is unknown, differs from the site in width, or has no layer or several to choose from.
    """
    found = _named(catalog, name, f"{at}.probe", "the name of a vector, one of")
    layers, kind = found.layers, found.kind
    own, here = parse(canonical(written) if kind else written)
    if layers is None or (here in layers and kind in (None, own)):
        site = canonical(written)
        fit(catalog, site, found.width, f"{at}.probe")
        return site, Direction(name, None if layers is None else here)
    if len(layers) > 1:
        message = f"probe {name!r} has rows for layers {listing(layers)}, but none for layer {here}, where the edit is"
        fail(f"{at}.probe", "conflict", f"{message}, expected a row for this layer, or for one layer alone")
    place = f"{kind or 'resid_post'}.{layers[0]}"
    fit(catalog, place, found.width, f"{at}.probe")
    if not catalog.has_op(place):
        fail(f"{at}.probe", "not_served", f"{name!r} reads {place}, where this server has no op; start it with --sites")
    return place, Direction(name, layers[0])


def read_probe(catalog: Catalog, name: str, site: str | None, at: str) -> tuple[str, Direction]:
    """The canonical site where a request reads a probe for itself, and the probe's row there.

    Args:
        catalog: what the server has.
        name: the probe.
        site: the site that the request chooses; None: that of the probe's only layer, as in ``probe_of``.
        at: path of the object that names it.

    Raises:
        SpecError: the vector is unknown, differs from the site in width, has no row for its layer, or leaves the site
            open.
    """
    found = _named(catalog, name, f"{at}.probe", "the name of a vector, one of")
    layers, kind = found.layers, found.kind
    if site is None:
        if layers is None or len(layers) > 1:
            rows = "one row for any site" if layers is None else f"rows for layers {listing(layers)}"
            fail(f"{at}.site", "missing_field", f"is missing: probe {name!r} has {rows}, expected the site to read")
        site = f"{kind or 'resid_post'}.{layers[0]}"
    own, here = parse(canonical(site) if kind else site)
    if kind not in (None, own):
        fail(f"{at}.site", "conflict", f"got {site}, but the file of probe {name!r} says {kind}, expected that")
    if layers is not None and here not in layers:
        message = f"got {site}, but probe {name!r} has no row for layer {here}"
        fail(f"{at}.site", "out_of_range", f"{message}, expected one of its layers: {listing(layers)}")
    fit(catalog, canonical(site), found.width, f"{at}.probe")
    return canonical(site), Direction(name, None if layers is None else here)


def _named(catalog: Catalog, name: str, path: str, what: str = "one of") -> VectorSet:
    known = catalog.vectors
    if name not in known:
        fail(path, "unknown_name", f"got {show(name)}{closest(name, known)}, expected {what}: {listing(known)}")
    return known[name]


def _facts(catalog: Catalog, vector: Vector, path: str) -> tuple[tuple[int, ...] | None, str | None, int, str]:
    """What a vector is like, at its path.

    Its layers, of a request's own in its order, or None where it has one row for any site; the kind of site that its
    file holds it to, if any; its width; and the path of its width.
    """
    if isinstance(vector, str):
        found = _named(catalog, vector, path)
        return found.layers, found.kind, found.width, path
    if not isinstance(vector, InlineVector):
        return None, None, len(vector), path
    layers = vector.layers
    if layers and catalog.layers is not None and (last := max(layers)) >= catalog.layers:
        expected = f"layers of this model, 0 to {catalog.layers - 1}"
        fail(f"{path}.layers[{layers.index(last)}]", "out_of_range", f"got {last}, expected {expected}")
    return layers, None, vector.shape[-1], f"{path}.shape"


def fit(catalog: Catalog, site: str, width: int, path: str, what: str = "is") -> None:
    """Refuse what has another width than the tensor at a site.

    Raises:
        SpecError: it has, with ``what`` in front of its width.
    """
    expected = catalog.width_at(site)
    if expected not in (None, width):
        whose = "this model" if expected == catalog.width else f"{site} of this model"
        fail(path, "conflict", f"{what} {width} wide, expected {expected}, the width of {whose}")


def hint_of(catalog: Catalog, site: str, flag: str = "--sites") -> str:
    """What helps where there is no op at a canonical site."""
    if catalog.layers is not None and parse(site)[1] >= catalog.layers:
        return f"this model has layers 0 to {catalog.layers - 1}"
    return f"start it with {flag} {site} to have one there"


def _sites(catalog: Catalog) -> str:
    return "any site" if catalog.sites is None else f"one of {listing(catalog.sites)}"
