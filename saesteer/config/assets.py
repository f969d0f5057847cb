"""The contents of the files that a configuration names, each opened once. Knows no flag, no request and no device."""

import hashlib
import json
from collections import ChainMap
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rich.filesize import decimal

from saesteer.config.config import SaesteerConfig
from saesteer.config.modules import read_modules
from saesteer.config.origins import Infos, addresses_of, origin_of, refuse_others
from saesteer.config.row_store import RowStore
from saesteer.config.sets import check_set, opened
from saesteer.config.sources import DictionarySource
from saesteer.dictionaries.coder import RANKED, CoderInfo
from saesteer.dictionaries.vectors import VectorSet, check_vectors
from saesteer.errors import ConfigError
from saesteer.language.fields import listing
from saesteer.language.sites import NO_PREGAIN, canonical, expand_sites, op_site, order, parse, reading_site
from saesteer.language.spec import Spec
from saesteer.loaders import describe, largest
from saesteer.loaders.vectors import read_vectors
from saesteer.models.families import SERVED_KINDS, has_pregain, other_widths, sums_of
from saesteer.planning.plan import Catalog, member


@dataclass(frozen=True, slots=True, eq=False)
class Assets:
    """A configuration with the contents of its files; made by ``Assets.open``."""

    config: SaesteerConfig
    infos: Infos  # the dictionaries' headers by ``Catalog.key``, with the operator's sites filled in
    vectors: Mapping[str, VectorSet]
    modules: Mapping[str, Spec]  # each a valid spec that names only what this server has
    rows: RowStore  # dictionaries whose weights stay in their files; those with a name are in infos, too
    sets: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # the layers of the dictionaries that are sets

    @classmethod
    def open(cls, config: SaesteerConfig) -> "Assets":
        """Open every file once, without reading the dictionaries' weights.

        Raises:
            ConfigError: a dictionary or site that this version cannot serve, a dictionary whose site nobody named, or a
                module that cannot be read, is wrong, names something unknown, or uses itself.
            LoadError: a file is invalid.
        """
        sources, sets = opened(config.dictionaries)
        whole = {key: describe(one.path, site=one.reads) for key, one in sources.items() if not one.rows}
        whole = {key: info for key, info in whole.items() if info.targets is None}
        rows = RowStore(
            {key: one for key, one in sources.items() if key not in whole}, config.dictionary_folder, _placed
        )
        infos = {key: _placed(key, one, whole[key]) if key in whole else rows[key] for key, one in sources.items()}
        for name, layers in sets.items():
            check_set(name, config.dictionaries[name], infos, layers)
        for key, one in sources.items():
            if one.version is not None:
                found = infos[key].fingerprint or describe(one.path, site=one.reads).fingerprint
                if not found.startswith(one.version):
                    raise ConfigError(f"dictionary {key!r} has the version {found[:16]}, expected {one.version}")
        vectors = {
            name: read_vectors(one.path, bias=one.bias, function=one.function) for name, one in config.vectors.items()
        }
        for site in (*config.sites, *config.kept):
            if site.partition(".")[0] not in SERVED_KINDS:
                raise ConfigError(f"site {site!r} is not served by this version; served: {', '.join(SERVED_KINDS)}")
        known = [*config.dictionaries, *rows, *rows.sets, *addresses_of(infos)]
        modules = read_modules(config.modules, dictionaries=known, vectors=vectors)
        if config.default_module not in modules and (config.default_module or "default" in config.require):
            which = f"one of: {listing(modules)}" if modules else "and there is none; --module NAME=FILE adds one"
            under = " under --require default" if "default" in config.require else ""
            found = f"got {config.default_module!r}{under}, expected the name of a module, {which}"
            raise ConfigError(f"default_module: {found}")
        return cls(config, infos, vectors, modules, rows, sets)

    def info(self, dictionary: str, layer: int | None = None) -> CoderInfo:
        """The header of a dictionary; of a set, of the one at a layer."""
        return self.infos[dictionary if layer is None else member(dictionary, layer)]

    def sites(self, layers: int, other_widths: Mapping[str, int] | None = None) -> tuple[str, ...]:
        """Canonical names of all instrumented sites of a model, in the order of a forward pass.

        They are the dictionaries' sites, resid_post of each layer that a vector has a row for, and the named sites. A
        dictionary that writes to a part of the stream needs no op there, if it reads somewhere else. A vector of
        another width than the stream has its ops at the kind of that width. Arguments as for ``catalog``.
        """
        kinds = {width: kind for kind, width in (other_widths or {}).items()}
        wanted = [reading_site(str(info.site_in)) for info in self.infos.values()]
        wanted += expand_sites([*self.config.sites, *self.config.kept], layers)
        for vectors in self.vectors.values():
            kind = vectors.kind or kinds.get(vectors.width, "resid_post")
            wanted += [f"{kind}.{layer}" for layer in vectors.layers or ()]
        found = {canonical(site) for site in wanted}
        written = {canonical(site) for info in self.infos.values() for site in info.writes}
        return tuple(sorted(found | {op_site(site, found) for site in written}, key=order))

    def readable(self, sites: Collection[str], other_widths: Mapping[str, int] | None = None) -> frozenset[str]:
        """Those of the instrumented sites whose tensors requests may read.

        They are the sites where dictionaries read, the site of each vector that has one layer, and those
        that the operator names.
        """
        kinds = {width: kind for kind, width in (other_widths or {}).items()}
        layers = 1 + max((parse(site)[1] for site in sites), default=0)
        wanted = {reading_site(canonical(str(info.site_in))) for info in self.infos.values()}
        wanted |= {canonical(site) for site in expand_sites(self.config.kept, layers)}
        for vectors in self.vectors.values():
            if vectors.layers is not None and len(vectors.layers) == 1:
                kind = vectors.kind or kinds.get(vectors.width, "resid_post")
                wanted.add(f"{kind}.{vectors.layers[0]}")
        return frozenset(wanted.intersection(sites))

    def ends(self, name: str, sites: Collection[str]) -> tuple[str, str]:
        """The sites whose ops read and write for a dictionary."""
        info = self.infos[name]
        return reading_site(canonical(str(info.site_in))), op_site(canonical(str(info.site_out)), sites)

    def refuse_others(self, model: str) -> None:
        """Refuse dictionaries of another model than the served one, a hub id or a folder.

        Raises:
            ConfigError: there is one, beyond doubt.
        """
        refuse_others(self.infos, model, self.config.dictionaries_of)

    def refuse_unlike(self, config: Any) -> None:
        """Refuse dictionaries that do not go with how the layers of the model with this config are built.

        Raises:
            ConfigError: one reads a norm before its gain, and there is no such norm; or one writes where nothing but an
                op of that site will do, and there is none.
        """
        sites, sums = self.sites(config.num_hidden_layers, other_widths(config)), sums_of(config)
        for name, info in self.infos.items():
            if info.reads_pregain and not has_pregain(config):
                raise ConfigError(f"dictionary {name!r} {NO_PREGAIN.format(info.site_in)}")
            for site in map(canonical, info.writes):
                if op_site(site, sites, sums) not in sites:
                    why = f"writes {site}, and in this model no site behind it is the stream with that added"
                    raise ConfigError(f"dictionary {name!r} {why}; add --sites {site}")

    def catalog(
        self,
        *,
        width: int,
        layers: int,
        other_widths: Mapping[str, int] | None = None,
        model: str | None = None,
        stages: tuple[int, ...] = (),
    ) -> Catalog:
        """What requests may name on a server with this model.

        Args:
            width: width of the model's stream.
            layers: number of the model's layers.
            other_widths: of the kinds of sites that are not as wide, by kind.
            model: its hub id or folder, by which addresses are checked; None: unknown.
            stages: the layers with which the later stages of a pipeline begin.

        Raises:
            ConfigError: a dictionary, vector or site that the model does not have.
        """
        others = other_widths or {}
        check_vectors(self.vectors, width=width, layers=layers, other_widths=others)
        for name, info in self.infos.items():
            for site, own in ((str(info.site_in), info.d_in), *((site, info.d_out) for site in info.writes)):
                expected = others.get(parse(site)[0], width)
                if own != expected:
                    whose = "this model" if expected == width else f"{site} of this model"
                    raise ConfigError(f"dictionary {name!r} is {own} wide, but {whose} is {expected} wide")
        sites = self.sites(layers, others)
        for site in sites:
            if parse(site)[1] >= layers:
                raise ConfigError(f"site {site} does not exist: this model has layers 0 to {layers - 1}")
        served = model, self.config.dictionaries_of
        dictionaries: Infos = self.infos
        if self.config.dictionary_folder is not None:  # these are opened when a request names them
            dictionaries = ChainMap(dict(self.infos), self.rows.of_model(*served))  # type: ignore[arg-type]  # only read
        return Catalog(
            dictionaries=dictionaries,
            sites=frozenset(sites),
            max_entries=self.config.max_edits,
            vectors=self.vectors,
            modules=self.modules,
            width=width,
            layers=layers,
            inline_rows=self.config.inline_rows,
            default=self.config.default_module,
            scope=self.config.default_scope,
            other_widths=others,
            sets={**self.rows.sets, **self.sets},
            reads=self.readable(sites, others),
            addresses=addresses_of(self.infos),
            origin=lambda key: origin_of(key, dictionaries[key], *served),
            stages=stages,
            largest=largest,
        )

    def memory(self, size: int) -> list[str]:
        """A sentence for each dictionary that a request may name: what it takes in memory, and what is wrong with it.

        Args:
            size: bytes of a number of the model's dtype, in which the matrices are held.
        """
        found = []
        for name in self.config.dictionaries:
            keys = [member(name, layer) for layer in self.sets[name]] if name in self.sets else [name]
            infos = [self.infos[key] for key in keys]
            features = sum(info.features for info in infos)
            taken = sum(0 if info.by_rows else info.memory(size) for info in infos)
            several = f"{len(infos)} dictionaries with " if len(infos) > 1 else ""
            files = {info.source: info.bytes_on_disk for info in infos}  # one may hold all of a set
            on_disk = decimal(sum(files.values()))
            known = f"{several}{features:,} features, {decimal(taken)} in memory, {on_disk} on disk"
            found.append(f"{name}: {known}{_NOTES.get(infos[0].format, '')}")
        return found

    @property
    def fingerprint(self) -> str:
        """Hex digest of everything that decides where ops are in the compiled graph, and what they read.

        Files count by their content, so machines that keep the same files in different places agree.
        """
        facts = [
            replace(
                self.config,
                dictionaries={},
                dictionary_folder=None,
                vectors={},
                modules={},
                consumers={},
                capture_folder=None,
                dictionaries_of=(),
            ).to_json(),
            self.config.dictionary_folder is None,
            {name: replace(info, source="").to_json() for name, info in self.infos.items()},
            {name: found.fingerprint for name, found in self.vectors.items()},
            {name: spec.to_json() for name, spec in self.modules.items()},
        ]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


# By format. The loader's file has the reason.
_NOTES = {"connor_rob": "; it was trained on z without the bias of the values, so its features read a constant more"}


def unserved(info: CoderInfo) -> str | None:
    """Why no server can hold a dictionary with these files; None if one can, or could once the site is named."""
    reads, writes, not_served = info.site_in, info.site_out, "which is not served by this version"
    if info.targets is not None and info.activation in RANKED:
        return f"is a cross-layer transcoder with {info.activation}, {not_served}: its features are ranked among all"
    if info.d_in != info.d_out:
        return f"reads {info.d_in} numbers and writes {info.d_out}, {not_served}; served: as many read as written"
    if reads is None or writes is None:
        return None
    places = (reads if reads == writes else reading_site(reads), writes)
    if not {site.partition(".")[0] for site in places} <= set(SERVED_KINDS):
        return f"reads {reads} and writes {writes}, {not_served}; served: {', '.join(SERVED_KINDS)}"
    if order(reads) > order(writes):
        return f"reads {reads} and writes {writes}, which comes before it; expected the same site or a later one"
    if canonical(reads) == canonical(writes) and info.skip:
        return (
            f"adds a skip connection to {writes}, which it also reads, {not_served}; served: another site that it reads"
        )
    if canonical(reads) != canonical(writes) and info.in_norm != "none":
        return f"reads {reads} under the input norm {info.in_norm} and writes {writes}, {not_served}"
    return None


def sited(name: str, source: DictionarySource, info: CoderInfo) -> CoderInfo:
    """The facts with the operator's sites, if there are any; ConfigError where one site cannot stand for both."""
    if not source.site:
        return info
    reads, both, writes = source.site.partition(":")
    for site in (reads, writes) if both else (reads,):
        parse(site)
    if not both and info.site_in is not None and info.site_in != info.site_out:
        raise ConfigError(
            f"dictionary {name!r} reads {info.site_in} and writes {info.site_out or 'another place'}; "
            f"it cannot be moved to one site, got @{source.site}; expected two, such as @mlp_in.20:mlp_out.20"
        )
    return replace(info, site_in=reads, site_out=writes or reads)


def _placed(name: str, source: DictionarySource, info: CoderInfo) -> CoderInfo:
    """The facts with the operator's sites; ConfigError where they have none, or cannot be served."""
    info = sited(name, source, info)
    if info.site_in is None or info.site_out is None:
        raise ConfigError(
            f"dictionary {name!r}: the files in {source.path} do not say where they belong; "
            f"name the site, as in --dictionary {name}={source.path}@resid_post.20"
        )
    if why := unserved(info):
        raise ConfigError(f"dictionary {name!r} {why}")
    parse(info.site_in)
    return info
