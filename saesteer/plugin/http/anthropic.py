"""The field ``saesteer`` of /v1/messages, Anthropic's form of a chat, on its way into the chat completion.

vLLM turns such a request into a chat completion field by field, which drops ours.

    create_messages           a refusal becomes vLLM's error; vLLM would log an exception with its traceback
    create_chat_completion    the request gets the body's field, and its vllm_xargs if vLLM (0.26) drops them
"""

from collections.abc import Mapping
from typing import Any

from saesteer.config.config import KEY
from saesteer.plugin.http.bodies import refuse_misplaced
from saesteer.plugin.results.errors import SpecRefused
from saesteer.plugin.wrap import Original, around


@around
async def _answering(original: Original, self: Any, request: Any, raw_request: Any = None) -> Any:
    try:
        return await original(self, request, raw_request)
    except SpecRefused as error:
        return self.create_error_response(error)


@around
async def _forwarding(original: Original, self: Any, request: Any, raw_request: Any = None) -> Any:
    body = {} if raw_request is None else await raw_request.json()
    refuse_misplaced(request, body)
    if body.get(KEY) is not None:
        request.saesteer = body[KEY]
    arguments = body.get("vllm_xargs")
    if isinstance(arguments, Mapping) and KEY in arguments and request.vllm_xargs is None:
        request.vllm_xargs = {KEY: arguments[KEY]}
    return await original(self, request, raw_request)
