"""What is refused or dropped before a spec is compared with the server. Knows no name and no token."""

from collections.abc import Mapping
from typing import Any, NoReturn

from saesteer.config.config import KEY, SaesteerConfig
from saesteer.language.fields import fail
from saesteer.language.spec import Spec

_NOTHING = Spec()


def refuse_steering() -> NoReturn:
    """Raise SpecError: this server has nothing of saesteer's."""
    found = "this server was started without saesteer's dictionaries (additional_config.saesteer)"
    fail(KEY, "not_served", f"{found}, so it cannot steer")


def refuse_nothing(config: SaesteerConfig | None, spec: Spec | None) -> None:
    """Refuse a request that asks for nothing, where the operator demands a spec.

    Raises:
        SpecError: it does.
    """
    if config is not None and "spec" in config.require and spec in (None, _NOTHING):
        found = "is missing or asks for nothing, and this server answers no request without a spec (--require spec)"
        fail(KEY, "missing_field", f'{found}; expected edits, a read, or {{"defaults": false}}')


def without_ours(extra_args: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What a client may send with its spec: not our own words to the engine, which would key other requests' blocks."""
    if not extra_args or not any(name.startswith(f"{KEY}_") for name in extra_args):
        return extra_args  # type: ignore[return-value]  # it is the dict that vLLM made
    return {name: value for name, value in extra_args.items() if not name.startswith(f"{KEY}_")}
