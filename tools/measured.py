"""Tables of what was measured, from the JSON lines in bench/results; each line has its spread and its commit.

Of a file that grows, the last row of each case counts; of steps, all rows of a mode's last commit. Knows nothing of the
pages, and measures nothing.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench.contenders import ASKS, CONTENDERS
from bench.plot import COSTS, last, latest, read, size, swept

RESULTS = Path(__file__).parents[1] / "bench" / "results"
Row = dict[str, Any]
Table = tuple[Sequence[str], list[Sequence[object]]]

BRINGS = {
    "idle": "nothing",
    "clamp": "one clamp, at one layer",
    "named": "a module of vectors for all layers, by name",
    "inline-16": "vectors for all layers, 16 different sets",
    "shared": "the same vectors for all layers, sent by each",
}
MODELS = {"gemma-3-4b": "4B", "gemma-3-27b": "27B"}
USUAL = {"at_once": 16, "prompt_tokens": 256, "tokens": 256}  # of a run of bench.modes


def stored(name: str) -> list[Row]:
    """All rows of a file; none if there is no such file."""
    path = RESULTS / name
    return read(path) if path.exists() else []


def rows(name: str, *keys: str) -> list[Row]:
    """The rows of a file, of those that are equal in these keys the last."""
    return last(stored(name), *keys)


def joined(rows: Iterable[Row], *keys: str) -> list[Row]:
    """One row for those that are equal in these keys: their median, and the smallest and largest of all."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row.get(key) for key in keys), []).append(row)
    return [
        several[-1]
        | {"percent": median(row["percent"] for row in several)}
        | {"low": min(row["low"] for row in several), "high": max(row["high"] for row in several)}
        for several in found.values()
    ]


def steps() -> Table:
    """GPU time of a step of 16 requests: what the ops of the set that is replayed add, and what all ops would.

    A line is of the commit at which its mode was last measured, by all engines that measured it there: the same kernels
    differ by microseconds from one engine's graphs to the next one's.
    """
    head = ("edits in each request", "model", "smallest set, as served", "graphs with all ops", "commit")
    found = [row for row in stored("steps.jsonl") if row["requests"] == 16 and row.get("prompt_tokens", 256) == 256]
    found = latest([row for row in found if row["mode"] in COSTS], "model", "mode")
    found = joined(found, "model", "mode", "set", "sites")
    lines: list[Sequence[object]] = []
    for model, label in MODELS.items():
        for mode in COSTS:
            mine = sorted((row for row in found if (row["model"], row["mode"]) == (model, mode)), key=size)
            served = (row for row in mine if row["served"])
            lines.extend((BRINGS[mode], label, _percent(row), _percent(mine[-1]), row["commit"]) for row in served)
    return head, lines


def versus() -> Table:
    """Of ``rivals``, the time per token of 16 requests on a 4B model, by system and by what each request asks for."""
    asks = CONTENDERS["saesteer"].asks
    usual = {"model": "gemma-3-4b", "requests": 16}
    found = [
        row for row in rows("rivals.jsonl", "contender", "model", "ask", "requests") if usual.items() <= row.items()
    ]
    shown = {(row["contender"], row["ask"]): _deltas(row)[1] for row in found}
    versions = {row["contender"]: row["version"] for row in found if row["ask"] in asks and row["ask"] != "nothing"}
    lines = [
        (name if name == "saesteer" else f"{name} {version}", *(shown.get((name, ask), "not offered") for ask in asks))
        for name, version in versions.items()
    ]
    return ("each request asks for", *(ASKS[one] for one in asks)), lines


def modes() -> Table:
    """A server's times over those of stock vLLM in the same run."""
    head = (
        "edits in each request",
        "model",
        "runs × requests",
        "first token",
        "time per token",
        "end to end",
        "commit",
    )
    found = rows("modes.jsonl", "model", "way", "mode", "eager", *USUAL)
    usual = [row for row in found if row["way"] == "http" and not row.get("eager") and USUAL.items() <= row.items()]
    lines: list[Sequence[object]] = []
    for model, label in MODELS.items():
        for mode, brings in BRINGS.items():
            own = (row for row in usual if (row["model"], row["mode"]) == (model, mode))
            lines += [
                (brings, label, f"{row['runs']} × {row['requests']}", *_deltas(row), row["commit"]) for row in own
            ]
    return head, lines


def lengths() -> Table:
    """Times per token through ``LLM`` by tokens of an answer and requests, with graphs and without."""
    head = ("model", "requests", "tokens out", "graphs", "edits in each request", "ms, stock", "% over stock", "commit")
    keys = ("model", "at_once", "tokens", "eager", "mode")
    found = filter(swept, rows("modes.jsonl", "way", *keys))
    lines: list[Sequence[object]] = []
    for row in sorted(found, key=lambda row: [row[key] for key in keys]):
        place = MODELS.get(row["model"], row["model"]), row["at_once"], row["tokens"], "no" if row["eager"] else "yes"
        one = row["per_token"]
        brings = BRINGS.get(row["mode"], row["mode"])
        lines.append((*place, brings, f"{one['stock_ms']:.2f}", _deltas(row)[1], row["commit"]))
    return head, lines


def rivals() -> Table:
    """Systems in one rotation: bursts of requests, next to stock vLLM before and after each."""
    head = ("system", "each request asks for", "requests", "first token", "time per token", "end to end", "commit")
    found = [row for row in rows("rivals.jsonl", "contender", "model", "ask", "requests") if "width" not in row]
    lines: list[Sequence[object]] = []
    for row in found:
        pin = f", pins vLLM {row['pins_vllm']}" if row["pins_vllm"] else ""
        version = f" {row['version']}{pin}" if not row["contender"].startswith("saesteer") else ""
        place = f"{row['contender']}{version}", row.get("asked_for", ""), row.get("requests", "")
        told = (f"not run: {row['not_run']}", "", "") if "not_run" in row else _deltas(row)
        lines.append((*place, *told, row["commit"]))
    return head, lines


def gpu_tests() -> Table:
    """The last run of each file of tests on a GPU."""
    head = ("tests", "passed", "failed", "not reached", "GPU", "vLLM", "V2 runner", "commit", "date")
    lines: list[Sequence[object]] = []
    for row in sorted(rows("gpu_tests.jsonl", "file"), key=lambda row: row["file"]):
        wrong = ", ".join(name.partition("::")[2] for name in row["wrong"]) or 0
        left = row["left"] if row["whole"] or row["left"] else "ended in a test"
        about = (row[one] for one in ("gpu", "vllm", "v2_runner", "commit", "date"))
        lines.append((row["file"], row["passed"], wrong, left, *about))
    return head, lines


def on_gpus(version: str) -> str:
    """What ran with a release of vLLM on GPUs: test files by their last stored run, and the newest run."""
    found = [row for row in rows("gpu_tests.jsonl", "file", "vllm") if row["vllm"] == version]
    if not found:
        return "none"
    good = sum(row["whole"] and not (row["wrong"] or row["left"]) for row in found)
    last = max(found, key=lambda row: int(row["at"]))
    cards = ", ".join(sorted({row["gpu"].removeprefix("NVIDIA ") for row in found}))
    return f"{good} of {len(found)} files passed whole ({cards}), the last on {last['date']} at {last['commit']}"


def fork() -> Table:
    """µs of a published fork's kernels, and of ours, without a norm."""
    head = ("tokens × edits of each", "width", "the fork's", "ours", "the fork's commit", "commit")
    found = [row for row in rows("rivals.jsonl", "contender", "case", "width") if "width" in row]
    lines: list[Sequence[object]] = []
    for row in found:
        us = [f"{row[who]:.1f}" for who in ("median", "saesteer_median")] if "not_run" not in row else ["not run", ""]
        lines.append((row["case"], row["width"], *us, str(row["version"])[:9], row["commit"]))
    return head, lines


def block(
    write: Callable[[Sequence[str], Iterable[Sequence[object]]], str], made: Table, command: str, chart: str = ""
) -> str:
    """A table with its chart, or the command that makes its rows where none are stored.

    Args:
        write: makes a table.
        made: head and rows.
        command: that measures them.
        chart: the file in the folder of the results, without which nothing is shown.
    """
    head, lines = made
    if not lines:
        return f"No run is stored yet; `{command}` makes one.\n"
    shown = f"\n![{Path(chart).stem}](../bench/results/{chart})\n" if chart and (RESULTS / chart).exists() else ""
    return write(head, lines) + shown


def _percent(row: Row) -> str:
    median, low, high = (round(row[one], 2) + 0.0 for one in ("percent", "low", "high"))  # no minus in front of a zero
    return f"{median:.2f} ({low:.2f} to {high:.2f})"


def _deltas(row: Row) -> tuple[str, str, str]:
    """Of the three metrics: the median, the smallest and the largest, in % over stock."""
    first, token, whole = (
        f"{row[one]['delta_percent']:+.1f} ({row[one]['min_percent']:+.1f} to {row[one]['max_percent']:+.1f})"
        for one in ("ttft", "per_token", "end_to_end")
    )
    return first, token, whole
