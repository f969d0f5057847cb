"""What the admin routes take and return, as pydantic documents it. Knows catalogs, and neither HTTP nor keys."""

from typing import Annotated, Any, Self, get_args

from pydantic import BaseModel, ConfigDict, Field

from saesteer.dictionaries.vectors import Function
from saesteer.language.fields import Json
from saesteer.planning.plan import Catalog
from saesteer.plugin.http.openapi import reference

_SHORT = 16  # characters of a version hash, as in answers
_NAME = {"type": "string", "minLength": 1, "maxLength": 128}
_FUNCTION: Json = {"enum": [*get_args(Function)]}
_NUMBERS = {"type": "array", "items": {"type": "number"}}
_VECTOR: Json = {"anyOf": [_NUMBERS, reference("SaesteerInlineVector")]}
_SPEC: Json = {"anyOf": [reference("SaesteerSpec")]}  # pydantic would look up a reference that stands alone
_VECTOR_EXAMPLES: list[Any] = [
    {"name": "happy", "vector": [0.12, -0.5, 0.33]},
    {
        "name": "sentiment",
        "vector": {"dtype": "float32", "shape": [1, 2], "layers": [15], "data": "AACAPwAAAD8="},
        "bias": -0.5,
    },
]
_MODULE_EXAMPLES: list[Any] = [
    {
        "name": "calm",
        "spec": {"edits": [{"op": "add", "vector": "happy", "site": "resid_post.12", "scale": 4.0}]},
    }
]


class VectorBody(BaseModel):
    """A vector to register or to replace; never a path."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": _VECTOR_EXAMPLES})

    # Checked by the request language, whose errors name the field, so pydantic takes anything.
    name: Annotated[Any, Field(json_schema_extra=_NAME)]
    vector: Annotated[Any, Field(description="Width d, or one row for each of `layers`.", json_schema_extra=_VECTOR)]
    bias: Annotated[Any, Field(json_schema_extra={"type": "number"}, description="A probe's bias: x · v + bias.")] = 0.0
    function: Annotated[Any, Field(json_schema_extra=_FUNCTION, description="What a probe makes of it.")] = "linear"


class ModuleBody(BaseModel):
    """A module to register or to replace."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": _MODULE_EXAMPLES})

    name: Annotated[Any, Field(json_schema_extra=_NAME)]
    spec: Annotated[Any, Field(description="As in a request's `saesteer` field.", json_schema_extra=_SPEC)]


class VectorEntry(BaseModel):
    """A registered vector."""

    name: str
    shape: list[int] = Field(description="[d], or [layers, d].", examples=[[34, 2560]])
    layers: list[int] | None = Field(description="The layers of its rows; null if one row fits any site.")
    bias: float
    function: str
    version: str = Field(description="Hash of its content; answers report the same in `applied`.")
    uses: int = Field(description="Requests admitted with this content, also through modules.")

    @classmethod
    def of(cls, catalog: Catalog, name: str, uses: int = 0, **more: Any) -> Self:
        """The entry of a name in a catalog."""
        found = catalog.vectors[name]
        shape = [found.width] if found.layers is None else [len(found.layers), found.width]
        version = found.fingerprint[:_SHORT]
        probe: Json = {"bias": found.bias, "function": found.function, "layers": found.layers}
        return cls(name=name, shape=shape, version=version, uses=uses, **probe, **more)


class ModuleEntry(BaseModel):
    """A registered module."""

    name: str
    edits: int = Field(description="Number of edits in its own list.")
    version: str = Field(description="Hash of what it does, with the vectors and modules that it names.")
    uses: int = Field(description="Requests admitted with it, also through other modules, since it was registered.")

    @classmethod
    def of(cls, catalog: Catalog, name: str, uses: int = 0, **more: Any) -> Self:
        """The entry of a name in a catalog."""
        version, edits = catalog.digests[name][:_SHORT], len(catalog.modules[name].edits)
        return cls(name=name, edits=edits, version=version, uses=uses, **more)


class VectorList(BaseModel):
    """All registered vectors, and the room for more."""

    vectors: list[VectorEntry]
    pool_rows: int = Field(description="Slots for named vectors at the fullest site.")
    pool_rows_in_use: int = Field(description="Slots in use there, including versions that running requests hold.")


class ModuleList(BaseModel):
    """All registered modules."""

    modules: list[ModuleEntry]


class VectorDone(VectorEntry):
    """The vector that was registered."""

    replaced: bool


class ModuleDone(ModuleEntry):
    """The module that was registered."""

    replaced: bool


class DefaultBody(BaseModel):
    """The module that is to steer every request."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"module": "calm"}]})

    module: Annotated[Any, Field(json_schema_extra=_NAME)]


class DefaultEntry(BaseModel):
    """The module that steers every request."""

    module: str | None = Field(description="Its name; null if there is none.")


class Deleted(BaseModel):
    """A name that new requests cannot use."""

    name: str
    deleted: bool = True
