"""Requests for the dictionaries of a set, and the same for a server that has each of them by a name of its own."""

from typing import Any


def apart(value: Any) -> Any:
    """The same request for a server that has each dictionary under a name of its own."""
    if isinstance(value, list):
        return [apart(one) for one in value]
    if not isinstance(value, dict):
        return value
    found = {key: apart(one) for key, one in value.items()}
    return found | {"dictionary": f"{found['dictionary']}-{found.pop('layer')}"} if "layer" in found else found
