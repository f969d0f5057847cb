"""Where the messages of a chat request stand in its prompt, from the renderer that made the prompt. Knows no edit.

Every chat request, offline or over HTTP, goes through ``BaseRenderer.render_chat``, whose arguments are kept with the
prompt. The messages are found by their texts (see ``marks``). If these cannot be told apart, as where a tokenizer has
no offsets, the first k messages are rendered again and must be the beginning of the prompt, token by token.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from saesteer.errors import SpecError
from saesteer.language.fields import fail
from saesteer.planning.plan import Window
from saesteer.plugin.door.marks import Place, Untold, find
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

    renderer: Any  # vLLM's
    messages: Sequence[Any]
    chat_params: Any
    tok_params: Any
    _ends: dict[int, int] = field(default_factory=dict)  # number of messages → tokens of the prompt up to there
    _found: list[list[Place] | None] = field(default_factory=list)  # empty until somebody asks

    @property
    def roles(self) -> list[str]:
        """The role of each message."""
        return [str(one.get("role") if isinstance(one, Mapping) else getattr(one, "role", "")) for one in self.messages]

    @property
    def continued(self) -> bool:
        """Whether the answer continues the last message."""
        return bool(self.chat_params.chat_template_kwargs.get("continue_final_message"))

    def spans(self, ids: Sequence[int], runs: Sequence[tuple[int, int]], at: str) -> list[Window]:
        """The windows of runs of messages in the prompt, ascending; a run has one, or as many as its texts are apart.

        Args:
            ids: tokens of the whole prompt.
            runs: first message and the one after the last, ascending.
            at: path of the field that names the messages.

        Raises:
            SpecError: neither marks nor the beginnings of the conversation show where they are, or the request needs
                more than MOST_RENDERED tokens rendered.
        """
        places = self._places(ids)
        if places is not None:
            wanted = {number for first, end in runs for number in range(first, end)}
            windows: list[Window] = []
            for number, (low, high) in places:
                if number in wanted:
                    touching = bool(windows) and windows[-1][1] == low
                    windows[-1:] = [(windows[-1][0], high)] if touching else [*windows[-1:], (low, high)]
            return windows
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
        """Where the messages stand in the prompt, in its order, as answers have it; None if the template cannot tell.

        Tokens behind the last message, which open the answer, are an entry whose role is None; it is there without
        tokens as well, since what is generated is no message's, unless the answer continues the last one.
        """
        count = len(self.messages)
        places = self._places(ids)
        if places is None:
            try:
                spans = self.spans(ids, [(n, n + 1) for n in range(count)], "messages")
            except SpecError:
                return None
            places = [*enumerate(spans)]
        end = places[-1][1][1] if places else 0
        roles: list[str | None] = [*self.roles, None]
        if end < len(ids) or not self.continued:
            places = [*places, (count, (end, len(ids)))]
        return [{"role": roles[n], "index": n, "start": low, "end": high} for n, (low, high) in places]

    def opening(self, ids: Sequence[int]) -> int:
        """Where the tokens of the prompt begin that open the answer, or where the message begins that it continues.

        0 where the template cannot tell, as in a prompt that is no chat.
        """
        count = len(self.messages) - self.continued
        places = self._places(ids)
        if places is not None:
            return next((low for n, (low, _) in places if n == count), places[-1][1][1])
        try:  # one rendering more than MOST_RENDERED allows to those who name messages
            if count > 0 and count not in self._ends:
                self._ends[count] = self._end(count, ids, "messages")
        except SpecError:
            self._ends[count] = 0
        return self._ends.get(count, 0)

    def _places(self, ids: Sequence[int]) -> list[Place] | None:
        """The windows of tokens of all messages, in the order of the prompt; None: marks do not show them."""
        if not self._found:
            try:
                self._found.append(self._marked(ids))
            except Untold:
                self._found.append(None)
        return self._found[0]

    def _marked(self, ids: Sequence[int]) -> list[Place]:
        def render(messages: Sequence[Any], opened: bool) -> str:
            given = {**self.chat_params.chat_template_kwargs, "tokenize": False}
            if not opened:
                given |= {"add_generation_prompt": False, "continue_final_message": False}
            params = replace(self.chat_params, chat_template_kwargs=given)
            return str(self.renderer.render_messages([*messages], params)[1]["prompt"])

        try:
            tok_params = self.tok_params or self.renderer.default_chat_tok_params
            text = render(self.messages, True)
            options = {"add_special_tokens": tok_params.add_special_tokens, "return_offsets_mapping": True}
            made = self.renderer.get_tokenizer()(text, **options)
            whole, offsets = made["input_ids"], made["offset_mapping"]
        except Exception as exc:  # templates may raise anything, and some tokenizers know no offsets
            raise Untold from exc
        cut = max(0, len(whole) - len(ids))  # the client may have asked for the end of the prompt, or its beginning
        if [*ids] != whole[cut:]:
            cut = 0
        if [*ids] != whole[cut : cut + len(ids)]:
            raise Untold
        starts = [*accumulate((low for low, _ in offsets), max)]

        def token(at: int) -> int:
            return min(max(bisect_left(starts, at) - cut, 0), len(ids))

        places = find(self.messages, render, starts, text=text, continued=self.continued)
        return [(number, (token(low), token(high))) for number, (low, high) in places]

    def _end(self, count: int, ids: Sequence[int], at: str) -> int:
        given = self.chat_params.chat_template_kwargs
        if count == len(self.messages) and self.continued:
            return len(ids)  # the template omits the end of the last message
        alone = {**given, "add_generation_prompt": False, "continue_final_message": False}
        params = replace(self.chat_params, chat_template_kwargs=alone)
        what = f"the chat template cannot tell where message {count - 1} ends"
        expected = "positions, or a template that renders message by message"
        try:
            render = type(self.renderer).render_chat.__wrapped__  # vLLM's own
            _, (found,) = render(self.renderer, [[*self.messages[:count]]], params, self.tok_params)
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
    for prompt, messages in zip(prompts, conversations, strict=True):
        prompt[TEMPLATE] = chat_params.chat_template_kwargs
        # Images take more tokens in the prompt than in its template, and would be fetched again.
        if prompt.get("type") == "token":
            prompt[CONVERSATION] = Conversation(renderer, messages, chat_params, tok_params)
