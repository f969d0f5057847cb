"""Changes of names without a server: what the admin routes have of an engine, offline. Knows no test."""

import asyncio
from typing import Any


class Client:
    """What the admin routes have of the engine."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.names = llm.llm_engine.input_processor.saesteer_names
        self.engine_core = self
        self.core_engines = [0]

    async def _call_utility_async(self, call: str, *args: Any, engine: int) -> Any:
        return getattr(self.llm, call)(*args)

    def put(self, row: list[float]) -> None:
        """Register or replace v."""
        from saesteer.plugin.names.changes import Given

        asyncio.run(self.names.put(self, "vector", "v", Given.read(row, 0.0)))

    def delete(self) -> None:
        """Take v away."""
        asyncio.run(self.names.delete(self, "vector", "v"))


class Puts(dict[Any, int]):
    """Which change has put a name, for any name."""

    def __missing__(self, _: Any) -> int:
        return 0
