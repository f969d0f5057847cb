"""What ``saesteer inspect`` prints: a dictionary's headers in words; it reads no weights and knows no model."""

from __future__ import annotations

from pathlib import Path

from saesteer.coder import CoderInfo
from saesteer.loaders import describe


def report(place: str | Path) -> str:
    """What a weight file is, line by line, and what cannot be served with it.

    Raises:
        LoadError: when it is no dictionary saesteer reads.
    """
    info = describe(place)
    lines = [(name, value) for name, value in _facts(info) if value]
    lines += [("not served", note) for note in _not_served(info)]
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines)


def _facts(info: CoderInfo) -> list[tuple[str, str]]:
    site = info.site_in if info.site_in == info.site_out else f"{info.site_in} -> {info.site_out}"
    return [
        ("source", info.source),
        ("format", info.format),
        ("model", info.model or "not said by the files"),
        ("site", site or "not said by the files: give it, as in NAME=PATH@resid_post.12"),
        ("features", f"{info.features:,}{_ids(info)}"),
        ("shapes", f"w_enc [{info.features}, {info.d_in}]  w_dec [{info.features}, {info.d_out}]"),
        ("activation", f"topk, k = {info.k}" if info.k is not None else info.activation),
        ("input norm", info.in_norm),
        ("unit", f"{info.feature_unit} feature values"),
        ("max_act", "known" if info.has_max_act else "unknown: `saesteer calibrate` finds it"),
        ("leaves alone", f"the first {info.skip_first} position(s)" if info.skip_first else "no position"),
        ("dtype", info.stored_dtype),
        ("on disk", _size(info.bytes_on_disk)),
        ("fingerprint", info.fingerprint[:16]),
    ]


def _ids(info: CoderInfo) -> str:
    if info.feature_ids is None:
        return ""
    shown = ", ".join(map(str, info.feature_ids[:8]))
    return f" of a larger dictionary: {shown}{', ...' if info.features > 8 else ''}"


def _not_served(info: CoderInfo) -> list[str]:
    notes = []
    if info.feature_ids is not None:
        notes.append("features that the file does not hold")
    if not info.can_reconstruct:
        notes.append("reconstruct: the file lacks the output bias or some features")
    if not info.has_max_act:
        notes.append("values in unit max_act, until it is calibrated")
    if info.in_norm != "none":
        notes.append(f"clamps inside a model: the per-token {info.in_norm} is known to encode and decode only")
    if info.site_in != info.site_out:
        notes.append("clamps inside a model: what reads at one site and writes at another only encodes and decodes")
    return notes


def _size(count: int) -> str:
    size = float(count)
    for unit in ("bytes", "KB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError(count)
