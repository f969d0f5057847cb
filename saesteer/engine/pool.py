"""The slots of one site for vectors, assigned by content and shared. Knows their numbers, no tensor."""


class Pool:
    """Slots ``first`` to ``first + size - 1``.

    A slot that nobody holds keeps its content until it is needed, so a vector that comes again need not be copied.

    Args:
        first: the lowest slot.
        size: the number of slots; no more contents than this are held at a time.
    """

    def __init__(self, first: int, size: int) -> None:
        self.size = size
        self._free = list(range(first + size - 1, first - 1, -1))  # never used so far
        self._slots: dict[bytes, int] = {}  # slot of each content that is held or was held
        self._holders: dict[bytes, int] = {}  # how many hold each content
        self._idle: dict[bytes, None] = {}  # contents that nobody holds, the longest idle first

    def __len__(self) -> int:
        return len(self._holders)

    @property
    def room(self) -> int:
        """Slots that nobody holds."""
        return self.size - len(self._holders)

    def holds(self, content: bytes) -> bool:
        """Whether somebody holds this content."""
        return content in self._holders

    def take(self, content: bytes) -> tuple[int, bool]:
        """Hold a content once more; return its slot, and whether it must be written there.

        Args:
            content: a key that is equal for equal vectors only, such as a digest.
        """
        held = self._holders.get(content, 0)
        self._holders[content] = held + 1
        if content in self._slots:
            self._idle.pop(content, None)
            return self._slots[content], False
        if self._free:
            slot = self._free.pop()
        else:
            assert self._idle, "the pool has a slot for everything that may be held at a time"
            oldest = next(iter(self._idle))
            del self._idle[oldest]
            slot = self._slots.pop(oldest)
        self._slots[content] = slot
        return slot, True

    def release(self, content: bytes) -> None:
        """Give up one hold on a content."""
        self._holders[content] -= 1
        if not self._holders[content]:
            del self._holders[content]
            self._idle[content] = None
