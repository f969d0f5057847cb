"""Conversations, and the text that their messages become in a prompt of the embedded model."""

from typing import Any

DEFAULT = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
QUESTION = [{"role": "user", "content": "Who are you?"}]
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Where do ships sleep?"},
    {"role": "assistant", "content": "In the harbour."},
    {"role": "user", "content": "Who are you?"},
]


def pieces(turns: list[dict[str, str]]) -> list[str]:
    """The text that each message adds to a prompt of the demo model; shares nothing with the template."""
    found = [f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in turns]
    if turns[0]["role"] != "system":
        found[0] = f"<|im_start|>system\n{DEFAULT}<|im_end|>\n{found[0]}"
    return found


def renderer_of(render: Any) -> Any:
    """A renderer of vLLM's with this in place of its ``render_chat``, and no more."""

    def wrapped(_: Any, *words: Any) -> Any:
        return render(*words)

    wrapped.__wrapped__ = wrapped  # type: ignore[attr-defined]
    return type("Renderer", (), {"render_chat": wrapped})()
