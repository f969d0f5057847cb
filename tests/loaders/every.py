"""What the test modules of all formats hold: one module for each row of FORMATS, of the same name. Knows no format."""

from importlib import import_module
from typing import Any

import pytest

from saesteer.loaders import FORMATS
from tests.loaders.case import Case, Row, Sample, Told

MODULES: dict[str, Any] = {name: import_module(f"tests.loaders.formats.{name}") for name in FORMATS}
CASES: list[Case] = [case for module in MODULES.values() for case in module.cases()]
ROWS: list[Row] = [row for module in MODULES.values() for row in module.wrong()]
SAMPLES: dict[str, Sample] = {name: module.SAMPLE for name, module in MODULES.items()}
DESCRIBED: list[Told] = [told for module in MODULES.values() for told in getattr(module, "described", list)()]

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
every_sample = pytest.mark.parametrize("name", SAMPLES)
_FIRST = {case.name.partition("-")[0]: case for case in reversed(CASES)}
every_format = pytest.mark.parametrize("case", _FIRST.values(), ids=_FIRST)  # a case of each
