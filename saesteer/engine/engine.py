"""Dictionaries, tables, work list and counters of one worker, on its device. Knows requests by row, nothing of vLLM."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saesteer.config.assets import Assets
from saesteer.engine.captures import Captures
from saesteer.engine.graph_sets import sets_of
from saesteer.engine.parts import Border
from saesteer.engine.pool import Pool
from saesteer.engine.published import Published
from saesteer.engine.readouts import Reading, Source
from saesteer.engine.registry import Held, Registry
from saesteer.engine.table import Arrow, Floats, Placement, Places, Row, Rows, Words, rows_of_features
from saesteer.engine.weights import Site, decodes, fill, probes_of, rooms, rows_read, scratch_for, site_of, source_of
from saesteer.engine.wire import Wire, decode
from saesteer.kernels import layout, ops
from saesteer.kernels.bound import bind
from saesteer.kernels.edit.configs import TILED_ABOVE
from saesteer.kernels.read.features import read_features
from saesteer.kernels.step.updates import News, pack
from saesteer.language.sites import canonical
from saesteer.planning.pins import Pins, Place, counts, settle

__all__ = ["Engine", "Row", "Site"]

_PROBES = 1024  # that are remembered, those read together counted each, with their directions on the device


class Engine:
    """Turns plans into table rows and rows into work lists, on one device.

    All device tensors keep their addresses for life, as captured graphs need.

    Args:
        assets: what the operator asked for.
        width: the width of the model's residual stream.
        layers: the number of layers in the model.
        other_widths: the widths of the kinds of sites that are not as wide as the stream, by kind.
        model: hub id or folder of the model, for those who plan requests with ``catalog``.
        dtype: the dtype of the model, in which the dictionaries' weights are held.
        device: the device where the model runs.
        max_rows: the largest number of requests in one batch.
        max_tokens: the largest number of tokens in one step.
        positions: where the model's runner keeps each token's position in its request; default: a new tensor.
        drafts: the most tokens that a step may guess for one request, each of which has a row of its own.
        stages: the layers with which the later stages of a pipeline begin.
        stage: the number of this one. It has the weights and the op of its own sites only; rows are alike on all.

    Raises:
        ConfigError: a dictionary, vector or module does not fit the model.
        LoadError: a weight file does not hold what it should.
    """

    def __init__(
        self,
        assets: Assets,
        *,
        width: int,
        layers: int,
        other_widths: Mapping[str, int] | None = None,
        model: str | None = None,
        dtype: torch.dtype,
        device: torch.device,
        max_rows: int,
        max_tokens: int,
        positions: Tensor | None = None,
        drafts: int = 0,
        stages: tuple[int, ...] = (),
        stage: int = 0,
    ) -> None:
        self.is_last = stage == len(stages)  # of the pipeline: it has lm_head, and the output of a step
        self.answers = True  # whether what requests read leaves this process; else nothing is made of it
        self.max_rows, self._drafts, all_rows = max_rows, drafts, 1 + max_rows * (1 + drafts)
        self.config = config = assets.config
        infos, names = assets.infos, assets.sites(layers, other_widths)
        self.device = device
        self.dtype = dtype
        self.sites: dict[str, Site] = {}  # with an op in this process
        all_sites: dict[str, Site] = {}
        self._reads: dict[str, Site] = {}  # where each dictionary reads
        self._written: dict[tuple[str, int], Floats] = {}  # what the device does not have yet
        placements: dict[str, Placement] = {}
        catalog = assets.catalog(width=width, layers=layers, other_widths=other_widths, model=model, stages=stages)
        self.catalog, pins = settle(catalog)
        widths = {name: self.catalog.width_at(name) or width for name in names}
        pinned, brought = counts(pins), max_rows * config.inline_rows
        pools: tuple[dict[str, Pool], dict[str, Pool]] = {}, {}

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=device)

        self.table = zeros(all_rows, layout.width(len(names), config.max_edits))
        self.work = zeros(max_tokens + 1, 4)
        self.site_numbers = zeros(len(names), layout.SITE_STRIDE)
        self.site_numbers[:, 0] = ~torch.arange(len(names), dtype=torch.int32)
        self.positions = torch.zeros(max_tokens, dtype=torch.int64, device=device) if positions is None else positions
        kinds = torch.zeros(len(names), dtype=torch.int32)  # on the host, whatever the device
        self.counts = zeros(all_rows, layout.counters(len(names), config.max_edits))
        self.steps = zeros(1)
        self.published = torch.zeros(
            layout.PUBLISHED, 1 + self.counts.numel(), dtype=torch.int32, pin_memory=device.type == "cuda"
        )
        common = {
            "table": self.table,
            "work": self.work,
            "positions": self.positions,
            "cells": zeros(max_tokens),
            "registers": torch.zeros(max_tokens, config.max_edits, device=device),
            "scratch": scratch_for(
                [info for info in infos.values() if not info.by_rows], max(widths.values(), default=width), device
            ),
        }
        slots = {name: max(config.pool_rows, pinned[name]) for name in names}
        ends = {key: assets.ends(key, names) for key in infos}
        used = {site for pair in ends.values() for site in pair}
        used |= {self.catalog.op_site(canonical(site)) for info in infos.values() for site in info.writes}
        self.graph_sets = sets_of(names, used, assets.readable(names, other_widths))
        found, rows = rooms(infos, ends, {name: named + brought for name, named in slots.items()})
        whole = {key: decodes(info, ends[key]) for key, info in infos.items() if not info.by_rows}
        crossed = {site for key in whole if whole[key] and ends[key][0] != ends[key][1] for site in ends[key]}
        kept = torch.zeros(max_tokens, width, dtype=dtype, device=device) if crossed else None
        for room in found.values() if config.dictionary_folder else ():
            room.norms = True  # nobody knows yet what its dictionaries need
        here = [name for name in names if self.catalog.stage_of(name) == stage]
        readable = assets.readable(here, other_widths)
        self.captures = Captures({name: widths[name] for name in here if name in readable}, max_tokens, dtype, device)
        for number, name in enumerate(names):
            own = {"index": self.site_numbers[number, :1], "kinds": kinds[number : number + 1]}
            own |= self.captures.of(name)
            if kept is not None and name in crossed:
                own["kept"] = kept
            # Of another stage's site nothing is kept: PyTorch's meta device has shapes alone.
            place = device if name in here else torch.device("meta")
            site = site_of(name, found[name], common | own, width=widths[name], dtype=dtype, device=place)
            all_sites[name] = site
            if name in here:
                self.sites[name] = site
                bind(site)
            pools[0][name], pools[1][name] = Pool(site.pool, slots[name]), Pool(site.pool + slots[name], brought)
        for key in rows:
            reads, writes = (all_sites[site] for site in ends[key])
            info = infos[key]
            placements[key] = fill(info, reads, writes, rows[key], whole=whole[key])
            self._reads[key] = reads
        self.registry = Registry(*pools, config.inline_rows, self._written)
        self.registry.change(pins, ())
        self.places = Places({name: number for number, name in enumerate(names)}, placements)
        self._rows = Rows(self.places, config.max_dose or 0.0)
        self._sources: dict[str, Source] = {}  # dictionaries that were read
        self._probes: dict[tuple[tuple[bytes, float, int], ...], Source] = {}  # digest, bias and site of each
        self._kinds = kinds.numpy()  # the same memory: writing through a tensor takes microseconds
        self._staged: dict[int, Words] = {}  # rows that the device does not have yet
        self._listed: list[int] = []  # the last rows that came as a list, and where they are on the device
        self._numbers = zeros(2)
        self._filled: dict[int, Row] = {}  # rows of the table that are not empty
        self._held: dict[int, Held] = {}  # slots that a row holds for its request
        self._has_work = False
        self._step = 0  # number of the last step with counters, as the device counts
        self._published = [Published(words, self.counts.shape[1]) for words in self.published.numpy()]
        self._nothing = News(zeros(1), dtype)
        self._nobody = zeros(2)  # rows and starts of an empty batch
        self.flush()

    def make_row(self, admitted: Mapping[str, Any]) -> Row | None:
        """What a request's row will hold; None when it neither edits nor reads.

        Args:
            admitted: as ``saesteer.engine.wire`` encodes its plan.

        Raises:
            Gone: a vector is no longer here.
            torch.OutOfMemoryError: the device has no memory for what the request reads.
        """
        if not admitted["plan"]:
            return None
        wire = decode(admitted["plan"])
        arrows = self.registry.find(wire.digests, admitted["vectors"])
        self.captures.take({op: captured for op, _, _, captured in wire.sites})
        row = self._rows.make(wire, arrows)
        row.readings = tuple(self._reading(wire, arrows, one) for one in wire.readouts if self.answers)
        return row

    def _reading(self, wire: Wire, arrows: Sequence[Arrow], readout: Sequence[Any]) -> Reading | None:
        """What a readout reads, which encode.py has put together."""
        kind, ops, after, windows, last, reduce, source, bias, top_k, features, starts, watched = readout
        if not (ops[0] in self.sites if ops else self.is_last):
            return None
        of: Source | None = None
        named: tuple[int, ...] = ()
        if kind == "features" and isinstance(source, list):
            of = rows_read([arrows[~one] for one in source], bias, self.device, self.dtype)
            named = tuple(range(len(source)))
        elif kind == "features":
            name = wire.dictionaries[source]
            place = self.places.dictionaries[name]
            of = self._sources.get(name) or source_of(place, self.sites[ops[0]])
            self._sources[name] = of
            named = tuple(rows_of_features(place.info, np.array(features, dtype=np.int32)).tolist())
        elif kind == "probe":
            own, places = [arrows[~one] for one in source], {op: at for at, op in enumerate(dict.fromkeys(ops))}
            at, ops = [places[op] for op in ops], [*places]
            key = tuple(zip((one.digest for one in own), bias, at, strict=True))
            of = self._probes.pop(key, None) or probes_of(own, bias, at, self.device, self.dtype)
            self._probes[key] = of  # the last used stands last
            while len(self._probes) > 1 and sum(map(len, self._probes)) > _PROBES:
                del self._probes[next(iter(self._probes))]
        return Reading(kind, tuple(ops), after, windows, last, reduce, of, top_k, named, starts, tuple(watched) or None)

    def pin(self, pins: Pins, unpinned: Collection[Place]) -> None:
        """Keep vectors for names; the device gets new ones with the next work list, like all that a row needs.

        Not at once: between two steps vLLM may sleep, and then the memory of the weights is not there.

        Raises:
            RegistryError: there is too little room; then nothing new is pinned.
        """
        self.registry.change(pins, unpinned)

    def fill(self, row: int, content: Row | None, border: Border | None = None) -> None:
        """Put a request into its row, or empty the row; the device sees it with the next work list.

        Args:
            content: None empties the row.
            border: what the parts of the answer wait for, if the content has any.

        Raises:
            Gone: there is no slot for a vector whose name was replaced or deleted; then the row is empty.
        """
        if self._filled.pop(row, None) is None and content is None:
            return
        self.release(row)
        words = self._staged[row] = np.zeros(self.table.shape[1], dtype=np.int32)
        self._staged |= dict.fromkeys(self.drafts_of(row), words)
        if content is not None:
            self._held[row] = self.registry.take(content)
            self._filled[row] = content
            words[: len(content.words)] = content.words
            if border is not None:
                border.put(words, len(self.places.sites))

    def drafts_of(self, row: int) -> range:
        """Of a row, those of the tokens that a step guesses for its request: the same words, counters to be dropped."""
        first = 1 + self.max_rows + (row - 1) * self._drafts
        return range(first, first + self._drafts)

    def forget_drafts(self) -> None:
        """Set what guessed tokens have counted to zero, ordered with the device's work."""
        self.counts[1 + self.max_rows :].zero_()

    def release(self, row: int) -> None:
        """Free the slots of a row whose request has ended. Its words stay until it is filled, and nobody reads them."""
        held = self._held.pop(row, None)
        if held is not None:
            self.registry.release(held)

    def counted(self, row: int, counters: int) -> Tensor:
        """What a row has counted so far (layout.py), int32 [counters]; a copy, ordered with the device's work."""
        counts = self.counts[row, :counters]
        return torch.zeros_like(counts) if row in self._staged else counts.clone()

    def flush(self) -> None:
        """Copy what is staged to the device, ordered with its work; the work list stays as it is."""
        if self._staged or self._written:
            self._map(self._nobody, 0, self._nobody, -1, 0, 1)

    def _map(
        self, rows: Tensor | list[int], row_offset: int, starts: Tensor, requests: int, tokens: int, span: int
    ) -> None:
        """Make one copy, if anything is new, and launch one kernel. They leave alone what a step in flight reads, since
        they come after it in the device's order."""
        news, listed = self._nothing, rows if isinstance(rows, list) else self._listed
        numbers = [] if listed == self._listed else listed
        there = self._numbers if isinstance(rows, list) else rows
        if self._staged or self._written or numbers:
            slots, values = [], []
            for (name, slot), one in self._written.items():
                if name not in self.sites:
                    continue  # another stage has it
                both = self.sites[name].w_enc, self.sites[name].w_dec
                alone = one.ndim == 1  # a direction reads and writes
                slots += [(*both, slot)] if alone else [(weights, weights, slot) for weights in both]
                values += [one] if alone else [*one]
            news, beside = pack(self.table, self.dtype, self._staged, slots, values, numbers)
            self._staged = {}
            self._written.clear()
            if numbers:
                there = self._numbers = beside
                self._listed = numbers
        batch = there, row_offset, starts, self.table, self.counts, self.site_numbers, news
        ops.map_(self.work, *batch, requests, tokens, span)

    def schedule(
        self,
        rows: Tensor | list[int],
        row_offset: int,
        query_start_loc: Tensor,
        num_requests: int,
        num_tokens: int,
        kinds: Words,
        *,
        changed: bool = True,
        counting: bool = True,
    ) -> None:
        """Write the work list of a step with steered requests; positions are read where the runner keeps them.

        Args:
            rows: [>= num_requests], less ``row_offset``; int32 or int64 on the device, or a list that it may lack.
            row_offset: added to every element of ``rows``.
            query_start_loc: int32 [>= num_requests + 1], the first token of every request, then the number of tokens.
            num_requests: the number of requests in this batch.
            num_tokens: the number of tokens in this batch.
            kinds: [sites], the kinds of all its rows together.
            changed: False when the last list is valid for this step, too.
            counting: whether one of these rows has counters, so that the device numbers the step and publishes them.
        """
        if counting:
            self._step = (self._step + 1) % layout.STEPS
        if not changed and self._has_work and not self._staged:
            return
        span = layout.TILE if num_tokens > TILED_ABOVE else 1
        self._map(rows, row_offset, query_start_loc, num_requests, num_tokens, span)
        self._kinds[:] = kinds
        self._has_work = True

    def find_borders(
        self, rows: Tensor | list[int], row_offset: int, query_start_loc: Tensor, num_requests: int, tokens: Tensor
    ) -> None:
        """Let the parts of answers begin and end where this step's tokens say so.

        Args:
            rows, row_offset, query_start_loc, num_requests: as for ``schedule``, behind which it comes in each step of
                which a row has ``parts``.
            tokens: int32 [>= tokens of the step], the ids that are inputs, on the device.
        """
        there = self._numbers if isinstance(rows, list) else rows
        sites = len(self.places.sites)
        ops.border_(self.table, there, row_offset, query_start_loc, tokens, self.positions, sites, num_requests)

    def last_published(self) -> tuple[int, Published]:
        """The number of the last step that was counted, and its counters, which are ready once its tokens are."""
        return self._step, self._published[self._step % layout.PUBLISHED]

    def warm_map(self, rows: Tensor, query_start_loc: Tensor) -> None:
        """Compile the kernels that write a list, for tensors like these; the list is empty afterwards."""
        for span in (1, layout.TILE):
            self._map(rows, 0, query_start_loc, 0, 0, span)
        self._map(self._nobody, 0, self._nobody, 0, 0, 1)  # as flush does, with types of its own

    def warm_reads(self) -> None:
        """Load what reads of features launch, and make the memory in which rows for files come home."""
        for key, place in self.places.dictionaries.items():
            site = self._reads[key]
            if site.before is not None and key not in self._sources:
                source = self._sources[key] = source_of(place, site)
                assert source.encoder is not None
                zeros = torch.zeros(1, site.width, dtype=self.dtype, device=self.device)
                read_features(zeros, source.encoder, 1, self._nobody)
        self.captures.warm()

    @contextmanager
    def warming(self) -> Iterator[Callable[[str], list[int]]]:
        """Let every kernel launch on an empty work list; yield what numbers of tokens make all variants of a site."""
        self.work[0].zero_()
        self._kinds[:] = layout.KERNELS
        try:
            yield lambda site: self.sites[site].launch_sizes(len(self.work) - 1)
        finally:
            self._kinds[:] = 0

    def rest(self) -> None:
        """Empty the work list for a step without steered requests; this costs nothing when it is already empty."""
        if self._has_work:
            self.work[0].zero_()
            self._kinds[:] = 0
            self._has_work = False

    def edit(self, site: Site, stream: Tensor) -> None:
        """Apply the edits of a site to a stream [tokens, d] that is one tensor, in place."""
        ops.edit_(stream, None, None, self.counts, site.index, layout.BARE, 0.0, 0.0)
