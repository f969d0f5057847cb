"""What each event of a stream says is new of what a request reads, in the front end."""

from typing import Any

from saesteer.language.fields import Fields, Json
from saesteer.planning.answers import WORDS

_WORDS_OF_ANSWERS = frozenset(WORDS.values())


class Unsent:
    """What one choice has told that its stream has not said yet.

    It is taken down as each output comes, since the fields of an answer go on growing while events are on their way.
    """

    def __init__(self) -> None:
        self.fields: Fields = {}  # of the answer so far
        self._known: dict[str, int] = {}  # how many entries of each read-out were taken down
        self._new: dict[str, list[Any]] = {}
        self._ended = False

    def add(self, fields: Fields, *, ended: bool) -> None:
        """Takes down what an output brings.

        Args:
            fields: of the answer. Another object is that of another turn, which is a request of its own.
            ended: whether the output is the choice's last one.
        """
        if fields is not self.fields:
            self.fields, self._known = fields, {}
        for word in _WORDS_OF_ANSWERS & fields.keys():
            self._new.setdefault(word, []).extend(fields[word][self._known.get(word, 0) :])
            self._known[word] = len(fields[word])
        self._ended = ended

    @property
    def waits(self) -> bool:
        """Whether an event before the choice's end has something to say."""
        return not self._ended and any(self._new.values())

    def take(self, *, end: bool) -> Json:
        """What the next event says: new entries of read-outs, and at the end of the choice all other fields as well."""
        if not end and not self.waits:
            return {}
        new, self._new = self._new, {word: [] for word in self._new}
        return {**self.fields, **new} if end else {word: entries for word, entries in new.items() if entries}


def joined(before: Fields, piece: Fields) -> Json:
    """What pieces of a stream say together: entries of read-outs behind those before, and everything else anew."""
    found = {**before, **piece}
    for word in _WORDS_OF_ANSWERS & found.keys():
        found[word] = [*before.get(word, ()), *piece.get(word, ())]
    return found
