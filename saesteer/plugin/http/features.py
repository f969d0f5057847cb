"""The route that serves labels: features of a dictionary by words or by number. Only reads; knows no spec.

It is open to whoever may send requests, so a query is bounded in every respect. Each opens its label file anew.
"""

from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, Field

from saesteer.dictionaries.coder import CoderInfo
from saesteer.errors import LoadError, SpecError
from saesteer.labels.places import place_of
from saesteer.labels.store import MAX_QUERY, MOST, Labels, words_of
from saesteer.language.fields import MAX_NAME, fail
from saesteer.planning.lookup import dictionary_of, feature_of
from saesteer.plugin.http.refusals import Refused, first_of, refuse

_AT = "query"  # where a refusal says that the wrong field is


class ExampleEntry(BaseModel):
    """A token on which a feature is strong."""

    value: float = Field(description="The feature's activation there, in the dictionary's own unit.")
    before: str
    token: str
    after: str


class FeatureEntry(BaseModel):
    """What is known of a feature."""

    feature: int
    label: str | None
    label_by: str | None = Field(description="`rule`, or the model that explained the feature.")
    max_act: float | None = Field(description="Largest activation that was seen, in the dictionary's own unit.")
    density: float | None = Field(description="Fraction of the tokens on which it was active.")
    promotes: list[str] = Field(description="Tokens whose logits its decoder row raises most.")
    suppresses: list[str]
    examples: list[ExampleEntry] = Field(description="Strongest first.")
    score: float | None = Field(None, description="How well it fits `q`; larger is better.")


class FeatureList(BaseModel):
    """Features of one dictionary, best first."""

    dictionary: str
    layer: int | None
    source: str = Field(description="Where the labels come from.")
    features: list[FeatureEntry]


class _Missing(Exception):
    """A dictionary without labels."""


class _Route(APIRoute):
    """Makes all refusals look alike."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Any]]:
        handle = super().get_route_handler()

        async def told(request: Request) -> Any:
            try:
                return await handle(request)
            except SpecError as error:
                return refuse(400, str(error), error.code, error.field)
            except RequestValidationError as error:
                message, code, path = first_of(error, _AT)
                return refuse(400, f"{_AT}.{path}: {message}", code, f"{_AT}.{path}")
            except LoadError as error:
                return refuse(400, str(error), "unreadable", f"{_AT}.dictionary")
            except _Missing as error:
                return refuse(404, str(error), "not_served", f"{_AT}.dictionary")

        return told


def _state(request: Request) -> Any:
    return request.app.state


router = APIRouter(prefix="/v1/saesteer", route_class=_Route, tags=["saesteer"])
_RESPONSES: dict[int | str, dict[str, Any]] = {
    400: {"model": Refused, "description": "The query is wrong, or the label file is; `param` names the field."},
    404: {"model": Refused, "description": "The dictionary has no labels."},
}


@router.get("/features", responses=_RESPONSES, summary="Find features by words, or describe one")
def list_features(
    state: Annotated[Any, Depends(_state)],
    dictionary: Annotated[str, Query(max_length=MAX_NAME, description="A dictionary's name, as in a request.")],
    layer: Annotated[int | None, Query(description="Of a set.")] = None,
    q: Annotated[str | None, Query(max_length=MAX_QUERY, description="Words; nothing in them is syntax.")] = None,
    feature: Annotated[int | None, Query(ge=0, description="A feature's number, in place of `q`.")] = None,
    limit: Annotated[int, Query(ge=1, le=MOST)] = 10,
) -> FeatureList:
    """Labels, strongest examples, and the tokens that the feature promotes. In a thread: it reads a file."""
    if (q is None) == (feature is None):
        if q is None:
            fail(f"{_AT}.q", "missing_field", "is missing, expected q or feature")
        fail(f"{_AT}.q", "conflict", "is given next to feature, expected one of them")
    catalog = state.saesteer_admin.names.catalog
    key, info = dictionary_of(catalog, dictionary, layer, _AT)
    if feature is not None:
        feature_of(catalog, dictionary, layer, feature, _AT)
    if q is not None and not words_of(q):
        fail(f"{_AT}.q", "out_of_range", f"got {q!r}, expected words")
    places = state.saesteer_labels  # a place on the hub is looked up once
    if key not in places:
        assert isinstance(info, CoderInfo)
        places[key] = place_of(info)
    file, whose = places[key]
    if not file.is_file():
        raise _Missing(f"dictionary {key!r} has no labels, expected one for which `saesteer label` has made them")
    with Labels.open(file, dictionary=whose) as labels:
        if q is not None:
            found = [one.to_json() | {"score": score} for score, one in labels.find(q, limit)]
        else:
            one = labels.feature(int(feature or 0))
            found = [] if one is None else [one.to_json()]
        source = labels.about.source
    entries = [FeatureEntry(**one) for one in found]
    return FeatureList(dictionary=dictionary, layer=layer, source=source, features=entries)
