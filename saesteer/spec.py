"""The request language."""

from saesteer.language.spec import *  # noqa: F403
