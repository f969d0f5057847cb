"""What the operator asked for at start: dictionaries, vectors, modules, sites, limits. Knows nothing of vLLM.

The wire form is vLLM's ``additional_config["saesteer"]``, so every process of a server sees the same; weights and files
stay unread until somebody asks:

    {"dictionaries": {"gs20": {"path": "org/repo/folder", "site": "resid_post.20"}},
     "vectors": {"happy": {"path": "happy.gguf"}, "sentiment": {"path": "probe.npy", "bias": -0.5}},
     "modules": {"golden-gate": "golden-gate.json", "calm": {"edits": [...]}},
     "sites": ["resid_post.all"], "max_edits": 64, "pool_rows": 64, "inline_rows": 1,
     "max_dose": 0.5, "max_dose_action": "clamp"}
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

from saesteer.config.modules import read_modules
from saesteer.dictionaries.coder import CoderInfo
from saesteer.dictionaries.vectors import VectorSet
from saesteer.errors import ConfigError
from saesteer.language.fields import MAX_NAME, show
from saesteer.language.sites import canonical, expand_sites, order, parse
from saesteer.language.spec import Spec
from saesteer.loaders import describe
from saesteer.loaders.vectors import read_vectors
from saesteer.planning.planner import Catalog

KEY = "saesteer"
SERVED_KINDS = ("resid_pre", "resid_mid", "resid_post")
# Name of a limit → the least, the usual and the largest value.
LIMITS = {"max_edits": (1, 64, 4096), "pool_rows": (0, 64, 65536), "inline_rows": (0, 1, 64)}
DoseAction = Literal["clamp", "refuse"]  # scale a token's change down to the limit, or end its request with an error
MAX_DOSE = 1e6  # of the limit itself; what is more says nothing


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
class VectorSource:
    """Where vectors are: a file or ``org/repo/file``, and a probe's bias in place of the file's own."""

    path: str
    bias: float | None = None


@dataclass(frozen=True, slots=True)
class SaesteerConfig:
    """The operator's wishes; immutable, equal in every process of a server."""

    dictionaries: Mapping[str, DictionarySource] = field(default_factory=dict)
    sites: tuple[str, ...] = ()  # instrumented beside those that the dictionaries need; "resid_post.all": every layer
    max_edits: int = LIMITS["max_edits"][1]  # table entries of one request, over all sites
    vectors: Mapping[str, VectorSource] = field(default_factory=dict)
    modules: Mapping[str, str | Mapping[str, Any]] = field(default_factory=dict)  # a JSON file's path, or the spec
    pool_rows: int = LIMITS["pool_rows"][1]  # slots at every site for vectors
    inline_rows: int = LIMITS["inline_rows"][1]  # vectors of one request's own at every site
    max_dose: float | None = None  # how much edits may change a token at a site, in lengths of the stream; None: any
    max_dose_action: DoseAction = "clamp"  # with a token above it

    @classmethod
    def from_json(cls, raw: Any) -> "SaesteerConfig":
        """Read the wire form.

        Raises:
            ConfigError: an unknown field, a wrong type or a value out of range.
        """
        if not isinstance(raw, Mapping):
            raise ConfigError(f"additional_config.{KEY} is {show(raw)}, expected an object")
        known = [one.name for one in fields(cls)]
        for key in raw:
            if key not in known:
                raise ConfigError(f"additional_config.{KEY} has an unknown field {key!r}; known: {', '.join(known)}")
        sites = raw.get("sites", ())
        if not isinstance(sites, list | tuple) or not all(isinstance(site, str) for site in sites):
            raise ConfigError(f"{KEY}.sites is {show(sites)}, expected a list of sites such as 'resid_post.12'")
        expand_sites(sites, 1)
        return cls(
            _named(raw, "dictionaries", _dictionary_source),
            tuple(sites),
            _limit(raw, "max_edits"),
            _named(raw, "vectors", _vector_source),
            _named(raw, "modules", _module_source),
            _limit(raw, "pool_rows"),
            _limit(raw, "inline_rows"),
            *_dose(raw),
        )

    def to_json(self) -> dict[str, Any]:
        """The wire form, for vLLM's ``additional_config``."""
        return {
            "dictionaries": {name: {"path": s.path, "site": s.site} for name, s in self.dictionaries.items()},
            "sites": list(self.sites),
            "max_edits": self.max_edits,
            "vectors": {name: {"path": s.path, "bias": s.bias} for name, s in self.vectors.items()},
            "modules": dict(self.modules),
            "pool_rows": self.pool_rows,
            "inline_rows": self.inline_rows,
            "max_dose": self.max_dose,
            "max_dose_action": None if self.max_dose is None else self.max_dose_action,
        }

    def with_depth(self, layers: int) -> "SaesteerConfig":
        """The same for a model of this many layers: ``resid_post.all`` becomes the sites that it stands for."""
        return replace(self, sites=expand_sites(self.sites, layers))

    def describe(self) -> dict[str, CoderInfo]:
        """What each dictionary is, from its file headers, with the operator's site in place.

        Raises:
            ConfigError: a dictionary that this version cannot serve, or whose site nobody named.
            LoadError: a file that is not what it should be.
        """
        return {name: _placed(name, source) for name, source in self.dictionaries.items()}

    def read_vectors(self) -> dict[str, VectorSet]:
        """The vectors by name.

        Raises:
            LoadError: a file that is not what it should be.
        """
        return {name: read_vectors(source.path, bias=source.bias) for name, source in self.vectors.items()}

    def read_modules(self) -> dict[str, Spec]:
        """The modules by name, each a right spec that names what this server has.

        Raises:
            ConfigError: a file that cannot be read, a wrong spec, an unknown name, or modules that use each other.
        """
        return read_modules(self.modules, dictionaries=self.dictionaries, vectors=self.vectors)

    def catalog(self, infos: Mapping[str, CoderInfo], *, width: int | None = None) -> Catalog:
        """What requests may name on this server.

        Args:
            infos: those of ``describe``.
            width: of the model's stream, for the vectors that requests bring; None: any.
        """
        return Catalog(
            dictionaries=infos,
            sites=frozenset(self.all_sites(infos)),
            max_entries=self.max_edits,
            vectors=self.read_vectors(),
            modules=self.read_modules(),
            width=width,
            inline_rows=self.inline_rows,
        )

    def all_sites(self, infos: Mapping[str, CoderInfo]) -> tuple[str, ...]:
        """Canonical names of all instrumented sites, as a forward pass comes to them.

        Those of the dictionaries, resid_post of every layer that a vector has a row for, and those that were named.
        """
        for site in self.sites:
            if parse(site)[0] not in SERVED_KINDS:
                raise ConfigError(f"site {site!r} is not served by this version; served: {', '.join(SERVED_KINDS)}")
        wanted = [canonical(str(info.site_in)) for info in infos.values()] + [canonical(site) for site in self.sites]
        for found in self.read_vectors().values():
            wanted += [f"resid_post.{layer}" for layer in found.layers or ()]
        return tuple(sorted(set(wanted), key=order))

    def fingerprint(self) -> str:
        """Hex digest of all that decides which ops stand where in the compiled graph, and what they read.

        Files count by what they hold, so machines that keep the same ones in other places agree.
        """
        facts = [
            replace(self, dictionaries={}, vectors={}, modules={}).to_json(),
            {name: replace(info, source="").to_json() for name, info in self.describe().items()},
            {name: found.fingerprint for name, found in self.read_vectors().items()},
            {name: spec.to_json() for name, spec in self.read_modules().items()},
        ]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _named(raw: Mapping[str, Any], key: str, source: Callable[[str, Any], Any]) -> dict[str, Any]:
    found = raw.get(key, {})
    if not isinstance(found, Mapping):
        raise ConfigError(f"{KEY}.{key} is {show(found)}, expected an object of name: place")
    for name in found:
        # As in requests, or nobody could ask for it.
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
            raise ConfigError(f"{KEY}.{key} has the name {name!r}, expected 1 to {MAX_NAME} printable characters")
    return {name: source(name, value) for name, value in found.items()}


def _limit(raw: Mapping[str, Any], key: str) -> int:
    low, usual, high = LIMITS[key]
    value = raw.get(key, usual)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(f"{KEY}.{key} is {show(value)}, expected {low} to {high}")
    return value


def _dose(raw: Mapping[str, Any]) -> tuple[float | None, DoseAction]:
    """The limit and what to do; null is not said, for either."""
    limit, action = raw.get("max_dose"), raw.get("max_dose_action")
    number = isinstance(limit, int | float) and not isinstance(limit, bool)
    if limit is not None and not (number and 0 < limit <= MAX_DOSE):
        raise ConfigError(f"{KEY}.max_dose is {show(limit)}, expected a number above 0, {MAX_DOSE:.0f} at most")
    if action is not None and action not in get_args(DoseAction):
        raise ConfigError(f"{KEY}.max_dose_action is {show(action)}, expected {' or '.join(get_args(DoseAction))}")
    if action is not None and limit is None:
        raise ConfigError(f"{KEY}.max_dose_action is {show(action)} without {KEY}.max_dose, expected both or neither")
    return None if limit is None else float(limit), action or "clamp"


def _dictionary_source(name: str, value: Any) -> DictionarySource:
    if isinstance(value, DictionarySource):
        return value
    if isinstance(value, str):
        return DictionarySource.from_argument(value)
    if not isinstance(value, Mapping) or set(value) - {"path", "site"} or not isinstance(value.get("path"), str):
        raise ConfigError(f"dictionary {name!r} is {show(value)}, expected a path or {{'path': ..., 'site': ...}}")
    return DictionarySource(value["path"], value.get("site"))


def _vector_source(name: str, value: Any) -> VectorSource:
    if isinstance(value, VectorSource):
        return value
    if isinstance(value, str):
        return VectorSource(value)
    if not isinstance(value, Mapping) or set(value) - {"path", "bias"} or not isinstance(value.get("path"), str):
        raise ConfigError(f"vector {name!r} is {show(value)}, expected a path or {{'path': ..., 'bias': ...}}")
    bias = value.get("bias")
    if bias is not None and (isinstance(bias, bool) or not isinstance(bias, int | float) or not math.isfinite(bias)):
        raise ConfigError(f"vector {name!r} has the bias {show(bias)}, expected a finite number")
    return VectorSource(value["path"], None if bias is None else float(bias))


def _module_source(name: str, value: Any) -> str | dict[str, Any]:
    if isinstance(value, str):
        return value
    if not isinstance(value, Mapping):
        raise ConfigError(f"module {name!r} is {show(value)}, expected the path of a JSON file or a spec")
    return dict(value)


def unserved(info: CoderInfo) -> str | None:
    """Why no server can hold a dictionary, as its files are; None where one can, or would if the site were named."""
    site, not_served = info.site_in, "which is not served by this version"
    if info.d_in != info.d_out:
        return f"reads {info.d_in} numbers and writes {info.d_out}, {not_served}; served: as many read as written"
    if site is None or info.site_out is None or (site == info.site_out and site.partition(".")[0] in SERVED_KINDS):
        return None
    served = f"served: one of {', '.join(SERVED_KINDS)} read and written"
    return f"reads {site} and writes {info.site_out}, {not_served}; {served}"


def _placed(name: str, source: DictionarySource) -> CoderInfo:
    info = describe(source.path)
    if source.site:
        parse(source.site)
        if info.site_in is not None and info.site_in != info.site_out:
            raise ConfigError(
                f"dictionary {name!r} reads {info.site_in} and writes {info.site_out or 'another place'}; "
                f"it cannot be moved to one site, got @{source.site}"
            )
        info = replace(info, site_in=source.site, site_out=source.site)
    if info.site_in is None or info.site_out is None:
        raise ConfigError(
            f"dictionary {name!r}: the files in {source.path} do not say where they belong; "
            f"name the site, as in --dictionary {name}={source.path}@resid_post.20"
        )
    if why := unserved(info):
        raise ConfigError(f"dictionary {name!r} {why}")
    parse(info.site_in)
    return info
