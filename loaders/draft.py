"""What a format finds out about a dictionary (a ``Draft``), and the builder that does the rest. Knows no format.

A format reads names, small JSON and headers, and assigns a role to each array. The builder checks that the shapes
agree, reads and folds the values and fills in ``CoderInfo``, so all formats share checks and messages. It takes a
draft, not a place: a place with a dictionary for each layer gives a draft for each.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from saesteer.dictionaries.coder import Activation, CoderInfo, FeatureUnit, InNorm, SparseCoder
from saesteer.loaders import folds
from saesteer.loaders.arrays import Arrays, is_finite
from saesteer.loaders.files import bytes_on_disk, fingerprint, wrong

# Role -> axes. The roles after the first six name the fold that uses the array.
ROLES: dict[str, tuple[str, ...]] = {
    "w_enc": ("F", "d_in"),
    "b_enc": ("F",),
    "w_dec": ("F", "d_out"),
    "b_dec": ("d_out",),  # zeros if no array has the role
    "threshold": ("F",),
    "max_act": ("F",),
    "one_threshold": ("1",),  # for all features
    "log_threshold": ("F",),  # threshold = exp(log_threshold)
    "b_in": ("d_in",),  # the encoder reads x - b_in
    "b_gate": ("F",),  # with r_mag: a gated SAE, whose b_enc is the magnitude's bias
    "r_mag": ("F",),
    "ones": ("F",),  # a factor for each feature, refused unless all are 1
    "skip": ("d_out", "d_in"),  # y += x @ skip.T
    "length_in": ("1",),  # as Draft.lengths, in the file
    "length_out": ("1",),
}
KEYS = {"w_enc": "W_enc", "w_dec": "W_dec", "b_enc": "b_enc", "b_dec": "b_dec"}  # as many formats call them
MATRICES = ("w_enc", "w_dec")
UNASKED = 64 << 20  # bytes of a file that is hashed though nobody asked: 50 ms
SIZES = ("F", "d_in", "d_out")
Sites = tuple[str | None, str | None]  # site_in, site_out
SQUARE = "F other than d_in: nobody sees whether a square encoder is transposed"


class Axis(NamedTuple):
    """One axis of an array."""

    name: str  # as the format and the messages call it
    size: int


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """A dictionary described by the arrays of its file. Fields that ``CoderInfo`` also has mean the same there."""

    weights: Arrays
    keys: Mapping[str, str]  # role -> array; the shapes are checked in this order
    activation: Activation

    _: KW_ONLY
    optional: Mapping[str, str] = field(default_factory=dict)  # role -> array that the file may lack
    ignored: Set[str] = frozenset()  # arrays that the file may have, and that change nothing
    transposed: Set[str] = frozenset()  # roles whose arrays are stored as [columns, rows]
    configs: tuple[Path, ...] = ()  # small files read for this draft, which the fingerprint covers
    by_place: str = ""  # what only the place's name says, which the fingerprint covers as well
    sizes: tuple[Axis, Axis, Axis] | None = None  # F, d_in and d_out in the config; None: from the matrices' shapes
    # No other format has these keys, so F == d_in cannot hide a transposed matrix, and the sites are not guessed.
    unmistakable: bool = False

    # Where the lengths of the decoder's rows belong. values: into the feature values, which thresholds then are about.
    # gates: pre is compared multiplied by them. dropped: the format divides each row by its own.
    decoder_norm: Literal["kept", "values", "gates", "dropped"] = "kept"
    threshold: float | None = None  # of all features, by the config
    # Mean lengths of inputs and outputs. The arrays are about inputs and outputs that are scaled to sqrt(d).
    lengths: tuple[float, float] | None = None
    centred: bool = False  # the encoder reads x - mean(x), before it subtracts b_in; only without a norm
    mean_free: bool = False  # its rows have no mean, so they do so by themselves
    below_zero: Literal["refused", "raised", "kept"] = "refused"  # thresholds below 0; raised: to 0
    order: Tensor | None = None  # [F] int64, the file's row for each row of the dictionary
    # Only of a cross-layer transcoder: what w_dec (and length_out) are for each next layer that its features write.
    later: tuple[Mapping[str, str], ...] | None = None
    decoders: Arrays | None = None  # the file of the decoders, if they have one of their own
    k: int | None = None
    in_norm: InNorm = "none"
    sites: Sites = (None, None)
    feature_unit: FeatureUnit = "raw"
    skip_first: int = 1
    exclude_special_tokens: bool = False
    feature_ids: tuple[int, ...] | None = None
    can_reconstruct: bool = True
    model: str | None = None
    addresses: tuple[str, ...] = ()
    l0: float | None = None
    max_act_gaps: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert self.present.keys() <= ROLES.keys(), self.present
        assert not self.centred or self.in_norm == "none", self.in_norm
        assert self.transposed <= {*MATRICES, "skip"}, self.transposed
        assert self.later is None or self.decoder_norm in ("kept", "gates"), self.decoder_norm

    @property
    def present(self) -> dict[str, str]:
        """Role -> array, including the optional arrays that the file has."""
        return dict(self.keys) | {role: key for role, key in self.optional.items() if key in self.weights.index}

    @property
    def files(self) -> tuple[Arrays, ...]:
        """The arrays of each file of weights."""
        return (self.weights,) if self.decoders is None else (self.weights, self.decoders)

    def holding(self, role: str) -> Arrays:
        """The file that holds the array of a role."""
        return self.weights if role != "w_dec" or self.decoders is None else self.decoders

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Each role and its array; w_dec comes once for each layer that a cross-layer transcoder writes."""
        yield from self.present.items()
        for roles in self.later or ():
            yield from roles.items()


_SHARED = {one.name for one in fields(Draft)} & {one.name for one in fields(CoderInfo)}


class Format(Protocol):
    """A module or object that recognises the files of one format."""

    @property
    def FILES(self) -> tuple[str, ...]:
        """Names of the files of a dictionary, the only ones that the hub is asked for. May contain ``*``."""

    def draft(self, place: Path) -> Draft | Sequence[Draft] | None:
        """The draft of the dictionary at an existing file or folder, or None if the files have another format.

        A folder that holds several dictionaries has a draft for each, with a file of its own; a file that does has
        drafts with distinct sites, by which they are chosen.

        Raises:
            LoadError: the files have this format and are wrong.
        """


def facts(draft: Draft, name: str, *, hashed: bool = True) -> CoderInfo:
    """What is known about the dictionary without its values: reads the headers and hashes the files.

    Args:
        draft: the dictionary's draft.
        name: the format's name.
        hashed: False leaves the fingerprint empty where a large file would have to be read; so does ``later``.

    Raises:
        LoadError: naming the file, the array or the key, what is there and what was expected.
    """
    weights, held = draft.weights, draft.present
    for file in draft.files:
        keys = {key for role, key in draft.pairs() if draft.holding(role) is file} - {*draft.optional.values()}
        file.expect(keys, {*draft.optional.values(), *draft.ignored})
    axes = _axes(draft)
    site_in, site_out = draft.sites
    features, d_in, d_out = (axes[axis].size for axis in SIZES)
    for role, key in draft.pairs():
        draft.holding(role).check(key, *_expected(draft, axes, role))
    if not draft.unmistakable and features == d_in:
        raise wrong(weights.path, held["w_enc"], f"shape {[d_in, d_in]}", SQUARE)
    if not draft.unmistakable and site_in == site_out is not None and d_in != d_out:
        found = f"width {d_out} for an input of {d_in}"
        raise wrong(weights.path, held["w_dec"], found, f"equal widths at {site_in}")
    told_in = draft.configs[0] if draft.configs else f"{weights.path}: __metadata__"
    if draft.k is not None and draft.k > features:
        raise wrong(told_in, "k", draft.k, f"at most {axes['F'].name} = {features}")
    files = [*draft.configs, *(file.path for file in draft.files)]
    # Unasked, small files and those that the hub's cache names by their content.
    wanted = (hashed and draft.later is None) or all(
        file.stat().st_size <= UNASKED or file.resolve().parent.name == "blobs" for file in files
    )
    try:
        return CoderInfo(
            format=name,
            d_in=d_in,
            d_out=d_out,
            features=features,
            site_in=site_in,
            site_out=site_out,
            has_max_act="max_act" in held,
            skip="skip" in held,
            targets=None if draft.later is None else 1 + len(draft.later),
            fingerprint=fingerprint(files, draft.by_place) if wanted else "",
            stored_dtype=str(_dtype(draft)).removeprefix("torch."),
            bytes_on_disk=bytes_on_disk(files),
            **{name: getattr(draft, name) for name in _SHARED},
        )
    except AssertionError as exc:
        raise wrong(told_in, "values", exc, "values that agree with each other and with the arrays") from exc


def build(draft: Draft, name: str, dtype: torch.dtype | None) -> SparseCoder:
    """The dictionary, with its matrices in dtype (None: as stored).

    Raises:
        LoadError: as ``facts``, or a value is not finite or out of range.
    """
    return _built(draft, facts(draft, name), dtype)


def row_of(
    draft: Draft, info: CoderInfo, row: int, dtype: torch.dtype | None, descriptors: Mapping[Path, int]
) -> SparseCoder:
    """One row of ``build(draft, ...)``, as a dictionary of one feature; it reads nothing of the others.

    Its b_dec is zero and it has no skip connection: neither belongs to a feature.

    Args:
        draft: the dictionary's draft, whose arrays are seekable.
        info: the facts of the draft; no activation that ranks features.
        row: the row, below info.features.
        dtype: as in ``build``.
        descriptors: its files, open.

    Raises:
        LoadError: a value of the row is not finite or out of range, or a file cannot be read.
    """
    return _built(*_alone(draft, info, row, descriptors), dtype)


def later_of(
    draft: Draft, info: CoderInfo, row: int, dtype: torch.dtype | None, descriptors: Mapping[Path, int]
) -> Tensor:
    """The decoder rows of a cross-layer transcoder's feature for each layer after its own, [targets - 1, d_out].

    Arguments and errors are those of ``row_of``.
    """
    none = torch.empty(0, info.d_out, dtype=dtype or _dtype(draft))
    return torch.cat([none, *decoders(*_alone(draft, info, row, descriptors), dtype)])


def decoders(draft: Draft, info: CoderInfo, dtype: torch.dtype | None) -> Iterator[Tensor]:
    """The decoders [F, d_out] of a cross-layer transcoder for each layer after its own.

    Raises:
        LoadError: a value is not finite.
    """
    for roles in draft.later or ():
        there = replace(draft, keys={**draft.present, **roles}, later=())
        vectors = {role: vector_of(there, role) for role in there.keys if role not in (*MATRICES, "skip")}
        scale = _folded(there, info, vectors).dec_scale
        found = _matrix(there, "w_dec", (info.features, info.d_out), dtype or _dtype(draft), scale)
        yield found if draft.order is None else found[draft.order]


def _alone(draft: Draft, info: CoderInfo, row: int, descriptors: Mapping[Path, int]) -> tuple[Draft, CoderInfo]:
    """A dictionary of one row of another, without what belongs to no feature."""
    at = row if draft.order is None else int(draft.order[row])
    keys = {role: key for role, key in draft.present.items() if role not in ("b_dec", "skip")}

    def only(file: Arrays) -> Arrays:
        here = [(role, key) for role, key in draft.pairs() if draft.holding(role) is file and "F" in ROLES[role]]
        axes = {key: _axes_of(draft, role).index("F") for role, key in here}
        return file.only(axes, at, descriptors[file.path])

    one = replace(
        draft,
        weights=only(draft.weights),
        decoders=None if draft.decoders is None else only(draft.decoders),
        keys=keys,
        optional={},
        order=None,
        feature_ids=None,
    )
    return one, replace(info, features=1, feature_ids=None, skip=False, has_max_act="max_act" in keys)


def _built(draft: Draft, info: CoderInfo, dtype: torch.dtype | None) -> SparseCoder:
    weights, held = draft.weights, draft.present
    assert not info.skip or (draft.lengths is None and "length_in" not in held), "nobody scales a skip connection yet"
    vectors = {role: vector_of(draft, role) for role in held if role not in (*MATRICES, "skip")}
    folded = _folded(draft, info, vectors)

    wanted = dtype or _dtype(draft)

    def ordered(rows: Tensor) -> Tensor:
        return rows if draft.order is None else rows[draft.order]

    b_enc, threshold, centring = folded.b_enc, folded.threshold, draft.centred and not draft.mean_free
    exact = torch.float32 if centring else wanted
    w_enc = _matrix(draft, "w_enc", (info.features, info.d_in), exact, folded.enc_scale)
    if centring:
        w_enc, b_enc = folds.centre_input(w_enc, b_enc, vectors.get("b_in"))
        w_enc = w_enc.to(wanted)
    if "b_in" in vectors:
        b_enc = folds.subtract_from_input(w_enc, b_enc, vectors["b_in"])
    if not is_finite(b_enc):
        raise wrong(weights.path, held["b_enc"], "outside the range of float32 once folded", "finite values")
    return SparseCoder(
        w_enc=ordered(w_enc),
        b_enc=ordered(b_enc),
        w_dec=ordered(_matrix(draft, "w_dec", (info.features, info.d_out), wanted, folded.dec_scale)),
        b_dec=folded.b_dec,
        info=info,
        threshold=None if threshold is None else ordered(threshold),
        max_act=ordered(vectors["max_act"]) if "max_act" in vectors else None,
        w_skip=_matrix(draft, "skip", (info.d_out, info.d_in), wanted) if info.skip else None,
    )


def _matrix(draft: Draft, role: str, shape: tuple[int, int], dtype: torch.dtype, scale: Tensor | None = None) -> Tensor:
    turned = role in draft.transposed
    return draft.holding(role).matrix(draft.present[role], shape, dtype, transpose=turned, scale=scale)


class _Folded(NamedTuple):
    """What is left to do with the arrays once every fold is a factor."""

    enc_scale: Tensor | None  # [F], of the encoder's rows
    b_enc: Tensor
    threshold: Tensor | None
    dec_scale: Tensor | None  # [F], of the decoder's rows
    b_dec: Tensor


def _folded(draft: Draft, info: CoderInfo, vectors: Mapping[str, Tensor]) -> _Folded:
    """All folds but that of b_in, which needs the encoder itself."""
    b_enc, b_dec = vectors["b_enc"], vectors.get("b_dec", torch.zeros(info.d_out))
    threshold, enc_scale, dec_scale, factor = vectors.get("threshold"), None, None, 1.0
    if "one_threshold" in vectors:
        threshold = vectors["one_threshold"].expand(info.features).clone()
    if draft.threshold is not None:
        threshold = torch.full((info.features,), draft.threshold)
    if "log_threshold" in vectors:
        threshold = vectors["log_threshold"].exp()
    if "b_gate" in vectors:
        enc_scale, b_enc, threshold = folds.gated(vectors["b_gate"], b_enc, vectors["r_mag"])
    if draft.decoder_norm != "kept":
        turned, decoders = "w_dec" in draft.transposed, draft.holding("w_dec")
        parts = [decoders.row_norms(key, transpose=turned) for role, key in draft.pairs() if role == "w_dec"]
        norms = torch.stack(parts).norm(dim=0) if len(parts) > 1 else parts[0]
    if draft.decoder_norm == "gates" and threshold is not None:
        threshold = folds.gate_by_norm(threshold, norms)
    if draft.lengths is not None or "length_in" in vectors:
        lengths = draft.lengths or (vectors["length_in"].item(), vectors["length_out"].item())
        of_features, factor, of_output = folds.to_raw_units((info.d_in, info.d_out), lengths)
        b_enc, b_dec, dec_scale = b_enc * of_features, b_dec * of_output, torch.full((info.features,), factor)
        if threshold is not None and draft.decoder_norm != "values":
            threshold = threshold * of_features
    if draft.decoder_norm == "values":
        enc_scale, dec_scale = folds.to_decoder_norm(norms * factor)
        b_enc, dec_scale = b_enc * enc_scale, dec_scale * factor
    if draft.decoder_norm == "dropped":
        _, dec_scale = folds.to_decoder_norm(norms)
    return _Folded(enc_scale, b_enc, threshold, dec_scale, b_dec)


def _axes(draft: Draft) -> dict[str, Axis]:
    """The axes, by their names in ROLES."""
    sizes = draft.sizes
    if sizes is None:
        stored = (draft.holding(role).shape(draft.keys[role], 2) for role in MATRICES)
        (features, d_in), (_, d_out) = (
            shape[::-1] if role in draft.transposed else shape for role, shape in zip(MATRICES, stored, strict=True)
        )
        sizes = Axis("F", features), Axis("d_in", d_in), Axis("d_out", d_out)
    return dict(zip(SIZES, sizes, strict=True)) | {"1": Axis("1", 1)}


def _expected(draft: Draft, axes: Mapping[str, Axis], role: str) -> tuple[tuple[int, ...], str]:
    """The shape that an array must have in the file, and what the shape means, such as ``[d_in, F]``."""
    names = _axes_of(draft, role)
    meaning = f"[{', '.join(axes[name].name for name in names)}]"
    if role == "b_enc":
        meaning += f" of {draft.keys['w_enc']} {_expected(draft, axes, 'w_enc')[1]}"
    return tuple(axes[name].size for name in names), meaning


def _axes_of(draft: Draft, role: str) -> tuple[str, ...]:
    """The axes of an array in the file."""
    return ROLES[role][::-1] if role in draft.transposed else ROLES[role]


def _dtype(draft: Draft) -> torch.dtype:
    dtypes = (draft.holding(role).dtype(draft.keys[role]) for role in MATRICES)
    return torch.promote_types(*dtypes)


def vector_of(draft: Draft, role: str) -> Tensor:
    """An array's values, in the range that its role allows; raises LoadError."""
    weights, key = draft.weights, draft.present[role]
    below = {"max_act": "refused", "threshold": draft.below_zero, "one_threshold": draft.below_zero}.get(role, "kept")
    vector = weights.vector(key, negative=below != "refused")
    if role == "ones" and not (vector == 1).all():
        raise wrong(weights.path, key, "not all ones", "ones: another scale of the features is not served")
    if role.startswith("length") and not (vector > 0).all():
        raise wrong(weights.path, key, f"holds {vector.min().item()}", "values above 0")
    return vector.clamp_min(0) if below == "raised" else vector
