"""The table row of a spec, on the way that a server's requests go. Knows no test."""

from collections.abc import Iterator
from typing import Any

from saesteer.engine.engine import Engine, Row
from saesteer.engine.table import single
from saesteer.engine.wire import decode, encode
from saesteer.kernels import layout
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
    row = engine.make_row(admitted)
    if row is not None:
        # Graphs are chosen before there is a row.
        limit = engine.config.max_dose or 0.0
        assert single(decode(admitted["plan"]), engine.places, limit=limit) == {*single_of(row, engine)}
    return row


def single_of(row: Row, engine: Engine) -> Iterator[str]:
    """The sites at which a row has one entry that the kernel for such rows can do."""
    for name, number in engine.places.sites.items():
        if row.words[layout.HEAD + layout.SPAN * number + layout.KIND] & (layout.LONE | layout.SHORT):
            yield name
