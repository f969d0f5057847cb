"""Names while serving: the front end's versions and who uses them, and how a change comes to all who must know it.

A request takes the newest version when it is admitted and holds it until its answer has ended, or its client has gone.
A new version is on all workers before any request gets it, so nobody sees half of a change. Versions that nobody holds
are dropped with the next change. Several API servers take each other's changes over (board.py): a change has ended when
all of them have it. Knows vLLM's requests, and neither HTTP nor keys.
"""

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from functools import wraps
from threading import Lock
from typing import Any
from weakref import WeakSet

from saesteer.config.config import KEY
from saesteer.engine.pool import Pool
from saesteer.engine.registry import Registry, Version, changed, rooms
from saesteer.errors import RegistryError
from saesteer.language.fields import text
from saesteer.language.spec import Spec
from saesteer.planning.digests import Kind, Name, names_in
from saesteer.planning.plan import Catalog
from saesteer.plugin.names.board import Board
from saesteer.plugin.names.changes import Given, check_gone, check_put, of, read
from saesteer.plugin.names.rpc import ask_workers
from saesteer.plugin.results import metrics

logger = logging.getLogger("vllm.saesteer")
VERSION = f"{KEY}_version"  # beside the spec in extra_args, from the front end to the worker
# An answer may end by a stop string, which the engine hears of a moment later: so long a version stays after its last.
GRACE = 1.0
PATIENCE = 3.0  # with a full pool, for requests that run and may end soon; seconds as well
BEAT = 0.02  # so often an API server looks whether another one has made a version
STARTING = 60.0  # another API server may take so long to begin, and none to take a change over


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
    """The names of a server, in one of its API server processes.

    Args:
        catalog: what was named at start.
        pool_rows: slots for named vectors at every site that the operator reserves.
        layers: of the model.
        board: shared with the other API servers, if there are any.
    """

    def __init__(self, catalog: Catalog, *, pool_rows: int, layers: int, board: Board | None = None) -> None:
        self._registry = Registry(catalog, {site: Pool(0, room) for site, room in rooms(catalog, pool_rows).items()})
        self._current = self._registry.versions[0]
        self._layers = layers
        self._lock = Lock()  # requests are admitted in threads
        self._changing = asyncio.Lock()
        self._holders: dict[int, WeakSet[Held]] = {}  # of versions that somebody has held
        self._idle_since: dict[int, float] = {}
        self._uses: Counter[Name] = Counter()
        self._turn = 0  # of uses
        self._told: Any = None  # versions in use and turn, to the other API servers
        self._board = board
        self._beat: asyncio.Task[None] | None = None
        self._report()

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
            self._turn += 1

    async def uses(self) -> Counter[Name]:
        """Requests admitted so far with what each name stands for now, also through modules."""
        if self._board is not None:
            await self._all_have_it(self._board, time.monotonic_ns())
        with self._lock:
            found = self._uses.copy()
        for kind, name, count in () if self._board is None else self._board.told("uses"):
            found[kind, name] += count
        return found

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
        async with self._changing, self._alone():
            before = self._current
            existed = own in of(kind, before.catalog)
            if found is None:
                check_gone(name, before.catalog)
            vectors, modules = ({own: found}, {}) if kind == "vector" else ({}, {own: found})
            catalog = changed(before.catalog, vectors, modules)
            if found is not None:
                check_put(name, catalog, self._layers)
            change = {f"{kind}s": {own: None if wire is None else wire.to_json()}}
            made = before.number + 1
            await self._add(made, catalog)
            keep = [one for one in self._registry.versions if one != made]
            told = json.dumps({"number": made, "base": before.number, "keep": keep, **change})
            try:
                await self._tell(engine, made, told)
            except BaseException:
                self._drop([made])
                raise
            self._take(made, [name])
            if self._board is not None:
                self._board.post(made, told)
                await self._all_have_it(self._board)
            return existed, self._current.catalog

    def _take(self, made: int, names: Iterable[Name]) -> None:
        """A version is on all workers: requests get it from now on."""
        with self._lock:
            self._current = self._registry.versions[made]
            for name in names:
                self._uses.pop(name, None)
            self._turn += 1
        metrics.pools(self.usage())

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """While no other API server makes a version, and with the newest one."""
        if self._board is None:
            yield
            return
        async with self._board.alone():
            await self._keep_up(self._board)
            await self._all_have_it(self._board)
            yield

    async def _all_have_it(self, board: Board, at: int = 0) -> None:
        end = time.monotonic() + STARTING
        while late := board.behind(at):
            if time.monotonic() > end:
                raise RuntimeError(f"API server {late[0]} has not taken over version {board.newest} of the names")
            await asyncio.sleep(BEAT / 4)

    def begin(self) -> None:
        """Keep up with the other API servers from now on; to be called in the loop that answers requests."""
        if self._board is not None and self._beat is None:
            self._beat = asyncio.create_task(self._beating(self._board))

    async def _beating(self, board: Board) -> None:
        while True:
            try:
                await self._keep_up(board)
            except Exception:
                logger.exception("a change of names by another API server could not be taken over")
                await asyncio.sleep(GRACE)
            await asyncio.sleep(BEAT)

    async def _keep_up(self, board: Board) -> None:
        """Take over what another API server has made, and say what is in use here."""
        now, made = time.monotonic_ns(), board.newest
        if made != self._current.number:
            vectors, modules = await asyncio.to_thread(lambda: read(json.loads(board.change())))
        if made == self._current.number + 1:  # if not, it was taken over in the meantime
            self._drop_idle()
            self._registry.add(made, changed(self._current.catalog, vectors, modules))
            self._take(made, [*(("vector", one) for one in vectors), *(("module", one) for one in modules)])
        self._report(now)

    def _report(self, now: int = 0) -> None:
        if self._board is None:
            return
        with self._lock:
            told = [one for one in self._registry.versions if self._is_used(one)], self._turn
            uses = [] if told == self._told else [[kind, name, count] for (kind, name), count in self._uses.items()]
        if told != self._told:
            self._board.tell(told[0], uses)
            self._told = told
        self._board.report(self._current.number, now)

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
        with self._lock:
            old = [one for one in self._registry.versions if one != self._current.number]
            free = [one for one in old if not self._is_used(one)]
            held = any(self._holders.get(one) for one in old)
            idle = any(not self._holders.get(one) for one in set(old) - set(free))
        if self._board is not None:
            elsewhere = set(self._board.told("versions"))
            held = held or any(one in elsewhere for one in old)
            free = [one for one in free if one not in elsewhere]
        self._drop(free)
        return idle, held

    def _is_used(self, version: int) -> bool:
        """Whether a request here has it or may get it, or had it less than GRACE ago."""
        if version == self._current.number or self._holders.get(version):
            return True
        now = time.monotonic()
        return version in self._holders and now - self._idle_since.setdefault(version, now) < GRACE

    def _drop(self, versions: Iterable[int]) -> None:
        for old in versions:
            self._registry.drop(old)
            self._holders.pop(old, None)
            self._idle_since.pop(old, None)

    async def _tell(self, engine: Any, made: int, told: str) -> None:
        answers = await ask_workers(engine, "saesteer_names", told)
        wrong = [answer for answer in answers if answer]
        if wrong:
            raise RuntimeError(f"a worker could not make version {made} of the names: {wrong[0]}")


def version_of(params: Any) -> int:
    """The version that a request was admitted with."""
    found: int = (params.extra_args or {}).get(VERSION, 0)
    return found


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
