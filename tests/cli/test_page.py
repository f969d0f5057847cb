"""The page of `saesteer features --html`: what a browser makes of it. Knows no model."""

from html.parser import HTMLParser
from typing import Any

from saesteer.commands.page import Active, Listing, Token, page

EVIL = "<script>alert(1)</script>\"'&amp;\n<img src=x onerror=y>"
TOKENS = (
    Token(1, EVIL, (Active(7, 3.25, 0.5), Active(34, 1.0, None)), 1.0),
    Token(2, " bridge", (), 0.0),
)


class Reader(HTMLParser):
    """Every tag with its attributes, and the text of the body."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, Any]]] = []
        self.words = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words += data


def test_whatever_a_text_holds_is_text() -> None:
    found = Reader(page(EVIL, [Listing(f"features of {EVIL}", TOKENS)]))
    assert found.words.count(EVIL) == 4, "in the title, two headings and the text"
    spans = [attributes for tag, attributes in found.tags if tag == "span"]
    assert [one["title"] for one in spans] == ["7 3.25 (50%)\n34 1.00", ""]
    assert {tag for tag, _ in found.tags} == {"html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "span"}


def test_the_page_stands_alone() -> None:
    found = Reader(page("any", [Listing("any", TOKENS)]))
    assert not any({"src", "href"} & attributes.keys() for _, attributes in found.tags)
    assert not any(name.startswith("on") for _, attributes in found.tags for name in attributes)
    [policy] = [one["content"] for _, one in found.tags if "http-equiv" in one]
    assert policy.startswith("default-src 'none'")


def test_the_strongest_token_has_the_strongest_colour() -> None:
    found = Reader(page("any", [Listing("any", TOKENS)]))
    assert [one["style"] for tag, one in found.tags if tag == "span"] == [
        "background: rgb(64 128 255 / 0.70)",
        "background: rgb(64 128 255 / 0.00)",
    ]
