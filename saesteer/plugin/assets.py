"""What the operator configured, opened once per process: for the front end, the scheduler and the workers."""

import hashlib
import json
from functools import cache
from typing import Any

from saesteer import __version__
from saesteer.config.assets import Assets
from saesteer.config.config import SaesteerConfig
from saesteer.plugin.configured import wire_of
from saesteer.plugin.wrap import Original, around


def assets_of(vllm_config: Any) -> Assets | None:
    """What the operator configured, opened once per process; None without saesteer, or with SAESTEER_DISABLE=1."""
    wire = wire_of(vllm_config)
    return None if wire is None else opened(wire)


@cache
def opened(wire: str) -> Assets:
    """The assets of a wire form, as JSON."""
    return Assets.open(SaesteerConfig.from_json(json.loads(wire)))


def fingerprint(assets: Assets) -> str:
    """Digest of saesteer's version and of everything that its graphs and caches depend on."""
    return hashlib.sha256((__version__ + assets.fingerprint).encode()).hexdigest()


@around
def _salting_compile_cache(original: Original, self: Any, *args: Any, **kwargs: Any) -> str:
    stock = original(self, *args, **kwargs)
    assets = assets_of(self)
    if assets is None:
        return stock
    return hashlib.sha256((stock + fingerprint(assets)).encode()).hexdigest()[: len(stock)]
