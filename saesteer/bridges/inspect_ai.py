"""Inspect on a steered server: the provider `saesteer`, whose models send a spec with every request.

    inspect eval task.py --model saesteer/demo,saesteer/demo@bridge.json

answers a task without and with the spec in the file. The server's address is ``--model-base-url``, or the variable
``SAESTEER_BASE_URL`` such as http://localhost:8000/v1; its key is ``SAESTEER_API_KEY``. Inspect finds this file by
saesteer's entry point.
"""

from collections.abc import AsyncIterator
from typing import Any

from inspect_ai.model import GenerateConfig, ModelAPI, modelapi


@modelapi(name="saesteer")
def saesteer() -> type[ModelAPI]:
    """The provider; its packages are imported when somebody uses it."""
    from inspect_ai.model._providers.openai_compatible import OpenAICompatibleAPI

    from saesteer.bridges.specs import need_report, read_spec

    class Steered(OpenAICompatibleAPI):
        """Inspect's OpenAI-compatible provider, with a spec in each request.

        Args:
            model_name: the server's name of a model, or NAME@FILE with a file of JSON.
            **rest: as of `openai-api`.

        Raises:
            ConfigError: the spec is wrong.
        """

        def __init__(self, model_name: str, api_key: str | None = None, **rest: Any) -> None:
            self._served, _, file = model_name.partition("@")
            self._spec = read_spec(file) if file else None
            super().__init__(model_name, api_key=api_key or "none", service="saesteer", **rest)

        def service_model_name(self) -> str:
            """The server's name; logs have the whole one, by which they tell runs apart."""
            return self._served

        def completion_params(self, config: GenerateConfig, tools: bool) -> dict[str, Any]:
            """Inspect's own, with the spec in the body."""
            found: dict[str, Any] = super().completion_params(config, tools)
            if self._spec is not None:
                found["extra_body"] = (found.get("extra_body") or {}) | {"saesteer": self._spec}
            return found

        async def stream_completion(self, stream: Any) -> Any:
            """Inspect's own, which puts chunks together, with the field of the last ones."""
            said: Any = None

            async def seen() -> AsyncIterator[Any]:
                nonlocal said
                async for chunk in stream:
                    said = getattr(chunk, "saesteer", said)
                    yield chunk

            completion = await super().stream_completion(seen())
            if said is not None:
                completion.saesteer = said
            return completion

        def on_response(self, response: dict[str, Any]) -> None:
            """Looks at whether the spec was applied."""
            if self._spec is not None:
                need_report(response)
            super().on_response(response)

    return Steered
