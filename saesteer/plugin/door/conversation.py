"""Where the messages of a chat request stand in its prompt: told by the renderer that made the prompt. Knows no edit.

Every chat request, offline or over HTTP, goes through ``BaseRenderer.render_chat``; what went in is kept beside the
prompt that came out. Only a request that names messages is looked at further: its first k messages are rendered once
more, with the same template, tools and arguments, and must be the beginning of the whole, token by token.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any

from saesteer.errors import SpecError
from saesteer.language.fields import fail
from saesteer.planning.plan import Window

CONVERSATION = "saesteer_conversation"  # in the engine's input, which vLLM reads by its own keys alone
# Each place where a message begins or ends is a rendering of all before it, so many places in a long prompt cost as its
# square. A rendering takes 1 to 2 µs a token, nearly all in the tokenizer.
MOST_RENDERED = 2**20  # tokens for one request, each rendering counted as the whole prompt
FEW = 8  # renderings that a prompt of any length may have


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a prompt was rendered from."""

    render: Callable[..., Any]  # vLLM's own render_chat
    messages: Sequence[Any]
    chat_params: Any
    tok_params: Any
    _ends: dict[int, int] = field(default_factory=dict)  # number of messages → tokens of the prompt up to there

    @property
    def roles(self) -> list[str]:
        """Of the messages."""
        return [str(one.get("role") if isinstance(one, Mapping) else getattr(one, "role", "")) for one in self.messages]

    def spans(self, ids: Sequence[int], runs: Sequence[tuple[int, int]], at: str) -> list[Window]:
        """The windows of runs of messages in the prompt.

        Args:
            ids: tokens of the whole prompt.
            runs: first message and the one behind the last, ascending.
            at: path of the field that asks.

        Raises:
            SpecError: the template does not render the first messages as it does within the whole, or the request would
                have more rendered than MOST_RENDERED.
        """
        missing = sorted({count for run in runs for count in run if count} - self._ends.keys())
        ends = len(self._ends) + len(missing)
        most = max(FEW, MOST_RENDERED // len(ids))
        if ends > most:
            message = f"asks for {ends} places where messages begin or end, in a prompt of {len(ids)} tokens"
            fail(at, "too_many", f"{message}; expected at most {most} in a prompt so long, or positions")
        for count in missing:
            self._ends[count] = self._end(count, ids, at)
        return [(self._ends.get(first, 0), self._ends[end]) for first, end in runs]

    def _end(self, count: int, ids: Sequence[int], at: str) -> int:
        given = self.chat_params.chat_template_kwargs
        if count == len(self.messages) and given.get("continue_final_message"):
            return len(ids)  # the template leaves the end of the last message away
        alone = {**given, "add_generation_prompt": False, "continue_final_message": False}
        params = replace(self.chat_params, chat_template_kwargs=alone)
        what = f"the chat template cannot tell where message {count - 1} ends"
        expected = "positions, or a template that renders message by message"
        try:
            _, (found,) = self.render([list(self.messages[:count])], params, self.tok_params)
            beginning = found["prompt_token_ids"]
        except Exception as exc:  # templates raise what they like
            message = f"{what}: it refuses the messages up to there ({str(exc)[:200]}), expected {expected}"
            raise SpecError(message, field=at, code="not_served") from exc
        if beginning != list(ids[: len(beginning)]):
            same = next((n for n, pair in enumerate(zip(beginning, ids, strict=False)) if pair[0] != pair[1]), len(ids))
            why = f"rendered alone, the messages up to there differ from the prompt at token {same}"
            fail(at, "not_served", f"{what}: {why}, expected {expected}")
        return len(beginning)


def conversation_of(prompt: Any) -> Conversation | None:
    """What an engine's input was rendered from; None where it is no chat."""
    found = prompt.get(CONVERSATION) if isinstance(prompt, Mapping) else None
    return found if isinstance(found, Conversation) else None


def _remembering(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def render_chat(
        self: Any, conversations: Any, chat_params: Any, tok_params: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        made = original(self, conversations, chat_params, tok_params, *args, **kwargs)
        _remember(self, made[1], conversations, chat_params, tok_params)
        return made

    return render_chat


def _remembering_async(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    async def render_chat_async(
        self: Any, conversations: Any, chat_params: Any, tok_params: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        made = await original(self, conversations, chat_params, tok_params, *args, **kwargs)
        _remember(self, made[1], conversations, chat_params, tok_params)
        return made

    return render_chat_async


def _remember(renderer: Any, prompts: Any, conversations: Any, chat_params: Any, tok_params: Any) -> None:
    render = type(renderer).render_chat.__wrapped__.__get__(renderer)
    for prompt, messages in zip(prompts, conversations, strict=True):
        # Images stand in the prompt as more tokens than in its template, and would be fetched again.
        if prompt.get("type") == "token":
            prompt[CONVERSATION] = Conversation(render, messages, chat_params, tok_params)
