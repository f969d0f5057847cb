"""Edits at admission: what they become in a plan, and how they are refused."""

from collections.abc import Callable
from typing import Any

import pytest

from saesteer.errors import SpecError
from saesteer.language.spec import Spec, from_json
from saesteer.planning.plan import Catalog, Group, Plan
from saesteer.planning.planner import plan
from tests.spec.catalogs import CATALOG

P = 10  # tokens of a prompt


def planned(*found: Any, catalog: Catalog = CATALOG, prompt_len: int = P) -> tuple[Group, ...]:
    """The groups of these edits."""
    return plan(Spec(edits=found), catalog, prompt_len).groups


def refusal(*found: Any, catalog: Catalog = CATALOG, prompt_len: int = P) -> tuple[str, str, str]:
    """How these edits are refused: field, code and sentence."""
    return refusal_of(lambda: planned(*found, catalog=catalog, prompt_len=prompt_len))


def refusal_of(work: Callable[[], object]) -> tuple[str, str, str]:
    """How a spec is refused by what is called here: field, code and sentence."""
    with pytest.raises(SpecError) as caught:
        work()
    return caught.value.field, caught.value.code, str(caught.value)


def plan_or_code(spec: dict[str, Any], catalog: Catalog) -> Plan | str:
    """The plan of a request with a prompt of twelve tokens, or the code of its refusal."""
    try:
        return plan(from_json(spec), catalog, 12)
    except SpecError as error:
        return error.code
