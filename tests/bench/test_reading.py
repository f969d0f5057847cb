"""The meter of what reading costs the host: every answer has what was read. It judges no time."""

from pathlib import Path

import pytest


def test_answers_have_what_was_read_in_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # It brings Triton, for which tests/kernels first chooses its interpreter.
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from bench import reading

    monkeypatch.setattr(reading, "REQUESTS", 3)
    monkeypatch.setattr(reading, "STEPS", 9)
    host = reading.Host("tiny", tmp_path)
    for turn in range(2):
        for case in reading.CASES:
            assert set(host.run(case, turn)) == set(reading.PARTS), "a part had no clock"
