"""The operator's settings at start: from a command line or a file to checked dictionaries, vectors and modules."""

from saesteer.config.config import SaesteerConfig

__all__ = ["SaesteerConfig"]
