"""Turns a command line's arguments and a YAML file into one SaesteerConfig; arguments win. Reads no weights.

The file has the same content as the wire form (``saesteer.config``). A relative path in it that exists next to the
file is resolved there, and so is the path of a folder that the server writes to:

    dictionaries:
      gs20: org/repo/folder@resid_post.20
    vectors:
      happy: vectors/happy.gguf
      sentiment: {path: vectors/probe.npy, bias: -0.5}
    modules:
      golden-gate: modules/golden-gate.json
      calm:
        edits:
          - {op: add, vector: happy, site: resid_post.12, scale: 4}
    sites: [resid_post.all]
    max_edits: 64
    max_dose: 0.5
    max_dose_action: refuse
"""

import json
import os
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from saesteer.config.config import ADMIN_KEY, OPTIONS, SaesteerConfig
from saesteer.config.sources import PIN, DictionarySource
from saesteer.errors import ConfigError
from saesteer.language.address import PREFIX

MAX_FILE_BYTES = 1 << 20


def read_settings(
    dictionaries: Sequence[str] | None = None,
    sites: Sequence[str] | None = None,
    *,
    file: str | Path | None = None,
    **given: Any,
) -> SaesteerConfig:
    """The operator's settings.

    Args:
        dictionaries: each ``NAME=PLACE[@@REVISION][@SITE]``; ``np:MODEL/SOURCE...`` is its own name.
        sites: names; each argument holds one, or several separated by commas.
        file: a YAML file; the other arguments override it, except that lists of sites, models and hosts add up.
        **given: other options of ``saesteer.config`` by name; None: not given. ``reads``, ``capture``, ``require``,
            ``dictionaries_of`` and ``allow_hosts`` are as ``sites``; ``vectors`` and ``modules`` each ``NAME=FILE``;
            ``consumers`` each ``NAME``, or ``NAME=`` and its options as a JSON object.

    Raises:
        ConfigError: an argument or the file does not have that form.
    """
    told = SaesteerConfig() if file is None else _read(Path(file))
    given |= {"dictionaries": dictionaries, "sites": sites}
    words = {name: value for name, value in given.items() if value is not None}
    for name in ("sites", "reads", "capture", "dictionaries_of", "allow_hosts", "require"):
        more = [one for word in words.get(name, ()) for one in word.split(",") if one]
        words[name] = [*getattr(told, name), *more]
    for name, example in (
        ("dictionaries", "PLACE[@SITE], such as gs20=org/repo@resid_post.20"),
        ("vectors", "FILE, such as happy=happy.gguf"),
        ("modules", "FILE, such as golden-gate=golden-gate.json"),
    ):
        places = _named(OPTIONS[name].flag, words.get(name, ()), f"NAME={example}")
        words[name] = {**getattr(told, name), **places}
    words["consumers"] = {**told.consumers, **_consumers(words.get("consumers", ()))}
    return told.changed(words)


def checked_key(key: str, source: str) -> str:
    """A key that a header can carry; ConfigError, which names its source, for any other."""
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"{source} is empty or cannot be sent in a header, expected printable ASCII without blanks")
    return key


def admin_key() -> str:
    """The operator's key for the admin routes, from the environment or the file that it names; empty without one.

    Raises:
        ConfigError: there are two, the file cannot be read, or no header can carry the key.
    """
    key, file = os.environ.get(ADMIN_KEY, ""), os.environ.get(name := f"{ADMIN_KEY}_FILE")
    if not file:
        return checked_key(key, ADMIN_KEY) if key else ""
    if key:
        raise ConfigError(f"{ADMIN_KEY} and {name} are both set, expected one of them")
    try:
        key = Path(file).read_text().strip()
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{name} {file} cannot be read ({exc}), expected a file that holds the key") from exc
    return checked_key(key, f"the key in {name} {file}")


def _named(flag: str, words: Sequence[str], form: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for word in words:
        name, equals, place = word.partition("=")
        if not equals and (source := DictionarySource.from_argument(word)).path.startswith(PREFIX):
            name, equals, place = source.path.partition(PIN)[0], "=", word  # its address is its name
        if not (name and equals and place):
            raise ConfigError(f"{flag} {word}: expected {form}")
        if name in found:
            raise ConfigError(f"{flag} {word}: the name {name!r} is taken by another {flag}")
        found[name] = place
    return found


def _consumers(words: Sequence[str]) -> dict[str, Any]:
    form = """NAME or NAME={options as JSON}, such as 'filesystem={"folder": "runs"}'"""
    given = _named("--consumer", [word if "=" in word else f"{word}={{}}" for word in words], form)
    try:
        return {name: json.loads(options) for name, options in given.items()}
    except ValueError as exc:
        raise ConfigError(f"--consumer {' '.join(words)}: not JSON ({exc}), expected {form}") from exc


def _read(file: Path) -> SaesteerConfig:
    """Read a file, and resolve relative paths in it."""
    at = f"--saesteer-config {file}"
    try:
        with file.expanduser().open("rb") as stream:
            text = stream.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise ConfigError(f"more than {MAX_FILE_BYTES} bytes; expected a short YAML file")
        document = yaml.load(text, _Loader)  # a SafeLoader
        if document is not None and not isinstance(document, Mapping):
            raise ConfigError(f"holds a {type(document).__name__}, expected names and values")
        told = SaesteerConfig.from_json(document or {})
    except OSError as exc:
        raise ConfigError(f"{at}: cannot be read ({exc.strerror}); expected a YAML file") from exc
    except ConfigError as exc:
        raise ConfigError(f"{at}: {exc}") from exc
    except (yaml.YAMLError, RecursionError, ValueError) as exc:
        raise ConfigError(f"{at}: not YAML ({' '.join(str(exc).split())})") from exc
    folder = file.expanduser().parent
    beside, made = partial(_beside, folder), partial(_made, folder)
    consumers = dict(told.consumers)
    if isinstance(where := consumers.get("filesystem", {}).get("folder"), str):
        consumers["filesystem"] = {**consumers["filesystem"], "folder": made(where)}
    return replace(
        told,
        dictionaries={name: replace(one, path=beside(one.path)) for name, one in told.dictionaries.items()},
        dictionary_folder=told.dictionary_folder and beside(told.dictionary_folder),
        capture_folder=told.capture_folder and made(told.capture_folder),
        consumers=consumers,
        vectors={name: replace(one, path=beside(one.path)) for name, one in told.vectors.items()},
        modules={name: beside(one) if isinstance(one, str) else one for name, one in told.modules.items()},
    )


def _made(folder: Path, path: str) -> str:
    """Where a folder is made that need not exist yet."""
    return str(folder / Path(path).expanduser()) if path else path


def _beside(folder: Path, path: str) -> str:
    base, mark, name = path.rpartition("#")  # a file in a folder, in the form that loaders accept
    place = base if mark else path
    found = folder / place
    there = (folder / place.partition("*")[0]).exists() if "*" in place else found.exists()
    return f"{found}{mark}{name if mark else ''}" if not Path(place).is_absolute() and there else path


class _Loader(yaml.SafeLoader):
    """YAML's safe part, in which a repeated key is a mistake and does not replace the first one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} appears twice", key.start_mark
                )
            seen.add(key.value if isinstance(key.value, str) else id(key))
        return super().construct_mapping(node, deep)
