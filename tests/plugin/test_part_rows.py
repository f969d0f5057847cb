"""Edits of a part of an answer behind both runners' hooks, with a made-up scheduler. Starts no engine of vLLM.

Requests arrive, wait, are preempted, come back partly cached, and end, in fewer rows than there are requests. Tokens of
each step are edited as the whole sequence says, though the host may know the last of them only later.
"""

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="vLLM is not installed")

from saesteer.engine.engine import Engine
from saesteer.language.spec import from_json
from saesteer.planning.plan import END
from saesteer.plugin import reasoning
from saesteer.plugin.door import admission, borders
from saesteer.plugin.worker.steering import Steering
from saesteer.plugin.worker.worker import _wrap_v1, _wrap_v2
from tests.parts import CLOSES, EDITS, explicit
from tests.rows import row_of
from tests.small_engine import make_engine
from tests.small_world import NARROW, WIDTH

PROMPT, TOKENS = 4, 12  # of each request, as in test_answer_parts.py
UNKNOWN = -1  # a token that was sampled in the last step: the host learns it while the next one runs
ROWS = 4


class Parser:
    """As vLLM's, of a model whose prompt never ends the reasoning."""

    reasoning_end_token_ids = frozenset({CLOSES})

    def is_reasoning_end(self, _: Any) -> bool:
        return False

    def is_reasoning_end_streaming(self, _: Any, new: list[int]) -> bool:
        return CLOSES in new


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, Engine]:
    """One behind the hooks, and one that says what is right."""
    found = [make_engine(tmp_path_factory.mktemp("rows"), max_edits=32) for _ in range(2)]
    for one in found:
        one.catalog = replace(one.catalog, parts=True)
    return found[0], found[1]


@dataclass
class Asked:
    """A request: all tokens that it will have, the parts of its edits, and what its streams become."""

    name: str
    ids: list[int]
    parts: list[tuple[int, str]]  # of EDITS, and which part
    x: torch.Tensor
    wanted: torch.Tensor
    extra: dict[str, Any] = field(default_factory=dict)
    slot: int = -1
    computed: int = 0
    reached: int = 0  # the most that were computed
    last: int = -2  # the number of the last step that had it

    def data(self, step: int) -> Any:
        """vLLM's NewRequestData."""
        params = SimpleNamespace(extra_args=self.extra, stop=[])
        known = self.known(step)
        return SimpleNamespace(
            req_id=self.name,
            prompt_token_ids=self.ids[:PROMPT],
            prefill_token_ids=known,
            sampling_params=params,
            num_computed_tokens=self.computed,
        )

    def known(self, step: int) -> list[int]:
        """The token ids that the host has: one more than were computed, but for what the last step has sampled."""
        found = self.ids[: max(PROMPT, self.reached + 1)]
        if self.last == step - 1 and len(found) > PROMPT:
            found[-1] = UNKNOWN
        return found


def request(name: str, engine: Engine, data: st.DataObject) -> Asked:
    """One with its edits spelled out for the engine that says what is right."""
    ids = data.draw(st.lists(st.sampled_from([1, 2, CLOSES]), min_size=TOKENS, max_size=TOKENS), label="ids")
    number = st.sampled_from([0, 1, 4, 5])
    parts = data.draw(st.lists(st.tuples(number, st.sampled_from(["reasoning", "answer"])), max_size=2), label="parts")
    parts = [one for at, one in enumerate(parts) if one[0] not in {before for before, _ in parts[:at]}]
    x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(len(name)))
    made = Asked(name, ids, parts, x, x.clone())
    if parts:
        spec = {"edits": [{**EDITS[at], "scope": {"part": part}} for at, part in parts]}
        params = SimpleNamespace(extra_args=None, max_tokens=None)
        asked = SimpleNamespace(prompt_token_ids=ids[:PROMPT], sampling_params=params)
        admission.Door().admit(from_json(spec), engine.catalog, asked)
        made.extra = asked.sampling_params.extra_args
    border = next((at for at in range(PROMPT, TOKENS) if ids[at] == CLOSES), END)
    said = [one for at, part in parts if (one := explicit(EDITS[at], part, border)) is not None]
    if said:
        content = row_of(engine, from_json({"edits": said}), PROMPT)
        assert content is not None
        engine.fill(1, content)
        engine.positions[:TOKENS] = torch.arange(TOKENS)
        engine.schedule([1], 0, torch.tensor([0, TOKENS], dtype=torch.int32), 1, TOKENS, content.kinds)
        for site in NARROW:
            engine.edit(engine.sites[site], made.wanted)
        engine.fill(1, None)
    return made


class V2:
    """The V2 runner's calls: slots for as long as a request runs; one that was preempted comes as a new one."""

    def __init__(self, engine: Engine) -> None:
        self.state, self.steering = Mock(), Steering(engine)
        _wrap_v2(Mock(), self.state, self.steering)
        self.free = [*range(ROWS)]

    def room(self) -> int:
        return len(self.free)

    def begin(self, one: Asked, step: int, new: bool) -> None:
        one.slot = self.free.pop(0)
        self.state.add_request(one.slot, one.data(step))

    def leave(self, one: Asked, ended: bool) -> None:
        self.free.append(one.slot)
        one.slot = -1
        self.state.remove_request(one.name)

    def run(self, batch: list[Asked], starts: torch.Tensor, ids: torch.Tensor, step: int) -> None:
        about = {"req_ids": [one.name for one in batch], "num_reqs": len(batch), "num_tokens": len(ids)}
        slots = torch.tensor([one.slot for one in batch], dtype=torch.int32)
        self.state.prepare_inputs(
            SimpleNamespace(**about, idx_mapping=slots, query_start_loc=starts, input_ids=ids), None
        )


class V1:
    """The V1 runner's calls: rows are our own, fewer than running requests, and others take those of who waits."""

    def __init__(self, engine: Engine) -> None:
        self.runner, self.steering = Mock(), Steering(engine)
        self.runner.requests = {}
        _wrap_v1(self.runner, self.steering)
        self.new: list[Any] = []
        self.resumed: dict[str, int] = {}
        self.ended: list[str] = []

    def room(self) -> int:
        return 99

    def begin(self, one: Asked, step: int, new: bool) -> None:
        one.slot = 0
        if new:
            self.new.append(one.data(step))
        else:
            self.resumed[one.name] = one.computed

    def leave(self, one: Asked, ended: bool) -> None:
        one.slot = -1
        if ended:
            self.ended.append(one.name)

    def run(self, batch: list[Asked], starts: torch.Tensor, ids: torch.Tensor, step: int) -> None:
        resumed = {name: computed for name, computed in self.resumed.items() if name in {one.name for one in batch}}
        cached = SimpleNamespace(
            resumed_req_ids={*resumed}, req_ids=[*resumed], num_computed_tokens=[*resumed.values()]
        )
        output = SimpleNamespace(
            finished_req_ids=self.ended,
            scheduled_new_reqs=self.new,
            scheduled_cached_reqs=cached,
            total_num_scheduled_tokens=len(ids),
            scheduled_spec_decode_tokens={},
        )
        self.runner._update_states(output)
        for one in batch:
            known = one.known(step)
            self.runner.requests[one.name] = SimpleNamespace(
                prompt_token_ids=known[:PROMPT], output_token_ids=known[PROMPT:], num_computed_tokens=one.computed
            )
        self.runner.input_batch = SimpleNamespace(req_ids=[one.name for one in batch], num_reqs=len(batch))
        self.runner.query_start_loc.gpu, self.runner.input_ids.gpu = starts, ids
        self.runner._prepare_inputs(output)
        self.new, self.ended = [], []
        self.resumed = {name: computed for name, computed in self.resumed.items() if name not in resumed}


@pytest.mark.parametrize("runner", [V1, V2])
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_token_has_the_edits_of_its_part(
    runner: Any, engines: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch, data: st.DataObject
) -> None:
    for place in (borders, reasoning):
        monkeypatch.setattr(place, "parser_of", lambda *_: Parser())
    engine, judge = engines
    world, step = runner(engine), 0
    number = data.draw(st.integers(1, 6), label="requests")
    waiting = [request(f"request {'i' * n}", judge, data) for n in range(number)]
    running: list[Asked] = []
    while waiting or running:
        for one in [*running]:
            if data.draw(st.integers(0, 9), label="preempted") == 9:
                world.leave(one, False)
                running.remove(one)
                waiting.append(one)
                one.computed = data.draw(st.integers(0, one.computed), label="cached")
        fresh: list[Asked] = []
        while waiting and world.room() and len(fresh) < ROWS:
            if running and not data.draw(st.booleans(), label="joins"):
                break
            one = waiting.pop(0)
            world.begin(one, step, one.last < 0)
            running.append(one)
            fresh.append(one)
        others = [one for one in running if one not in fresh]
        going = st.lists(st.sampled_from(others), unique_by=id, max_size=ROWS) if others else st.just([])
        chosen = data.draw(going, label="go on")
        batch = (fresh + chosen)[:ROWS] or others[:1]
        left = [len(one.known(step)) - one.computed for one in batch]
        counts = [data.draw(st.integers(1, count), label="tokens") for count in left]
        places = [(one, one.computed + n) for one, count in zip(batch, counts, strict=True) for n in range(count)]
        starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        ids = torch.tensor([one.ids[at] for one, at in places], dtype=torch.int32)
        engine.positions[: len(places)] = torch.tensor([at for _, at in places])
        world.run(batch, starts, ids, step)
        stream = torch.stack([one.x[at] for one, at in places])
        for site in NARROW:
            engine.edit(engine.sites[site], stream)
        torch.testing.assert_close(stream, torch.stack([one.wanted[at] for one, at in places]), atol=1e-5, rtol=1e-5)
        for one, count in zip(batch, counts, strict=True):
            one.computed, one.last = one.computed + count, step
            one.reached = max(one.reached, one.computed)
            if one.computed == TOKENS:
                world.leave(one, True)
                running.remove(one)
        step += 1
    assert not world.steering.failed
