"""Dictionaries, tables and work list of one worker, on its device. Knows requests by row, and nothing of vLLM."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from saesteer.coder import CoderInfo
from saesteer.config import SaesteerConfig
from saesteer.errors import ConfigError
from saesteer.kernels import layout, ops
from saesteer.plan import plan
from saesteer.sites import canonical, parse
from saesteer.spec import Spec
from saesteer.tables import Placement, Row, make_row
from saesteer.weights import Site, load_site, scratch_for

_TILED_ABOVE = 512  # tokens of a step; a step of more is worked on in tiles

__all__ = ["Engine", "Row", "Site", "check_fit"]


class Engine:
    """Turns specs into table rows and rows into work lists, on one device.

    All device tensors keep their addresses for life, as captured graphs need.

    Args:
        config: what the operator asked for.
        width: of the model's residual stream.
        layers: of the model.
        dtype: of the model; the dictionaries' weights are held in it.
        device: where the model runs.
        max_rows: requests in one batch at most.
        max_tokens: tokens in one step at most.

    Raises:
        ConfigError: a dictionary does not fit the model.
        LoadError: a weight file is not what it should be.
    """

    def __init__(
        self,
        config: SaesteerConfig,
        *,
        width: int,
        layers: int,
        dtype: torch.dtype,
        device: torch.device,
        max_rows: int,
        max_tokens: int,
    ) -> None:
        infos = config.describe()
        names = config.all_sites(infos)
        check_fit(infos, names, width=width, layers=layers)
        self.config = config
        self.catalog = config.catalog(infos)
        self.device = device
        self.placements: dict[str, Placement] = {}
        self.sites: dict[str, Site] = {}
        paths = {key: source.path for key, source in config.dictionaries.items()}
        for number, name in enumerate(names):
            here = {key: info for key, info in infos.items() if canonical(str(info.site_in)) == name}
            self.sites[name], placements = load_site(number, name, here, paths, width=width, dtype=dtype, device=device)
            self.placements |= placements

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=device)

        self.table = zeros(max_rows + 1, layout.width(len(names), config.max_edits))
        self.work = zeros(max_tokens + 1, 4)
        self.kinds = torch.zeros(1, dtype=torch.int32)  # on the host, whatever the device
        self.cells = zeros(max_tokens)
        self.counts = zeros(max_rows + 1, config.max_edits)
        self.scratch = scratch_for(list(self.sites.values()), width, device)
        self._kinds = self.kinds.numpy()  # the same memory: writing through a tensor takes microseconds
        self._empty = np.zeros(layout.head(len(names)), dtype=np.int32)
        self._staged: dict[int, Row | None] = {}  # rows that the device does not have yet
        self._steered_rows: set[int] = set()  # rows of the table that are not empty
        self._has_work = False

    def make_row(self, spec: Spec, prompt_len: int) -> Row | None:
        """What a request's row will hold; None when the spec edits nothing.

        Raises:
            SpecError: the spec is wrong; the front end has refused such a request already.
        """
        groups = plan(spec, self.catalog, prompt_len)
        return make_row(groups, self.placements, len(self.sites), self.config.max_edits) if groups else None

    def fill(self, row: int, content: Row | None) -> None:
        """Put a request into its row, or empty the row; the device sees it with the next work list."""
        if content is not None:
            self._steered_rows.add(row)
            self._staged[row] = content
        elif row in self._steered_rows:
            self._steered_rows.discard(row)
            self._staged[row] = None

    def flush(self) -> None:
        """Bring the staged rows to the device: one copy for all of them, ordered with the device's work."""
        if not self._staged:
            return
        words = [self._empty if content is None else content.words for content in self._staged.values()]
        longest = max(map(len, words))
        staged = np.zeros((len(words), 1 + longest), dtype=np.int32)
        staged[:, 0] = list(self._staged)
        for line, found in zip(staged, words, strict=True):
            line[1 : 1 + len(found)] = found
        self._staged.clear()
        tensor = torch.from_numpy(staged)
        if self.device.type == "cuda":
            # A fresh pinned buffer each time; torch reuses its memory once the copy is done.
            tensor = tensor.pin_memory().to(self.device, non_blocking=True)
        rows = tensor[:, 0].long()
        self.table[:, :longest].index_copy_(0, rows, tensor[:, 1:])
        self.counts.index_fill_(0, rows, 0)

    def schedule(
        self,
        rows: Tensor,
        row_offset: int,
        query_start_loc: Tensor,
        positions: Tensor,
        num_requests: int,
        num_tokens: int,
        kinds: int,
    ) -> None:
        """Write the work list of a step in which somebody is steered.

        Args:
            rows: int32 or int64 [>= num_requests], less ``row_offset``.
            row_offset: added to every element of ``rows``.
            query_start_loc: int32 [>= num_requests + 1], first token of every request, then their number.
            positions: absolute position of every token.
            num_requests: of this batch.
            num_tokens: of this batch.
            kinds: of all its rows together.
        """
        self.flush()
        span = layout.TILE if num_tokens > _TILED_ABOVE else 1
        ops.map_(self.work, rows, row_offset, query_start_loc, positions, self.table, num_requests, span)
        self._kinds[0] = kinds
        self._has_work = True

    def rest(self) -> None:
        """Make the work list empty, for a step in which nobody is steered; free when it is already."""
        if self._has_work:
            self.work[0].zero_()
            self._kinds[0] = 0
            self._has_work = False

    def edit(self, site: Site, stream: Tensor) -> None:
        """Apply the edits of a site to a stream [tokens, d] that is one tensor, in place."""
        ops.edit_(
            stream,
            None,
            None,
            self.table,
            site.index,
            self.work,
            self.kinds,
            site.w_enc,
            site.w_dec,
            site.b_enc,
            site.threshold,
            site.b_dec,
            self.cells,
            self.counts,
            self.scratch,
            layout.BARE,
            0.0,
            0.0,
            site.dense_size,
            site.has_norms,
        )


def check_fit(infos: Mapping[str, CoderInfo], sites: Sequence[str], *, width: int, layers: int) -> None:
    """Refuse dictionaries and sites that the model does not have.

    Raises:
        ConfigError: naming the dictionary or site, and what the model has.
    """
    for name, info in infos.items():
        if info.d_in != width:
            raise ConfigError(f"dictionary {name!r} is {info.d_in} wide, but this model is {width} wide")
    for site in sites:
        if parse(site)[1] >= layers:
            raise ConfigError(f"site {site} does not exist: this model has layers 0 to {layers - 1}")
