"""Finds the messages of a chat request in its prompt, with the renderer that made the prompt. Knows no edit.

Every chat request, offline or over HTTP, goes through ``BaseRenderer.render_chat``, whose arguments are kept with the
prompt. If a request names messages, its first k messages are rendered again, with the same template, tools and
arguments, and must be the beginning of the whole prompt, token by token.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from saesteer.errors import SpecError
from saesteer.language.fields import fail
from saesteer.planning.plan import Window
from saesteer.plugin.wrap import Original, around

CONVERSATION = "saesteer_conversation"  # key in the engine's input, of which vLLM reads only its own keys
TEMPLATE = "saesteer_template"  # the same, of every chat: what its template was given
# Each place where a message begins or ends takes a rendering of everything before it, so many places in a long prompt
# cost the square of its length. A rendering takes 1 to 2 µs a token, nearly all of it in the tokenizer.
MOST_RENDERED = 2**20  # tokens for one request, each rendering counted as the whole prompt
FEW = 8  # renderings that are allowed for a prompt of any length


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a prompt was rendered from."""

    render: Callable[..., Any]  # vLLM's own render_chat
    messages: Sequence[Any]
    chat_params: Any
    tok_params: Any
    _ends: dict[int, int] = field(default_factory=dict)  # number of messages → tokens of the prompt up to there
    _told: list[list[dict[str, Any]] | None] = field(default_factory=list)  # empty until somebody asks
    _opening: list[int] = field(default_factory=list)  # the same

    @property
    def roles(self) -> list[str]:
        """The role of each message."""
        return [str(one.get("role") if isinstance(one, Mapping) else getattr(one, "role", "")) for one in self.messages]

    def spans(self, ids: Sequence[int], runs: Sequence[tuple[int, int]], at: str) -> list[Window]:
        """The windows of runs of messages in the prompt.

        Args:
            ids: tokens of the whole prompt.
            runs: first message and the one after the last, ascending.
            at: path of the field that names the messages.

        Raises:
            SpecError: the template renders the first messages alone in another way than within the whole prompt, or the
                request needs more than MOST_RENDERED tokens rendered.
        """
        missing = sorted({count for run in runs for count in run if count} - self._ends.keys())
        ends = len(self._ends) + len(missing)
        most = max(FEW, MOST_RENDERED // max(1, len(ids)))  # a template may render to nothing, which vLLM refuses
        if ends > most:
            message = f"asks for {ends} places where messages begin or end, in a prompt of {len(ids)} tokens"
            fail(at, "too_many", f"{message}; expected at most {most} in a prompt of this length, or positions")
        for count in missing:
            self._ends[count] = self._end(count, ids, at)
        return [(self._ends.get(first, 0), self._ends[end]) for first, end in runs]

    def told(self, ids: Sequence[int]) -> list[dict[str, Any]] | None:
        """Where the messages stand in the prompt, as answers have it; None if the template cannot tell.

        Tokens behind the last message, which open the answer, are an entry whose role is None; it is there without
        tokens as well, since what is generated is no message's, unless the answer continues the last one.
        """
        if not self._told:
            count = len(self.messages)
            try:
                spans = self.spans(ids, [(n, n + 1) for n in range(count)], "messages")
            except SpecError:
                self._told.append(None)
                return None
            roles: list[str | None] = [*self.roles]
            end = spans[-1][1] if spans else 0
            if end < len(ids) or not self.chat_params.chat_template_kwargs.get("continue_final_message"):
                spans, roles = [*spans, (end, len(ids))], [*roles, None]
            found = zip(roles, spans, strict=True)
            self._told.append(
                [{"role": role, "index": n, "start": lo, "end": hi} for n, (role, (lo, hi)) in enumerate(found)]
            )
        return self._told[0]

    def opening(self, ids: Sequence[int]) -> int:
        """Where the tokens of the prompt begin that open the answer, or where the message begins that it continues.

        0 where the template cannot tell, as in a prompt that is no chat.
        """
        if not self._opening:  # one rendering more than MOST_RENDERED allows to those who name messages
            count = len(self.messages) - bool(self.chat_params.chat_template_kwargs.get("continue_final_message"))
            try:
                self._opening.append(self._ends.get(count) or self._end(count, ids, "messages") if count > 0 else 0)
            except SpecError:
                self._opening.append(0)
        return self._opening[0]

    def _end(self, count: int, ids: Sequence[int], at: str) -> int:
        given = self.chat_params.chat_template_kwargs
        if count == len(self.messages) and given.get("continue_final_message"):
            return len(ids)  # the template omits the end of the last message
        alone = {**given, "add_generation_prompt": False, "continue_final_message": False}
        params = replace(self.chat_params, chat_template_kwargs=alone)
        what = f"the chat template cannot tell where message {count - 1} ends"
        expected = "positions, or a template that renders message by message"
        try:
            _, (found,) = self.render([list(self.messages[:count])], params, self.tok_params)
            beginning = found["prompt_token_ids"]
        except Exception as exc:  # templates may raise anything
            message = f"{what}: it refuses the messages up to there ({str(exc)[:200]}), expected {expected}"
            raise SpecError(message, field=at, code="not_served") from exc
        if beginning != list(ids[: len(beginning)]):
            same = next((n for n, pair in enumerate(zip(beginning, ids, strict=False)) if pair[0] != pair[1]), len(ids))
            why = f"rendered alone, the messages up to there differ from the prompt at token {same}"
            fail(at, "not_served", f"{what}: {why}, expected {expected}")
        return len(beginning)


def conversation_of(prompt: Any) -> Conversation | None:
    """The conversation that an engine's input was rendered from; None if it is not a chat."""
    found = prompt.get(CONVERSATION) if isinstance(prompt, Mapping) else None
    return found if isinstance(found, Conversation) else None


def template_of(prompt: Any) -> Mapping[str, Any]:
    """What the chat template of an engine's input was given, also where a message has more than text."""
    found = prompt.get(TEMPLATE) if isinstance(prompt, Mapping) else None
    return found or {}


@around
def _remembering(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    made = original(self, *args, **kwargs)
    _remember(self, made[1], *args, **kwargs)
    return made


@around
async def _remembering_async(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    made = await original(self, *args, **kwargs)
    _remember(self, made[1], *args, **kwargs)
    return made


def _remember(
    renderer: Any, prompts: Any, conversations: Any, chat_params: Any, tok_params: Any = None, *_: Any, **__: Any
) -> None:
    """Keep what each prompt was rendered from, given the arguments of render_chat."""
    render = type(renderer).render_chat.__wrapped__.__get__(renderer)
    for prompt, messages in zip(prompts, conversations, strict=True):
        prompt[TEMPLATE] = chat_params.chat_template_kwargs
        # Images take more tokens in the prompt than in its template, and would be fetched again.
        if prompt.get("type") == "token":
            prompt[CONVERSATION] = Conversation(render, messages, chat_params, tok_params)
