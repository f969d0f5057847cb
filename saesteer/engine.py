"""Dictionaries, tables and work list of one worker, on its device. Knows requests by row, and nothing of vLLM."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from saesteer.coder import CoderInfo, SparseCoder
from saesteer.config import SaesteerConfig
from saesteer.errors import ConfigError
from saesteer.kernels import layout, ops
from saesteer.loaders import load
from saesteer.plan import plan
from saesteer.sites import canonical, parse
from saesteer.spec import Spec
from saesteer.tables import Placement, row_words


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """What the op at one site reads beside the common table and work list."""

    name: str
    index: Tensor  # int32 [1], the site's number in the table; a tensor, so that all compiled layers are alike
    w_enc: Tensor  # [slots, d]
    w_dec: Tensor  # [slots, d]
    b_enc: Tensor  # float32 [slots]
    has_topk: bool

    @property
    def layer(self) -> int:
        """The layer in the site's name."""
        return parse(self.name)[1]


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
        self.sites = {
            name: self._load_site(number, name, infos, width, dtype, device) for number, name in enumerate(names)
        }
        columns = layout.width(len(names), config.max_edits)
        self.table = torch.zeros(max_rows + 1, columns, dtype=torch.int32, device=device)
        self.work = torch.zeros(max_tokens + 1, 4, dtype=torch.int32, device=device)
        self._steered_rows: set[int] = set()  # rows of the table that are not empty
        self._has_work = False

    def _load_site(
        self,
        number: int,
        name: str,
        infos: Mapping[str, CoderInfo],
        width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Site:
        here = [key for key, info in infos.items() if canonical(str(info.site_in)) == name]
        slots = sum(infos[key].features for key in here)
        w_enc = torch.zeros(slots, width, dtype=dtype, device=device)
        w_dec = torch.zeros(slots, width, dtype=dtype, device=device)
        b_enc = torch.zeros(slots, dtype=torch.float32, device=device)
        base = 0
        for key in here:
            coder = load(self.config.dictionaries[key].path, dtype=dtype)
            end = base + coder.info.features
            w_enc[base:end].copy_(coder.w_enc)
            w_dec[base:end].copy_(coder.w_dec)
            b_enc[base:end].copy_(coder.b_enc)
            self.placements[key] = _placement(number, base, infos[key], coder)
            base = end
        index = torch.tensor([number], dtype=torch.int32, device=device)
        return Site(name, index, w_enc, w_dec, b_enc, any(infos[key].activation == "topk" for key in here))

    def row_words(self, spec: Spec, prompt_len: int) -> NDArray[np.int32] | None:
        """What a request's row will hold; None when the spec edits nothing.

        Raises:
            SpecError: the spec is wrong; the front end has refused such a request already.
        """
        groups = plan(spec, self.catalog, prompt_len)
        return row_words(groups, self.placements, len(self.sites), self.config.max_edits) if groups else None

    def fill(self, row: int, words: NDArray[np.int32] | None) -> None:
        """Put a request's words into its row, or empty the row; one copy, ordered with the device's work."""
        if words is not None:
            staged = torch.from_numpy(words)
            if self.device.type == "cuda":
                staged = staged.pin_memory()
            self.table[row, : words.size].copy_(staged, non_blocking=True)
            self._steered_rows.add(row)
        elif row in self._steered_rows:
            self.table[row, : layout.head(len(self.sites))].zero_()
            self._steered_rows.discard(row)

    def schedule(
        self, rows: Tensor, row_offset: int, query_start_loc: Tensor, positions: Tensor, num_requests: int
    ) -> None:
        """Write the work list of a step in which somebody is steered.

        Args:
            rows: int32 or int64 [>= num_requests], less ``row_offset``.
            row_offset: added to every element of ``rows``.
            query_start_loc: int32 [>= num_requests + 1], first token of every request, then their number.
            positions: absolute position of every token.
            num_requests: of this batch.
        """
        ops.map_(self.work, rows, row_offset, query_start_loc, positions, self.table, num_requests)
        self._has_work = True

    def rest(self) -> None:
        """Make the work list empty, for a step in which nobody is steered; free when it is already."""
        if self._has_work:
            self.work[0].zero_()
            self._has_work = False


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


def _placement(site: int, base: int, info: CoderInfo, coder: SparseCoder) -> Placement:
    def array(tensor: Tensor) -> NDArray[np.float32]:
        return np.ascontiguousarray(tensor.float().cpu().numpy())

    threshold = np.zeros(info.features, np.float32) if coder.threshold is None else array(coder.threshold)
    return Placement(
        site, base, info, array(coder.b_enc), threshold, None if coder.max_act is None else array(coder.max_act)
    )
