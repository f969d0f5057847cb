"""The front end's names without an engine: workers that keep what they are told, and a request that names a vector."""

import json
from collections import defaultdict
from typing import Any

from saesteer.language.spec import from_json
from saesteer.planning.plan import Catalog
from saesteer.plugin.names.board import Board
from saesteer.plugin.names.versions import Names

SPEC = from_json({"edits": [{"op": "add", "vector": "v", "site": "resid_post.3"}]})


class Workers:
    """Stands for engines: keeps what the first is told; a worker answers with what went wrong, or nothing."""

    def __init__(self, engines: int = 1) -> None:
        self.told: list[Any] = []
        self.answers: list[str] = ["", ""]  # of the last engine
        self.full = 0  # how often a worker still answers that it has no room
        self.engine_core = self
        self.core_engines = list(range(engines))

    async def _call_utility_async(self, call: str, method: str, _: None, args: Any, __: None, *, engine: int) -> Any:
        assert (call, method) == ("collective_rpc", "saesteer_names")
        told = json.loads(args[0])
        if engine == 0:
            self.told.append(told)
        wrong = self.answers if engine == self.core_engines[-1] else ["", ""]
        full, self.full = self.full > 0, self.full - 1
        usage = defaultdict[str, tuple[int, int]](lambda: (len(told["pin"]), 4))
        return [{"error": "--pool-rows 3" if full else one, "full": full, "usage": usage} for one in wrong]

    @property
    def pinned(self) -> list[tuple[int, int]]:
        """How many vectors each change has pinned and unpinned."""
        return [(len(told["pin"]), len(told["unpin"])) for told in self.told]


def start(rows: int = 2, board: Board | None = None) -> Names:
    """Names of which none is registered yet."""
    catalog = Catalog(dictionaries={}, sites=frozenset({"resid_post.3"}), max_entries=64, width=3, inline_rows=1)
    return Names(catalog, pool_rows=rows, layers=6, board=board)
