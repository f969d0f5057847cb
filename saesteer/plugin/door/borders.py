"""What finds where the reasoning in a request's answer ends, settled at the door, where its parser can be refused.

Knows the prompt and what the parser is given. ``saesteer.plugin.reasoning`` asks the parser about tokens.
"""

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from saesteer.config.config import KEY
from saesteer.errors import SpecError
from saesteer.kernels.layout import MOST_CLOSING
from saesteer.language.fields import Fields, Json, fail
from saesteer.language.spec import Spec
from saesteer.planning.expand import steps_of
from saesteer.planning.plan import END, Catalog
from saesteer.plugin.door.conversation import Conversation
from saesteer.plugin.reasoning import arguments, closing, parser_of

MOST_GIVEN = 64, 2**16  # arguments of a parser, and characters of all of them
_KNOWN = 64  # sets of arguments


class Borders:
    """The borders of a server's requests.

    Args:
        vllm_config: vLLM's; None: there is no reasoning parser.
    """

    def __init__(self, vllm_config: Any) -> None:
        self._vllm_config = vllm_config
        self._closing: dict[bytes, tuple[int, ...]] = {}  # by the digest of what the parser is given

    def prepare(
        self,
        spec: Spec,
        catalog: Catalog,
        ids: Sequence[int],
        conversation: Conversation | None,
        template: Fields,
    ) -> None:
        """Find in a thread what takes a while, if a scope names a part; what is wrong, the door says later.

        Args:
            spec: what the request asks for.
            catalog: what the server has.
            ids: of the prompt.
            conversation: of a chat with nothing but text.
            template: what the chat template was given.
        """
        with suppress(SpecError):
            edited = any(step.edit.scope.part for step in steps_of(spec, catalog))
            if edited or any(scope.part for _, scope in spec.returns.scopes()):
                given, _ = self.told(ids, conversation, template)
                if edited:
                    self._closing_of(given)

    def told(self, ids: Sequence[int], conversation: Conversation | None, template: Fields) -> tuple[Json, int]:
        """What ``border_of`` is told of a request whose scopes name a part of the answer. Arguments as for ``prepare``.

        Raises:
            SpecError: the parser cannot tell parts, or refuses what it is given, or that is too much.
        """
        given = arguments(template)
        words = given.get("chat_template_kwargs", {})
        many, long = len(words), sum(len(name) + len(str(value)) for name, value in words.items())
        if many > MOST_GIVEN[0] or long > MOST_GIVEN[1]:
            found = (
                f"names a part of the answer, and its reasoning parser is given chat_template_kwargs: {many} of them"
            )
            fail(
                KEY, "too_many", f"{found} with {long} characters, expected at most {MOST_GIVEN[0]} and {MOST_GIVEN[1]}"
            )
        try:
            parser_of(self._vllm_config, given)  # behind the door, it would be an error of the server
        except Exception as exc:
            found = f"names a part of the answer, and the reasoning parser cannot tell it ({str(exc)[:200]})"
            raise SpecError(f"{found}; expected other scopes", field=KEY, code="not_served") from exc
        return given, 0 if conversation is None else conversation.opening(ids)

    def edited(self, at: str, told: tuple[Json, int], ended: int) -> tuple[tuple[int, ...], int]:
        """What ends the reasoning in an answer whose parts are edited, and where the prompt has ended it, or END.

        Args:
            at: path of the first edit whose scope names a part.
            told: as of ``told``.
            ended: where the prompt has ended it, as ``border_of`` finds it.

        Raises:
            SpecError: the device cannot find the border.
        """
        # A wrong guess would end the reasoning for good.
        if getattr(self._vllm_config, "speculative_config", None) is not None:
            message = "names a part of the answer, and this server guesses tokens (speculative decoding)"
            fail(f"{at}.scope.part", "not_served", f"{message}; expected it in reads and rules only")
        if ended < END:
            return (), ended
        tokens = self._closing_of(told[0])
        if not tokens:
            message = (
                f"names a part of the answer, but no single token ends the reasoning (or more than {MOST_CLOSING})"
            )
            fail(f"{at}.scope.part", "not_served", f"{message}; expected it in reads and rules only")
        return tokens, END

    def _closing_of(self, given: Fields) -> tuple[int, ...]:
        key = hashlib.sha256(repr(given).encode(errors="surrogatepass")).digest()
        found = self._closing.get(key)
        if found is None:
            found = closing(parser_of(self._vllm_config, given))
            if len(self._closing) >= _KNOWN:
                self._closing.clear()  # it takes a client that invents arguments
            self._closing[key] = found
        return found
