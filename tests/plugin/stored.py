"""What consumers of tensors have stored in their folder."""

import time
from pathlib import Path
from typing import Any

from safetensors import safe_open

from saesteer.consumers.shards import shards

SITE = "resid_post.20"
Rows = dict[int, tuple[int, bytes]]  # by position: the token's id and the row


def written(folder: Path, site: str = SITE) -> dict[tuple[str, int], Rows]:
    """The rows of the activations at a site in shards, by request and choice; none is there twice."""
    found: dict[tuple[str, int], Rows] = {}
    for tensors, about in shards(folder):
        with safe_open(tensors, "np") as file:
            for piece in about["pieces"]:
                for name, first in piece["first"].items():
                    told = about["tensors"][name]
                    if (told["kind"], told["site"]) != ("activation", site):
                        continue
                    rows = file.get_slice(name)[first : first + piece["rows"]]
                    mine = found.setdefault((piece["request"], piece["choice"]), {})
                    for row, at, token in zip(rows, piece["positions"], piece["tokens"], strict=True):
                        assert at not in mine
                        mine[at] = token, row.tobytes()
    return found


def captured(llm: Any, folder: Path, site: str = SITE) -> dict[tuple[str, int], Rows]:
    """What has been captured, once that has been written."""
    [runner] = [
        one for one in llm.llm_engine.input_processor.saesteer_door.consumers.capturing if one.name == "capture"
    ]
    while runner._queue or runner._held:
        time.sleep(0.01)
    runner.consumer._publish(runner.consumer._captured)
    return written(folder / "captured", site)


def tensors_in(shard: Path) -> dict[str, tuple[list[int], bytes]]:
    """What a shard of one answer has: by the tensor's name, positions and rows."""
    found: dict[str, tuple[list[int], bytes]] = {}
    for tensors, about in shards(shard):
        with safe_open(tensors, "np") as file:
            for piece in about["pieces"]:
                for name, first in piece["first"].items():
                    positions, rows = found.get(name, ([], b""))
                    more = file.get_slice(name)[first : first + piece["rows"]]
                    found[name] = [*positions, *piece["positions"]], rows + more.tobytes()
    return found
