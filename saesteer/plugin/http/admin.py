"""The admin routes: vectors and modules over HTTP, for whoever has the operator's key. Does not look inside vectors.

They enter vLLM's app as an endpoint plugin does, through vllm.plugins.load_endpoint_plugins, but VLLM_PLUGINS need not
name it: the key is the operator's consent, and without a key every route reports that and does nothing.
"""

import logging
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException

from saesteer import wings
from saesteer.config.config import ADMIN_KEY, KEY, SaesteerConfig
from saesteer.config.settings import admin_key
from saesteer.errors import ConfigError, RegistryError, SpecError
from saesteer.language.fields import fail
from saesteer.language.sites import order
from saesteer.language.spec import MAX_CHARACTERS, from_json
from saesteer.plugin.configured import configure, disabled, with_file
from saesteer.plugin.http import access, features, results
from saesteer.plugin.http.answers import Answers
from saesteer.plugin.http.entries import (
    DefaultBody,
    DefaultEntry,
    Deleted,
    ModuleBody,
    ModuleDone,
    ModuleEntry,
    ModuleList,
    VectorBody,
    VectorDone,
    VectorEntry,
    VectorList,
)
from saesteer.plugin.http.memory import MemoryGuard
from saesteer.plugin.http.openapi import document
from saesteer.plugin.http.refusals import Handler, Refused, first_of, refuse, refusing
from saesteer.plugin.http.routes import SERVED, Guard
from saesteer.plugin.names.changes import Given
from saesteer.plugin.names.versions import Names

_log = logging.getLogger("vllm.saesteer")
# What adds the routes of a wing, by the option that asks for them; labels have none.
_WINGS = {
    "labels": "saesteer.labels.routes:add_routes",
    "neuronpedia": "saesteer.plugin.http.neuronpedia.routes:add_routes",
    "playground": "saesteer.plugin.http.playground:add_routes",
}
MAX_BODY = MAX_CHARACTERS  # bytes


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
        given = with_file(args.additional_config) or {}
        configured = KEY in given
        steers = configured and not disabled()
        app.add_middleware(Guard, served=SERVED if steers else ())
        if not configured:
            return
        if steers:
            configure()  # here at the latest
        app.add_middleware(Answers)
        key = admin_key()
        keys = access.keys_of(args)
        if key and key in keys:
            raise ConfigError(f"{ADMIN_KEY} equals a key of --api-key or VLLM_API_KEY, expected a different key")
        if key and keys:
            args.api_key = [*keys, key]
        app.include_router(router)
        if steers:
            _add_routes(app, args, SaesteerConfig.from_json(given[KEY]))
        document(app)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Remember the engine and the names of this process."""
        names = getattr(getattr(engine_client, "input_processor", None), "saesteer_names", None)
        if names is not None:
            state.saesteer_admin = Admin(engine_client, names, admin_key())
            state.saesteer_results = engine_client.input_processor.saesteer_door.results
            places = sorted(names.catalog.sites or (), key=order)
            _log.info("The API is at %s/v1 and edits at %s", access.listens_at(args), ", ".join(places) or "no site")


def _add_routes(app: FastAPI, args: Any, config: SaesteerConfig) -> None:
    """The routes of a server that steers: for every client, and what the operator has asked for."""
    app.include_router(features.router)
    app.include_router(results.router)
    app.state.saesteer_access = access.keys_of(args), access.hosts_of(args, config.allow_hosts)
    args.middleware = [*args.middleware, access.MIDDLEWARE]
    if config.memory_guard is not None:
        app.add_middleware(MemoryGuard, limit=config.memory_guard)
    for name, place in _WINGS.items():
        if getattr(config, name, True):
            if add := wings.find(place):
                add(app, config)
            elif hasattr(config, name):
                raise ConfigError(f"--{name}: this installation of saesteer has no {name}")


class _TooLarge(HTTPException):
    """FastAPI lets this kind of error through while it reads the body."""


def _refused_by_key(request: Request) -> JSONResponse | None:
    admin: Admin | None = getattr(request.app.state, "saesteer_admin", None)
    if admin is None or not admin.key:
        hint = f"start the server with --saesteer-admin-key or {ADMIN_KEY}"
        return refuse(403, f"the admin routes are off on this server; {hint}", "admin_off")
    if access.sent_key(request.headers, [admin.key]) is None:
        message = "the Authorization header does not hold the admin key, expected Bearer and the key"
        return refuse(401, message, access.WRONG_KEY)
    return None


async def _guarded(handle: Handler, request: Request) -> Any:
    """Check the key before reading the body, and cut the body off at its limit."""
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
    if announced.isdecimal() and int(announced) > MAX_BODY:
        raise _TooLarge(413)
    try:
        return await handle(Request(request.scope, limited))
    except SpecError as error:
        status = 404 if request.method == "DELETE" and error.code == "unknown_name" else 400
        return refuse(status, str(error), error.code, error.field)


def _refusal(error: Exception) -> JSONResponse | None:
    match error:
        case _TooLarge():
            return refuse(413, f"the body is larger than {MAX_BODY} bytes, expected less", "too_many")
        case RegistryError():
            return refuse(409, str(error), error.code)
        case RequestValidationError():
            return refuse(400, *_told(error))
        case HTTPException():  # a body that is nested too deeply, or in an unknown encoding
            return refuse(error.status_code, f"the body is not a JSON object ({error.detail})", "bad_json")
    return None


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
        409: "No room, no op where it belongs, or it is in use; the message says what helps.",
        413: f"The body is larger than {MAX_BODY} bytes.",
    }
    return {status: {"model": Refused, "description": why[status]} for status in (401, 403, *statuses)}


def _admin(request: Request) -> Any:
    return request.app.state.saesteer_admin


_Admin = Annotated[Admin, Depends(_admin)]
# Only for the OpenAPI document; the routes ask for the key before they read a body.
_BEARER = HTTPBearer(auto_error=False, scheme_name="saesteer_admin_key", description="The key of --saesteer-admin-key.")
router = APIRouter(
    prefix="/v1/saesteer",
    route_class=refusing(_refusal, handled=_guarded),
    tags=["saesteer"],
    dependencies=[Depends(_BEARER)],
)


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
    replaced, catalog = await admin.names.put(admin.engine, "vector", body.name, given)
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
    replaced, catalog = await admin.names.put(admin.engine, "module", body.name, _spec(body.spec))
    return ModuleDone.of(catalog, body.name, replaced=replaced)


@router.delete("/modules/{name:path}", responses=_says(404, 409), summary="Delete a module")
async def delete_module(admin: _Admin, name: str) -> Deleted:
    """New requests cannot name it; running requests keep it. A module that another module uses is not deleted."""
    await admin.names.delete(admin.engine, "module", name)
    return Deleted(name=name)


@router.get("/default", responses=_says(), summary="Name the default module")
async def get_default(admin: _Admin) -> DefaultEntry:
    """The module that steers every request but those with `"defaults": false`."""
    return DefaultEntry(module=admin.names.catalog.default)


@router.put("/default", responses=_says(400, 413), summary="Set the default module")
async def put_default(admin: _Admin, body: DefaultBody) -> DefaultEntry:
    """The module steers every request that is admitted from now on. Running requests keep what they started with."""
    await admin.names.set_default(body.module)
    return DefaultEntry(module=body.module)


@router.delete("/default", responses=_says(409), summary="Clear the default module")
async def delete_default(admin: _Admin) -> DefaultEntry:
    """No module steers requests that do not ask for it. Under --require default this is refused."""
    if "default" in admin.engine.input_processor.saesteer_door.config.require:
        message = "this server requires a default module (--require default); set another one instead"
        raise RegistryError(message, code="in_use")
    await admin.names.set_default(None)
    return DefaultEntry(module=None)


def _spec(value: Any) -> Any:
    if isinstance(value, str):
        fail("spec", "wrong_type", "got a text, expected a spec as a JSON object; files are named at start")
    try:
        return from_json(value)
    except SpecError as error:
        raise error.below("spec") from None
