"""Names while serving: what they stand for now, who used them, and how a change reaches every process that needs it.

A request is planned with what its names stand for when it is admitted; the plan refers to vectors by digest, so a later
change of the names does not reach it. A change puts its vectors on all workers before any request gets them, so nobody
sees half of it. What a name stood for before stays pinned there until the next change. Several API servers take over
each other's changes when they look up names (board.py). Knows vLLM's engine by its RPC, but no HTTP and no keys.
"""

import asyncio
import json
import logging
import time
from base64 import b64encode
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from threading import RLock
from typing import Any, NamedTuple

from saesteer.errors import RegistryError
from saesteer.language.alike import Alike, Edits, parts_of
from saesteer.language.edits import Use
from saesteer.language.fields import show, text
from saesteer.language.spec import Spec
from saesteer.planning.digests import Kind, Name, names_in
from saesteer.planning.expand import in_front
from saesteer.planning.pins import Pins, Place, changed, counts, no_room, settle
from saesteer.planning.plan import Catalog
from saesteer.plugin.names.board import Board
from saesteer.plugin.names.changes import Given, check_default, check_gone, check_put, of, read, version_of
from saesteer.plugin.names.rpc import ask_workers
from saesteer.plugin.results import metrics

logger = logging.getLogger("vllm.saesteer")
PATIENCE = 3.0  # seconds to wait with a full pool, since running requests with replaced vectors may end soon
PAUSE = 0.25

Usage = Mapping[str, tuple[int, int]]  # by site: slots for named vectors in use, and all slots


class Version(NamedTuple):
    """What names stand for, for the requests that are admitted with it."""

    number: int  # of the last change, 1 or more; names from the start have the first numbers
    catalog: Catalog
    pins: Pins
    puts: Mapping[Name, int]  # which change has put what the name stands for


class Names:
    """The names of a server, in one of its API server processes.

    Args:
        catalog: what was named at start.
        pool_rows: slots that the operator reserves for named vectors at every site.
        layers: number of the model's layers.
        board: shared with the other API servers, if there are any.
    """

    def __init__(self, catalog: Catalog, *, pool_rows: int, layers: int, board: Board | None = None) -> None:
        names: list[Name] = [*(("vector", name) for name in catalog.vectors)]
        names += (("module", name) for name in catalog.modules)
        settled, pins = settle(catalog)
        self._now = Version(len(names) + 1, settled, pins, {name: number for number, name in enumerate(names)})
        used = counts(pins)
        self._rooms = {site: max(pool_rows, used[site]) for site in catalog.sites or ()}
        self._usage: Usage = {site: (used[site], room) for site, room in self._rooms.items()}
        self._stale: Collection[Place] = ()  # what may be pinned on workers although no name stands for it
        self._layers = layers
        self._lock = RLock()  # requests are admitted in threads
        self._changing = asyncio.Lock()
        self._uses: Counter[int] = Counter()  # by change; only for a single API server
        self._board = board

    @property
    def catalog(self) -> Catalog:
        """The newest catalog."""
        return self.hold().catalog

    def hold(self) -> Version:
        """The newest version, for a request."""
        with self._lock:
            while self._board is not None and (newest := self._board.newest) > self._now.number:
                try:
                    self._follow(self._board)
                except FileNotFoundError:
                    if self._board.newest == newest:
                        raise
            return self._now

    def count(self, version: Version, spec: Spec) -> None:
        """Count a request that was admitted with a version."""
        first = [Alike(Use(name)) for _, name in in_front(spec, version.catalog)]
        edits = Edits([*first, *parts_of(spec.edits)]) if first else spec.edits
        used = [version.puts[name] for name in names_in(edits, version.catalog.modules, spec.returns)]
        with self._lock:
            if self._board is None:
                self._uses.update(used)
            else:
                for change in used:
                    self._board.use(change)

    def uses(self) -> Counter[Name]:
        """Requests admitted so far with what each name stands for now, also through modules."""
        puts, board = self.hold().puts, self._board
        return Counter({name: self._uses[one] if board is None else board.uses(one) for name, one in puts.items()})

    def usage(self) -> Usage:
        """Slots for named vectors in use at the last change of names, also by running requests; and all slots."""
        self.hold()
        return self._usage

    async def put(self, engine: Any, kind: Kind, name: str, given: Given | Spec) -> tuple[bool, Catalog]:
        """Register or replace a vector or a module; returns whether there was one, and the catalog now.

        Raises:
            SpecError: it cannot be used on this server, or a module cannot use it.
            RegistryError: there is no room, or no op where it belongs.
        """
        return await self._shielded(engine, (kind, text(name, "name")), given)

    async def delete(self, engine: Any, kind: Kind, name: str) -> None:
        """Delete a name.

        Raises:
            SpecError: there is no such name.
            RegistryError: a module uses it.
        """
        await self._shielded(engine, (kind, name), None)

    async def set_default(self, module: str | None) -> None:
        """Let a module steer every request that is admitted from now on, or none.

        Raises:
            SpecError: there is no such module, or no request could use it.
        """
        async with self._changing, self._alone():
            before = self.hold()
            if module is not None:
                check_default(module, before.catalog)
            catalog = replace(before.catalog, default=module)
            self._post(before._replace(number=before.number + 1, catalog=catalog), self._stale, self._usage)

    async def _shielded(self, engine: Any, name: Name, given: Given | Spec | None) -> tuple[bool, Catalog]:
        # A change that has begun is completed even if its client disconnects.
        return await asyncio.shield(asyncio.create_task(self._change(engine, name, given)))

    async def _change(self, engine: Any, name: Name, given: Given | Spec | None) -> tuple[bool, Catalog]:
        kind, own = name
        found: Any = await asyncio.to_thread(given.decode) if isinstance(given, Given) else given
        async with self._changing, self._alone():
            before = self.hold()
            if given is None:
                check_gone(name, before.catalog)

            def made() -> tuple[Catalog, Pins]:
                catalog = changed(before.catalog, *(({own: found}, {}) if kind == "vector" else ({}, {own: found})))
                if given is not None:
                    check_put(name, catalog, self._layers)
                return settle(catalog)

            catalog, pins = await asyncio.to_thread(made)  # thousands of modules take seconds
            used = counts(before.pins)
            # What it replaces and what it adds exist side by side for a moment.
            for site, wanted in counts(before.pins, pins).items():
                if wanted > (room := self._rooms[site]):
                    raise no_room(site, wanted - used[site], room - used[site], room)
            new = {place: pins[place] for place in pins.keys() - before.pins.keys()}
            unpinned = set(self._stale) - pins.keys() - before.pins.keys()
            number = before.number + 1
            puts = {**before.puts, name: number}
            if given is None:
                del puts[name]
            elif self._board is not None:
                self._board.put(number, {f"{kind}s": {own: given.to_json()}})
            # If it fails, some workers have pinned what is new, and the next change unpins it.
            self._post(before, {*self._stale, *new}, self._usage, keep=number)
            usage = await self._tell(engine, new, unpinned)
            self._post(Version(number, catalog, pins, puts), before.pins.keys() - pins.keys(), usage)
            known = own in of(kind, before.catalog)
            action = "delete" if given is None else "replace" if known else "register"
            versions = version_of(name, catalog), version_of(name, before.catalog)
            logger.info("admin: %s %s %s, version %s, before it %s", action, kind, show(own), *versions)
            metrics.changed(action)
            return known, catalog

    def _post(self, version: Version, stale: Collection[Place], usage: Usage, keep: int = 0) -> None:
        """Give requests a version from now on, here and on all other API servers."""
        with self._lock:
            for old in set(self._now.puts.values()).difference(version.puts.values()):
                self._uses.pop(old, None)
            self._now, self._stale, self._usage = version, stale, usage
        if self._board is not None:
            state = {"number": version.number, "usage": usage, "default": version.catalog.default}
            state["puts"] = [[*name, change] for name, change in version.puts.items()]
            state["stale"] = [[site, digest.hex()] for site, digest in stale]
            self._board.post(version.number, state, {*version.puts.values(), keep})
        metrics.pools(usage)

    def _follow(self, board: Board) -> None:
        """Take over what other API servers have changed.

        Raises:
            FileNotFoundError: they have changed it again in the meantime.
        """
        state, before = board.read(), self._now
        puts: dict[Name, int] = {(kind, name): change for kind, name, change in state["puts"]}
        if state["number"] != before.number:
            gone = before.puts.keys() - puts.keys()
            found: dict[str, dict[str, Any]] = {
                f"{kind}s": {name: None for one, name in gone if one == kind} for kind in ("vector", "module")
            }
            for name, change in puts.items():
                if before.puts.get(name) != change:
                    for several, one in board.change(change).items():
                        found[several] |= one
            catalog, pins = settle(replace(changed(before.catalog, *read(found)), default=state["default"]))
            self._now = Version(state["number"], catalog, pins, puts)
        self._stale = {(site, bytes.fromhex(digest)) for site, digest in state["stale"]}
        self._usage = {site: (used, room) for site, (used, room) in state["usage"].items()}
        metrics.pools(self._usage)

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Keep other API servers from changing names meanwhile, and first take over what they have changed."""
        if self._board is None:
            yield
            return
        async with self._board.alone():
            if self._board.newest:
                with self._lock:
                    self._follow(self._board)
            yield

    async def _tell(self, engine: Any, new: Pins, unpinned: Collection[Place]) -> Usage:
        """Pin the vectors on all workers, and wait for slots that running requests may soon free."""
        sites: defaultdict[bytes, list[str]] = defaultdict(list)
        rows = {digest: row for (_, digest), row in new.items()}
        for site, digest in new:
            sites[digest].append(site)
        pin = [[digest.hex(), sites[digest], b64encode(row.tobytes()).decode()] for digest, row in rows.items()]
        told = json.dumps({"pin": pin, "unpin": [[site, digest.hex()] for site, digest in unpinned]})
        end = time.monotonic() + PATIENCE
        while True:
            answers = await ask_workers(engine, "saesteer_names", told)
            wrong = [answer for answer in answers if answer["error"]]
            if not wrong:
                break
            if any(not answer["full"] for answer in wrong):
                raise RuntimeError(f"a worker could not take over a change of names: {wrong[0]['error']}")
            if time.monotonic() > end:
                raise RegistryError(wrong[0]["error"], code="no_room")
            await asyncio.sleep(PAUSE)
        usage = [answer["usage"] for answer in answers]
        return {site: (max(one[site][0] for one in usage), room) for site, room in self._rooms.items()}
