"""Requests and answers of the activation routes, as Neuronpedia's published schema has them. Knows no meaning."""

from pydantic import StrictBool, StrictInt, StrictStr

from saesteer.plugin.http.neuronpedia.shapes import Row, Shape


class SingleOf(Shape):
    """A feature by `source` and `index`, or a vector by `vector` and `hook`."""

    model: StrictStr
    source: StrictStr | None = None
    index: StrictStr | None = None
    vector: Row | None = None
    hook: StrictStr | None = None


class Values(Shape):
    """A value for each token, and the largest."""

    values: list[float]
    max_value: float
    max_value_index: int


class SingleResponse(Shape):
    """The activation at each token; a BOS token at the beginning is left out."""

    activation: Values
    tokens: list[str]
    tokens_is_special: list[bool]


class AllOf(Shape):
    """The strongest features of all sources of a set, or of those that are selected."""

    model: StrictStr
    source_set: StrictStr
    selected_sources: list[StrictStr]
    sort_by_token_indexes: list[StrictInt]
    ignore_bos: StrictBool
    num_results: StrictInt | None = 25


class AllFeature(Values):
    """A feature, and its value at each token."""

    source: str
    index: int
    sum_values: float | None = None


class AllResponse(Shape):
    """Features, strongest first."""

    activations: list[AllFeature]
    tokens: list[str]


class TopkOf(Shape):
    """The strongest features of each token."""

    model: StrictStr
    source: StrictStr
    top_k: StrictInt | None = None
    ignore_bos: StrictBool


class TopkFeature(Shape):
    """A feature that is active at a token."""

    activation_value: float
    feature_index: int


class TopkToken(Shape):
    """A token, and its strongest features first."""

    token: str
    token_position: int
    is_special: bool
    top_features: list[TopkFeature]


class TopkResponse(Shape):
    """One result for each token."""

    results: list[TopkToken]
    tokens: list[str]


class SourceRequest(Shape):
    """All active features of prompts."""

    model: StrictStr
    prompts: list[StrictStr]
    source: StrictStr


class SourceResult(Shape):
    """The tokens, and by feature where it is active: `[token, value]`."""

    tokens: list[str]
    active_features: dict[str, list[tuple[int, float]]]


class RawRequest(Shape):
    """The stream behind layers, at the last token of each prompt."""

    prompts: list[StrictStr]
    layers: list[StrictInt] | None = None
    model: StrictStr | None = None
    hook_point: StrictStr = "residual_stream"
    type: StrictStr = "final_output_token"


class RawLayer(Shape):
    """The rows of a layer."""

    layer: int
    token_indices: list[int]
    values: list[list[float]]


class RawResult(Shape):
    """A prompt's tokens and rows."""

    token_strings: list[str]
    token_ids: list[int]
    activations: list[RawLayer]


class RawResponse(Shape):
    """One result for each prompt."""

    hook_point: str
    type: str
    dtype: str
    device: str
    results: list[RawResult]
