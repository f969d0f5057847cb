"""What the server of forks imports: see ``tests.forks``."""

import importlib

from tests import forks

forks.install()
for _name in forks.IMPORTED:
    importlib.import_module(_name)
