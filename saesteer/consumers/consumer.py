"""What a consumer is, and what it gets of a request. Knows no queue, no thread and no engine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from saesteer.errors import ConfigError, SaesteerError
from saesteer.language.fields import fail, listing, step

if TYPE_CHECKING:
    from torch import Tensor

_AROUND = 700  # bytes of memory, as measured: what one piece of rows takes beside its numbers
SIZES = {"bfloat16": 2, "float16": 2, "float32": 4, "int32": 4}  # bytes of a number

Numbers = NDArray[np.int64]


class ConsumerError(SaesteerError):
    """A consumer failed for one request; the message is one sentence for the client, who gets a 500."""


class DiskError(ConsumerError):
    """A consumer could not write what it keeps; the message names no path of the operator's. The client gets a 507.

    Attributes:
        rows: how many rows were lost, for the metrics.
    """

    rows = 0


@dataclass(frozen=True, slots=True, eq=False)
class Array:
    """Numbers as the worker sent them, to the bit."""

    dtype: str  # one of SIZES
    shape: tuple[int, int]  # rows, numbers in each
    data: bytes  # little-endian, row by row

    def numpy(self) -> NDArray[Any]:
        """The array [rows, numbers]; bfloat16 becomes float32, which holds every bfloat16."""
        if self.dtype == "bfloat16":
            wide = np.frombuffer(self.data, "<u2").astype("<u4") << 16
            return wide.view("<f4").reshape(self.shape)
        return np.frombuffer(self.data, np.dtype(self.dtype).newbyteorder("<")).reshape(self.shape)

    def tensor(self) -> "Tensor":
        """The tensor [rows, numbers] in its own dtype."""
        import torch

        return torch.frombuffer(bytearray(self.data), dtype=getattr(torch, self.dtype)).reshape(self.shape)


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """What one read of a request has for some positions, ascending here; each of them comes once.

    ``arrays`` has ``data`` for activations and hidden states, ``scores`` for probes; for features ``indices`` (-1 where
    fewer are active), ``strengths`` and ``named``. A reduction comes as one piece at the end: its positions are the
    first one and the one behind the last, and it has no tokens.
    """

    kind: str  # activation, hidden, features or probe
    about: Mapping[str, Any]  # site, at, layers, dictionary, layer, probe, reduce: what answers say of the read
    positions: Numbers  # [rows], absolute
    tokens: Numbers  # [rows], the ids of the tokens there
    arrays: Mapping[str, Array]

    def __len__(self) -> int:
        return next((array.shape[0] for array in self.arrays.values()), 0)

    @property
    def words(self) -> tuple[str, ...]:
        """The kind and what tells the read from others of its kind; its site names the layers."""
        return self.kind, *(str(value) for word, value in self.about.items() if word != "layers")

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes: one row of a probe has 4 bytes of numbers, and all else around them."""
        numbers = sum(len(array.data) for array in self.arrays.values())
        return numbers + self.positions.nbytes + self.tokens.nbytes + _AROUND

    def part(self, start: int, stop: int) -> "Rows":
        """The rows from ``start`` up to, not including, ``stop``."""
        arrays = {}
        for name, array in self.arrays.items():
            size = array.shape[1] * SIZES[array.dtype]
            found = array.data[start * size : stop * size]
            arrays[name] = Array(array.dtype, (min(stop, array.shape[0]) - start, array.shape[1]), found)
        return Rows(self.kind, self.about, self.positions[start:stop], self.tokens[start:stop], arrays)


@dataclass(slots=True, eq=False)
class Request:
    """One answer to a request, as a consumer sees it."""

    id: str  # as the client knows the request
    choice: int  # the answer's number, of n
    parameters: Any  # what ``Consumer.check`` made of the request's parameters
    captured: bool = False  # the operator asked for it, and no answer will have the result
    prompt_len: int = 0
    tokens: Sequence[int] = ()  # ids of the prompt and the answer; complete when ``end`` is called
    finish: str | None = None  # stop or length; set when ``end`` is called
    rows: list[Rows] = field(default_factory=list)  # what has come, where ``take`` is the base class's


class Consumer:
    """The base class of consumers. All methods but ``__init__`` and ``check`` are called in one thread of its own.

    Args:
        options: the operator's, without those that every consumer has.

    Raises:
        ConfigError: an option is wrong; the server does not start then.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        if options:
            raise ConfigError(f"has the options {listing(options)}, expected none")

    def check(self, parameters: Mapping[str, Any], at: str) -> Any:
        """Check a request's parameters, at the door; here there are none.

        Args:
            parameters: the JSON object that the request gives.
            at: its path in the request.

        Returns:
            What ``Request.parameters`` will be, one object for all answers of the request.

        Raises:
            SpecError: a parameter is wrong; any ValueError becomes one. The client gets a 400.
        """
        for name in parameters:
            fail(step(at, name), "unknown_field", "is not a parameter of this consumer, expected none")

    def take(self, request: Request, rows: Rows) -> None:
        """Take rows that have come; here they are kept in ``request.rows`` until the end."""
        request.rows.append(rows)

    def end(self, request: Request) -> Any:
        """Take the end of an answer.

        Returns:
            What the answer has under ``saesteer.consumers.NAME``: JSON of at most 65,536 characters, such as a verdict.
        """

    def drop(self, request: Request) -> None:
        """Forget a request that was abandoned, failed or lost rows; ``end`` is not called for it."""

    def close(self) -> None:
        """Finish: the server stops."""
