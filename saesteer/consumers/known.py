"""Which consumers there are, and which of them an operator has switched on. Knows no request.

A consumer is built in, registered in Python, or an entry point in the group ``saesteer.consumers`` of an installed
package. Only the code of those that the operator names is loaded.
"""

import weakref
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points

from saesteer.consumers.consumer import Consumer
from saesteer.consumers.runner import Count, Policy, Runner
from saesteer.errors import ConfigError, SaesteerError
from saesteer.language.fields import Fields, closest, listing

GROUP = "saesteer.consumers"
CAPTURE = "capture"  # the consumer of --capture-folder, in metrics and logs; no request can name it

Factory = Callable[[Fields], Consumer]
_KNOWN: dict[str, Factory] = {}
_BUILT_IN = (
    EntryPoint("filesystem", "saesteer.consumers.filesystem:Filesystem", GROUP),
    EntryPoint("logging", "saesteer.consumers.lines:Logging", GROUP),
)


def register(name: str, factory: Factory) -> None:
    """Make a consumer known in this process, where no package has an entry point for it.

    Args:
        name: as the operator's settings name it.
        factory: a subclass of Consumer, or a function: options → a consumer.
    """
    _KNOWN[name] = factory


def factory_of(name: str) -> Factory:
    """What makes a consumer of this name.

    Raises:
        ConfigError: there is none, or its package cannot be imported.
    """
    if name in _KNOWN:
        return _KNOWN[name]
    installed = {one.name: one for one in (*_BUILT_IN, *entry_points(group=GROUP))}
    if name not in installed:
        known = [*_KNOWN, *installed]
        found = f"there is no consumer {name!r}{closest(name, known)}, expected one of {listing(known)}"
        raise ConfigError(f"consumers: {found}, or one that an installed package has under the entry point {GROUP}")
    try:
        factory: Factory = installed[name].load()
    except Exception as exc:
        raise ConfigError(f"consumers.{name}: {installed[name].value} cannot be loaded ({exc})") from exc
    return factory


class Consumers:
    """The consumers of a server; those who wait in them are served before the process ends.

    Args:
        named: those that requests may name.
        capturing: those that get what the operator captures.
    """

    def __init__(self, named: Mapping[str, Runner], capturing: tuple[Runner, ...] = ()) -> None:
        self.named, self.capturing = named, capturing
        every = {id(one): one for one in (*named.values(), *capturing)}
        self.close = weakref.finalize(self, _close, [*every.values()])

    @classmethod
    def open(
        cls, settings: Mapping[str, Fields], folder: str | None = None, count: Count = lambda *_: None
    ) -> "Consumers":
        """The consumers of an operator's settings.

        Args:
            settings: name → options.
            folder: of ``--capture-folder``.
            count: as ``Runner`` has it.

        Raises:
            ConfigError: a consumer does not exist, or refuses its options.
        """
        named = {name: _runner(name, factory_of(name), options, count) for name, options in settings.items()}
        capturing = [one for one in named.values() if one.policy.all]
        if folder is not None:
            # A set of training data should be whole: where the disk is slow, new requests wait.
            options = {"folder": folder, "queue_mib": 256, "wait_ms": 10_000}
            capturing.append(_runner(CAPTURE, factory_of("filesystem"), options, count))
        return cls(named, tuple(capturing))


def _runner(name: str, factory: Factory, options: Fields, count: Count) -> Runner:
    policy, rest = Policy.taken(options, f"consumers.{name}")
    try:
        return Runner(name, factory(rest), policy, count)
    except SaesteerError as exc:
        at = "--capture-folder:" if name == CAPTURE else f"consumers.{name}"
        raise ConfigError(f"{at} {exc}") from exc


def _close(runners: list[Runner]) -> None:
    for one in runners:
        one.close()
