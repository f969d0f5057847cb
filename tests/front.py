"""The table row of a spec on the way through a server's door, which fetches rows from files. Knows no test."""

from collections.abc import Callable
from typing import Any

import torch

from saesteer.config.assets import Assets
from saesteer.engine.engine import Engine, Row
from saesteer.language.spec import from_json
from saesteer.plugin.door.admission import Door
from saesteer.plugin.door.rows import Fetching


def making(assets: Assets) -> Callable[[Engine, Any, int], Row | None]:
    """What a server's front end does with a request, and what its worker makes of that."""

    def row_of(engine: Engine, spec: Any, prompt_len: int) -> Row | None:
        door = Door("server", assets.config, Fetching(assets.rows, torch.float32))
        return engine.make_row(door.meaning(from_json(spec), engine.catalog, prompt_len).admitted)

    return row_of
