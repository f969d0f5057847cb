"""A newcomer's path by docs/start.md, from `saesteer serve demo` to copied code that ran, and the time of each step."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.plugin.pages import FIRST_ANSWER, browser, copied, ended, first_answer, keep, text_of
from tests.plugin.serving import served

pytestmark = [pytest.mark.slow, pytest.mark.long]  # a server of its own: its start is a part of the path

START = (Path(__file__).parents[2] / "docs" / "start.md").read_text()
MOST = 300.0  # seconds


class Clock:
    """How long each step of a path took, in seconds."""

    def __init__(self) -> None:
        self.steps: dict[str, float] = {}
        self._begun = time.monotonic()

    def lap(self, step: str) -> None:
        """A step has ended, and the next one begins."""
        now = time.monotonic()
        self.steps[step] = now - self._begun
        self._begun = now

    @property
    def total(self) -> float:
        """Of all steps."""
        return sum(self.steps.values())

    def table(self) -> str:
        """A line for each step."""
        return "\n".join(f"{step:22}{seconds:8.1f} s" for step, seconds in [*self.steps.items(), ("total", self.total)])


def test_the_first_minutes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the page says to search, to set and to ask is done as it stands there."""
    told = re.search(r"Search for \*(\w+)\*, add the feature,\s+move its slider to (\d+), and ask “(.+?)”", START)
    assert told, "docs/start.md has other words"
    word, value, question = told.groups()
    log = tmp_path / "log"
    with browser() as page:
        clock = Clock()
        with served(["demo"], log):
            clock.lap("server ready")
            [address] = set(re.findall(r"The playground is at (\S+)", log.read_text()))
            page.goto(address)
            page.locator("form[role=search] button:enabled").wait_for()  # the server has said what it has
            clock.lap("page open")
            seconds = first_answer(page)
            page.get_by_role("button", name="Remove slider 1").click()
            page.locator("#words").fill(word)
            page.get_by_role("button", name="Search").click()
            add = page.get_by_role("list", name="Features found").get_by_role("button").first
            assert word in str(add.get_attribute("aria-label"))
            clock.lap("feature found")
            add.click()
            page.get_by_label("Value", exact=True).fill(value)
            page.locator("#message").fill(question)
            page.get_by_role("button", name="Run", exact=True).click()
            page.locator("article").nth(1).wait_for()
            exchange = page.locator("article").first
            ended(page, exchange)
            clock.lap("both answers complete")
            plain, steered = text_of(exchange, "plain"), text_of(exchange, "steered")
            code = copied(page, "Python")
            environment = {name: held for name, held in os.environ.items() if name != "SAESTEER_API_KEY"}
            run = [sys.executable, "-c", code]
            done = subprocess.run(run, env=environment, capture_output=True, text=True, check=False)
            clock.lap("copied code ran")
            keep(page, "first-minutes")
    assert done.returncode == 0, done.stderr
    with capsys.disabled():
        print(f"\n\n{clock.table()}\n\nfirst answer after {seconds:.2f} s\nplain: {plain}\nsteered: {steered}")
    assert word in steered.lower() and word not in plain.lower()
    # Two answers at a time may be rounded otherwise than one alone, so the first words are compared.
    assert done.stdout.startswith(steered[:24]) and "'applied'" in done.stdout
    assert seconds < FIRST_ANSWER and clock.total < MOST
