"""The routes that list what a request may name: dictionaries, and what the server has. Only read, know no spec."""

from itertools import islice

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from saesteer import __version__
from saesteer.config.config import KEY, LIMITS
from saesteer.errors import ConfigError, LoadError
from saesteer.language.sites import order
from saesteer.planning.plan import Catalog
from saesteer.plugin.http.routes import SERVED

MOST_LISTED = 1000  # dictionaries; a folder of them may hold more


class DictionaryEntry(BaseModel):
    """A dictionary, or a set of them."""

    dictionary: str = Field(description="Its name, as in a request.")
    layers: list[int] | None = Field(description="Of a set: its layers, one of which a request names.")
    site: str | None = Field(description="Where it reads; of a set, that of its first layer; null: its file is unfit.")
    readable: bool = Field(
        description="Whether `return.features` may read its strongest features, not only named ones."
    )


class DictionaryList(BaseModel):
    """The dictionaries of the server, as the operator listed them."""

    dictionaries: list[DictionaryEntry]
    more: bool = Field(description="Whether the server has others, which are left out here.")


class Server(DictionaryList):
    """What the server is and has."""

    version: str = Field(description="Of saesteer.")
    models: list[str] = Field(description="Names of the model in requests.")
    layers: int | None = Field(description="Of the model.")
    sites: list[str] = Field(description="Those that edits may change: an op runs there.")
    reads: list[str] = Field(description="Those whose tensors `return.activations` may read.")
    limits: dict[str, int | float | None] = Field(description="The settings that bound a request; null: no bound.")
    routes: list[str] = Field(description="Those that serve the field `saesteer`, and saesteer's own.")


router = APIRouter(prefix="/v1/saesteer", tags=["saesteer"])


@router.get("", summary="Describe the server")
def describe(request: Request) -> Server:
    """What requests may use here. In a thread: it may open files."""
    admin, args = request.app.state.saesteer_admin, request.app.state.args
    catalog, config = admin.names.catalog, admin.engine.input_processor.saesteer_door.config
    paths = {getattr(route, "path", "") for route in request.app.routes}
    return Server(
        **list_dictionaries(request).model_dump(),
        version=__version__,
        models=args.served_model_name or [args.model],
        layers=catalog.layers,
        sites=sorted(catalog.sites or (), key=order),
        reads=sorted(catalog.reads or (), key=order),
        limits={name: getattr(config, name) for name in (*LIMITS, "max_dose")},
        routes=sorted(path for path in paths if path in (*SERVED, f"/{KEY}/") or path.startswith(router.prefix)),
    )


@router.get("/dictionaries", summary="List the dictionaries")
def list_dictionaries(request: Request) -> DictionaryList:
    """The names that a request may use, the layers of sets, and what can be read. In a thread: it may open files."""
    catalog = request.app.state.saesteer_admin.names.catalog
    keys: dict[str, str] = {}  # of a dictionary or of one of a set, by name
    for key in catalog.dictionaries:
        keys.setdefault(catalog.named(key)[0], key)
    for name, layers in catalog.sets.items():  # also those below the folder
        keys.setdefault(name, catalog.key(name, layers[0]))
    entries = [
        DictionaryEntry(dictionary=name, layers=catalog.sets.get(name), site=site, readable=readable)
        for name, key in islice(keys.items(), MOST_LISTED)
        for site, readable in [_reading(catalog, key)]
    ]
    return DictionaryList(dictionaries=entries, more=len(keys) > MOST_LISTED)


def _reading(catalog: Catalog, key: str) -> tuple[str | None, bool]:
    """Where a dictionary reads, and whether its features can be read there."""
    try:
        info = catalog.dictionaries[key]
    except (ConfigError, LoadError):  # below the folder; a request that names it is told why
        return None, False
    return info.site_in or info.site_out, not info.by_rows
