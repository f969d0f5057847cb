"""Events of a stream, however the network cuts them."""

import json
import time
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from saesteer.client.responses import Events

TEXT = st.text(st.sampled_from('aü\u2028\n\r "'), max_size=6)


def event(text: str, end: str = "\n") -> str:
    choice = {"index": 0, "text": text, "finish_reason": None}
    return f"data: {json.dumps({'choices': [choice]}, ensure_ascii=False)}{end}{end}"


def texts(data: bytes) -> list[str]:
    """What whole lines say, the simple way."""
    lines = [line.removeprefix(b"data:").strip() for line in data.split(b"\n")[:-1] if line.startswith(b"data:")]
    return [json.loads(line)["choices"][0]["text"] for line in lines if line != b"[DONE]"]


@given(
    st.lists(st.one_of(st.tuples(TEXT, st.sampled_from(["\n", "\r\n"])), st.sampled_from([": comment\n", "\n"]))),
    st.sampled_from(["data: [DONE]\n\n", 'data: {"choices"', ""]),
    st.data(),
)
def test_cuts_change_nothing(said: list[str | tuple[str, str]], last: str, draw: st.DataObject) -> None:
    data = "".join([*(one if isinstance(one, str) else event(*one) for one in said), last]).encode()
    cuts = draw.draw(st.lists(st.integers(0, len(data)), max_size=30))
    events = Events("completions")
    parts = [data[lo:hi] for lo, hi in pairwise([0, *sorted(cuts), len(data)])]
    assert [piece.text for part in parts for piece in events.feed(part)] == texts(data)


def test_a_long_event_in_small_parts_takes_as_long_as_it_is() -> None:
    data = event("x" * 2**23).encode()
    events, start = Events("completions"), time.monotonic()
    pieces = [piece for at in range(0, len(data), 1024) for piece in events.feed(data[at : at + 1024])]
    assert [len(piece.text) for piece in pieces] == [2**23]
    assert time.monotonic() - start < 3, "not its square"
