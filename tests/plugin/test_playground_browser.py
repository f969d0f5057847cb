"""The playground in a real browser: on the demo's real server, and on a stand-in whose every text is markup."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.plugin.conftest import BRIDGE
from tests.plugin.pages import (
    BROKEN_KEY,
    CASE,
    FIRST_ANSWER,
    KEY,
    MARKUP,
    UNTOUCHED,
    browser,
    copied,
    ended,
    first_answer,
    keep,
    listening,
    stand_in,
    text_of,
)

pytestmark = pytest.mark.slow

DESK = {"width": 1280, "height": 900}
PHONE = {"width": 360, "height": 740}


class Watched:
    """A page, and what it must not do: load from elsewhere, break its policy, or fail."""

    def __init__(self, page: Any, home: str) -> None:
        self.page, self.home = page, home
        self.requests: list[str] = []
        self.complaints: list[str] = []
        page.on("request", lambda one: self.requests.append(one.url))
        page.on("pageerror", lambda one: self.complaints.append(str(one)))
        page.on("console", self._hear)

    def _hear(self, said: Any) -> None:
        if said.type in ("error", "warning") and "the server responded with a status of" not in said.text:
            self.complaints.append(said.text)

    def check(self) -> None:
        """What holds at the end of every visit."""
        assert self.complaints == []
        assert {urlsplit(one).netloc for one in self.requests} == {urlsplit(self.home).netloc}
        assert self.page.title() == "saesteer playground"
        assert self.page.evaluate("localStorage.length + sessionStorage.length") == 0
        assert not self.page.context.cookies()
        assert self.page.url == f"{self.home}/saesteer/"


@pytest.fixture
def visit(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A function that opens the page of a server, and checks it when the test has passed."""
    watched: list[Watched] = []
    with browser(viewport=DESK, has_touch=True) as page:

        def open_page(home: str) -> Any:
            watched.append(Watched(page, home))
            page.goto(f"{home}/saesteer/")
            page.get_by_role("heading", name="Find features").wait_for()
            return page

        yield open_page
        for one in watched:
            one.check()


def ask(page: Any, message: str) -> Any:
    """Send a message and wait for both answers; returns its exchange."""
    from playwright.sync_api import expect

    before = page.locator("article").count()
    page.locator("#message").fill(message)
    page.locator("#message").press("Enter")
    expect(page.locator("article")).to_have_count(before + 1)
    newest = page.locator("article").first
    ended(page, newest)
    return newest


def tab_to(page: Any, selector: str, backward: bool = False) -> None:
    for _ in range(80):
        page.keyboard.press("Shift+Tab" if backward else "Tab")
        if page.evaluate("(wanted) => document.activeElement.matches(wanted)", selector):
            return
    raise AssertionError(f"the tab key does not reach {selector}")


def fits(page: Any) -> bool:
    """Whether nothing has to be scrolled sideways."""
    return bool(page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"))


def test_the_demo(demo_server: httpx.Client, visit: Any) -> None:
    """A stored answer at once; then search, slide, run, what is marked, a refusal, and what was copied runs."""
    from playwright.sync_api import expect  # where it is not installed, `visit` has skipped the test

    page = visit(str(demo_server.base_url).rstrip("/"))
    seconds = first_answer(page)
    print(f"first answer after {seconds:.2f} s")
    assert seconds < FIRST_ANSWER
    assert page.locator("#key").count() == 0, "this server has no key"
    page.get_by_role("button", name="Horse: ").click()
    expect(page.locator("fieldset legend")).to_contain_text("horse")
    expect(page.locator("article .user")).to_contain_text("Tell me about yourself.")
    keep(page, "desk-start")
    page.get_by_role("button", name="Remove slider 1").click()
    page.locator("#words").fill("bridge")
    page.get_by_role("button", name="Search").click()  # enabled once the server has said what it has
    page.get_by_role("button", name=f"Add slider for demo {BRIDGE['feature']},").click()
    slider = page.locator("fieldset")
    slider.get_by_label("Value", exact=True).fill("2")
    expect(slider.get_by_label("Value as a number")).to_have_value("2")  # the page draws with the next frame
    page.locator("#message").fill("Who are you?")
    page.get_by_role("button", name="Run", exact=True).click()
    page.locator(".steered[aria-busy=true] [role=option]").first.wait_for()  # it streams
    exchange = page.locator("article").first
    ended(page, exchange)
    page.get_by_role("button", name="Run again").wait_for()
    plain, steered = text_of(exchange, "plain"), text_of(exchange, "steered")
    assert "bridge" in steered.lower() and "bridge" not in plain.lower()
    marked = strong(exchange, "steered").all_inner_texts()
    assert "bridge" in " ".join(marked).lower() and len(marked) < 10, "what the clamp changed, not all that it touched"
    page.locator("#colour").select_option(index=1)
    expect(strong(exchange, "steered").nth(10)).to_be_visible()
    assert strong(exchange, "plain").count() == 0
    assert "resid_post.15" in exchange.locator(".steered dl").inner_text()
    strong(exchange, "steered").first.hover()
    page.get_by_role("complementary", name="Features of the token").get_by_text("demo 3497").wait_for()
    exchange.locator(".steered [data-index='3']").tap()
    page.get_by_role("list", name="Strongest features").get_by_text("bridge").first.wait_for()
    keep(page, "desk")
    _runs_what_was_copied(page, steered)
    slider.get_by_label("Value as a number").fill("")
    refused = ask(page, "And now?")
    slider.get_by_text("saesteer.edits[0].value").wait_for()
    assert "slider 1" in refused.locator(".steered .error").inner_text()
    assert text_of(refused, "plain") and not text_of(refused, "steered")
    keep(page, "refusal")
    page.emulate_media(color_scheme="dark")
    page.set_viewport_size(PHONE)
    assert fits(page)
    keep(page, "phone-dark")
    page.get_by_role("button", name="Remove slider 1").click()
    expect(page.locator("#colour")).to_have_value("changed")
    page.get_by_role("button", name="Put back bridge 2 ×").click()
    expect(slider.get_by_label("Value as a number")).to_have_value("2")
    expect(page.locator("#message")).to_have_value("Who are you?")


def _runs_what_was_copied(page: Any, expected: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "SAESTEER_API_KEY"}
    code = copied(page, "Python")
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # Two answers at a time may be rounded otherwise than one alone, so the first words are compared.
    assert done.stdout.startswith(expected[:24]) and "'applied'" in done.stdout and "'dose'" in done.stdout
    if shutil.which("curl"):
        shell = ["bash", "-euc", copied(page, "curl")]
        sent = subprocess.run(shell, env={**environment, "SAESTEER_API_KEY": "x"}, capture_output=True, check=False)
        answer = json.loads(sent.stdout)
        assert answer["choices"][0]["message"]["content"].startswith(expected[:24]) and answer["saesteer"]["applied"]


def test_the_demo_by_keyboard_on_a_phone(demo_server: httpx.Client, visit: Any) -> None:
    """What a key changes is drawn with a later frame, so each look waits for what it expects."""
    from playwright.sync_api import expect

    page = visit(str(demo_server.base_url).rstrip("/"))
    page.set_viewport_size(PHONE)
    keys = page.keyboard
    tab_to(page, ".card[aria-label^='Ocean']")
    keys.press("Enter")
    tab_to(page, "[type=range]")
    for _ in range(5):
        keys.press("ArrowLeft")
    tab_to(page, "fieldset [type=number]")
    expect(page.locator("fieldset [type=number]")).to_have_value("1")
    tab_to(page, "#words")
    keys.type("horse")
    keys.press("Enter")
    page.get_by_role("list", name="Features found").wait_for()
    tab_to(page, "[aria-label^='Add slider for demo']")
    keys.press("Enter")
    expect(page.locator("fieldset")).to_have_count(2)
    tab_to(page, "#message")
    keys.press("Enter")
    expect(page.locator("article")).to_have_count(2)
    ended(page, page.locator("article").first)
    tab_to(page, "[aria-label^='Tokens of the steered']")
    keys.press("ArrowRight")
    keys.press("ArrowRight")
    page.get_by_role("list", name="Strongest features").locator("li").first.wait_for()
    chosen = page.locator(".steered [aria-selected=true]")
    expect(chosen).to_have_attribute("data-index", "2")
    listbox = page.get_by_role("listbox", name="Tokens of the steered").first
    expect(listbox).to_have_attribute("aria-activedescendant", chosen.get_attribute("id"))
    assert fits(page)
    keep(page, "phone")
    keys.press("Escape")
    page.get_by_role("complementary").wait_for(state="hidden")
    tab_to(page, "article > .row button")
    keys.press("Enter")
    page.get_by_text("Copied; it takes the key").wait_for()
    tab_to(page, ".chips", backward=True)
    keys.press("Enter")
    page.get_by_text("Its sliders and its question are back").wait_for()


@pytest.fixture
def asked() -> list[dict[str, Any]]:
    return []


@pytest.fixture
def home(asked: list[dict[str, Any]]) -> Iterator[str]:
    with listening(stand_in(asked, [CASE])) as url:
        yield url


def test_markup_is_text_and_the_key_stays_in_memory(home: str, asked: list[dict[str, Any]], visit: Any) -> None:
    """Labels, names, examples, answers and errors hold markup that would change the page's title."""
    from playwright.sync_api import expect

    page = visit(home)
    assert text_of(page, "plain") == CASE["plain"] and text_of(page, "steered") == f"{MARKUP} less"
    assert "may break" in page.locator(".steered dl").inner_text()
    page.get_by_role("button", name="Remove slider 1").click()
    page.get_by_role("button", name="Clear").click()
    page.get_by_text("The server asks for its key.").wait_for()
    page.locator("#key").fill(BROKEN_KEY)
    page.locator("#key").press("Enter")
    page.locator("p.error").get_by_text(MARKUP).wait_for()
    page.locator("#key").fill(KEY)
    page.locator("#key").press("Enter")
    page.get_by_text("It stays in this page's memory.").wait_for()
    page.locator("#words").fill("#10")
    page.locator("#words").press("Enter")
    page.locator("#search-error").get_by_text(MARKUP).wait_for()
    page.locator("#words").fill(MARKUP)
    page.locator("#words").press("Enter")
    page.get_by_role("button", name="Add slider").nth(1).click()
    page.get_by_role("button", name="Add slider").first.click()
    page.get_by_label("Continue the conversation").check()
    exchange = ask(page, MARKUP)
    assert text_of(exchange, "plain") == text_of(exchange, "steered") == f"{MARKUP} two🌉 three four"
    assert shades(exchange) == [0, 4, 10, 10, 10], (
        "1, 10 and more times likelier, of the last three at least 1000 times"
    )
    page.locator("#colour").select_option(index=2)
    expect(page.locator(".scale")).to_have_text("0  2 × max_act")
    assert shades(exchange) == [0, 1, 2, 3, 3]
    assert exchange.locator(".steered dl").inner_text().count(MARKUP) == 3, "where the dose is, and the edits"
    exchange.locator(".steered [data-index='2']").click()
    page.get_by_role("list", name="Strongest features").get_by_text(MARKUP).first.wait_for()
    for language in ("Python", "curl"):
        code = copied(page, language)
        assert "SAESTEER_API_KEY" in code and KEY not in code
    keep(page, "markup")
    page.locator("fieldset").nth(1).get_by_label("Value as a number").fill("")
    ask(page, "again")
    page.locator("fieldset").nth(1).get_by_text(MARKUP).nth(1).wait_for()
    assert not page.locator("fieldset").first.locator(".error").is_visible()
    page.locator("fieldset").nth(1).get_by_label("Value as a number").fill("3")
    unread = ask(page, "unreadable")
    assert page.locator("#read-error").inner_text() == MARKUP
    assert unread.locator(".error").all_inner_texts() == [MARKUP, MARKUP]
    broken = ask(page, "break")
    assert broken.locator(".error").all_inner_texts() == [MARKUP, MARKUP]
    assert page.locator("#made").count() == page.locator("img[src=x]").count() == 0
    assert KEY not in page.content()
    _sent_as_shown(asked)


def strong(exchange: Any, side: str) -> Any:
    """The pieces of an answer that have the three strongest colours."""
    return exchange.locator(", ".join(f".{side} [data-shade='{shade}']" for shade in (8, 9, 10)))


def shades(exchange: Any) -> list[int]:
    """How strongly each piece of the steered answer is coloured."""
    return [int(one.get_attribute("data-shade")) for one in exchange.locator(".steered [role=option]").all()]


def _sent_as_shown(asked: list[dict[str, Any]]) -> None:
    """The plain request has no edits, not even the server's own; refused turns are no part of the conversation."""
    plain, steered, *_ = sorted(asked[:2], key=lambda one: "edits" in one["saesteer"])
    assert plain["saesteer"]["defaults"] is False and "edits" not in plain["saesteer"]
    clamp = {"op": "clamp", "dictionary": MARKUP, "value": 2, "unit": "max_act"}
    assert steered["saesteer"]["edits"] == [{**clamp, "feature": 4}, {**clamp, "feature": 3}]
    assert steered["saesteer"]["return"]["dose"] is True
    [read] = steered["saesteer"]["return"]["features"]
    assert read["dictionary"] == MARKUP and sorted(read["features"]) == [3, 4]
    turns = [one["messages"] for one in asked[-2:]]
    assert sorted(map(len, turns)) == [3, 5], "the steered side has one turn less"


def test_modes_scopes_and_layers_are_sent_as_the_language_has_them(asked: list[dict[str, Any]], visit: Any) -> None:
    """On a server without keys, and without stored cases."""
    with listening(stand_in(asked, key=False)) as home:
        page = visit(home)
        _send_modes(page, asked)
        assert page.locator("#key").count() == page.locator(".card").count() == 0


def _send_modes(page: Any, asked: list[dict[str, Any]]) -> None:
    page.locator("#dictionary").select_option("set")
    page.get_by_label("Layer").select_option("17")
    page.locator("#words").fill("5")
    page.locator("#words").press("Enter")
    for number, (mode, scope) in enumerate([("scale", "user"), ("min", "generated"), ("add", "prompt")]):
        page.get_by_role("button", name="Add slider").first.click()
        slider = page.locator("fieldset").nth(number)
        slider.get_by_text("Mode and scope").click()
        slider.get_by_label("Mode").select_option(mode)
        slider.get_by_label("Scope").select_option(scope)
        slider.get_by_label("Value as a number").fill("0.5")
    page.get_by_role("button", name="Remove slider 2").click()
    exchange = ask(page, "x")
    for body in asked:
        assert not body["saesteer"]["return"].get("features"), "a dictionary in its file cannot be read"
    clamp = {"op": "clamp", "dictionary": "set", "layer": 17, "feature": 5, "value": 0.5}
    [edits] = [body["saesteer"]["edits"] for body in asked if "edits" in body["saesteer"]]
    assert edits == [
        {**clamp, "mode": "scale", "scope": {"messages": "user"}},
        {**clamp, "mode": "add", "unit": "max_act", "scope": {"prompt": True}},
    ]
    assert f"edit 2 at {MARKUP}" in exchange.locator(".steered dl").inner_text()
    page.locator("#dictionary").select_option("gain")
    ask(page, "y")
    for body in asked[-2:]:
        assert body["saesteer"]["return"]["features"] == [{"dictionary": "gain", "top_k": 8, "at": "before"}]
    untouched = ask(page, UNTOUCHED).locator(".steered dl").inner_text()
    assert "none: no token was changed" in untouched and f"edit 2 at {MARKUP}" in untouched
