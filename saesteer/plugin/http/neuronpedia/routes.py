"""The routes of Neuronpedia's inference server, and how they refuse: ``{"error": ...}``. Knows no vLLM.

They are off unless the operator says --neuronpedia. /health stays vLLM's own.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Annotated, Any, TypeVar

import numpy as np
from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import StrictStr, create_model

from saesteer.config.config import SaesteerConfig
from saesteer.config.decoders import Decoders, hook_of_site
from saesteer.errors import SpecError
from saesteer.language.fields import fail
from saesteer.plugin.http import access
from saesteer.plugin.http.leaving import while_there
from saesteer.plugin.http.neuronpedia import activation_shapes, activations, shapes, steering
from saesteer.plugin.http.neuronpedia.host import Busy, Host, Turns
from saesteer.plugin.http.neuronpedia.keys import with_bearer
from saesteer.plugin.http.neuronpedia.meaning import place_of, sets_of
from saesteer.plugin.http.refusals import refusing

T = TypeVar("T")
_MOST_NEIGHBOURS = 128
_MOST_PROMPTS = 16  # of one request
# What Neuronpedia's server has and this one has not.
LACKING = ("activation/attention", "apply-chat-template", "lens/prompt", "util/similarity-matrix-pred")
_SERVED = (
    "tokenize",
    "activation_single",
    "activation_all",
    "activation_source",
    "activation_raw",
    "activation_topk_by_token",
    "steer_completion",
    "steer_completion_chat",
)
_OFF = ("activation_attention", "dfa", "lens_logit", "lens_jacobian", "neurons")


def refuse(message: str, status: int = 400) -> JSONResponse:
    """The answer of a refusal."""
    return JSONResponse(shapes.Failure(error=message).model_dump(), status)


def _refusal(error: Exception) -> JSONResponse | None:
    """As Neuronpedia's server makes it."""
    match error:
        case SpecError():
            return refuse(str(error))
        case Busy():
            return refuse(str(error), 429)
        case RequestValidationError():
            detail = [{key: one[key] for key in ("loc", "msg", "type")} for one in error.errors()]
            return JSONResponse({"detail": detail}, 422)
    return None


def add_routes(app: FastAPI, config: SaesteerConfig) -> None:
    """Add the routes to vLLM's app, and their way to send a key."""
    access.ADAPTED[:] = [with_bearer]
    app.state.saesteer_decoders = Decoders(), Turns()
    app.include_router(router)


async def _host(request: Request) -> Host:
    state = request.app.state
    admin = state.saesteer_admin
    fetching = admin.engine.input_processor.saesteer_door.fetching
    return Host(admin.engine, admin.names.catalog, state.args.chat_template, fetching, *state.saesteer_decoders)


_Host = Annotated[Host, Depends(_host)]
_REFUSED: dict[int | str, dict[str, Any]] = {
    400: {"model": shapes.Failure, "description": "The request is wrong, or asks for what this server lacks."},
    429: {"model": shapes.Failure, "description": "Too many requests wait for the whole file of a dictionary."},
}
router = APIRouter(route_class=refusing(_refusal, handled=while_there), tags=["neuronpedia"], responses=_REFUSED)
_LEAN: dict[str, Any] = {"response_model_exclude_none": True}


@router.post("/initialize", summary="Load nothing")
async def initialize(custom_hf_model_id: str | None = None) -> None:
    """The model is there as soon as the server answers, and stays."""
    if custom_hf_model_id is not None:
        fail("custom_hf_model_id", "not_served", "is set, but a server keeps the model that it was started with")


@router.get("/v1/steer/health", summary="Whether the engine runs")
async def health(host: _Host) -> dict[str, str]:
    """Raises what vLLM's own health check raises."""
    await host.engine.check_health()
    return {"summary": "healthy"}


@router.get("/v1/capabilities", summary="What this server serves")
async def capabilities(host: _Host) -> shapes.Capabilities:
    """Limits, sets of sources, and routes by name."""
    longest, reads = host.longest, host.catalog.reads
    return shapes.Capabilities(
        model=host.model.model,
        device=_device(host),
        max_tokens=longest,
        token_limit=longest,
        activation_token_limit=longest - 1,
        max_num_results=activations.MOST,
        num_layers=host.model.hf_text_config.num_hidden_layers,
        capture_points=sorted({site.partition(".")[0] for site in reads or ()}),
        sae_sets=sets_of(host.catalog),
        endpoints=dict.fromkeys(_SERVED, True) | dict.fromkeys(_OFF, False),
    )


def _device(host: Host) -> str:
    return str(host.engine.vllm_config.device_config.device_type)


@router.post("/v1/tokenize", summary="Tokens of a text")
async def tokenize(host: _Host, asked: shapes.TokenizeRequest) -> shapes.TokenizeResponse:
    """As the other routes tokenize a prompt, unless the request says otherwise."""
    prompt = await host.prompt(asked.text, bos=asked.prepend_bos is not False)
    put = asked.prepend_bos is not False and prompt.begins
    return shapes.TokenizeResponse(tokens=[*prompt.ids], token_strings=[*prompt.tokens], prepend_bos=put)


# Steering


@router.post("/v1/steer/completion", summary="Continue a text", response_model=shapes.SteerCompletionResponse, **_LEAN)
async def steer_completion(host: _Host, asked: shapes.SteerCompletionRequest) -> Any:
    """Steered, not, or both; in a stream, each event has the whole texts so far."""
    return await _sent(await steering.completion(host, asked), stream=bool(asked.stream))


@router.post(
    "/v1/steer/completion-chat", summary="Answer in a chat", response_model=shapes.SteerCompletionChatResponse, **_LEAN
)
async def steer_completion_chat(host: _Host, asked: shapes.SteerCompletionChatRequest) -> Any:
    """Steered, not, or both; in a stream, each event has the whole texts so far."""
    return await _sent(await steering.chat(host, asked), stream=bool(asked.stream))


async def _sent(answers: steering.Answers, *, stream: bool) -> Any:
    """The last answer, or all as events. A stream begins with the first, so what is wrong before is a refusal."""
    first = await anext(answers)
    if stream:
        return StreamingResponse(_events(first, answers), media_type="text/event-stream")
    return [first, *[one async for one in answers]][-1]


async def _events(first: shapes.Shape, rest: steering.Answers) -> AsyncIterator[str]:
    async with aclosing(rest):
        yield _event(first)
        try:
            async for one in rest:
                yield _event(one)
        except SpecError as error:
            yield _event(shapes.Failure(error=str(error)))


def _event(one: Any) -> str:
    return f"data: {one.model_dump_json(by_alias=True, exclude_none=True)}\n\n"


# Activations


async def _each(made: Callable[[Host, Any, str], Awaitable[T]], host: Host, asked: Any) -> list[T]:
    """The results of several prompts; the engine reads them at the same time."""
    if not 1 <= len(asked.prompts) <= _MOST_PROMPTS:
        fail("prompts", "too_many", f"has {len(asked.prompts)} texts, expected 1 to {_MOST_PROMPTS}")
    host.check_texts(asked.prompts, "prompts")
    tasks = [asyncio.ensure_future(made(host, asked, one)) for one in asked.prompts]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def _add(path: str, made: Callable[..., Awaitable[Any]], of: type[shapes.Shape], answer: Any, summary: str) -> None:
    """Add a route for one prompt and one for several."""
    name = f"Activation{path.title().replace('-', '')}"
    alone: Any = create_model(f"{name}Request", __base__=of, prompt=(StrictStr, ...))
    several: Any = create_model(f"{name}BatchRequest", __base__=of, prompts=(list[StrictStr], ...))

    @router.post(f"/v1/activation/{path}", summary=f"{summary} of a text", **_LEAN)
    async def one(host: _Host, asked: alone) -> answer:
        return await made(host, asked, asked.prompt)

    @router.post(f"/v1/activation/{path}-batch", summary=f"{summary} of several texts", **_LEAN)
    async def batch(host: _Host, asked: several) -> shapes.Results[answer]:
        return shapes.Results(results=await _each(made, host, asked))


_add("single", activations.single, activation_shapes.SingleOf, activation_shapes.SingleResponse, "A feature's values")
_add("all", activations.strongest, activation_shapes.AllOf, activation_shapes.AllResponse, "The strongest features")
_add(
    "topk-by-token",
    activations.by_token,
    activation_shapes.TopkOf,
    activation_shapes.TopkResponse,
    "The strongest features at each token",
)


@router.post("/v1/activation/source", summary="All active features of texts", **_LEAN)
async def source(host: _Host, asked: activation_shapes.SourceRequest) -> shapes.Results[activation_shapes.SourceResult]:
    """Of one source."""
    return shapes.Results(results=await _each(activations.active, host, asked))


@router.post("/v1/activation/raw", summary="The stream at the last token of texts", **_LEAN)
async def raw(host: _Host, asked: activation_shapes.RawRequest) -> activation_shapes.RawResponse:
    """Behind some layers, or all."""
    results = await _each(activations.raw, host, asked)
    return activation_shapes.RawResponse(
        hook_point=asked.hook_point,
        type=asked.type,
        dtype=str(host.model.dtype).removeprefix("torch."),
        device=_device(host),
        results=results,
    )


# Decoders


@router.post("/v1/util/sae-vector", summary="The decoder row of a feature", **_LEAN)
async def sae_vector(host: _Host, asked: shapes.FeatureName) -> shapes.VectorResponse:
    """And the hook where it is added."""
    place = place_of(host.catalog, asked.source, asked.model)
    [row] = await host.rows_of(place, {"feature": asked.index})
    site = place.info.site_out
    hook = hook_of_site(site or "")
    if hook is None:
        fail("source", "not_served", f"writes {site}, which has no name in TransformerLens, expected another")
    return shapes.VectorResponse(vector=row.tolist(), hook_name=hook)


@router.post("/v1/util/sae-topk-by-decoder-cossim", summary="The features with the nearest decoder rows", **_LEAN)
async def cossim(host: _Host, asked: shapes.CossimRequest) -> shapes.CossimResponse:
    """To a feature of this source or another, or to a vector."""
    if (asked.feature is None) == (asked.vector is None):
        fail("feature", "conflict", "stands next to vector, or both are missing, expected one of the two")
    place, named = place_of(host.catalog, asked.source, asked.model), asked.feature
    info = place.info
    if named is None:
        with np.errstate(over="ignore"):
            vector = np.array(asked.vector, np.float32)
    else:
        other = place_of(host.catalog, named.source, named.model, "feature.source")
        [vector] = await host.rows_of(other, {"feature": named.index})
    if len(vector) != info.d_out or not np.isfinite(vector).all():
        fail("vector", "conflict", f"has {len(vector)} numbers, expected {info.d_out} that float32 holds")
    most = max(1, min(asked.num_results, _MOST_NEIGHBOURS, info.features))
    near = await host.nearest(place, vector, most)
    found = [
        shapes.CossimFeature(
            feature=shapes.FeatureName(model=asked.model, source=asked.source, index=index), cosine_similarity=cosine
        )
        for index, cosine in near
    ]
    return shapes.CossimResponse(feature=named, topk_decoder_cossim_features=found)


async def _lacking(request: Request) -> JSONResponse:
    return refuse(f"{request.url.path} is not served here, expected a route that GET /v1/capabilities lists")


for _path in LACKING:
    router.add_api_route(f"/v1/{_path}", _lacking, methods=["POST"], summary="Not served", response_class=JSONResponse)
