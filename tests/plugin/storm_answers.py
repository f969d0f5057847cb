"""What the answer to a request of a storm must be, by plain definitions. Knows no engine and no scheduler.

A definition takes the tokens that the model makes up, the numbers at each of them, and which positions were computed
and cached; how steps were cut, who ran beside and what was guessed must not show in an answer.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.sampling_params import RequestOutputKind

from tests.entries import positions, tensor
from tests.plugin.storm_requests import CLOSES, FIRST, KNOWN, STOPS, Asked
from tests.small_world import BIASES, CODERS, VECTORS

HOW = {"mean": lambda rows: rows.mean(0), "max": lambda rows: rows.max(0), "last": lambda rows: rows[-1]}
Got = Mapping[str, Sequence[tuple[list[int], list[int], list[float]]]]  # what a consumer got, see judged


def judged(request: Any) -> Got:
    """What a consumer has got: by kind and place, pieces of positions, tokens and the first number of each row."""
    found: dict[str, list[Any]] = {}
    for rows in request.rows:
        about = rows.about
        place = " ".join((rows.kind, about.get("site", ""), about.get("at", ""), about.get("reduce", "none")))
        first = next(iter(rows.arrays.values())).numpy()[:, 0]
        found.setdefault(place, []).append((rows.positions.tolist(), rows.tokens.tolist(), first.tolist()))
    return found


class Truth:
    """What one choice must be answered.

    Args:
        asked: the choice, at its end.
    """

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        spec = asked.spec or {}
        self.edits: list[dict[str, Any]] = spec.get("edits", [])
        self.reads: dict[str, Any] = spec.get("return", {})
        lengths = [asked.max_tokens, asked.stop_string or KNOWN]
        if asked.stop_token and STOPS in asked.ids[asked.prompt :]:
            lengths.append(asked.ids[asked.prompt :].index(STOPS) + 1)
        self.fired = self._fired()
        self.tokens = min(lengths)
        last = asked.prompt + self.tokens - 2  # the last position that is an input
        self.stopped = next((at for at, _, stops in self.fired if stops and (at < asked.prompt or at <= last)), None)
        if self.stopped is not None:
            self.tokens = min(self.tokens, self.stopped - asked.prompt + 2) if self.stopped >= asked.prompt else 0
        self.end = asked.prompt + max(0, self.tokens - 1)  # behind the last position that is an input
        self.events: list[str] = []  # what has been seen of interest

    def _resolve(self, one: Mapping[str, Any], end: int, *, default: Any = None, first: int = 0) -> set[int]:
        """The positions of the scope of an edit, a rule or a read, up to an end."""
        scope, prompt = one.get("scope", default or {}), self.asked.prompt
        found = set(range(first, end))
        if "positions" in scope:
            found = set()
            for low, high in scope["positions"]:
                start = low + prompt if low < 0 else low
                stop = high if high is not None else prompt if low < 0 else end
                found |= set(range(max(0, start), min(stop, end)))
        if scope.get("prompt"):
            found = {at for at in found if at < prompt}
        if "generated" in scope or "part" in scope:
            found = {at for at in found if at >= prompt}
        if "part" in scope:
            # The token that ends the reasoning belongs to it; behind the answer nobody looks for it.
            said = self.asked.ids[prompt:]
            border = prompt + said.index(CLOSES) if CLOSES in said else KNOWN
            found = {at for at in found if (at <= border) == (scope["part"] == "reasoning")}
        return found

    def edited(self, end: int) -> set[int]:
        """The positions below an end that the edit changes; all storms have the same edit."""
        adds = [self._resolve(one, end, first=1) for one in self.edits if one["op"] == "add"]
        return set().union(*adds)

    def check_cached(self, others: Iterable[Asked]) -> None:
        """Assert that the tokens from the prefix cache are those of somebody with the same tokens and edits."""
        end, edited = self.asked.cached, self.edited(self.asked.cached)
        able = [one for one in others if one.reached >= end and (one is not self.asked or one.preemptions)]
        same = [one for one in able if one.ids[:end] == self.asked.ids[:end]]
        assert any(edited == (set() if one.broken else Truth(one).edited(end)) for one in same), ("cached", end, edited)
        self.events += ["cached edits"] * bool(edited)

    def _score(self, position: int, site: str) -> float:
        row = self.asked.row(position, site).double().numpy()
        return float(row @ VECTORS["any"][None].astype(np.float64)) + BIASES["any"]

    def _fired(self) -> list[tuple[int, int, bool]]:
        """Where each rule fires first, the rule's number among the edits, and whether it stops; in order."""
        found = []
        for number, rule in enumerate(self.edits):
            if rule["op"] not in ("stop", "flag"):
                continue
            run, before = 0, -2
            for at in sorted(self._resolve(rule, KNOWN, first=1)):
                above = self._score(at, rule["when"]["site"]) > rule["when"]["above"]
                run = 0 if not above else run + 1 if at == before + 1 else 1
                before = at
                if run == rule["for"]:
                    found.append((at, number, rule["op"] == "stop"))
                    break
        return sorted(found, key=lambda one: (one[0], one[2], one[1]))

    def _row(self, position: int, site: str, at: str) -> NDArray[np.float32]:
        """The row that an activation has."""
        row: NDArray[np.float32] = self.asked.row(position, site).numpy()
        if at == "after" and site == FIRST:
            for one in self.edits:
                if one["op"] == "add" and position in self._resolve(one, KNOWN, first=1):
                    row = row + np.float32(1)
        return row

    def check(self, fields: Any) -> None:
        """Assert that the answer is this.

        Args:
            fields: the answer's ``saesteer``, whose consumers have settled.
        """
        asked = self.asked
        said = asked.ids[asked.prompt :][: self.tokens]
        assert asked.tokens == said, ("tokens", asked.tokens, said)
        if asked.spec is None:
            assert fields is None, "nobody asked"
            return
        assert fields is not None, "no saesteer"
        self._check_edits(fields)
        for one in self.reads.get("activations", ()):
            self._check_activation(one, fields)
        for one in self.reads.get("probes", ()):
            entries = [entry for entry in fields["probes"] if entry["site"] == one["site"]]
            told = self._told(one, entries, default={"generated": True})
            scores = [score for entry in entries for score in entry["scores"]]
            _near(scores, [self._score(at, one["site"]) for at in told], "scores", one)
        for one in self.reads.get("features", ()):
            self._check_features(one, fields)
        if hidden := self.reads.get("hidden"):
            entries = fields["hidden"]
            if hidden is True:
                told = [at for entry in entries for at in entry["positions"]]
                assert told == ([self.end - 1] if self.tokens else []), ("the last hidden state", told)
            else:
                told = self._told(hidden, entries)
            rows = [row for entry in entries for row in tensor(entry)]
            _near(rows, asked.hidden[told].numpy(), "hidden states", hidden)
        self.events += ["preempted"] * (asked.preemptions > 0) + ["cached"] * (asked.cached > 0)
        self.events += ["choices"] * (asked.choices > 1) + ["stop string"] * (self.tokens == asked.stop_string)
        self.events += ["streamed"] * (asked.kind == RequestOutputKind.DELTA)

    def _check_edits(self, fields: Any) -> None:
        """What was applied, and which rules have fired."""
        flags = []
        for at, number, stops in self.fired:
            if at < self.end:
                flags.append({"edit": f"saesteer.edits[{number}]", "position": at})
                self.events.append("stop" if stops else "flag")
            if stops and at == self.stopped:
                break
        if any(one["op"] in ("stop", "flag") for one in self.edits):
            assert fields["flags"] == flags, (fields["flags"], flags)
        for one in self.edits:
            if one["op"] == "add" and self.tokens:
                [applied] = fields["applied"]
                scope = self._resolve(one, self.end, first=1)
                found = applied["tokens_edited"], applied["tokens_cached"]
                assert sum(found) == len(scope), (found, scope)
                if not self.asked.preemptions:
                    assert found[1] == len(scope & {*range(self.asked.cached)}), (found, scope)
                self.events += ["edited"] * (found[0] > 0) + ["edited part"] * ("part" in one["scope"])

    def _told(self, one: Mapping[str, Any], entries: Any, *, default: Any = None, told: Any = None) -> list[int]:
        """Assert that an answer tells the positions of a read, each once and in order, and return them.

        Args:
            one: the read.
            entries: of the answer; in a stream there may be several.
            default: its scope, where it has none.
            told: positions that a reduction took, which the answer does not list.
        """
        assert entries, ("no entry", one)
        assert not any("cached" in entry for entry in entries[1:]), (one, entries)
        spans = entries[0].get("cached", [])
        assert all(low < high for low, high in spans) and [*map(list, spans)] == sorted(map(list, spans)), (one, spans)
        named = {at for low, high in spans for at in range(low, high)}
        computed = self.asked.computed
        scope = self._resolve(one, self.end, default=default)
        listed = [at for entry in entries for at in positions(entry)] if told is None else []
        if not self.tokens:  # a rule has stopped it somewhere in its prompt
            computed = computed | {*listed} & {*range(self.asked.reached)}  # files may have rows of the step behind it
            scope &= computed | {*range(self.asked.cached)}
        if told is None:
            told = listed
            assert len(entries) == 1 or all(map(positions, entries)), ("an empty entry", one, entries)
        else:
            told = sorted(scope - named)
        assert not named or one.get("cached") == "skip", (one, spans)
        assert all(at < self.asked.cached for at in named), ("never cached", one, spans)
        assert told == sorted(scope - named) and named <= scope, ("positions", one, told, spans, sorted(scope))
        if self.asked.kind == RequestOutputKind.FINAL_ONLY or not self.asked.preemptions:
            assert {*told} == scope & computed, ("what was computed", one, told, sorted(scope & computed), spans)
        self.events += ["cached spans"] * bool(named) + ["part"] * ("part" in one.get("scope", {}))
        return [*told]

    def _check_activation(self, one: Mapping[str, Any], fields: Any) -> None:
        site, at, how = one["site"], one.get("at", "before"), one.get("reduce", "none")
        entries = [entry for entry in fields["activations"] if (entry["site"], entry["at"]) == (site, at)]
        told = self._told(one, entries, told=None if how == "none" else ())
        truth = np.stack([self._row(position, site, at) for position in told] or [np.zeros(0, np.float32)])
        rows = [row for entry in entries for row in _kept(entry)]
        if how == "none":
            _near(rows, truth if told else [], "rows", one)
        else:
            [entry] = entries
            assert entry["tokens"] == len(told), ("tokens", one, entry["tokens"], told)
            assert entry["positions"] == ([told[0], told[-1] + 1] if told else []), ("positions", one, told)
            _near(rows[:1], [HOW[how](truth)] if told else rows[:1], "reduction", one)
            self.events.append("reduced")
        self.events += ["handle"] * ("handle" in entries[0])
        if "consumers" in self.reads:
            got = fields["consumers"]["judge"].get(f"activation {site} {at} {how}", [])
            self._check_consumer(one, got, told)

    def _check_consumer(self, one: Mapping[str, Any], got: Any, told: list[int]) -> None:
        """A consumer gets what answers have; behind a preemption it may have rows of positions that are cached now."""
        self.events.append("consumer")
        if one.get("reduce", "none") != "none":
            assert [piece[0] for piece in got] == ([[told[0], told[-1] + 1]] if told else []), (one, got, told)
            return
        positions = self._check_pieces(got, one["site"], one.get("at", "before"))
        if not self.asked.preemptions:
            assert positions == told, (one, positions, told)
        assert {*positions} <= {*told, *range(self.asked.cached)}, (one, positions, told)

    def _check_pieces(self, pieces: Any, site: str, at: str) -> list[int]:
        """Assert that pieces have each position once, with its token and row; return the positions."""
        positions = [position for piece in pieces for position in piece[0]]
        assert len(positions) == len({*positions}), ("once", site, positions)
        assert [token for piece in pieces for token in piece[1]] == [self.asked.ids[position] for position in positions]
        truth = [self._row(position, site, at)[0] for position in positions]
        _near([number for piece in pieces for number in piece[2]], truth, "rows of a consumer", site)
        return positions

    def check_captured(self, got: Got, tokens: list[int], sites: Sequence[str]) -> None:
        """Assert that a consumer of captured sites has got all that was computed for this choice, and its tokens."""
        assert tokens == self.asked.ids[: self.asked.prompt + self.tokens], "tokens of a consumer"
        wanted = {position for position in self.asked.computed if position < self.end}
        for site in sites:
            positions = {*self._check_pieces(got.get(f"activation {site} before none", []), site, "before")}
            assert positions == wanted, (site, sorted(positions), sorted(wanted))

    def _check_features(self, one: Mapping[str, Any], fields: Any) -> None:
        entries = [entry for entry in fields["features"] if entry["dictionary"] == one["dictionary"]]
        told = self._told(one, entries, default={"generated": True})
        rows = [row for entry in entries for row in entry["rows"]]
        if told:
            strengths = CODERS[one["dictionary"]].encode(torch.stack([self.asked.row(at, FIRST) for at in told]))
            for row, of in zip(rows, strengths.tolist(), strict=True):
                names = [int(name) for name in row["features"]]
                assert {*one["features"]} <= {*names}, (one, row)
                _near([*row["features"].values()], [of[name] for name in names], "features", row)
                strongest = sorted((strength for strength in of if strength > 0), reverse=True)[: one["top_k"]]
                _near([strength for _, strength in row["top"]], strongest, "the strongest", row)
                _near([of[name] for name, _ in row["top"]], strongest, "the strongest", row)


def _kept(entry: Mapping[str, Any]) -> Iterator[NDArray[np.float32]]:
    """The rows of an entry; a result that is kept is deleted."""
    if "handle" not in entry:
        yield from tensor(entry)
        return
    rows = entry["handle"].numbers().copy()
    entry["handle"].delete()
    yield from rows


def _near(found: Any, truth: Any, *what: Any) -> None:
    assert len(found) == len(truth), (*what, len(found), len(truth))
    if len(truth):
        np.testing.assert_allclose(np.asarray(found), np.asarray(truth), rtol=1e-5, atol=5e-4, err_msg=str(what))
