"""Which table row a request holds, where the engine's own request slots cannot serve as rows. Knows no device.

Row 0 belongs to nobody. There are as many other rows as requests fit into one batch, so a batch can always be served:
a request that is not in the batch gives its row up when another one needs it, and is filled again when it returns.
"""

from collections.abc import Sequence


class Rows:
    """Rows 1 to ``capacity``, given to request ids.

    Args:
        capacity: the largest number of requests in one batch.
    """

    def __init__(self, capacity: int) -> None:
        self._free = list(range(capacity, 0, -1))
        self._held: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._held)

    def take(self, batch: Sequence[str]) -> tuple[list[int], list[str]]:
        """Rows of the batch's requests, in its order, and the ids whose row is new and must be filled.

        Args:
            batch: distinct request ids, at most ``capacity`` of them.
        """
        fresh = [request for request in batch if request not in self._held]
        if len(fresh) > len(self._free):
            wanted = set(batch)
            for request in [held for held in self._held if held not in wanted]:
                self.release(request)
        for request in fresh:
            self._held[request] = self._free.pop()
        return [self._held[request] for request in batch], fresh

    def release(self, request: str) -> int | None:
        """Give the request's row back; None if it holds none."""
        row = self._held.pop(request, None)
        if row is not None:
            self._free.append(row)
        return row
