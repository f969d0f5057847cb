"""The table row of a spec, on the way that a server's requests go. Knows no test."""

from typing import Any

from saesteer.engine.engine import Engine, Row
from saesteer.engine.wire import encode
from saesteer.language.spec import as_spec
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
