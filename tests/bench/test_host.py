"""The host's benchmark without a GPU: the worker's hooks run as the runner calls them. It judges no time."""

from unittest.mock import Mock

import pytest


def test_the_fake_runs_the_hooks_that_the_worker_has(monkeypatch: pytest.MonkeyPatch) -> None:
    # These bring Triton, for which tests/kernels first chooses its interpreter.
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from bench import host
    from saesteer.engine.engine import Engine
    from saesteer.kernels import ops

    monkeypatch.setattr(ops, "map_", ops.map_)  # so that it is put back
    scheduled = Mock(wraps=Engine.schedule)
    monkeypatch.setattr(Engine, "schedule", lambda *given, **also: scheduled(*given, **also))
    rows = host.fake(16)
    kinds = ("fake decode", "fake admission")
    assert [(row["mode"], row["steered"]) for row in rows] == [(kind, n) for n in host.STEERED for kind in kinds]
    assert all(row["us"] > 0 for row in rows), "the hooks had no clock"
    judged = [row for row in rows if row["limit_us"] is not None]
    assert [(row["mode"], row["steered"], row["limit_us"]) for row in judged] == [("fake decode", 64, 15.0)]
    assert scheduled.call_count == 3 * (1 + 50 + 16), "each step in which somebody is steered, and no other one"
