"""Requests and answers of Neuronpedia's inference server, as its published schema has them. Knows no meaning.

Field names are camelCase on the wire. A number that is not finite is refused, as JSON has none. Fields that an answer
leaves out are absent, not null.
"""

from typing import Annotated, Generic, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr
from pydantic.alias_generators import to_camel

Type = Literal["STEERED", "DEFAULT"]
Method = Literal["SIMPLE_ADDITIVE", "ORTHOGONAL_DECOMP", "PROJECTION_CAP"]
Row = list[StrictFloat]
T = TypeVar("T")
_MOST = 256  # features or vectors of one request
_Distinct = AfterValidator(lambda given: [*dict.fromkeys(given)])


class Shape(BaseModel):
    """What all of them share. Snake case is accepted as well, as Neuronpedia's server does."""

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, protected_namespaces=(), allow_inf_nan=False
    )


class Results(Shape, Generic[T]):
    """One result for each prompt."""

    results: list[T]


class Failure(BaseModel):
    """Why nothing was done."""

    error: str


class FeatureName(Shape):
    """A feature at Neuronpedia."""

    model: StrictStr
    source: StrictStr
    index: StrictInt


class SteerFeature(FeatureName):
    """A feature to steer with. `steeringVector` is ignored: the row is that of the dictionary."""

    strength: StrictFloat
    steering_vector: Row | None = None


class SteerVector(Shape):
    """A vector to steer with, and the TransformerLens hook where it is added."""

    steering_vector: Row
    strength: StrictFloat
    hook: StrictStr


class Steer(Shape):
    """What both steering routes take."""

    model: StrictStr
    steer_method: Method
    normalize_steering: StrictBool
    types: Annotated[list[Type], Field(min_length=1, max_length=2), _Distinct]
    features: Annotated[list[SteerFeature], Field(max_length=_MOST)] | None = None
    vectors: Annotated[list[SteerVector], Field(max_length=_MOST)] | None = None
    n_completion_tokens: Annotated[StrictInt, Field(ge=1)]
    temperature: Annotated[StrictFloat, Field(ge=0)]
    strength_multiplier: StrictFloat
    freq_penalty: StrictFloat
    seed: StrictFloat
    stream: StrictBool | None = False
    n_logprobs: Annotated[StrictInt, Field(ge=0, le=10)] | None = 0


class SteerCompletionRequest(Steer):
    """Steer the continuation of a text."""

    prompt: StrictStr


class ChatMessage(Shape):
    """A message of a chat."""

    content: StrictStr
    role: StrictStr


class SteerCompletionChatRequest(Steer):
    """Steer the answer in a chat."""

    prompt: list[ChatMessage]
    is_assistant_axis: StrictBool | None = False
    steer_special_tokens: StrictBool


class LogprobTop(Shape):
    """A token that was likely at a position."""

    token: str
    logprob: float


class Logprob(LogprobTop):
    """The token that was sampled at a position, and the most likely ones."""

    top_logprobs: list[LogprobTop]


class SteerOutput(Shape):
    """A text: all of it, or in a stream all of it so far."""

    type: Type
    output: str
    logprobs: list[Logprob] | None = None


class SteerCompletionResponse(Shape):
    """One output for each of `types`, in this order; a type that is given twice counts once."""

    outputs: list[SteerOutput]


class ChatResult(Shape):
    """A chat, as messages and as the text that the model reads and writes."""

    chat_template: list[ChatMessage]
    raw: str
    type: Type | None = None
    logprobs: list[Logprob] | None = None


class SteerCompletionChatResponse(Shape):
    """One output for each of `types`, in this order, and the chat as it was given."""

    outputs: list[ChatResult]
    input: ChatResult


class TokenizeRequest(Shape):
    """A text; without `prependBos`, a BOS token is prepended if the model has one."""

    model: StrictStr
    text: StrictStr
    prepend_bos: StrictBool | None = None


class TokenizeResponse(Shape):
    """Its tokens."""

    tokens: list[int]
    token_strings: list[str]
    prepend_bos: bool


class VectorResponse(Shape):
    """Its decoder row, and the TransformerLens hook where it is added."""

    vector: list[float]
    hook_name: str


class CossimRequest(Shape):
    """Either a feature or a vector, and the source in which its neighbours are looked for."""

    model: StrictStr
    source: StrictStr
    num_results: StrictInt
    feature: FeatureName | None = None
    vector: Row | None = None


class CossimFeature(Shape):
    """A feature, and the cosine of its decoder row."""

    feature: FeatureName
    cosine_similarity: float


class CossimResponse(Shape):
    """The nearest first."""

    feature: FeatureName | None = None
    topk_decoder_cossim_features: list[CossimFeature]


class Capabilities(BaseModel):
    """What this server serves, in the words of Neuronpedia's."""

    model: str
    backend: str = "vllm"
    device: str
    max_tokens: int = Field(description="Of a prompt and its answer.")
    token_limit: int
    activation_token_limit: int
    max_num_results: int
    num_layers: int
    capture_points: list[str]
    sae_sets: list[str]
    hooks_available: bool = True
    generation_only: bool = False
    endpoints: dict[str, bool]
