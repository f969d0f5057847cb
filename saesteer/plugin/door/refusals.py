"""What is refused before a spec is compared with the server. Knows no name and no token."""

from typing import NoReturn

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
