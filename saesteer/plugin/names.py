"""Names while serving: the front end's versions and who uses them, and the function that makes them on every worker.

A request takes the newest version when it is admitted and holds it until its answer has ended, or its client has gone.
A new version is on all workers before any request gets it, so nobody sees half of a change. Versions that nobody holds
are dropped with the next change. Knows vLLM's requests, and neither HTTP nor keys.
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import wraps
from threading import Lock
from typing import Any
from weakref import WeakSet

from saesteer.checks import closest, listing, number, show, text
from saesteer.config import KEY
from saesteer.errors import RegistryError, SpecError
from saesteer.identity import Kind, Name, names_in, users_of
from saesteer.inline import InlineVector, vector
from saesteer.plan import plan
from saesteer.planned import Catalog
from saesteer.plugin import hooks, metrics
from saesteer.pool import Pool
from saesteer.registry import Registry, Version, changed, rooms
from saesteer.sites import canonical
from saesteer.spec import Return, Spec, from_json
from saesteer.vectors import VectorSet, from_inline

VERSION = f"{KEY}_version"  # beside the spec in extra_args, from the front end to the worker
MOST = 4096  # vectors, and modules
# An answer may end by a stop string, which the engine hears of a moment later: so long a version stays after its last.
GRACE = 1.0
PATIENCE = 3.0  # with a full pool, for requests that run and may end soon; seconds as well
_LENGTHS = (1 << 20, 64, 8)  # of prompts, for which a module must mean something
_BY_PROMPT = ("empty_scope", "duplicate")  # what may be wrong for one prompt and right for another


@dataclass(frozen=True, slots=True)
class Given:
    """A vector as it was registered."""

    vector: tuple[float, ...] | InlineVector
    bias: float = 0.0

    @classmethod
    def read(cls, value: Any, bias: Any) -> "Given":
        """From JSON.

        Raises:
            SpecError: it is no vector, or its bias is no number.
        """
        if isinstance(value, str):
            expected = "a list of numbers or an object with dtype, shape and data; files are named at start"
            raise SpecError(f"got {show(value)}, expected {expected}", field="vector", code="wrong_type")
        found = vector(value, "vector")
        assert not isinstance(found, str)
        return cls(found, 0.0 if bias is None else number(bias, "bias"))

    def decode(self) -> VectorSet:
        """The directions."""
        return from_inline(self.vector, bias=self.bias)

    def to_json(self) -> dict[str, Any]:
        """What ``read`` takes."""
        inline = self.vector
        return {"vector": inline.to_json() if isinstance(inline, InlineVector) else list(inline), "bias": self.bias}


class Held:
    """A version, as long as somebody keeps this."""

    __slots__ = ("__weakref__", "version")

    def __init__(self, version: Version) -> None:
        self.version = version

    @property
    def catalog(self) -> Catalog:
        """What the version's names stand for."""
        return self.version.catalog


class Names:
    """The names of a server, in its one API server process.

    Args:
        catalog: what was named at start.
        pool_rows: slots for named vectors at every site that the operator reserves.
        layers: of the model.
    """

    def __init__(self, catalog: Catalog, *, pool_rows: int, layers: int) -> None:
        self._registry = Registry(catalog, {site: Pool(0, room) for site, room in rooms(catalog, pool_rows).items()})
        self._current = self._registry.versions[0]
        self._layers = layers
        self._lock = Lock()  # requests are admitted in threads
        self._changing = asyncio.Lock()
        self._holders: dict[int, WeakSet[Held]] = {}  # of versions that somebody has held
        self._idle_since: dict[int, float] = {}
        self._owed: list[int] = []  # dropped here, and not yet on the workers
        self._next = 1
        self._uses: Counter[Name] = Counter()

    @property
    def catalog(self) -> Catalog:
        """The newest."""
        return self._current.catalog

    def hold(self) -> Held:
        """The newest version, for a request."""
        with self._lock:
            held = Held(self._current)
            self._holders.setdefault(held.version.number, WeakSet()).add(held)
            return held

    def bind(self, held: Held, spec: Spec, request: Any) -> None:
        """A request was admitted with a version: the worker hears which, and it is held until the answer has ended."""
        params = request.sampling_params
        params.extra_args = {**params.extra_args, VERSION: held.version.number}
        params.saesteer_held = held  # stays in this process
        used = names_in(spec.edits, held.catalog.modules)
        with self._lock:
            self._uses.update(used)

    def uses(self, kind: Kind, name: str) -> int:
        """Requests admitted with what a name stands for now, also through modules."""
        return self._uses[kind, name]

    def usage(self) -> dict[str, tuple[int, int]]:
        """Slots for named vectors in use, and all, by site."""
        return self._registry.usage()

    async def put_vector(self, engine: Any, name: str, given: Given) -> tuple[bool, Catalog]:
        """Register or replace a vector: whether there was one, and what there is now.

        Raises:
            SpecError: it is of another width than the model, or a module cannot use it.
            RegistryError: there is no room, or no op where it belongs.
        """
        found = await asyncio.to_thread(given.decode)
        return await self._shielded(engine, ("vector", text(name, "name")), found, given)

    async def put_module(self, engine: Any, name: str, spec: Spec) -> tuple[bool, Catalog]:
        """Register or replace a module: whether there was one, and what there is now.

        Raises:
            SpecError: it cannot be used on this server.
            RegistryError: there is no room for the vectors in it.
        """
        return await self._shielded(engine, ("module", text(name, "name")), spec, spec)

    async def delete(self, engine: Any, kind: Kind, name: str) -> None:
        """Take a name away.

        Raises:
            SpecError: there is none such.
            RegistryError: a module uses it.
        """
        await self._shielded(engine, (kind, name), None, None)

    async def _shielded(self, engine: Any, name: Name, found: Any, wire: Any) -> tuple[bool, Catalog]:
        # A change that has begun ends, also when its client has gone.
        return await asyncio.shield(asyncio.create_task(self._change(engine, name, found, wire)))

    async def _change(self, engine: Any, name: Name, found: Any, wire: Any) -> tuple[bool, Catalog]:
        kind, own = name
        async with self._changing:
            before = self._current
            existed = own in _of(kind, before.catalog)
            if found is None:
                _check_gone(name, before.catalog)
            vectors, modules = ({own: found}, {}) if kind == "vector" else ({}, {own: found})
            catalog = changed(before.catalog, vectors, modules)
            if found is not None:
                _check_put(name, catalog, self._layers)
            made, self._next = self._next, self._next + 1
            await self._add(made, catalog)
            try:
                await self._tell(engine, made, before.number, name, wire)
            except BaseException:
                self._drop([made])
                raise
            with self._lock:
                self._current = self._registry.versions[made]
                self._uses.pop(name, None)
            metrics.pools(self.usage())
            return existed, self._current.catalog

    async def _add(self, made: int, catalog: Catalog) -> None:
        """Make the version here, as every worker will; without room, wait for what nobody holds, and a little for more.

        The clock is asked after each sleep: uvloop ends one up to a millisecond early, and a busy machine late.
        """
        end = time.monotonic() + PATIENCE
        while True:
            idle, held = self._drop_idle()
            try:
                self._registry.add(made, catalog)
            except RegistryError:
                if not idle and (not held or time.monotonic() > end):
                    raise
                await asyncio.sleep(GRACE / 4)
            else:
                return

    def _drop_idle(self) -> tuple[bool, bool]:
        """Drop what nobody has held for GRACE; whether older versions stay that nobody holds, or somebody."""
        now, free, idle, held = time.monotonic(), [], False, False
        with self._lock:
            for old in [one for one in self._registry.versions if one != self._current.number]:
                if self._holders.get(old):
                    held = True
                elif old not in self._holders or now - self._idle_since.setdefault(old, now) >= GRACE:
                    free.append(old)
                else:
                    idle = True
        self._drop(free)
        return idle, held

    def _drop(self, versions: Iterable[int]) -> None:
        for old in versions:
            self._registry.drop(old)
            self._holders.pop(old, None)
            self._idle_since.pop(old, None)
            self._owed.append(old)

    async def _tell(self, engine: Any, made: int, base: int, name: Name, wire: Any) -> None:
        kind, own = name
        change = {own: None if wire is None else wire.to_json()}
        told = {"number": made, "base": base, "drop": self._owed, f"{kind}s": change}
        answers = await engine.collective_rpc("saesteer_names", args=(json.dumps(told),))
        wrong = [answer for answer in answers if answer]
        if wrong:
            raise RuntimeError(f"a worker could not make version {made} of the names: {wrong[0]}")
        self._owed = []


def make_version(self: Any, wire: str) -> str:
    """Make a version of the names on this worker, and drop old ones; called by name over collective_rpc.

    Returns:
        What went wrong, or nothing; an error that is raised would leave the other workers' answers unread.
    """
    try:
        told = json.loads(wire)
        for old in told["drop"]:
            with suppress(KeyError):  # one whose making failed before it came here
                self.saesteer.engine.registry.drop(old)
        vectors = {name: _given(one) for name, one in told.get("vectors", {}).items()}
        modules = {name: None if one is None else from_json(one) for name, one in told.get("modules", {}).items()}
        self.saesteer.engine.add_version(told["number"], told["base"], vectors, modules)
    except Exception as exc:  # noqa: BLE001  # it is told, see above
        return f"{type(exc).__name__}: {exc}"
    return ""


def version_of(params: Any) -> int:
    """The version that a request was admitted with."""
    found: int = (params.extra_args or {}).get(VERSION, 0)
    return found


def _given(wire: Mapping[str, Any] | None) -> VectorSet | None:
    return None if wire is None else Given.read(wire["vector"], wire["bias"]).decode()


def keep_held(original: Callable[..., Any]) -> Callable[..., Any]:
    """The wrap of OutputProcessor.add_request: what a request holds is held by the state of each of its answers."""

    @wraps(original)
    def add_request(self: Any, request: Any, prompt: Any, parent_req: Any = None, *args: Any, **kwargs: Any) -> Any:
        made = original(self, request, prompt, parent_req, *args, **kwargs)
        # Of n answers each has a copy of the parameters, which leaves our part behind.
        params = request.sampling_params if parent_req is None else parent_req.sampling_params
        held = getattr(params, "saesteer_held", None)
        if held is not None:
            self.request_states[request.request_id].saesteer_held = held
        return made

    return add_request


def install() -> None:
    """Put the front end's wrap in place."""
    hooks.wrap("OutputProcessor.add_request", keep_held)


def _of(kind: Kind, catalog: Catalog) -> Mapping[str, Any]:
    return catalog.vectors if kind == "vector" else catalog.modules


def _check_gone(name: Name, catalog: Catalog) -> None:
    kind, own = name
    known = _of(kind, catalog)
    if own not in known:
        found = f"got {show(own)}{closest(own, known)}, expected one of: {listing(known)}"
        raise SpecError(found, field="name", code="unknown_name")
    users = users_of([name], catalog.modules, direct=True)
    if users:
        raise RegistryError(f"{kind} {own!r} is used by module {listing(users)}; delete that first", code="in_use")


def _check_put(name: Name, catalog: Catalog, layers: int) -> None:
    kind, own = name
    if len(_of(kind, catalog)) > MOST:
        raise RegistryError(f"the server has {MOST} {kind}s already; delete one first", code="no_room")
    if kind == "vector":
        _check_vector(own, catalog, layers)
    else:
        _check_module(catalog.modules[own], catalog, "spec")
    for user in users_of([name], catalog.modules):
        if (kind, own) != ("module", user):
            try:
                _check_module(catalog.modules[user], catalog, user)
            except SpecError as error:
                message = f"module {user!r} uses {kind} {own!r}, and could not use this one ({error})"
                raise RegistryError(f"{message}; replace or delete the module first", code="in_use") from None


def _check_vector(name: str, catalog: Catalog, layers: int) -> None:
    found = catalog.vectors[name]
    if found.width != catalog.width:
        message = f"is {found.width} wide, expected {catalog.width}, the width of this model"
        raise SpecError(message, field="vector.shape", code="conflict")
    if found.layers and found.layers[-1] >= layers:
        message = f"got layer {found.layers[-1]}, expected layers of this model, 0 to {layers - 1}"
        raise SpecError(message, field="vector.layers", code="out_of_range")
    sites = catalog.sites or frozenset()
    if not sites:
        hint = "start it with --sites, such as --sites resid_post.all"
        raise RegistryError(
            f"no site of this server has an op, so vector {name!r} fits nowhere; {hint}", code="no_site"
        )
    bare = [layer for layer in found.layers or () if not _instrumented(layer, sites)]
    if bare:
        hint = "start it with --sites " + ",".join(f"resid_post.{layer}" for layer in bare[:8])
        message = f"vector {name!r} has rows for layers without an op on this server: {listing(bare)}"
        raise RegistryError(f"{message}; {hint}", code="no_site")


def _instrumented(layer: int, sites: frozenset[str]) -> bool:
    return any(canonical(f"{kind}.{layer}") in sites for kind in ("resid_pre", "resid_mid", "resid_post"))


def _check_module(spec: Spec, catalog: Catalog, where: str) -> None:
    """Refuse a module that no request could use; what depends on the prompt is seen when one does."""
    if spec.returns != Return():
        raise SpecError("asks for return, expected edits only", field=f"{where}.return", code="not_served")
    catalog = replace(catalog, inline_rows=None)  # a module's own vectors get slots with it
    for prompt_len in _LENGTHS:
        try:
            plan(spec, catalog, prompt_len)
            return
        except SpecError as error:
            if error.code not in _BY_PROMPT:
                message = str(error).removeprefix(f"{error.field}: ")
                raise SpecError(message, field=error.field.replace(KEY, where, 1), code=error.code) from None
    for kind, name in names_in(spec.edits, {}):
        if name not in _of(kind, catalog):
            raise SpecError(f"names the unknown {kind} {name!r}", field=where, code="unknown_name")
