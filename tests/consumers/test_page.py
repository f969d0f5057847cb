"""The examples of docs/consumers.md run: the consumer that it writes, and the reader of shards."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from saesteer.config.config import SaesteerConfig
from saesteer.consumers import Array, Rows
from saesteer.consumers.filesystem import Filesystem
from saesteer.consumers.known import Consumers
from saesteer.consumers.runner import Runner
from saesteer.errors import SpecError
from saesteer.language.spec import from_json
from tests.consumers.rows import request, rows
from tests.markdown import blocks

PAGE = (Path(__file__).parents[2] / "docs/consumers.md").read_text()


def test_the_consumer_of_the_page_judges() -> None:
    told: dict[str, Any] = {}
    exec(blocks(PAGE, "python")[1], told)
    reward = told["Reward"]({})
    for above, good in ((0.25, True), (2.0, False)):
        asked = request(parameters=Runner("reward", reward).check({"above": above}, "at"))
        scores = Array("float32", (3, 1), np.array([0.5, 1.0, 1.5], "<f4").tobytes())
        reward.take(asked, Rows("probe", {"probe": "p"}, np.arange(3), np.arange(3), {"scores": scores}))
        assert reward.end(asked) == {"mean": 1.0, "good": good}
    with pytest.raises(SpecError, match="expected only above"):
        Runner("reward", reward).check({"over": 1}, "at")


def test_the_reader_of_the_page_finds_the_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    consumer = Filesystem({"folder": "rows"})
    consumer.take(request(4, captured=True), rows(4, 2, 5))
    consumer.close()
    exec(blocks(PAGE, "python")[0], {})
    assert capsys.readouterr().out == "request 4 activation [2, 3, 4] (3, 3)\n"


def test_the_settings_of_the_page_are_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    [settings] = blocks(PAGE, "yaml consumers")
    config = SaesteerConfig.from_json(yaml.safe_load(settings))
    made = Consumers.open(config.consumers)
    assert config.capture and [one.name for one in made.capturing] == ["logging"]
    asked = from_json(next(json.loads(block) for block in blocks(PAGE, "json") if block.startswith("{")))
    for one in asked.returns.consumers:
        made.named[one.name].check(one.parameters, "at")
    made.close()
