"""saesteer's own file: one .safetensors for each dictionary, already in canonical form; knows no other library's names.

    W_enc [F, d_in]  W_dec [F, d_out]  b_enc [F]  b_dec [d_out]
    and where it has them threshold [1 or F], max_act [F], W_skip [d_out, d_in] of a skip transcoder
    pre = x @ W_enc.T + b_enc;  f = pre where pre > threshold (relu without one; topk with metadata k)

The file's metadata holds everything else, as strings: format (saesteer), activation, k, in_norm, site_in, site_out,
feature_unit, skip_first, exclude_special_tokens, model, addresses, feature_ids, can_reconstruct, centred, l0,
max_act_gaps; and measured, which nothing reads. A file without metadata is accepted if it has max_act, as the first
ones had, and if F != d, which shows that it is not transposed like other formats with the same keys.
"""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import get_args

from saesteer.dictionaries.coder import Activation, CoderInfo, FeatureUnit, InNorm, SparseCoder
from saesteer.errors import LoadError
from saesteer.loaders.draft import Draft
from saesteer.loaders.files import check_fetched, one_of, whole_numbers, wrong
from saesteer.loaders.max_act import GAPS, gaps_in
from saesteer.loaders.neuronpedia import addresses
from saesteer.loaders.opening import open_arrays
from saesteer.loaders.write import write_arrays

NAME = "saesteer"
Said = dict[str, str]  # a file's metadata
FILES = ("saesteer.safetensors",)
_KEYS = {"w_enc": "W_enc", "b_enc": "b_enc", "w_dec": "W_dec", "b_dec": "b_dec"}
_SITE = re.compile(r"[a-z]+(_[a-z]+)*(\.\d+)?")


def draft(place: Path) -> list[Draft] | None:
    """The draft of our .safetensors file or of a folder with ``saesteer.safetensors``, or those of a folder's files.

    A ``saesteer.safetensors`` is always ours; another file is ours if its metadata or keys say so. Raises LoadError.
    """
    drafts = []
    files = [place]
    if place.is_dir():
        whole = place / FILES[0]
        files = [whole] if whole.is_file() else sorted(place.glob("*.safetensors"))
    for file in files:
        if (one := _one(file)) is None:
            return None
        drafts.append(one)
    return drafts or None


def _one(file: Path) -> Draft | None:
    if file.suffix != ".safetensors" or not file.is_file():
        return None
    check_fetched(file)
    try:
        weights = open_arrays(file)
    except LoadError:
        if file.name in FILES:
            raise
        return None
    about, index = weights.metadata, weights.index
    if file.name not in FILES and about.get("format") != NAME and not {*_KEYS.values(), "max_act"} <= index.keys():
        return None
    if about.get("format", NAME) != NAME:
        raise wrong(file, "format", repr(about["format"]), repr(NAME))
    shape = weights.shape("W_enc", 2)
    if "format" not in about and shape[0] == shape[1]:
        raise wrong(file, "W_enc", f"shape {list(shape)} and no metadata", "format: saesteer, or F other than d")
    default = "jumprelu" if "threshold" in index else "relu"
    activation = one_of(file, about, "activation", get_args(Activation), default)
    if activation != "jumprelu" and "threshold" in index:
        raise wrong(file, "threshold", "there", "one for jumprelu, else none")
    one = "threshold" in index and index["threshold"].shape == (1,)
    in_norm = one_of(file, about, "in_norm", get_args(InNorm), "none")
    centred = _is_true(file, about, "centred", "false")
    if centred and in_norm != "none":
        raise wrong(file, "centred", f"true, with in_norm {in_norm}", "one of the two")
    keys = {"one_threshold" if one else "threshold": "threshold"} if activation == "jumprelu" else {}
    listed = "feature_ids" in about
    ids = whole_numbers(file, about, "feature_ids", "a list of whole numbers") if listed else None
    return Draft(
        weights,
        _KEYS | keys,
        activation,
        optional={"max_act": "max_act", "skip": "W_skip"},
        unmistakable=True,
        below_zero="kept",
        centred=centred,
        mean_free=True,
        k=_number(file, about, "k") if "k" in about else None,
        in_norm=in_norm,
        sites=(_site(file, about, "site_in"), _site(file, about, "site_out")),
        feature_unit=one_of(file, about, "feature_unit", get_args(FeatureUnit), "raw"),
        skip_first=_number(file, about, "skip_first") if "skip_first" in about else 1,
        exclude_special_tokens=_is_true(file, about, "exclude_special_tokens", "false"),
        feature_ids=ids,
        can_reconstruct=_is_true(file, about, "can_reconstruct", "true"),
        model=about.get("model"),
        addresses=addresses(about.get("addresses")),
        l0=_l0(file, about),
        max_act_gaps=gaps_in(file, about),
    )


def write(path: Path | str, coder: SparseCoder, *, measured: Mapping[str, object] | None = None) -> None:
    """Writes a dictionary so that reading it gives the same tensors and meaning; equal dictionaries give equal bytes.

    The file is written completely or not at all. It does not keep ``info.source`` or the format that the dictionary
    came from. A threshold that all features share is stored once.

    Args:
        path: the file.
        coder: the dictionary.
        measured: how it was trained and how good it is, as values that JSON has; nothing reads it.

    Raises:
        LoadError: the file cannot be written.
    """
    tensors = {"W_enc": coder.w_enc, "W_dec": coder.w_dec, "b_enc": coder.b_enc, "b_dec": coder.b_dec}
    if coder.threshold is not None:
        same = bool((coder.threshold == coder.threshold[0]).all())
        tensors["threshold"] = coder.threshold[:1] if same else coder.threshold
    if coder.max_act is not None:
        tensors["max_act"] = coder.max_act
    if coder.w_skip is not None:
        tensors["W_skip"] = coder.w_skip
    about = {} if measured is None else {"measured": json.dumps(measured)}
    write_arrays(Path(path), tensors, _metadata(coder.info) | about)


def _metadata(info: CoderInfo) -> Said:
    document = {
        "format": NAME,
        "activation": info.activation,
        "addresses": " ".join(info.addresses) or None,
        "can_reconstruct": info.can_reconstruct,
        "centred": info.centred or None,
        "exclude_special_tokens": info.exclude_special_tokens or None,
        "feature_ids": info.feature_ids,
        "feature_unit": info.feature_unit,
        "in_norm": info.in_norm,
        "k": info.k,
        "l0": info.l0,
        GAPS: info.max_act_gaps or None,
        "model": info.model,
        "site_in": info.site_in,
        "site_out": info.site_out,
        "skip_first": info.skip_first,
    }
    said = {key: value for key, value in document.items() if value is not None}
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in said.items()}


def _is_true(file: Path, about: Said, key: str, default: str) -> bool:
    return bool(one_of(file, about, key, ("true", "false"), default) == "true")


def _l0(file: Path, about: Said) -> float | None:
    if "l0" not in about:
        return None
    try:
        value = float(about["l0"])
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise wrong(file, "__metadata__: l0", repr(about["l0"]), "a number of features")
    return value


def _site(file: Path, about: Said, key: str) -> str | None:
    if key in about and not _SITE.fullmatch(about[key]):
        raise wrong(file, key, repr(about[key]), "a site such as resid_post.15")
    return about.get(key)


def _number(file: Path, about: Said, key: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", about[key]):
        raise wrong(file, f"__metadata__: {key}", repr(about[key]), "a whole number")
    return int(about[key])
