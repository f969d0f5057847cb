"""The embedded model."""

from saesteer.commands.embedded import ensure_model

__all__ = ["ensure_model"]
