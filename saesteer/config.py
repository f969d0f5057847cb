"""What the operator asked for at start: dictionaries, sites, limits. Knows nothing of vLLM; weights stay unread.

The wire form is vLLM's ``additional_config["saesteer"]``, so every process of a server sees the same:

    {"dictionaries": {"gs20": {"path": "org/repo/folder", "site": "resid_post.20"}}, "sites": [], "max_edits": 64}
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from saesteer.coder import CoderInfo
from saesteer.errors import ConfigError
from saesteer.loaders import describe
from saesteer.plan import Catalog
from saesteer.sites import canonical, parse

KEY = "saesteer"
SERVED_KINDS = ("resid_pre", "resid_mid", "resid_post")
MAX_EDITS_LIMIT = 4096


@dataclass(frozen=True, slots=True)
class DictionarySource:
    """Where a dictionary's weights are: a path or hub id, and the site when the files do not say it."""

    path: str
    site: str | None = None

    @classmethod
    def from_argument(cls, text: str) -> "DictionarySource":
        """Read ``PATH_OR_REPO[@SITE]``, as on the command line."""
        path, at, site = text.rpartition("@")
        return cls(path, site) if at and "/" not in site else cls(text)


@dataclass(frozen=True, slots=True)
class SaesteerConfig:
    """The operator's wishes; immutable, equal in every process of a server."""

    dictionaries: Mapping[str, DictionarySource] = field(default_factory=dict)
    sites: tuple[str, ...] = ()  # instrumented beside those that the dictionaries need
    max_edits: int = 64  # table entries of one request, over all sites

    @classmethod
    def from_json(cls, raw: Any) -> "SaesteerConfig":
        """Read the wire form.

        Raises:
            ConfigError: an unknown field, a wrong type or a value out of range.
        """
        if not isinstance(raw, Mapping):
            raise ConfigError(f"additional_config.{KEY} is {raw!r}, expected an object")
        known = ("dictionaries", "sites", "max_edits")
        for key in raw:
            if key not in known:
                raise ConfigError(f"additional_config.{KEY} has an unknown field {key!r}; known: {', '.join(known)}")
        sources = raw.get("dictionaries", {})
        if not isinstance(sources, Mapping):
            raise ConfigError(f"{KEY}.dictionaries is {sources!r}, expected an object of name: path")
        dictionaries = {name: _source(name, value) for name, value in sources.items()}
        sites = raw.get("sites", ())
        if isinstance(sites, str) or not all(isinstance(site, str) for site in sites):
            raise ConfigError(f"{KEY}.sites is {sites!r}, expected a list of sites such as 'resid_post.12'")
        max_edits = raw.get("max_edits", 64)
        if not isinstance(max_edits, int) or isinstance(max_edits, bool) or not 1 <= max_edits <= MAX_EDITS_LIMIT:
            raise ConfigError(f"{KEY}.max_edits is {max_edits!r}, expected 1 to {MAX_EDITS_LIMIT}")
        return cls(dictionaries, tuple(sites), max_edits)

    def to_json(self) -> dict[str, Any]:
        """The wire form, for vLLM's ``additional_config``."""
        return {
            "dictionaries": {name: {"path": s.path, "site": s.site} for name, s in self.dictionaries.items()},
            "sites": list(self.sites),
            "max_edits": self.max_edits,
        }

    def describe(self) -> dict[str, CoderInfo]:
        """What each dictionary is, from its file headers, with the operator's site in place.

        Raises:
            ConfigError: a dictionary that this version cannot serve, or whose site nobody named.
            LoadError: a file that is not what it should be.
        """
        return {name: _placed(name, source) for name, source in self.dictionaries.items()}

    def catalog(self, infos: Mapping[str, CoderInfo]) -> Catalog:
        """What requests may name on this server; ``infos`` are those of ``describe``."""
        return Catalog(dictionaries=infos, sites=frozenset(self.all_sites(infos)), max_entries=self.max_edits)

    def all_sites(self, infos: Mapping[str, CoderInfo]) -> tuple[str, ...]:
        """Canonical names of all instrumented sites, in the order of the device tables."""
        wanted = [canonical(str(info.site_in)) for info in infos.values()] + [canonical(site) for site in self.sites]
        for site in self.sites:
            if parse(site)[0] not in SERVED_KINDS:
                raise ConfigError(f"site {site!r} is not served by this version; served: {', '.join(SERVED_KINDS)}")
        return tuple(sorted(set(wanted), key=lambda site: (parse(site)[1], site)))

    def fingerprint(self) -> str:
        """Hex digest of all that decides which ops stand where in the compiled graph, and what they read."""
        infos = self.describe()
        facts = [self.to_json(), self.all_sites(infos), {name: info.to_json() for name, info in infos.items()}]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _source(name: str, value: Any) -> DictionarySource:
    if isinstance(value, DictionarySource):
        return value
    if isinstance(value, str):
        return DictionarySource.from_argument(value)
    if not isinstance(value, Mapping) or set(value) - {"path", "site"} or not isinstance(value.get("path"), str):
        raise ConfigError(f"dictionary {name!r} is {value!r}, expected a path or {{'path': ..., 'site': ...}}")
    return DictionarySource(value["path"], value.get("site"))


def _placed(name: str, source: DictionarySource) -> CoderInfo:
    info = describe(source.path)
    site_in, site_out = (source.site, source.site) if source.site else (info.site_in, info.site_out)
    if site_in is None or site_out is None:
        raise ConfigError(
            f"dictionary {name!r}: the files in {source.path} do not say where they belong; "
            f"name the site, as in --dictionary {name}={source.path}@resid_post.20"
        )
    if site_in != site_out or parse(site_in)[0] not in SERVED_KINDS:
        raise ConfigError(
            f"dictionary {name!r} reads {site_in} and writes {site_out}, which is not served by this version; "
            f"served: one of {', '.join(SERVED_KINDS)} read and written"
        )
    return replace(info, site_in=site_in, site_out=site_out)
