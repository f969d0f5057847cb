"""What ``saesteer inspect`` prints: a dictionary's headers, or vectors, in words; does not know models or requests."""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.filesize import decimal

from saesteer.commands.embedded import DICTIONARIES, dictionaries
from saesteer.config.assets import sited, unserved
from saesteer.config.sets import check_set, opened
from saesteer.config.sources import DictionarySource
from saesteer.dictionaries.coder import RANKED, CoderInfo
from saesteer.dictionaries.vectors import VectorSet
from saesteer.errors import LoadError, printable
from saesteer.language.address import PREFIX
from saesteer.loaders import UnknownFormat, describe, hub
from saesteer.loaders.vectors import read_vectors
from saesteer.loaders.vectors.contents import READERS

_HERE = "PLACE"  # what a refusal calls the dictionary, which has no name yet


def report(place: str | Path) -> str:
    """Describe a weight file line by line, and list what cannot be served from it.

    Reads headers and small files alone: a file of more than 64 MB is not hashed.

    Args:
        place: a dictionary or a file of vectors, as ``PLACE[@SITE]``, or the name of an embedded dictionary.

    Raises:
        LoadError: when it is neither a dictionary nor a file of vectors that saesteer reads.
        ConfigError: when it is a transcoder, and one site is given.
    """
    if str(place) in DICTIONARIES and not Path(place).exists():
        place = dictionaries()[str(place)]
    if "=" in str(place).partition("/")[0] and not Path(place).exists():
        raise LoadError(f"{place}: no such file; inspect takes PLACE alone, without NAME=")
    lines = _dictionary_or_vectors(place)
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {printable(value)}" for name, value in lines)


def _dictionary_or_vectors(place: str | Path) -> list[tuple[str, str]]:
    """Most files may be either; if one is neither, the error says why it is no dictionary, or else no vectors."""
    source = DictionarySource(str(place)) if Path(place).exists() else DictionarySource.from_argument(str(place))
    file = Path(source.path.partition("#")[0])
    if file.suffix in (".npy", ".gguf"):
        return _vector_facts(place, read_vectors(place))
    try:
        return _dictionary(source)
    except LoadError as error:
        if file.suffix not in READERS:
            raise
        try:
            return _vector_facts(place, read_vectors(place))
        except LoadError as why:
            if isinstance(error, UnknownFormat):
                raise LoadError(f"{why}; nor is it a dictionary of a known format") from error
        raise


def _dictionary(source: DictionarySource) -> list[tuple[str, str]]:
    """A dictionary or a set, from headers alone: of one on the hub, nothing else is downloaded."""
    with tempfile.TemporaryDirectory(prefix="saesteer-") as folder:
        copies = hub.Headers(folder)
        try:
            return [(name, copies.said(value)) for name, value in _described(source, copies)]
        except LoadError as error:
            raise type(error)(copies.said(str(error))) from error


def _described(source: DictionarySource, copies: hub.Headers) -> list[tuple[str, str]]:
    sources, sets = opened({_HERE: source}, copies.get)
    own = {key: describe(one.path, site=one.reads, hashed=False) for key, one in sources.items()}
    found = {key: sited(_HERE, sources[key], info) for key, info in own.items()}
    if not copies.whole:  # a hash would be one of zeros
        found = {key: replace(info, fingerprint="") for key, info in found.items()}
    if sets:
        check_set(_HERE, source, found, sets[_HERE])
        return _set_facts(source.path, list(found.values()), sets[_HERE])
    [(key, info)] = found.items()
    facts = dict(_facts(info)) | {"site": _site(info, own[key])}
    lines = [(name, value) for name, value in facts.items() if value]
    return lines + [("not served", note) for note in _not_served(info)]


def _set_facts(place: str, infos: list[CoderInfo], layers: tuple[int, ...]) -> list[tuple[str, str]]:
    """What all dictionaries of a set have in common, and one line for each of them."""
    first = dict(_facts(infos[0]))
    shared = ("format", "kind", "model", "activation", "input norm", "unit", "leaves alone", "trained", "dtype")
    without = [layer for layer, info in zip(layers, infos, strict=True) if not info.has_max_act]
    known = f"unknown at layer {_listed(tuple(without))}" if without else "known"
    lines = [("source", place), ("set", f"{len(infos)} dictionaries, of layer {_listed(layers)}")]
    lines += [(name, first[name]) for name in shared if first[name]]
    on_disk = decimal(sum({info.source: info.bytes_on_disk for info in infos}.values()))  # one file may hold all
    lines += [("max_act", known), ("on disk", on_disk), _in_memory(infos)]
    lines.append(("by rows", first["by rows"]))
    for layer, info in zip(layers, infos, strict=True):
        about = dict(_facts(info))
        lines.append((f"layer {layer}", f"{about['features']} features, {about['site']}, {info.source}"))
    notes = dict.fromkeys(note for info in infos for note in _not_served(info))
    return lines + [("not served", note) for note in notes]


def _in_memory(infos: Sequence[CoderInfo]) -> tuple[str, str]:
    if all(info.targets for info in infos):
        return "in memory", "nothing: rows of its features come with requests"
    half, full = (decimal(sum(info.memory(size) for info in infos)) for size in (2, 4))
    return "in memory", f"{half} in float16 or bfloat16, {full} in float32"


def _by_rows(info: CoderInfo) -> str:
    """What a server keeps of it that leaves it in its file: two rows of the site for each slot of a request."""
    if info.activation in RANKED:
        return f"not served: {info.activation} ranks all features"
    sites = {info.site_in, *info.writes}
    half = decimal(len(sites) * 2 * info.d_in * 2)
    return f"{half} in float16 or bfloat16 for each feature that a request names, with rows: in front of the place"


def _vector_facts(place: str | Path, found: VectorSet) -> list[tuple[str, str]]:
    layers, kind = "one, for any site", f" of {found.kind}" if found.kind else ""
    if found.layers is not None:
        layers = f"one for each layer of {_listed(found.layers)}{kind}"
    if found.stack is not None:
        layers += f", if the model has {found.stack} layers; #ROW@SITE behind the place takes one"
    lengths = [float(np.linalg.norm(row.astype(np.float64))) for row in found.rows.values()]
    length = f"{min(lengths):.4g}" if len(lengths) == 1 else f"{min(lengths):.4g} to {max(lengths):.4g}"
    return [
        ("source", str(place)),
        ("vectors", layers),
        ("width", f"{found.width} wide"),
        ("length", length),
        ("bias", f"{found.bias:g}, of a probe" if found.bias else "0"),
        ("fingerprint", found.fingerprint[:16]),
        *found.notes,
    ]


def _listed(layers: tuple[int, ...]) -> str:
    whole = len(layers) > 2 and layers == tuple(range(layers[0], layers[-1] + 1))
    return f"{layers[0]} to {layers[-1]}" if whole else ", ".join(map(str, layers))


def _site(info: CoderInfo, own: CoderInfo | None = None) -> str:
    """Where it reads and writes; `own` is what its files say, which a given site replaces."""
    if info.site_in is None or info.site_out is None:
        return "not stated in the files: give it, as in PLACE@resid_post.12"
    behind = f" to {info.writes[-1]}" if len(info.writes) > 1 else ""
    site = info.site_in if info.site_in == info.site_out else f"{info.site_in} -> {info.site_out}{behind}"
    if own is None or None in (own.site_in, own.site_out) or _site(own) == site:
        return site
    return f"{site}, as given (its files say {_site(own)})"


def _facts(info: CoderInfo) -> list[tuple[str, str]]:
    skip = f"  w_skip [{info.d_out}, {info.d_in}]" if info.skip else ""
    unsaid = info.site_in is None and info.site_out is None and info.kind == "SAE"
    unknown = "unknown" if unserved(info) else "unknown: `saesteer calibrate` measures it"
    return [
        ("source", info.source),
        ("format", info.format),
        ("kind", "SAE, unless it is a transcoder of equal widths" if unsaid else info.kind),
        ("model", info.model or "not stated in the files"),
        ("address", ", ".join(f"{PREFIX}{one}" for one in info.addresses)),
        ("site", _site(info)),
        ("features", f"{info.features:,}{_ids(info)}"),
        ("shapes", f"w_enc [{info.features}, {info.d_in}]  w_dec [{info.features}, {info.d_out}]{skip}"),
        ("activation", _activation(info)),
        ("input norm", info.in_norm if info.in_norm == "none" else f"{info.in_norm}, of each token"),
        ("unit", f"{info.feature_unit} feature values"),
        ("max_act", "known" if info.has_max_act else unknown),
        ("leaves alone", f"the first {max(1, info.skip_first)} position(s), unless a scope names them"),
        ("trained", "without special tokens" if info.exclude_special_tokens else ""),
        ("dtype", info.stored_dtype),
        ("on disk", decimal(info.bytes_on_disk)),
        _in_memory([info]),
        ("by rows", _by_rows(info)),
        ("fingerprint", info.fingerprint[:16] or "not computed: it takes reading the whole file once"),
    ]


def _activation(info: CoderInfo) -> str:
    if info.k is None:
        return info.activation
    if info.activation == "groupmax":
        return f"groupmax, {info.k} groups of {info.features // info.k}"
    return f"{info.activation}, k = {info.k}"


def _ids(info: CoderInfo) -> str:
    if info.feature_ids is None:
        return ""
    shown = ", ".join(map(str, info.feature_ids[:8]))
    return f" of a larger dictionary: {shown}{', ...' if info.features > 8 else ''}"


def _not_served(info: CoderInfo) -> list[str]:
    """What a server refuses to do with this dictionary, at start or in a request."""
    if why := unserved(info):
        return [f"this dictionary, in a server: it {why}"]
    notes = []
    if info.feature_ids is not None:
        notes.append("features that the file does not hold")
    if info.targets is not None:
        notes.append("reconstruct: it makes no layer's output alone")
    elif not info.can_reconstruct:
        notes.append("reconstruct with error drop: the file lacks the output bias or some features")
    elif info.activation == "groupmax":
        notes.append("reconstruct with error drop, for groupmax")
    elif info.site_in != info.site_out:
        notes.append(f"reconstruct with error drop, unless --sites names {info.site_out}")
    if not info.has_max_act:
        notes.append("values in unit max_act, until it is calibrated")
    if info.activation in RANKED and info.site_in == info.site_out:
        notes.append(f"clamps after other edits of the site in one request, as {info.activation} needs all features")
    return notes
