"""The route that finds features by their labels, in the dictionaries of a server. Only reads, and knows no spec.

It is open to all clients, so a query is bounded in every respect. Each opens its label file anew.
"""

from contextlib import suppress
from functools import lru_cache
from itertools import zip_longest
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from saesteer.config.config import SaesteerConfig
from saesteer.errors import LoadError, SpecError
from saesteer.labels.places import place_of
from saesteer.labels.store import MAX_QUERY, MOST, Dose, Example, words_of
from saesteer.language.fields import MAX_NAME, fail
from saesteer.planning.lookup import dictionary_of, feature_of, without_path
from saesteer.planning.plan import Catalog
from saesteer.plugin.http.refusals import Refused, first_of, refuse, refusing

MOST_SEARCHED = 64  # dictionaries at once
# Looked up once, as a place may be on the hub; so many, as clients may name any sites of a dictionary.
_place_of = lru_cache(4096)(place_of)
_AT = "query"  # where a refusal says that the wrong field is


class FeatureEntry(BaseModel):
    """What is known of a feature."""

    dictionary: str = Field(description="As in a request, like `layer` and `feature`.")
    layer: int | None
    feature: int
    label: str | None
    label_by: str | None = Field(description="`rule`, or the model that explained the feature.")
    max_act: float | None = Field(description="What `unit: max_act` multiplies by, in the dictionary's own unit.")
    max_act_by: str | None = Field(description="Where it comes from: `calibration`, `file` or `labels`.")
    density: float | None = Field(description="Fraction of the tokens on which it was active.")
    promotes: list[str] = Field(description="Tokens whose logits its decoder row raises most.")
    suppresses: list[str]
    examples: list[Example] = Field(description="Strongest first; `value` is the activation there.")
    writes: list[str] = Field(description="Words that its clamp makes the model write, the most frequent first.")
    best: Dose | None = Field(description="A clamp at which the model writes them, or the word that `q` has.")
    breaks: Dose | None = Field(description="The smallest that was tried at which half of the answers break.")
    only_reads: bool | None = Field(description="Whether no clamp makes the model write its words; null: not measured.")
    instead: str | None = Field(description="The similar words that found it, where no feature has those of `q`.")
    score: float | None = Field(None, description="How well it fits `q`, and does what it says; larger is better.")


class FeatureList(BaseModel):
    """Features of one dictionary or of all, best first."""

    dictionary: str | None = Field(description="As asked; null: all were searched.")
    layer: int | None
    source: str | None = Field(description="Where the labels of the one dictionary come from.")
    features: list[FeatureEntry]


class _Missing(Exception):
    """A dictionary without labels."""


def _refusal(error: Exception) -> JSONResponse | None:
    match error:
        case SpecError():
            return refuse(400, str(error), error.code, error.field)
        case RequestValidationError():
            message, code, path = first_of(error, _AT)
            return refuse(400, f"{_AT}.{path}: {message}", code, f"{_AT}.{path}")
        case _Missing():
            return refuse(404, str(error), "not_served", f"{_AT}.dictionary")
    return None


router = APIRouter(prefix="/v1/saesteer", route_class=refusing(_refusal), tags=["saesteer"])
_RESPONSES: dict[int | str, dict[str, Any]] = {
    400: {"model": Refused, "description": "The query is wrong, or the label file is; `param` names the field."},
    404: {"model": Refused, "description": "The dictionary has no labels."},
}


def add_routes(app: FastAPI, config: SaesteerConfig) -> None:
    """Add the route to vLLM's app."""
    app.include_router(router)


@router.get("/features", responses=_RESPONSES, summary="Find features by words, or describe one")
def list_features(
    request: Request,
    dictionary: Annotated[
        str | None, Query(max_length=MAX_NAME, description="A dictionary's name, as in a request; all if left out.")
    ] = None,
    layer: Annotated[int | None, Query(description="Of a set.")] = None,
    q: Annotated[str | None, Query(max_length=MAX_QUERY, description="Words; nothing in them is syntax.")] = None,
    feature: Annotated[int | None, Query(ge=0, description="A feature's number, in place of `q`.")] = None,
    limit: Annotated[int, Query(ge=1, le=MOST)] = 10,
) -> FeatureList:
    """Labels, strongest examples, and the tokens that the feature promotes. In a thread: it reads files."""
    if (q is None) == (feature is None):
        if q is None:
            fail(f"{_AT}.q", "missing_field", "is missing, expected q or feature")
        fail(f"{_AT}.q", "conflict", "is given next to feature, expected one of them")
    if q is not None and not words_of(q):
        fail(f"{_AT}.q", "out_of_range", f"got {q!r}, expected words")
    catalog: Catalog = request.app.state.saesteer_admin.names.catalog
    if dictionary is not None:
        source, found = _found(catalog, dictionary, layer, q, feature, limit)
        return FeatureList(dictionary=dictionary, layer=layer, source=source, features=found)
    if q is None or layer is not None or len(catalog.dictionaries) > MOST_SEARCHED:
        message = f"is missing, expected unless q searches all dictionaries, {MOST_SEARCHED} at most"
        fail(f"{_AT}.dictionary", "missing_field", message)
    lists: list[list[FeatureEntry]] = []
    for key in catalog.dictionaries:
        with suppress(_Missing, SpecError):  # the log says which cannot be read
            lists.append(_found(catalog, *catalog.named(key), q, None, limit)[1])
    if not lists:
        raise _Missing("no dictionary of this server has labels that can be read")
    # The best of each, then the second of each: scores of different files do not compare.
    best = [one for rank in zip_longest(*lists) for one in rank if one is not None]
    return FeatureList(dictionary=None, layer=None, source=None, features=best[:limit])


def _found(
    catalog: Catalog, name: str, layer: int | None, q: str | None, feature: int | None, limit: int
) -> tuple[str, list[FeatureEntry]]:
    """Where the labels of a dictionary come from, and features by words or by number."""
    key, info = dictionary_of(catalog, name, layer, _AT, address="dictionary")
    if feature is not None:
        feature_of(catalog, name, layer, feature, _AT)
    try:
        place = _place_of(info)
        if not place.file.is_file():
            raise _Missing(f"dictionary {key!r} has no labels, expected one for which `saesteer label` has made them")
        with place.open() as labels:
            if q is not None:
                found = [one.to_json() | {"score": score} for score, one in labels.find(q, limit)]
            else:
                only = labels.feature(int(feature or 0))
                found = [] if only is None else [only.to_json()]
            source = labels.about.source
        for one in found:
            one |= {"max_act": catalog.largest(info, one["feature"]), "max_act_by": info.max_act_from}
    except LoadError as exc:
        fail(f"{_AT}.dictionary", "unreadable", f"the labels of {key!r} cannot be read: {without_path(exc)}")
    return source, [FeatureEntry(dictionary=name, layer=layer, **one) for one in found]
