"""The largest activation of each feature, which ``saesteer calibrate`` or ``label`` saves next to a dictionary.

They are in ``FILE.max_act`` next to a file, or ``saesteer.max_act`` in a folder: a safetensors file with max_act [F],
whose metadata has a digest of the weights that were measured (``loaders/sample.py``), so other weights under the same
name do not get these values, and says what made them. Those of ``calibrate`` count most, then those in the dictionary's
own file, then those of ``label``: ``calibrate`` replaces what ``label`` made, never the other way around. Values that
were measured at another site, where the files do not name one, do not count. No weight file has this suffix. Knows no
format.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from torch import Tensor

from saesteer.dictionaries.coder import CoderInfo, SparseCoder, place_of
from saesteer.loaders.arrays import Arrays
from saesteer.loaders.draft import Draft
from saesteer.loaders.files import fingerprint, whole_numbers, wrong
from saesteer.loaders.opening import open_arrays
from saesteer.loaders.sample import sample
from saesteer.loaders.write import write_arrays

_KEY, GAPS = "max_act", "max_act_gaps"
CALIBRATION, LABELS = "calibration", "labels"  # what made the values
_AGAIN = {  # a stale file of ``calibrate`` does not keep it from running
    CALIBRATION: "one made for this dictionary: run `saesteer calibrate` again",
    LABELS: "one made for this dictionary: delete it, and run `saesteer label` again or `saesteer calibrate`",
}


def beside(path: Path) -> Path:
    """The file with the values for the dictionary at this path, which need not exist."""
    return path / "saesteer.max_act" if path.is_dir() else path.with_name(f"{path.name}.max_act")


def write(
    path: Path,
    draft: Draft,
    max_act: Tensor,
    *,
    tokens: int | None,
    by: str = CALIBRATION,
    site: str | None = None,
    gaps: Sequence[int] = (),
) -> Path:
    """Saves the values and replaces older ones.

    Args:
        path: the dictionary's path.
        draft: the dictionary's draft, made before it was measured.
        max_act: [F] float32, 0 or more, in the dictionary's unit.
        tokens: how many tokens they were measured on; None: unknown.
        by: what made them.
        site: where the dictionary read when they were measured; None: unknown.
        gaps: features whose values are unknown, as ``CoderInfo.max_act_gaps`` has them.

    Raises:
        LoadError: the file cannot be written, or the weights have changed since the draft was made.
    """
    known = {"weights": sample(draft), "by": by, "tokens": None if tokens is None else str(tokens)}
    known |= {"site": site and place_of(site), GAPS: json.dumps([*gaps]) if gaps else None}
    write_arrays(beside(path), {_KEY: max_act}, {name: one for name, one in known.items() if one is not None})
    return beside(path)


@contextmanager
def set_aside(path: Path) -> Iterator[None]:
    """Hides the saved values while new ones are measured, since stale ones are refused; an error restores them."""
    now = beside(path)
    old = now.with_name(f"{now.name}.old")
    try:
        if now.is_file():
            now.replace(old)
        yield
    except BaseException:
        if old.is_file():
            old.replace(now)
        raise
    old.unlink(missing_ok=True)


def known(path: Path, info: CoderInfo, site: str | None) -> CoderInfo:
    """The info, with the values next to the dictionary if there are any that count; raises LoadError.

    Args:
        path: the dictionary's path.
        info: its facts without the values.
        site: where it reads, if the operator says so.
    """
    if not beside(path).is_file():
        return info
    about, reads = _open(path, info).metadata, site or info.site_in
    if reads is not None and about.get("site", place_of(reads)) != place_of(reads):
        return info
    by = about.get("by", CALIBRATION)
    if by not in (CALIBRATION, LABELS):
        raise wrong(beside(path), "by", repr(by[:60]), f"{CALIBRATION} or {LABELS}")
    if by == LABELS and info.has_max_act:
        return info
    both = hashlib.sha256(f"{info.fingerprint} {fingerprint([beside(path)])}".encode()).hexdigest()
    gaps = gaps_in(beside(path), about)
    return replace(info, has_max_act=True, max_act_by=by, fingerprint=both, max_act_gaps=gaps)


def gaps_in(file: Path, about: Mapping[str, str]) -> tuple[int, ...]:
    """The features without a value, as a file's metadata has them; raises LoadError."""
    found = whole_numbers(file, about, GAPS, "pairs of whole numbers")
    if len(found) % 2 or not all(one < other for one, other in pairwise(found)):
        raise wrong(file, GAPS, f"{about[GAPS]:.100}", "pairs of whole numbers, ascending")
    return found


def added(path: Path, coder: SparseCoder, site: str | None, draft: Draft) -> SparseCoder:
    """The dictionary, with the values next to it if there are any that count; arguments and errors as of ``known``."""
    info = known(path, coder.info, site)
    if info is coder.info:
        return coder
    return replace(coder, info=info, max_act=_values(_open(path, info), draft))


def values(path: Path, info: CoderInfo, draft: Draft) -> Tensor | None:
    """The values [F] next to a dictionary whose weights nobody loads; None if there are none.

    Args:
        path: the dictionary's path.
        info: its facts without the values.
        draft: its draft.

    Raises:
        LoadError: the values were measured on other weights, or cannot be read.
    """
    return _values(_open(path, info), draft) if beside(path).is_file() else None


def _values(arrays: Arrays, draft: Draft) -> Tensor:
    about = arrays.metadata
    if about.get("weights") != sample(draft):
        old = "dictionary" in about and "weights" not in about
        found = "made by an older version, which did not look at the encoder" if old else "measured on other weights"
        raise wrong(arrays.path, "weights", found, _again(arrays))
    return arrays.vector(_KEY, negative=False)


def _open(path: Path, info: CoderInfo) -> Arrays:
    arrays = open_arrays(beside(path))
    arrays.expect({_KEY})
    if arrays.shape(_KEY, 1) != (info.features,):
        found = f"{arrays.shape(_KEY, 1)[0]} values for {info.features} features"
        raise wrong(arrays.path, _KEY, found, _again(arrays))
    return arrays


def _again(arrays: Arrays) -> str:
    return _AGAIN[LABELS if arrays.metadata.get("by") == LABELS else CALIBRATION]
