"""What the operator asked for at start: from a command line or a file to checked dictionaries, vectors and modules."""

from saesteer.config.config import SaesteerConfig

__all__ = ["SaesteerConfig"]
