"""`saesteer doctor` from its first line to its last, with stand-ins for the model and for every engine."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from saesteer.config.config import SaesteerConfig
from saesteer.errors import ConfigError
from saesteer.plugin.job import Batch, Completion
from saesteer.workbench import doctor
from saesteer.workbench.doctor import TOKENS
from tests.cli.coders import STREAMS, coder

LOGITS = torch.tensor([4.0, 3, 2, 1, 0, -1, -2, -3])
CONFIG = SaesteerConfig().changed({"dictionaries": {"demo": "x.safetensors"}})


class Oracle:
    """Of ``saesteer.hf.Model``, as much as is asked."""

    tokenizer = SimpleNamespace(chat_template="{{ messages }}", decode=lambda ids: f"t{ids[0]}")

    def logits(self, ids: Sequence[int], *, steer: Any = None, prompt_len: int | None = None) -> torch.Tensor:
        return (LOGITS.flip(0) if steer else LOGITS).expand(len(ids), -1)

    def layers_of(self, name: str) -> tuple[None]:
        return (None,)

    def info(self, name: str, layer: None = None) -> Any:
        return coder()[1]

    def coder(self, name: str, layer: None = None) -> Any:
        return coder()[0]

    def encode(self, text: str) -> list[int]:
        return [1, 2, 3]


class Engines:
    """Stand in for engines: greedy, with the logits of the oracle, moved by as much as is said."""

    def __init__(self, move: float = 0.0, error: str = "") -> None:
        self.asked: list[tuple[bool, bool, int]] = []  # with saesteer, eager, batches
        self._move, self._error = move, error

    def run(
        self, place: str, batches: Sequence[Batch], *, dictionaries: Any, options: Mapping[str, Any], **_: Any
    ) -> Any:
        ours = dictionaries is not None
        self.asked.append((ours, options.get("enforce_eager") is True, len(batches)))
        assert options.get("fail_fast", False) is ours, "always on, where saesteer is"
        if ours and self._error:
            raise ConfigError(self._error)
        found: list[Any] = []
        for batch in batches:
            specs = batch.steer or [None] * len(batch.prompts)
            found.append([self._answer(batch, spec, ours, self._cached(batch, found)) for spec in specs])
        return found

    def _cached(self, batch: Batch, found: Sequence[Any]) -> int:
        return 0 if batch.fresh or not (batch.follows or len(found) == 4) else 8

    def _answer(self, batch: Batch, spec: Any, ours: bool, cached: int) -> Completion:
        logprobs = (LOGITS.flip(0) if spec else LOGITS).log_softmax(0)
        if ours and batch.top:
            logprobs = logprobs + self._move * torch.arange(8)
        best = int(logprobs.argmax())
        ids = [best] * (TOKENS if batch.max_tokens > 1 else 1)
        first = [(one, f"t{one}", float(logprobs[one])) for one in range(batch.top)]
        seconds = 0.1 if cached else 0.5
        return Completion("", [1, 2], ids, [float(logprobs[best])] * len(ids), cached, {}, first, seconds)


def run(monkeypatch: pytest.MonkeyPatch, engines: Engines, *, eager: bool = True) -> tuple[bool, str]:
    options = {"dtype": "float32", **({"enforce_eager": True} if eager else {})}

    @contextmanager
    def captured(*_: Any) -> Iterator[Any]:
        yield iter(STREAMS)

    monkeypatch.setattr(doctor, "resolve", lambda model, config: (model, config, options))
    monkeypatch.setattr(doctor, "check", lambda *_: None)
    monkeypatch.setattr(doctor, "load_model", lambda *_: Oracle())
    monkeypatch.setattr(doctor, "run_engine", engines.run)
    monkeypatch.setattr(doctor, "captured", captured)
    console = Console(width=200)
    with console.capture() as said:
        well = doctor.run(console, "demo", CONFIG, None)
    return well, said.get()


def test_all_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = Engines()
    well, said = run(monkeypatch, engines)
    assert well, said
    assert said.count(" ok ") == 12 and "A = B = C" in said and "dictionary demo" in said
    assert engines.asked == [(False, True, 8), (True, True, 17)], "the eager engine is the stock one"


def test_a_compiled_engine_is_compared_with_an_eager_one(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = Engines()
    assert run(monkeypatch, engines, eager=False)[0]
    assert engines.asked == [(False, False, 8), (True, False, 17), (False, True, 1)]


def test_a_fault_of_ours_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    well, said = run(monkeypatch, Engines(move=0.5))
    assert not well and "A = C and B differs" in said and said.count("FAILED") == 1


@pytest.mark.parametrize("code", ["non_finite", "collapsed"])
def test_a_request_that_is_not_sound_leaves_the_other_witnesses(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    well, said = run(monkeypatch, Engines(error=f"saesteer: it has gone wrong [{code}]"))
    assert not well and f"it has gone wrong [{code}]" in said and "A = C and B differs" in said and "ended" in said
    assert "dictionary demo" in said


def test_other_errors_of_an_engine_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="out_of_range"):
        run(monkeypatch, Engines(error="no such feature [out_of_range]"))
