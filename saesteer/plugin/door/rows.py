"""The rows of features that a request needs of dictionaries in files, read before it is sent on. Knows no tensor.

They are read in a thread before vLLM is ready for the request (``prepare``), so the event loop waits for no disk. The
plan then finds them among the store's recent rows, and only looks at their files' state (``fetch``). Offline, where no
loop waits, ``fetch`` reads them.
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from saesteer.config.row_store import RowStore
from saesteer.dictionaries.vectors import FeatureRow
from saesteer.errors import ConfigError, LoadError
from saesteer.language.fields import fail
from saesteer.language.spec import Spec
from saesteer.planning.expand import mentioned
from saesteer.planning.lookup import without_path
from saesteer.planning.plan import Catalog, Feature, Plan


class Fetching:
    """A server's store of rows.

    Args:
        store: the store.
        dtype: torch's, of the server's weights.
    """

    def __init__(self, store: RowStore, dtype: Any) -> None:
        self._store, self._dtype = store, dtype

    def __bool__(self) -> bool:
        return bool(len(self._store))

    def prepare(self, spec: Spec, catalog: Catalog) -> None:
        """Read what a spec names; what is wrong with it, ``fetch`` and the plan say.

        No more than a request may have entries: what a refused one names costs no more than what is served.
        """
        named = (one for one in dict.fromkeys(mentioned(spec, catalog)) if one.dictionary in self._store)
        for one in islice(named, catalog.max_entries):
            with suppress(ConfigError, LoadError):
                if self._store[one.dictionary].row_of(one.feature) is not None:
                    self._store.row(one.dictionary, one.feature, self._dtype)

    def fetch(self, plan: Plan, catalog: Catalog) -> Mapping[Feature, FeatureRow]:
        """The rows that a plan needs.

        Raises:
            SpecError: a file has changed or vanished since it was opened, or holds a wrong number.
        """
        found = {}
        for one, at in plan.rows(catalog).items():
            try:
                found[one] = self._store.row(one.dictionary, one.feature, self._dtype, one.target)
            except LoadError as exc:
                _refuse(exc, one, at)
        return found

    def decoders(self, name: str, features: Sequence[int]) -> list[NDArray[np.float32]]:
        """Decoder rows [d] of features of a dictionary here, which is no cross-layer transcoder.

        Raises:
            LoadError: its file has changed or vanished since it was opened, or holds a wrong number.
        """
        return [self._store.row(name, one, torch.float32).rows[1] for one in features]

    def check_file(self, name: str) -> None:
        """Raises LoadError if the file of a dictionary here has changed or vanished since it was opened."""
        self._store.check(name)

    def check(self, rows: Collection[tuple[Feature, str]]) -> None:
        """Refuses rows whose files have changed or vanished since they were opened.

        Raises:
            SpecError: one has.
        """
        for one, at in rows:
            try:
                self._store.check(one.dictionary)
            except LoadError as exc:
                _refuse(exc, one, at)


def _refuse(exc: LoadError, feature: Feature, at: str) -> None:
    fail(f"{at}.dictionary", "unreadable", f"the file of {feature.dictionary!r} gives no rows: {without_path(exc)}")
