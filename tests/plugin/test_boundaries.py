"""Where chat messages stand in a prompt, and how much is rendered to find them: bounded, whatever scopes name."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")


from saesteer.errors import SpecError
from saesteer.language.spec import Spec, clamp, from_json
from saesteer.planning.messages import resolve
from saesteer.plugin.door.admission import located
from saesteer.plugin.door.conversation import MOST_RENDERED, Conversation
from tests.plugin.turns import renderer_of
from tests.spec.catalogs import CATALOG

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
    return Conversation(renderer_of(render), turns, ChatParams(), None), [7] * (tokens * messages), rendered


def apart(count: int) -> Sequence[tuple[int, int]]:
    """Runs of messages, behind the first, with two ends each."""
    return [(2 * n + 1, 2 * n + 2) for n in range(count)]


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


def test_all_messages_and_what_opens_the_answer_are_the_prompt() -> None:
    chat, ids, rendered = conversation(3, 10)
    expected = [
        {"role": "user" if n != 1 else "assistant", "index": n, "start": 10 * n, "end": 10 * n + 10} for n in range(3)
    ]
    nothing = {"role": None, "index": 3, "start": 30, "end": 30}  # is there for what is generated
    assert chat.told(ids) == [*expected, nothing] and rendered == [1, 2, 3]
    assert chat.told(ids) == [*expected, nothing] and len(rendered) == 3, "it is known"
    chat, ids, _ = conversation(3, 10)
    opened = {"role": None, "index": 3, "start": 30, "end": 34}
    assert chat.told([*ids, 7, 7, 7, 7]) == [*expected, opened]


def test_a_long_chat_is_read_without_its_messages_and_never_by_message() -> None:
    chat, ids, rendered = conversation(260, 64)
    read = {"site": "resid_post.15"}
    spec = from_json({"return": {"activations": [read]}})
    assert located(spec, CATALOG, ids, chat) == (spec, None)
    with pytest.raises(SpecError, match="asks for 260 places where messages begin or end") as error:
        located(
            from_json({"return": {"activations": [read, {**read, "at": "after", "reduce": "message"}]}}),
            CATALOG,
            ids,
            chat,
        )
    assert (error.value.field, error.value.code) == ("saesteer.return.activations[1].reduce", "too_many")
    assert not rendered
    first = {"return": {"activations": [{**read, "scope": {"messages": [0]}}]}}
    found, messages = located(from_json(first), CATALOG, ids, chat)
    assert messages is None and found.returns.activations[0].scope.positions == ((0, 64),), "what is named is found"


READS: list[Any] = [
    {"features": [{"dictionary": "gs15"}]},
    {"probes": ["a"]},
    {"activations": [{"site": "resid_post.15", "scope": {"generated": True}}]},
    {"hidden": {"scope": {"generated": True}}},
]


@pytest.mark.parametrize("reads", READS, ids=lambda one: next(iter(one)))
def test_generated_tokens_are_read_beside_the_messages_before_them(reads: Any) -> None:
    chat, ids, _ = conversation(3, 10)
    spec = from_json({"return": reads})
    found, messages = located(spec, CATALOG, ids, chat)
    assert found == spec and messages == chat.told(ids) and messages
    chat, ids, _ = conversation(3, 10)
    ids[15] = 8
    assert located(spec, CATALOG, ids, chat) == (spec, None), "it does not depend on them"
    named = from_json({"edits": [{**CLAMP, "scope": {"messages": [1]}}], "return": reads})
    with pytest.raises(SpecError, match="cannot tell where message 1 ends") as error:
        located(named, CATALOG, ids, chat)
    assert (error.value.field, error.value.code) == (AT, "not_served")


CLAMP = {"op": "clamp", "dictionary": "gs15", "feature": 7, "value": 2.0}
