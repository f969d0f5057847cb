"""The consumer ``filesystem``: what requests read, as shards in a folder of the operator. Knows no queue.

A request gets shards of its own, below ``requests/TAG``, which are on the disk when its answer comes. What the operator
captures shares shards below ``captured``, which are published when they are full. A request gives only a tag, the name
of a folder, so none can get in the way of what is captured.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from saesteer.consumers.consumer import Consumer, DiskError, Request, Rows
from saesteer.consumers.shards import Place, Shard
from saesteer.errors import ConfigError
from saesteer.language.fields import Fields, fail, integer, known_field, show

_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", re.ASCII)
_OPTIONS = ("folder", "shard_mib")


@dataclass(slots=True, eq=False)
class _Series:
    """The shards of one request, or all that is captured."""

    below: str
    shard: Shard = field(default_factory=Shard)
    published: list[str] = field(default_factory=list)
    rows: int = 0  # in published shards
    failed: DiskError | None = None


class Filesystem(Consumer):
    """Writes shards.

    Args:
        options: ``folder``, and ``shard_mib``: how large a shard is at most, and how much all that are not published
            hold in memory; default 64.

    Raises:
        ConfigError: an option is wrong, or the folder cannot be written to.
    """

    def __init__(self, options: Fields) -> None:
        for name in options:
            if name not in _OPTIONS:
                known_field(name, "options", _OPTIONS)
        folder = options.get("folder")
        if not isinstance(folder, str) or not folder:
            found = "no folder" if folder is None else f"the folder {show(folder)}"
            raise ConfigError(f'has {found}, expected a path, as in --consumer \'filesystem={{"folder": "runs"}}\'')
        self._most = integer(1, 4096)(options.get("shard_mib", 64), "shard_mib") << 20
        self._place = Place(Path(folder).expanduser())
        self._captured = _Series("captured")
        self._series: dict[Request, _Series] = {}

    def check(self, parameters: Fields, at: str) -> str:
        """The tag: the folder, below ``requests`` in the operator's, of the request's shards."""
        for name in parameters:
            if name != "tag":
                known_field(name, at, ["tag"])
        tag = parameters.get("tag", "untagged")
        if not isinstance(tag, str):
            fail(f"{at}.tag", "wrong_type", f"got {show(tag)}, expected a text")
        if not _TAG.fullmatch(tag):
            found = f"got {show(tag)}, expected 1 to 64 letters of a to z, A to Z, 0 to 9, _ and -, not _ or - first"
            fail(f"{at}.tag", "out_of_range", found)
        return tag

    def take(self, request: Request, rows: Rows) -> None:
        """Append rows; what is full is published."""
        series = self._captured if request.captured else self._of(request)
        for part in self._parts(series, rows):
            if series.failed is not None:
                series.failed.rows += len(part)
                continue
            series.shard.add(request.id, request.choice, part)
        every = self._captured, *self._series.values()
        while sum(one.shard.nbytes for one in every) > self._most:
            self._publish(max(every, key=lambda one: one.shard.nbytes))
        self._refuse_failed(series)

    def end(self, request: Request) -> Any:
        """The tag, the shards and how many rows are in them, all on the disk."""
        if request.captured:
            return None
        series = self._of(request)
        self._publish(series)
        self._refuse_failed(series)
        del self._series[request]
        return {"tag": request.parameters, "shards": series.published, "rows": series.rows}

    def drop(self, request: Request) -> None:
        """Forget what is not published."""
        self._series.pop(request, None)

    def close(self) -> None:
        """Publish what is captured so far."""
        self._publish(self._captured)
        self._place.close()
        self._refuse_failed(self._captured)

    def _of(self, request: Request) -> _Series:
        return self._series.setdefault(request, _Series(f"requests/{request.parameters}"))

    def _parts(self, series: _Series, rows: Rows) -> Any:
        """The rows in parts that fit into a shard; shards that they fill are published in between."""
        size, start = max(1, rows.nbytes // max(1, len(rows))), 0
        while start < len(rows):
            room = (self._most - series.shard.nbytes) // size
            if room < 1 and series.shard.rows:
                self._publish(series)
                continue
            stop = min(len(rows), start + max(1, room))
            yield rows if stop - start == len(rows) else rows.part(start, stop)
            start = stop

    def _publish(self, series: _Series) -> None:
        """Publish a series' shard; if that fails, the error is for its own request, whichever is served now."""
        shard, series.shard = series.shard, Shard()
        before = series.failed
        if shard.rows:
            try:
                series.published.append(self._place.publish(shard, series.below))
                series.rows += shard.rows
            except OSError as exc:
                series.failed = DiskError(f"a shard of {shard.rows} rows could not be written: {exc.strerror or exc}")
                series.failed.rows = shard.rows + (before.rows if before else 0)
        if series is self._captured:
            series.published.clear()

    def _refuse_failed(self, series: _Series) -> None:
        failed = series.failed
        if series is self._captured:
            series.failed = None  # the disk may have room again
        if failed is not None:
            raise failed
