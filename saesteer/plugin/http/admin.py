"""The admin routes: vectors and modules over HTTP, for whoever has the operator's key. Does not look inside vectors.

They enter vLLM's app as an endpoint plugin does, through vllm.plugins.load_endpoint_plugins, but VLLM_PLUGINS need not
name it: the key is the operator's consent, and without a key every route reports that and does nothing.
"""

import hmac
import logging
import os
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Annotated, Any, Self

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from saesteer.config.config import ADMIN_KEY, KEY, SaesteerConfig
from saesteer.config.settings import admin_key
from saesteer.dictionaries.vectors import Function
from saesteer.errors import ConfigError, RegistryError, SpecError
from saesteer.language.fields import fail
from saesteer.language.inline import InlineVector
from saesteer.language.spec import MAX_CHARACTERS, Spec, from_json
from saesteer.planning.plan import Catalog
from saesteer.plugin.configured import configure, disabled
from saesteer.plugin.http import features, results
from saesteer.plugin.http.memory import MemoryGuard
from saesteer.plugin.http.openapi import document, schema_of
from saesteer.plugin.http.playground import PREFIX, add_playground
from saesteer.plugin.http.refusals import Refused, first_of, refuse
from saesteer.plugin.http.routes import SERVED, Guard
from saesteer.plugin.http.statuses import Statuses
from saesteer.plugin.names.changes import Given
from saesteer.plugin.names.versions import Names

_log = logging.getLogger("vllm.saesteer")
MAX_BODY = MAX_CHARACTERS  # bytes
_SHORT = 16  # characters of a version hash, as in answers


_NAME = {"type": "string", "minLength": 1, "maxLength": 128}
_FUNCTION = schema_of(Function)
_VECTOR = schema_of(tuple[float, ...] | InlineVector)
_SPEC = {"anyOf": [schema_of(Spec)]}  # pydantic would look up a reference that stands alone
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
        found: Any = catalog.vectors[name]
        shape = [found.width] if found.layers is None else [len(found.layers), found.width]
        version = found.fingerprint[:_SHORT]
        probe = {"bias": found.bias, "function": found.function}
        return cls(name=name, shape=shape, layers=found.layers, version=version, uses=uses, **probe, **more)


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


class Deleted(BaseModel):
    """A name that new requests cannot use."""

    name: str
    deleted: bool = True


@dataclass(frozen=True, slots=True)
class Admin:
    """What the routes work on, in ``app.state``."""

    engine: Any
    names: Names
    key: str


class EndpointPlugin:
    """vLLM's protocol of this name: routes first, then what they need."""

    name = KEY
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Guard all routes, and if this server runs saesteer, document the field and add our routes.

        Where --api-key guards /v1, vLLM would answer 401 before the routes are called, so the admin key passes that
        check as well; the routes themselves accept no other key.

        Raises:
            ConfigError: the admin key equals a key that all clients use.
            UnsupportedError: settings ask for saesteer, and this vLLM lacks a hook.
        """
        args = app.state.args
        configured = KEY in (args.additional_config or {})
        steers = configured and not disabled()
        app.add_middleware(Guard, served=SERVED if steers else ())
        if not configured:
            return
        if steers:
            configure()  # here at the latest
        app.add_middleware(Statuses)
        key = admin_key()
        keys = [one for one in (args.api_key or [os.environ.get("VLLM_API_KEY")]) if one]
        if key and key in keys:
            raise ConfigError(f"{ADMIN_KEY} equals a key of --api-key or VLLM_API_KEY, expected a different key")
        if key and keys:
            args.api_key = [*keys, key]
        app.include_router(router)
        if steers:
            _add_routes(app, args)
        document(app)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Remember the engine and the names of this process."""
        names = getattr(getattr(engine_client, "input_processor", None), "saesteer_names", None)
        if names is not None:
            state.saesteer_admin = Admin(engine_client, names, admin_key())
            state.saesteer_results = engine_client.input_processor.saesteer_door.results


def _add_routes(app: FastAPI, args: Any) -> None:
    """The routes of a server that steers: for every client, and what the operator has asked for."""
    app.include_router(features.router)
    app.include_router(results.router)
    config = SaesteerConfig.from_json(args.additional_config[KEY])
    if config.memory_guard is not None:
        app.add_middleware(MemoryGuard, limit=config.memory_guard)
    if config.neuronpedia:
        from saesteer.plugin.http.neuronpedia.routes import add_neuronpedia  # needs more of vLLM than a guard may

        add_neuronpedia(app, args)
    if config.playground:
        add_playground(app)
        scheme = "https" if args.ssl_certfile else "http"
        _log.info("The playground is at %s://%s:%s%s", scheme, args.host or "localhost", args.port, PREFIX)


class _TooLarge(HTTPException):
    """FastAPI lets this kind of error through while it reads the body."""


def _refused_by_key(request: Request) -> JSONResponse | None:
    admin: Admin | None = getattr(request.app.state, "saesteer_admin", None)
    if admin is None or not admin.key:
        hint = f"start the server with --saesteer-admin-key or {ADMIN_KEY}"
        return refuse(403, f"the admin routes are off on this server; {hint}", "admin_off")
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), admin.key.encode()):
        message = "the Authorization header does not hold the admin key, expected Bearer and the key"
        return refuse(401, message, "wrong_key")
    return None


class _Route(APIRoute):
    """Check the key before reading the body, cut the body off at its limit, and make all refusals look alike."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Any]]:
        handle = super().get_route_handler()

        async def guarded(request: Request) -> Any:
            refused = _refused_by_key(request)
            if refused is not None:
                return refused
            receive, total = request.receive, 0

            async def limited() -> Any:
                nonlocal total
                message = await receive()
                total += len(message.get("body", b""))
                if total > MAX_BODY:
                    raise _TooLarge(413)
                return message

            announced = request.headers.get("Content-Length", "0")
            try:
                if announced.isdecimal() and int(announced) > MAX_BODY:
                    raise _TooLarge(413)
                return await handle(Request(request.scope, limited))
            except _TooLarge:
                return refuse(413, f"the body is larger than {MAX_BODY} bytes, expected less", "too_many")
            except SpecError as error:
                status = 404 if request.method == "DELETE" and error.code == "unknown_name" else 400
                return refuse(status, str(error), error.code, error.field)
            except RegistryError as error:
                return refuse(409, str(error), error.code)
            except RequestValidationError as error:
                return refuse(400, *_told(error))
            except HTTPException as error:  # a body that is nested too deeply, or in an unknown encoding
                return refuse(error.status_code, f"the body is not a JSON object ({error.detail})", "bad_json")

        return guarded


def _told(error: RequestValidationError) -> tuple[str, str, str | None]:
    message, code, path = first_of(error, "body")
    if code == "bad_json" or not path:
        return f"the body is not a JSON object ({message}), expected one as in the examples", code, None
    return f"{path}: {message}, expected an object as in the examples", code, path


def _says(*statuses: int) -> dict[int | str, dict[str, Any]]:
    why = {
        400: "The body is wrong; `param` names the field.",
        401: "The Authorization header does not hold the admin key.",
        403: "The server was started without an admin key, so these routes are off.",
        404: "No such name.",
        409: "No room, no op where it belongs, or a module uses it; the message says what helps.",
        413: f"The body is larger than {MAX_BODY} bytes.",
    }
    return {status: {"model": Refused, "description": why[status]} for status in (401, 403, *statuses)}


def _admin(request: Request) -> Any:
    return request.app.state.saesteer_admin


_Admin = Annotated[Admin, Depends(_admin)]
# Only for the OpenAPI document; the routes ask for the key before they read a body.
_BEARER = HTTPBearer(auto_error=False, scheme_name="saesteer_admin_key", description="The key of --saesteer-admin-key.")
router = APIRouter(prefix="/v1/saesteer", route_class=_Route, tags=["saesteer"], dependencies=[Depends(_BEARER)])


@router.get("/vectors", responses=_says(), summary="List the named vectors")
async def list_vectors(admin: _Admin) -> VectorList:
    """Shapes, layers, version hashes and use counts, and how full the pool is."""
    used, size = max(admin.names.usage().values(), default=(0, 0))
    catalog, uses = admin.names.catalog, admin.names.uses()
    vectors = [VectorEntry.of(catalog, name, uses["vector", name]) for name in catalog.vectors]
    return VectorList(vectors=vectors, pool_rows=size, pool_rows_in_use=used)


@router.post("/vectors", responses=_says(400, 409, 413), summary="Register or replace a vector")
async def put_vector(admin: _Admin, body: VectorBody) -> VectorDone:
    """The vector is on the device when this returns. Running requests keep what they started with."""
    given = Given.read(body.vector, body.bias, body.function)
    replaced, catalog = await admin.names.put_vector(admin.engine, body.name, given)
    return VectorDone.of(catalog, body.name, replaced=replaced)


@router.delete("/vectors/{name:path}", responses=_says(404, 409), summary="Delete a vector")
async def delete_vector(admin: _Admin, name: str) -> Deleted:
    """New requests cannot name it; running requests keep it. A vector that a module uses is not deleted."""
    await admin.names.delete(admin.engine, "vector", name)
    return Deleted(name=name)


@router.get("/modules", responses=_says(), summary="List the modules")
async def list_modules(admin: _Admin) -> ModuleList:
    """Version hashes and use counts."""
    catalog, uses = admin.names.catalog, admin.names.uses()
    return ModuleList(modules=[ModuleEntry.of(catalog, name, uses["module", name]) for name in catalog.modules])


@router.post("/modules", responses=_says(400, 409, 413), summary="Register or replace a module")
async def put_module(admin: _Admin, body: ModuleBody) -> ModuleDone:
    """Its own vectors are on the device when this returns. Running requests keep what they started with."""
    replaced, catalog = await admin.names.put_module(admin.engine, body.name, _spec(body.spec))
    return ModuleDone.of(catalog, body.name, replaced=replaced)


@router.delete("/modules/{name:path}", responses=_says(404, 409), summary="Delete a module")
async def delete_module(admin: _Admin, name: str) -> Deleted:
    """New requests cannot name it; running requests keep it. A module that another module uses is not deleted."""
    await admin.names.delete(admin.engine, "module", name)
    return Deleted(name=name)


def _spec(value: Any) -> Any:
    if isinstance(value, str):
        fail("spec", "wrong_type", "got a text, expected a spec as a JSON object; files are named at start")
    try:
        return from_json(value)
    except SpecError as error:
        message = str(error).removeprefix(f"{error.field}: ")
        raise SpecError(message, field=error.field.replace(KEY, "spec", 1), code=error.code) from None
