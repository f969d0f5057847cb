"""The embedded dictionaries and the engine options that suit the embedded model."""

from saesteer.commands.embedded import DEMO_SAE, DEMO_TRANSCODER, engine_options

__all__ = ["DEMO_SAE", "DEMO_TRANSCODER", "engine_options"]
