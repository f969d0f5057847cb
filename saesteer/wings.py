"""Finds wings, parts that the core works without and names only in calls of ``find``. One may have been deleted."""

from pkgutil import resolve_name
from typing import Any


def find(place: str) -> Any:
    """Import what stands at ``module:name``; None if the wing is not there."""
    try:
        return resolve_name(place)
    except ModuleNotFoundError as exc:
        if place.startswith(exc.name or ":"):
            return None
        raise
