"""Where vLLM's reasoning parser sees an answer's reasoning end. Knows tokens, no text and no rule.

The front end, which tells what was read, and the scheduler, where rules fire, find the border from the same tokens. For
edits the device finds it, which knows a step's tokens first: ``closing`` says what it looks for.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.reasoning import ReasoningParserManager
from vllm.tokenizers import cached_tokenizer_from_config

from saesteer.config.config import KEY
from saesteer.engine import parts
from saesteer.kernels.layout import MOST_CLOSING
from saesteer.planning.plan import END

BORDER = f"{KEY}_border"  # next to it: what ends the reasoning (closing), and END, or its end in the prompt
PARSER = f"{KEY}_parser"  # next to the spec in extra_args: arguments of the parser, where its scopes name a part


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
    """
    settings = vllm_config.structured_outputs_config
    try:
        made_by = ReasoningParserManager.get_reasoning_parser(settings.reasoning_parser)
    except KeyError:
        ReasoningParserManager.import_reasoning_parser(settings.reasoning_parser_plugin)
        made_by = ReasoningParserManager.get_reasoning_parser(settings.reasoning_parser)
    return made_by(cached_tokenizer_from_config(vllm_config.model_config), **given)


def closing(parser: Any) -> tuple[int, ...]:
    """The tokens of which each ends the reasoning by itself; none if it takes several tokens, or there are too many.

    Parsers without a list of them are asked about each token of the vocabulary, which takes a tenth of a second.
    """
    listed = getattr(parser, "reasoning_end_token_ids", None)
    found: list[int] = []
    for token in sorted(set(parser.vocab.values())) if listed is None else sorted(listed):
        if parser.is_reasoning_end_streaming([token], [token]):
            found.append(token)
            if len(found) > MOST_CLOSING:
                return ()
    return tuple(found)


def border_of(vllm_config: Any, given: Mapping[str, Any], prompt: Sequence[int]) -> "Border":
    """A border with a parser of its own; arguments as of ``parser_of`` and ``Border``."""
    return Border(parser_of(vllm_config, given), prompt)


def border_in(request: Any) -> parts.Border:
    """What the row of a request waits for that edits a part of its answer.

    Args:
        request: vLLM's NewRequestData.
    """
    tokens, found = request.sampling_params.extra_args[BORDER]
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

    Args:
        parser: vLLM's, for this sequence alone.
        prompt: token ids.
    """

    def __init__(self, parser: Any, prompt: Sequence[int]) -> None:
        self._parser = parser
        self._ids = [*prompt]
        self._prompt = len(self._ids)
        self._found = self._prompt - 1 if parser.is_reasoning_end(self._ids) else END

    @property
    def found(self) -> int:
        """What ``find`` has found so far."""
        return self._found

    def find(self, generated: Sequence[int]) -> int:
        """The position of the token that ends the reasoning; END: it has not come yet.

        Args:
            generated: all token ids of the answer so far.
        """
        for place in range(len(self._ids) - self._prompt, len(generated) if self._found == END else 0):
            token = generated[place]
            self._ids.append(token)
            if self._parser.is_reasoning_end_streaming(self._ids, [token]):
                self._found = len(self._ids) - 1
                break
        return self._found


def found_in(border: Border | None, state: Any) -> int:
    """What a choice's border has found in the tokens that it has so far; END where nobody needs it.

    Args:
        border: of the choice.
        state: vLLM's RequestState.
    """
    return END if border is None else border.find(state.detokenizer.output_token_ids)
