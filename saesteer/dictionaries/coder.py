"""SparseCoder, the canonical dictionary that every loader returns. Knows no file format, no engine and no request.

Its plain torch methods define what the fields mean, in fp32; only memory is saved.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, NamedTuple, get_args

import torch
from einops import rearrange
from torch import Tensor

from saesteer.errors import ConfigError, LoadError
from saesteer.language.sites import canonical, is_pregain, onward, reading_site

Activation = Literal["relu", "jumprelu", "topk", "abstopk", "groupmax"]
InNorm = Literal["none", "layer_norm", "l2_sqrt_d"]
FeatureUnit = Literal["raw", "normalised"]

RANKED = ("topk", "abstopk", "groupmax")  # whether a feature is active depends on the others

LAYER_NORM_EPS = 1e-5  # added to the standard deviation, outside the root
SMALLEST_NORM = 1e-12  # a zero token stays zero instead of becoming NaN
ROWS_AT_ONCE = 16384  # rows widened to fp32 at a time: a 10 GB bf16 dictionary is never held twice


def blocks(rows: int) -> Iterator[slice]:
    """All rows of a matrix, ROWS_AT_ONCE at a time."""
    return (slice(start, start + ROWS_AT_ONCE) for start in range(0, rows, ROWS_AT_ONCE))


class _Ids(tuple[int, ...]):
    """The features of a file, in the order of its rows."""

    @cached_property
    def rows(self) -> Mapping[int, int]:
        """The row of each."""
        return {feature: row for row, feature in enumerate(self)}


@dataclass(frozen=True, slots=True)
class CoderInfo:
    """What is known about a dictionary without its weights in memory, as plain Python values.

    ``feature_ids`` is None if row i of the weights is feature i. A file that holds only some features of a dictionary
    (a manifest) lists them in row order; requests use the original index, and ``row_of`` finds its row.
    """

    format: str
    d_in: int
    d_out: int
    features: int  # rows of w_enc and w_dec
    activation: Activation
    k: int | None = None  # features that are active at most; only if they are ranked
    in_norm: InNorm = "none"  # per token, before the encoder
    site_in: str | None = None  # "resid_post.20", or None if the files do not say
    site_out: str | None = None
    feature_unit: FeatureUnit = "raw"  # the unit of a clamp's value
    has_max_act: bool = False
    skip_first: int = 1  # first positions that the format leaves unedited
    source: str = ""  # the path or hub id as given
    fingerprint: str = ""  # digest of the files' content, see loaders.files.fingerprint
    feature_ids: tuple[int, ...] | None = None
    can_reconstruct: bool = True  # False: features or the output bias are missing, so only deltas mean something
    model: str | None = None  # the language model that it was trained on, if the files say
    addresses: tuple[str, ...] = ()  # MODEL/SOURCE at Neuronpedia, as far as its files or its place say it
    skip: bool = False  # y += x @ w_skip.T as well
    centred: bool = False  # it reads x - mean(x), as its encoder does by itself, and makes that
    l0: float | None = None  # active features of a token, as whoever trained it measured, if the files say
    stored_dtype: str = "float32"  # of the weight matrices in the file
    bytes_on_disk: int = 0
    targets: int | None = None  # of a cross-layer transcoder: layers that a feature writes, site_out's and those behind
    max_act_by: str | None = None  # what made the max_act next to its files: calibration or labels; None: there is none
    by_rows: bool = False  # the server holds no weights of it: rows of features come from its file with a request
    # The features without a known max_act though others have one: first, one after the last, first, ..., ascending.
    max_act_gaps: tuple[int, ...] = ()
    exclude_special_tokens: bool = False  # it was trained without the tokenizer's special tokens

    def __post_init__(self) -> None:
        assert self.activation in get_args(Activation), self.activation
        assert self.in_norm in get_args(InNorm), self.in_norm
        assert self.feature_unit in get_args(FeatureUnit), self.feature_unit
        assert min(self.features, self.d_in, self.d_out) > 0, (self.features, self.d_in, self.d_out)
        assert (self.k is not None) == (self.activation in RANKED), f"k = {self.k} for {self.activation}"
        assert self.k is None or 0 < self.k <= self.features, f"k = {self.k} of {self.features} features"
        groups = f"{self.k} groups of {self.features} features, not of equal size"
        assert self.activation != "groupmax" or self.features % (self.k or 1) == 0, groups
        assert self.in_norm == "none" or self.d_in == self.d_out, "a transcoder's output has no input statistics"
        assert self.skip_first >= 0, self.skip_first
        gaps = self.max_act_gaps
        assert len(gaps) % 2 == 0 and all(one < next_ for one, next_ in pairwise(gaps)), "gaps that are not ascending"
        assert self.targets is None or (self.targets > 0 and not self.can_reconstruct), self.targets
        if self.feature_ids is not None:
            object.__setattr__(self, "feature_ids", _Ids(self.feature_ids))
            assert len(self.feature_ids) == self.features == len(set(self.feature_ids)), "one distinct id a row"
            assert self.activation not in RANKED, "ranking inside a subset of the features is wrong"

    @property
    def max_act_from(self) -> str | None:
        """Where its maximum activations come from: ``file``, ``calibration`` or ``labels``; None: they are unknown."""
        return (self.max_act_by or "file") if self.has_max_act else None

    def knows_max_act(self, feature: int) -> bool:
        """Whether the largest activation of a feature, by its original index, is known."""
        return self.has_max_act and bisect_right(self.max_act_gaps, feature) % 2 == 0

    @property
    def kind(self) -> str:
        """What a dictionary is called that reads and writes these places."""
        if self.targets is not None:
            return "cross-layer transcoder"
        if self.skip:
            return "skip transcoder"
        return "SAE" if self.site_in == self.site_out and self.d_in == self.d_out else "transcoder"

    @property
    def writes(self) -> tuple[str, ...]:
        """The sites that it writes, in forward order; none if the files do not say."""
        return () if self.site_out is None else onward(self.site_out, self.targets)

    @property
    def read(self) -> str:
        """The site whose op has what it reads, where its files or the operator name one."""
        return reading_site(canonical(str(self.site_in)))

    @property
    def written(self) -> str:
        """The one name of the first site that it writes, where its files or the operator name one."""
        return canonical(str(self.site_out))

    @property
    def reads_pregain(self) -> bool:
        """Whether it reads mlp_in_pregain, for which the op of resid_mid normalises the stream."""
        return self.site_in is not None and is_pregain(self.site_in)

    def memory(self, size: int) -> int:
        """Bytes in memory, with matrices whose items have this size: what loading needs, and keeps."""
        rows = self.features * ((self.d_in + self.d_out) * size + 4)
        thresholds, max_act = self.activation == "jumprelu", self.has_max_act
        return rows + 4 * (self.features * (thresholds + max_act) + self.d_out)

    @property
    def ids(self) -> Sequence[int]:
        """The feature of the original dictionary in each row."""
        return range(self.features) if self.feature_ids is None else self.feature_ids

    def row_of(self, feature: int) -> int | None:
        """The row of ``w_enc`` and ``w_dec`` that holds this feature of the original dictionary, or None."""
        if self.feature_ids is None:
            return feature if 0 <= feature < self.features else None
        assert isinstance(self.feature_ids, _Ids)
        return self.feature_ids.rows.get(feature)

    def to_json(self) -> dict[str, object]:
        """A JSON object with every field."""
        document = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in document.items()}

    @classmethod
    def from_json(cls, document: object) -> CoderInfo:
        """The inverse of ``to_json``.

        Raises:
            LoadError: the object is not a CoderInfo.
        """
        if not isinstance(document, Mapping):
            raise LoadError(f"dictionary info: {type(document).__name__}; expected a JSON object")
        try:
            values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in document.items()}
            return cls(**values)
        except (TypeError, AssertionError) as exc:
            raise LoadError(f"dictionary info: {exc}; expected the fields of CoderInfo") from exc


@dataclass(frozen=True, slots=True, eq=False)
class SparseCoder:
    """An SAE or transcoder: ``f = act(in_norm(x) @ w_enc.T + b_enc)``, ``x_hat = un_norm(f @ w_dec + b_dec)``.

    A skip transcoder, which has no input norm, adds ``x @ w_skip.T``.

    The loader folds in whatever a format subtracts, scales or gates, so these two formulas always hold.
    """

    w_enc: Tensor  # [F, d_in]   row i = encoder direction of row i; fp16, bf16 or fp32, contiguous
    b_enc: Tensor  # [F]         float32
    w_dec: Tensor  # [F, d_out]  row i = decoder direction of row i; dtype of w_enc, contiguous
    b_dec: Tensor  # [d_out]     float32
    info: CoderInfo
    threshold: Tensor | None = None  # [F] float32, only for jumprelu
    max_act: Tensor | None = None  # [F] float32, the largest activation seen, in info.feature_unit
    w_skip: Tensor | None = None  # [d_out, d_in], dtype of w_enc; only of a skip transcoder

    def __post_init__(self) -> None:
        info = self.info
        matrices = {"w_enc": (info.features, info.d_in), "w_dec": (info.features, info.d_out)}
        shapes: dict[str, tuple[int, ...]] = {**matrices, "w_skip": (info.d_out, info.d_in), "b_dec": (info.d_out,)}
        shapes |= dict.fromkeys(("b_enc", "threshold", "max_act"), (info.features,))
        for name, shape in shapes.items():
            one: Tensor | None = getattr(self, name)
            if one is None:
                continue
            assert tuple(one.shape) == shape, f"{name} is {list(one.shape)}, expected {list(shape)}"
            assert len(shape) == 2 or one.dtype == torch.float32, f"{name} is {one.dtype}, expected float32"
            assert name not in matrices or one.is_floating_point(), f"{name} is {one.dtype}, expected a float dtype"
            assert name not in matrices or one.is_contiguous(), f"{name} is not contiguous"
        assert self.w_enc.dtype == self.w_dec.dtype, (self.w_enc.dtype, self.w_dec.dtype)
        assert (self.w_skip is not None) == info.skip, "skip contradicts w_skip"
        assert (self.threshold is not None) == (info.activation == "jumprelu"), "a threshold belongs to jumprelu"
        assert (self.max_act is not None) == info.has_max_act, "has_max_act contradicts max_act"

    def pre(self, x: Tensor) -> Tensor:
        """Pre-activations ``in_norm(x) @ w_enc.T + b_enc``.

        in_norm: ``none`` x;  ``layer_norm`` (x - mean(x)) / (std(x, ddof=1) + 1e-5);
        ``l2_sqrt_d`` ``x * sqrt(d) / |x|``.

        Args:
            x: [..., d_in], any float dtype.

        Returns:
            [..., F] float32.
        """
        normed = x.float()
        if self.info.in_norm != "none":
            normed = _NORMS[self.info.in_norm][0](normed)
        out = normed.new_empty((*normed.shape[:-1], self.info.features))
        for rows in blocks(self.info.features):
            out[..., rows] = torch.nn.functional.linear(normed, self.w_enc[rows].float(), self.b_enc[rows])
        return out

    def encode(self, x: Tensor) -> Tensor:
        """Feature activations of ``p = pre(x)``; features that are not active are exactly 0.

        ``relu`` p where p > 0;  ``jumprelu`` p where p > threshold (strict);  ``topk`` p where p > 0 and p is among the
        k largest of its token, ties going to the lowest row;  ``abstopk`` p where ``|p|`` is among the k largest,
        whatever its sign;  ``groupmax`` p where p > 0 and p is the largest of its group of F / k neighbouring rows.

        Args:
            x: [..., d_in], any float dtype.

        Returns:
            [..., F] float32, in ``info.feature_unit``.
        """
        pre = self.pre(x)
        kind, k = self.info.activation, self.info.k or 0
        if kind == "abstopk":
            return torch.where(_largest(pre.abs(), k), pre, 0.0)
        active = pre > (0.0 if self.threshold is None else self.threshold)
        if kind == "topk":
            active &= _largest(pre, k)
        elif kind == "groupmax":
            groups = rearrange(pre, "... (group member) -> ... group member", group=k)
            active &= rearrange(_largest(groups, 1), "... group member -> ... (group member)")
        return torch.where(active, pre, 0.0)

    def decode(self, f: Tensor, like: Tensor | None = None) -> Tensor:
        """The reconstruction ``y = f @ w_dec + b_dec``, with the input norm undone and the skip connection added.

        un_norm with the statistics of ``like``: ``none`` y;  ``layer_norm`` y * std(like, ddof=1) + mean(like);
        ``l2_sqrt_d`` ``y * |like| / sqrt(d)``. A skip transcoder adds ``like @ w_skip.T``.

        Args:
            f: [..., F].
            like: [..., d_in], the input that f was encoded from; needed with an input norm or a skip connection.

        Returns:
            [..., d_out] float32.
        """
        f = f.float()
        out = self.b_dec.expand(*f.shape[:-1], -1).clone()
        for rows in blocks(self.info.features):
            out += f[..., rows] @ self.w_dec[rows].float()
        if self.w_skip is not None:
            assert like is not None, "decode of a skip transcoder needs like="
            out += like.float() @ self.w_skip.float().T
        if self.info.in_norm == "none":
            return out
        assert like is not None, f"decode of a dictionary with in_norm {self.info.in_norm} needs like="
        return _NORMS[self.info.in_norm][1](out, like.float())

    def to(self, device: torch.device | str) -> SparseCoder:
        """The same dictionary on a device."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {name: one.to(device) for name, one in values.items() if isinstance(one, Tensor)}
        return replace(self, **moved)


def _largest(pre: Tensor, k: int) -> Tensor:
    """True at the k largest of the last axis; ties go to the lowest index, which torch.topk does not promise."""
    kth = pre.topk(k, dim=-1).values[..., -1:]
    above, equal = pre > kth, pre == kth
    return above | (equal & (equal.cumsum(-1) <= k - above.sum(-1, keepdim=True)))


def l2_normed(x: Tensor) -> Tensor:
    """x · sqrt(d) / |x|, the input norm l2_sqrt_d: x [..., d] float32."""
    return x * _l2_scale(x)


def place_of(site: str) -> str:
    """The one name of a site; one that no server has, such as embed, has no other."""
    try:
        return canonical(site)
    except ConfigError:
        return site


def inputs(info: CoderInfo, streams: Mapping[str, Tensor]) -> Tensor:
    """What a dictionary reads [tokens, d_in], of the tensors at the sites that have an op, by their names."""
    found = streams[info.read]
    return l2_normed(found.float()) if info.reads_pregain else found


class ActiveFeature(NamedTuple):
    """One feature on one token."""

    position: int
    token: str
    feature: int
    value: float  # in the dictionary's own unit


def strongest(info: CoderInfo, f: Tensor, words: Sequence[str], top_k: int) -> list[list[ActiveFeature]]:
    """The strongest active features of each token, strongest first; ties go to the lowest row.

    The strongest of abstopk have the largest absolute value, whatever their sign.

    Args:
        info: of the dictionary.
        f: [tokens, F], what its ``encode`` returns.
        words: of the tokens.
        top_k: features of a token, at most.

    Raises:
        ConfigError: ``top_k`` is negative.
    """
    if top_k < 0:
        raise ConfigError(f"top_k: got {top_k}, expected 0 or more")
    found = []
    for position, (word, values) in enumerate(zip(words, f, strict=True)):
        rows = values.nonzero()[:, 0]
        key = values[rows].abs() if info.activation == "abstopk" else values[rows]
        rows = rows[key.argsort(descending=True, stable=True)[:top_k]]
        pairs = zip(rows.tolist(), values[rows].tolist(), strict=True)
        found.append([ActiveFeature(position, word, info.ids[row], value) for row, value in pairs])
    return found


def _l2_scale(x: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return math.sqrt(x.shape[-1]) / norm.clamp_min(SMALLEST_NORM)


def _layer_norm(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + LAYER_NORM_EPS)


# in_norm -> (into the norm, back out of it with the statistics of the second argument)
_NORMS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "layer_norm": (_layer_norm, lambda y, like: y * like.std(-1, keepdim=True) + like.mean(-1, keepdim=True)),
    "l2_sqrt_d": (l2_normed, lambda y, like: y / _l2_scale(like)),
}
