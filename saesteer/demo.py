"""The embedded dictionary and the engine options that suit the embedded model."""

from saesteer.commands.embedded import DEMO_SAE, engine_options

__all__ = ["DEMO_SAE", "engine_options"]
