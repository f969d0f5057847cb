"""Reads a server's settings where vLLM makes its config, and installs saesteer if they ask for it.

Wraps EngineArgs.create_engine_config. It is called in each process that starts others, and these get the word in their
environment. Imports nothing of vLLM, so settings are never ignored, whatever a later vLLM has moved.
"""

import json
import os
from collections.abc import Mapping
from functools import cache
from typing import Any

from saesteer.config.config import CONFIG_FILE, KEY, SaesteerConfig
from saesteer.config.settings import read_settings
from saesteer.errors import ConfigError
from saesteer.plugin import contract, unservable
from saesteer.plugin.names import board
from saesteer.plugin.wrap import Original, around

ENV = "SAESTEER_CONFIGURED"
_RAY = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"  # for engines in Ray's actors


def disabled() -> bool:
    """Return whether SAESTEER_DISABLE=1 leaves the engine as stock vLLM has it."""
    return os.environ.get("SAESTEER_DISABLE") == "1"


def with_file(additional: Any) -> Any:
    """vLLM's additional_config, with the settings of the file that the environment names, if it names one.

    Raises:
        ConfigError: the file is wrong, or there are settings without it.
    """
    file = os.environ.get(CONFIG_FILE)
    if not file or disabled():
        return additional
    if KEY in (additional or {}):
        raise ConfigError(
            f"{CONFIG_FILE} names {file}, and additional_config has {KEY!r} as well, expected one of them"
        )
    return {**(additional or {}), KEY: read_settings(file=file).to_json()}


def wire_of(vllm_config: Any) -> str | None:
    """Return the settings in vLLM's config as JSON; None without any, or with SAESTEER_DISABLE=1."""
    additional = getattr(vllm_config, "additional_config", None)
    raw = additional.get(KEY) if isinstance(additional, Mapping) else None
    return None if raw is None or disabled() else json.dumps(raw, default=str)


@cache
def configure() -> None:
    """Install the rows of ``every``, in this process and in those that it starts.

    Raises:
        UnsupportedError: this vLLM lacks a hook that saesteer needs; the message names both.
    """
    contract.check("stock")
    contract.install("every")
    board.announce()
    os.environ[ENV] = "1"
    os.environ[_RAY] = ",".join(filter(None, (os.environ.get(_RAY), ENV)))


@around
def _configuring(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    given = self.additional_config
    self.additional_config = with_file(given)
    try:
        found = original(self, *args, **kwargs)
    finally:
        self.additional_config = given  # the same arguments may make another config
    wire = wire_of(found)
    if wire is not None:  # the files stay closed: this process may only start others, which open them
        configure()
        unservable.refuse(found, SaesteerConfig.from_json(json.loads(wire)))
    return found
