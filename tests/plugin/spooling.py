"""Rows on their way into files: what a front end promises, a step that writes them, and what an answer says of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load

from saesteer.engine.brought import Brought
from saesteer.engine.captures import Captures
from saesteer.engine.lanes import Lanes
from saesteer.engine.readouts import Reading, Segment
from saesteer.engine.sinks import Sinks, address
from saesteer.planning.answers import Reported, Rows
from saesteer.planning.plan import END, Readout, Window
from saesteer.plugin.results.kept import Results
from saesteer.plugin.results.spools import Layout, Spool
from tests.plugin.results import results

WIDTH, STEP = 3, 16
SITES = ("a", "b", "c")


def roomy(folder: Path, number: int = 100) -> Results:
    """Results with room for all that is written here, unless said otherwise."""
    return results(folder, number)


def spool_of(found: Results, scope: Sequence[Window] = ((0, END),), rows: int = 30, sites: int = 3) -> Spool:
    """A file for the rows of one readout at some sites."""
    abouts = [{"site": name, "at": "before"} for name in SITES[:sites]]
    [made] = found.promise([Layout(abouts, rows, 2 * WIDTH * sites)])
    assert isinstance(made, Spool)
    return made


def told(made: Spool, scope: Sequence[Window] = ((0, END),)) -> tuple[Rows, dict[str, Any]]:
    """The rows of an answer whose readout goes into this file, and the fields that it fills."""
    fields: dict[str, Any] = {}
    one = Readout("activation", "saesteer.return", SITES[0], SITES[0], False, tuple(scope), inline=False)
    return Rows([Reported(one, tuple(made.layout.abouts), "bfloat16")], fields, [made]), fields


def sinks_of(made: Spool, scope: Sequence[Window] = ((0, END),)) -> Any:
    """Where a worker finds the file."""
    reading = Reading("activation", (SITES[0],), False, scope, False, "none", None, 0, ())
    found = Sinks()
    found.add("r", address([(0, *made.address)]))
    return found.of("r", [reading])


def filed(brought: Brought, name: str) -> list[Any]:
    """What an answer that may end here is told of rows in files, all of which are written then."""
    found = brought.owed([name])
    return found[name].told() if found else [*brought.told().get(name, [])]


def truth(site: int, position: int, noise: int = 0) -> torch.Tensor:
    """The row of a site and a position."""
    return torch.tensor([site, position, site * position + noise]).bfloat16()


class Steps:
    """A worker's side, for one request and one readout of all sites."""

    def __init__(self, scope: Sequence[Window], sites: int = 3) -> None:
        self.names = SITES[:sites]
        self.captures = Captures(dict.fromkeys(self.names, WIDTH), STEP, torch.bfloat16, torch.device("cpu"))
        self.reading = Reading("activation", self.names, False, scope, False, "none", None, 0, ())
        self.lanes, self.sinks = Lanes(), None

    def run(self, sinks: Any, lo: int, hi: int, noise: int = 0, first: int = 2) -> Brought | None:
        """A step of one request's tokens, behind some of another one."""
        for site, name in enumerate(self.names):
            for at in range(lo, hi):
                self.captures.of(name)["before"][first + at - lo] = truth(site, at, noise)
        if sinks is None:
            return self.captures.read([Segment("r", [self.reading], first, lo, hi - lo)], None)
        if sinks is not self.sinks or lo == 0:  # it begins, or was preempted
            self.sinks = sinks
            self.lanes.forget("r")
            self.lanes.add("r", [self.reading], sinks, self.captures.where)
            self.lanes.look(["other", "r"], {"r": sinks})
        reads, files = self.lanes.step(np.array([0, first]), np.array([first, first + hi - lo]), np.array([0, lo]))
        assert not reads
        return self.captures.bring([], None, files, self.lanes.sinks)


def check(found: Results, entries: Any, positions: Sequence[int], noise: int = 0) -> None:
    """These entries name files with the rows of these positions, site by site."""
    assert [entry["site"] for entry in entries] == [*SITES[: len(entries)]]
    for site, entry in enumerate(entries):
        assert entry["positions"] == [*positions] and entry["dtype"] == "bfloat16"
        assert entry["shape"] == [len(positions), WIDTH if positions else 0]
        with found.open(entry["handle"]) as file:
            data = file.read()
        both = load(data)
        assert both["positions"].tolist() == [*positions]
        expected = [truth(site, at, noise) for at in positions]
        assert torch.equal(both["activations"], torch.stack(expected) if expected else torch.zeros(0, 0).bfloat16())
