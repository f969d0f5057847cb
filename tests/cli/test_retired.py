"""Settings that are no options any more: a server that is given one warns once, and starts."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from saesteer.commands import serve
from saesteer.commands.cli import app
from saesteer.config import retired
from saesteer.config.config import OPTIONS, SaesteerConfig
from saesteer.config.settings import read_settings

NAMES = [*retired.RETIRED]


@pytest.fixture(autouse=True)
def _new_process() -> Iterator[None]:
    retired._warn.cache_clear()
    yield
    retired._warn.cache_clear()


def test_none_of_them_is_an_option() -> None:
    assert not retired.RETIRED.keys() & OPTIONS.keys()


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_still_has_one_gets_one_warning(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "old.yaml").write_text(f"max_edits: 32\n{name}: 8\n")
    assert read_settings(file=tmp_path / "old.yaml") == SaesteerConfig(max_edits=32)
    SaesteerConfig.from_json({name: 8})
    [message] = [record.getMessage() for record in caplog.records]
    assert name in message and message.endswith("ignored")


@pytest.mark.parametrize("form", ["{flag} 8", "{flag}=8"], ids=["two", "one"])
@pytest.mark.parametrize("name", NAMES)
def test_its_flag_gets_one_warning_and_does_not_go_to_vllm(
    name: str, form: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given = []
    monkeypatch.setattr(serve, "serve", lambda *args: given.append(args))
    words = form.format(flag=f"--{name.replace('_', '-')}").split()
    CliRunner().invoke(app, ["serve", "demo", "--port", "1", *words, "--seed=7"], catch_exceptions=False)
    assert given == [("demo", SaesteerConfig(), ["--port", "1", "--seed=7"], None)]
    [message] = [record.getMessage() for record in caplog.records]
    assert name in message
