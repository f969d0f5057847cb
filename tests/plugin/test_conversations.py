"""Where chat messages stand in a prompt, by templates that add nothing for the answer, without an engine."""

from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from saesteer.plugin.door.conversation import Conversation

TURNS = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}, {"role": "user", "content": "de"}]


def rendered(turns: Any) -> list[int]:
    """As Llama 2's template does: the end of a question opens the answer."""
    ids = [1]
    for turn in turns:
        words = [ord(letter) for letter in turn["content"]]
        ids += [3, *words, 4] if turn["role"] == "user" else [*words, 2]
    return ids


def told(turns: Any, **template: Any) -> Any:
    def render(several: Any, *_: Any) -> Any:
        return None, [{"prompt_token_ids": rendered(several[0])}]

    conversation = Conversation(render, turns, params(template), None)
    return conversation.told(rendered(turns))


def params(template: dict[str, Any]) -> Any:
    from vllm.renderers.params import ChatParams

    return ChatParams(chat_template_kwargs={"add_generation_prompt": True, **template})


def test_what_is_generated_belongs_to_no_message() -> None:
    """Else its rows would count to the last question's mean."""
    *messages, last = told(TURNS)
    assert [(one["role"], one["start"], one["end"]) for one in messages] == [
        ("user", 0, 5),
        ("assistant", 5, 7),
        ("user", 7, 11),
    ]
    assert last == {"role": None, "index": 3, "start": 11, "end": 11}


def test_what_continues_a_message_belongs_to_it() -> None:
    found = told(TURNS[:2], continue_final_message=True, add_generation_prompt=False)
    assert [one["role"] for one in found] == ["user", "assistant"]
