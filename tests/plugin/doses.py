"""Clamps of the embedded model whose doses are known to be above a limit."""

from tests.plugin.conftest import BRIDGE

LIMIT = 1.0  # of a dose
STRONG = {**BRIDGE, "value": 20.0}  # a dose of 4 to 6, ten times that of BRIDGE
LATE = {**STRONG, "scope": {"positions": [[12, None]]}}  # in the middle of an answer
