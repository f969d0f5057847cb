"""Where vLLM's reasoning parser sees an answer's reasoning end. Knows tokens, no text and no rule.

The front end, which tells what was read, and the scheduler, where rules fire, find the border from the same tokens. For
edits the device finds it, which knows a step's tokens first: ``closing`` says what it looks for.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.reasoning import ReasoningParserManager
from vllm.tokenizers import cached_tokenizer_from_config

from saesteer.engine import parts
from saesteer.kernels.layout import MOST_CLOSING
from saesteer.planning.plan import END
from saesteer.plugin.results.sending import sent

# Sent with a request (sending.py):
BORDER = "border"  # what ends the reasoning (closing), and END, or its end in the prompt
PARSER = "parser"  # what ``border_of`` is told, where its scopes name a part

NEAR = 32  # tokens; where reasoning ends with several, they are fewer (GPT-OSS: some 23)

# Parsers that look for the end in text alone, or take nothing but a tool call for it.
_BLIND = frozenset({"granite", "hunyuan_a13b", "muse", "muse_glimmer", "musespark1x"})


def has_parser(vllm_config: Any) -> bool:
    """Whether a server was started with a reasoning parser, and with the tokenizer that it needs."""
    model, named = vllm_config.model_config, vllm_config.structured_outputs_config.reasoning_parser
    return bool(named) and not model.skip_tokenizer_init


def arguments(template: Mapping[str, Any]) -> dict[str, Any]:
    """What a parser is made with, as vLLM makes its own for a chat.

    Args:
        template: arguments of the chat template; those that no message between processes can hold are left out.
    """
    plain = {name: value for name, value in template.items() if isinstance(value, bool | int | float | str)}
    return {"chat_template_kwargs": plain} if plain else {}


def parser_of(vllm_config: Any, given: Mapping[str, Any]) -> Any:
    """A parser for one sequence.

    Args:
        vllm_config: of a server that has one.
        given: its ``arguments``.

    Raises:
        ValueError: its answers do not depend on the tokens that it sees, or it refuses what it is given.
    """
    settings = vllm_config.structured_outputs_config
    try:
        made_by = ReasoningParserManager.get_reasoning_parser(settings.reasoning_parser)
    except KeyError:
        ReasoningParserManager.import_reasoning_parser(settings.reasoning_parser_plugin)
        made_by = ReasoningParserManager.get_reasoning_parser(settings.reasoning_parser)
    parser, name = made_by(cached_tokenizer_from_config(vllm_config.model_config), **given), settings.reasoning_parser
    # From 0.29 on, vLLM tells the channels of GPT-OSS elsewhere, and any token ends the reasoning here. So it does for
    # parsers of chats that do not think, where it is right.
    if name in _BLIND or (name == "openai_gptoss" and parser.is_reasoning_end([])):
        raise ValueError(f"{name!r} does not look for the end of the reasoning in tokens")
    return parser


def closing(parser: Any) -> tuple[int, ...]:
    """The tokens of which each ends the reasoning by itself; none if it takes several tokens, or there are too many.

    Parsers without a list of them are asked about each token of the vocabulary, which takes a tenth of a second.
    """
    listed = getattr(parser, "reasoning_end_token_ids", None)
    found: list[int] = []
    for token in sorted(set(parser.vocab.values())) if listed is None else sorted(listed):
        # Twice: Step 3.5 until 0.30 remembers what it was asked, and says it of the next token.
        if all(parser.is_reasoning_end_streaming([token], [token]) for _ in range(2)):
            found.append(token)
            if len(found) > MOST_CLOSING:
                return ()
    return tuple(found)


def border_of(vllm_config: Any, told: Sequence[Any], prompt: Sequence[int]) -> "Border":
    """A border with a parser of its own.

    Args:
        vllm_config: of a server that has a parser.
        told: what the parser is given, as of ``parser_of``, and where the answer opens, as of ``Border``.
        prompt: token ids.
    """
    given, opening = told
    return Border(parser_of(vllm_config, given), prompt, opening)


def border_in(request: Any) -> parts.Border:
    """What the row of a request waits for that edits a part of its answer.

    Args:
        request: vLLM's NewRequestData.
    """
    tokens, found = sent(request.sampling_params)[BORDER]
    return parts.Border(tuple(tokens), len(request.prompt_token_ids), found)


def cached_tokens(request: Any) -> tuple[list[int], int]:
    """The token ids of a new or preempted request in the V2 runner, and how many of them are cached."""
    return request.prefill_token_ids, request.num_computed_tokens


def known_tokens(state: Any) -> tuple[list[int], int]:
    """The token ids of a request in the V1 runner, which it has all while the request is not in its batch, and how many
    of them are computed.
    """
    return [*state.prompt_token_ids, *state.output_token_ids], state.num_computed_tokens


class Border:
    """The border of one sequence, as its tokens come.

    For each token the parser sees a few others, since most look through all that they see.

    Args:
        parser: vLLM's, for this sequence alone.
        prompt: token ids.
        opening: where the prompt's tokens begin that open the answer; the parser sees none in front of them.
    """

    def __init__(self, parser: Any, prompt: Sequence[int], opening: int = 0) -> None:
        self._parser = parser
        self._opening = [*prompt[opening:]]
        self._start, self._looked = len(prompt), 0
        self._found = self._start - 1 if parser.is_reasoning_end(self._opening) else END
        self._shown = self._waiting() if self._found == END else []

    @property
    def found(self) -> int:
        """What ``find`` has found so far."""
        return self._found

    def find(self, generated: Sequence[int]) -> int:
        """The position of the token that ends the reasoning; END: it has not come yet.

        Args:
            generated: all token ids of the answer so far.
        """
        for place in range(self._looked, len(generated) if self._found == END else 0):
            if self._ends(generated, place):
                self._found = self._start + place
                break
        self._looked = len(generated)
        return self._found

    def _waiting(self) -> list[int]:
        """Tokens of the prompt behind which the parser waits for the end: the last ones, and those that it needs.

        Some take for an answer what follows no start of reasoning, which may be far back in a prompt.
        """
        ids, near = self._opening, self._opening[-NEAR:]
        for end in range(len(ids), 0, -NEAR):
            some = ids[max(0, end - 2 * NEAR) : end]
            if not self._parser.is_reasoning_end_streaming(some, some[-1:]):
                return some if end == len(ids) else some + near
        return near

    def _ends(self, generated: Sequence[int], place: int) -> bool:
        end, new = place + 1, [generated[place]]
        # The first ones as well: there, the model itself may begin to reason.
        few = [*self._shown, *generated[: min(end, NEAR)], *generated[max(NEAR, end - NEAR) : end]]
        parser = self._parser
        if not parser.is_reasoning_end_streaming(few, new):
            return False
        # Step 3.5 remembers until 0.30 what it was asked, and says it once.
        whole = [*self._opening, *generated[:end]]
        return bool(parser.is_reasoning_end_streaming(whole, new) or parser.is_reasoning_end(whole))


def found_in(border: Border | None, state: Any) -> int:
    """What a choice's border has found in the tokens that it has so far; END where nobody needs it.

    Args:
        border: of the choice.
        state: vLLM's RequestState.
    """
    return END if border is None else border.find(state.detokenizer.output_token_ids)
