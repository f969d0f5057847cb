"""How much of a conversation is rendered to find its messages: bounded for a request, whatever its scopes name."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from saesteer.errors import SpecError
from saesteer.language.spec import Spec, clamp
from saesteer.planning.messages import resolve
from saesteer.plugin.door import frontend
from saesteer.plugin.door.conversation import FEW, MOST_RENDERED, Conversation
from tests.spec.test_plan import CATALOG

AT = "saesteer.edits[0].scope.messages"


@dataclass(frozen=True)
class ChatParams:
    """What is read of vLLM's."""

    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


def conversation(messages: int, tokens: int) -> tuple[Conversation, list[int], list[int]]:
    """One whose messages have so many tokens each, the prompt's ids, and a list that tells what was rendered."""
    rendered: list[int] = []

    def render(conversations: Any, params: Any, tok_params: Any) -> Any:
        (found,) = conversations
        rendered.append(len(found))
        return found, ({"prompt_token_ids": [7] * (tokens * len(found))},)

    turns = [{"role": ("user", "assistant")[n % 2]} for n in range(messages)]
    return Conversation(render, turns, ChatParams(), None), [7] * (tokens * messages), rendered


def apart(count: int) -> Sequence[tuple[int, int]]:
    """Runs of messages, behind the first, with two ends each."""
    return [(2 * n + 1, 2 * n + 2) for n in range(count)]


def test_a_usual_conversation_is_found_by_its_ends() -> None:
    chat, ids, rendered = conversation(128, 64)  # 8192 tokens
    assert chat.spans(ids, apart(64), AT) == [(64 * first, 64 * end) for first, end in apart(64)]
    assert rendered == list(range(1, 129))
    assert chat.spans(ids, apart(64), AT) and len(rendered) == 128, "they are known"


def test_more_than_the_bound_is_refused_before_any_of_it_is_rendered() -> None:
    chat, ids, rendered = conversation(130, 64)
    most = MOST_RENDERED // len(ids)
    with pytest.raises(
        SpecError, match=f"asks for 130 places .* of {len(ids)} tokens; expected at most {most} "
    ) as error:
        chat.spans(ids, apart(65), AT)
    assert (error.value.field, error.value.code) == (AT, "too_many") and not rendered


def test_the_bound_is_the_request_s_and_not_each_edit_s() -> None:
    chat, ids, rendered = conversation(260, 64)
    most = MOST_RENDERED // len(ids)
    edits = [clamp("gs15", n, 1.0, scope={"messages": [n]}) for n in range(most, 0, -1)]
    place = partial(chat.spans, ids)
    assert resolve(Spec(tuple(edits[: most - 1])), CATALOG, len(ids), chat.roles, place) and len(rendered) == most
    with pytest.raises(SpecError, match=f"asks for {most + 1} places") as error:
        resolve(Spec(tuple(edits)), CATALOG, len(ids), chat.roles, place)
    assert error.value.field == f"saesteer.edits[{most - 1}].scope.messages" and len(rendered) == most


def test_a_few_messages_are_found_in_a_prompt_of_any_length() -> None:
    chat, ids, rendered = conversation(FEW + 2, MOST_RENDERED)
    assert chat.spans(ids, apart(FEW // 2), AT) and len(rendered) == FEW
    with pytest.raises(SpecError, match=f"expected at most {FEW} in a prompt of this length"):
        chat.spans(ids, apart(FEW // 2 + 1), AT)


CHAT = {"scope": {"messages": "user"}}


@pytest.mark.parametrize(
    ("wire", "mentions"),
    [
        ({"edits": [{"op": "use"}, {"op": "clamp", **CHAT}]}, True),
        ({"return": {"probes": ["a", {"probe": "b", **CHAT}]}}, True),
        ({"return": {"hidden": CHAT}}, True),
        ({"edits": [{"op": "clamp", "scope": {"prompt": True}}], "return": {"hidden": True, "probes": ["a"]}}, False),
        ({"edits": {"op": 3}, "return": {"features": None, "dose": 1, "activations": [None, [CHAT]]}}, False),
        ({"return": [CHAT]}, False),
        ([CHAT], False),
        (None, False),
    ],
)
def test_conversations_are_rendered_in_a_thread_where_a_spec_names_messages(wire: Any, mentions: bool) -> None:
    for written in (wire, json.dumps(wire)) if mentions else (wire,):
        assert frontend._mentions_messages(SimpleNamespace(extra_args={"saesteer": written})) is mentions
    assert not frontend._mentions_messages(SimpleNamespace(extra_args=None))
