"""The table row of a spec, on the way that a server's requests go. Knows no test."""

from collections.abc import Callable
from typing import Any

import torch

from saesteer.config.assets import Assets
from saesteer.engine.encode import encode
from saesteer.engine.engine import Engine, Row
from saesteer.language.spec import as_spec, from_json
from saesteer.planning.planner import plan


def row_of(engine: Engine, spec: Any, prompt_len: int) -> Row | None:
    """What a request's row holds; None when the spec edits nothing.

    Raises:
        SpecError: the spec is wrong.
    """
    found = as_spec(spec)
    assert found is not None
    admitted = encode(plan(found, engine.catalog, prompt_len), engine.catalog, dose=found.returns.dose)
    return engine.make_row(admitted)


def making(assets: Assets) -> Callable[[Engine, Any, int], Row | None]:
    """The same through a server's door, which fetches rows from files."""
    from saesteer.plugin.door.admission import Door
    from saesteer.plugin.door.rows import Fetching

    def made(engine: Engine, spec: Any, prompt_len: int) -> Row | None:
        door = Door("server", assets.config, Fetching(assets.rows, torch.float32))
        return engine.make_row(door.meaning(from_json(spec), engine.catalog, prompt_len).admitted)

    return made
