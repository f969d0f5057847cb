"""Finds the text of each chat message in a rendered prompt. Knows chat templates as functions, and no tokenizer.

Rendering a conversation message by message misleads: many templates render a message in another way once others follow.
So all messages are rendered once more with marks in their texts, which are characters that stand nowhere else. Without
the marks, that rendering must be the prompt itself, character by character; then each mark shows where its message is.
"""

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

from saesteer.planning.plan import Window

Message = Mapping[str, Any]
Render = Callable[[Sequence[Any], bool], str]  # messages, and whether the answer is to be opened → text of the prompt
Place = tuple[int, Window]  # index of a message, and its characters

MOST_RENDERED = 2**13  # messages for one request, of all renderings; one takes about 20 µs
FEW = 8  # renderings that are allowed for a conversation of any length
_MARKS = range(0xF0000, 0xFFFFE)  # for private use, no spaces: what strips a text leaves them
# What templates look for in a text: a mark stands between such words, never in them.
_WORD = re.compile(r"(<[^<>\s]{1,64}>|\[/?[A-Z_]+\]|/\w+)")


class Untold(Exception):  # no error: other ways remain
    """Marks cannot show where the messages are."""


def find(messages: Sequence[Any], render: Render, starts: Sequence[int], *, text: str, continued: bool) -> list[Place]:
    """The places of all messages, in the order of the prompt; they follow each other without a gap, from 0.

    A message has its header and its end. What precedes the first one belongs to it, and what opens the answer to none.
    A message that the template leaves out has an empty place. Where a template takes a message apart, with others
    between, it has several places.

    Args:
        messages: as the client sent them.
        render: renders them as for the prompt.
        starts: where the tokens of the prompt begin, ascending.
        text: the whole prompt, as ``render`` renders it.
        continued: the answer continues the last message.

    Raises:
        Untold: they cannot be found so.
    """
    return _Search(messages, render, text).places(starts, continued)


class _Search:
    def __init__(self, messages: Sequence[Any], render: Render, text: str) -> None:
        self._messages, self._render = messages, render
        self._left = max(MOST_RENDERED, FEW * len(messages))
        self.whole = text
        taken = {*text}
        marks = [*islice((chr(one) for one in _MARKS if chr(one) not in taken), len(messages))]
        if len(marks) < len(messages):
            raise Untold
        self._numbers = {mark: number for number, mark in enumerate(marks)}
        self._erased = dict.fromkeys(map(ord, marks))
        self._marks = marks

    def places(self, starts: Sequence[int], continued: bool) -> list[Place]:
        marked, seen = self._marked()
        groups: list[list[int]] = []  # message, where its first mark is, and its last
        at = 0
        for char in seen:
            number = self._numbers.get(char)
            if number is None:
                at += 1
            elif groups and groups[-1][0] == number:
                groups[-1][2] = at
            else:
                groups.append([number, at, at])
        if not groups:
            raise Untold
        nexts = [*(first for _, first, _ in groups[1:]), len(self.whole)]
        tails: dict[str, str | None] = {}  # what follows a message that is the last one, by what follows it here
        for (number, _, last), following in zip(groups, nexts, strict=True):
            gap = self.whole[last : following - 1]  # without the first character of the next text
            if gap not in tails:
                tails[gap] = self._tail(marked, number)
        user = self._tail([{"role": "user", "content": self._marks[0]}], 0)  # how most templates end any message
        known = sorted({*filter(None, (*tails.values(), user))}, key=len, reverse=True)
        found: list[Place] = []
        low = 0
        for (number, _, last), following in zip(groups, nexts, strict=True):
            gap = self.whole[last:following]
            if continued and following == len(self.whole):
                high = following
            else:
                high = last + _split(gap, tails[self.whole[last : following - 1]], known, last, starts)
                content = marked[number].get("content") if isinstance(marked[number], Mapping) else None
                rest = content.rpartition(self._marks[number])[2].rstrip() if isinstance(content, str) else ""
                if gap.startswith(rest):  # such as `</think>`
                    high = max(high, last + len(rest))
            found.append((number, (low, high)))
            low = high
        return _with_empty(found, len(self._messages))

    def _rendered(self, messages: Sequence[Any], opened: bool) -> str:
        self._left -= len(messages)
        if self._left < 0:
            raise Untold
        try:
            return self._render(messages, opened)
        except Exception as exc:  # templates may raise anything
            raise Untold from exc

    def _marked(self) -> tuple[list[Any], str]:
        """The messages with marks, and their rendering; those that the template leaves out have none."""
        marked = [_full(one, mark) for one, mark in zip(self._messages, self._marks, strict=True)]
        seen = self._verified(marked)
        if seen is None:  # in one of them a mark changes more than its text
            marked, seen = [*self._messages], self.whole
        for number, mark in enumerate(self._marks):
            told = True
            for way in () if mark in seen else _WAYS:
                other = [*marked[:number], way(self._messages[number], mark), *marked[number + 1 :]]
                verified = self._verified(other)
                told &= verified is not None
                if verified is not None and mark in verified:
                    marked, seen, told = other, verified, True
                    break
            if not told:
                raise Untold
        return marked, seen

    def _verified(self, marked: Sequence[Any]) -> str | None:
        with suppress(Untold):
            seen = self._rendered(marked, True)
            if seen.translate(self._erased) == self.whole:
                return seen
        return None

    def _tail(self, marked: Sequence[Any], number: int) -> str | None:
        """What follows a message's last mark if it is the last message; None: the template refuses that."""
        with suppress(Untold):
            seen = self._rendered(marked[: number + 1], False)
            _, mark, tail = seen.rpartition(self._marks[number])
            if mark and tail.translate(self._erased) == tail:
                return tail
        return None


def _split(gap: str, tail: str | None, known: Sequence[str], at: int, starts: Sequence[int]) -> int:
    """How much of what stands between two texts is the end of the first message; the rest is the second's header.

    Args:
        gap: what stands between them.
        tail: what follows the first message where it is the last one; None: the template cannot render that.
        known: what follows other messages there, longest first.
        at: where the gap begins in the prompt.
        starts: where the tokens of the prompt begin.
    """
    if tail is None:
        found = [(gap.find(one), one) for one in known]
        ends = [(low, low + len(one)) for low, one in found if low == 0 or (low > 0 and one.strip())]
        return min(ends, key=lambda end: (end[0], -end[1]), default=(0, 0))[1]
    same = next(
        (n for n, (one, other) in enumerate(zip(gap, tail, strict=False)) if one != other), min(len(gap), len(tail))
    )
    if tail and same == len(tail):
        return same
    if same:  # such as `<|` of two different tokens
        same = max(0, starts[bisect_right(starts, at + same) - 1] - at)
    return same + next((len(one) for one in known if gap.startswith(one, same)), 0)


def _with_empty(found: list[Place], count: int) -> list[Place]:
    """The places with an empty one for each message that has none, behind the message before it."""
    for number in {*range(count)} - {number for number, _ in found}:
        behind = max((n for n, place in enumerate(found) if place[0] == number - 1), default=-1)
        at = found[behind][1][1] if behind >= 0 else 0
        found.insert(behind + 1, (number, (at, at)))
    return found


def _full(message: Any, mark: str) -> Any:
    """The message with marks in all its text and behind it, none where there is no text."""
    return _changed(message, lambda text: _behind(_inside(text, mark), mark) if text.strip() else text)


def _between(message: Any, mark: str) -> Any:
    """The message with marks between the words that templates look for, also where it ends with one."""
    return _changed(message, lambda text: _inside(text, mark))


def _at_end(message: Any, mark: str) -> Any:
    """The message with a mark behind its text, even behind no text."""
    if isinstance(message, Mapping) and not message.get("content"):
        return {**message, "content": mark}
    return _changed(message, lambda text: _behind(text, mark))


def _in_names(message: Any, mark: str) -> Any:
    """The message with a mark in the names of the functions that it calls."""
    return _changed(message, None, lambda function: {**function, "name": _behind(str(function.get("name")), mark)})


_WAYS: tuple[Callable[[Any, str], Any], ...] = (_full, _between, _at_end, _in_names)


def _inside(text: str, mark: str) -> str:
    def stretch(part: str) -> str:
        first = len(part) - len(part.lstrip()) + 1
        return _behind(part[:first] + mark + part[first:], mark) if part.strip() else part

    return "".join(part if n % 2 else stretch(part) for n, part in enumerate(_WORD.split(text)))


def _behind(text: str, mark: str) -> str:
    end = len(text.rstrip())
    return text[:end] + mark + text[end:]


def _changed(
    message: Any,
    text: Callable[[str], str] | None,
    function: Callable[[Mapping[str, Any]], Any] | None = None,
) -> Any:
    """A copy of a message with other texts, those of arguments included, or with other functions."""
    if not isinstance(message, Mapping):
        return message
    found = dict(message)

    def called(given: Mapping[str, Any]) -> Any:
        arguments = given.get("arguments")
        if text is None or not arguments:
            return given
        if isinstance(arguments, str):  # a text of JSON, which vLLM reads
            with suppress(ValueError):
                return {**given, "arguments": json.dumps(_texts(json.loads(arguments), text, every=True))}
        return {**given, "arguments": _texts(arguments, text, every=True)}

    if text is not None:
        for name in ("content", "reasoning", "reasoning_content"):
            found |= {name: _texts(found[name], text)} if found.get(name) else {}
    if found.get("tool_calls"):
        found["tool_calls"] = [
            {**one, "function": (function or called)(one["function"])}
            if isinstance(one, Mapping) and isinstance(one.get("function"), Mapping)
            else one
            for one in found["tool_calls"]
        ]
    return found


def _texts(content: Any, text: Callable[[str], str], *, every: bool = False) -> Any:
    """The content with other texts: those of its parts, or every one in it."""
    if isinstance(content, str):
        return text(content)
    if isinstance(content, list):
        return [_texts(one, text, every=every) for one in content]
    if isinstance(content, Mapping):
        changed = content.keys() if every else {"text", "thinking"}
        return {name: _texts(one, text, every=every) if name in changed else one for name, one in content.items()}
    return content
