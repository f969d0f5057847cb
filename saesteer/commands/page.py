"""A text's tokens with their strongest features, and the page of HTML that shows them. Knows no model.

The page stands alone: it loads nothing and runs no script.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape

_STYLE = """
body { font: 16px/1.7 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; color: #111; }
h2 { font-size: 1.1rem; margin-top: 2.5rem; }
p { white-space: pre-wrap; overflow-wrap: anywhere; }
span { border-radius: 3px; }
span:hover, span:focus { outline: 2px solid #1c4ea0; }
"""
# A second lock, should a text ever not be escaped.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


@dataclass(frozen=True, slots=True)
class Active:
    """A feature on a token."""

    feature: int
    value: float  # in the dictionary's unit
    share: float | None  # of the largest known value, if that is known

    def __str__(self) -> str:
        return f"{self.feature} {self.value:.2f}" + ("" if self.share is None else f" ({self.share:.0%})")


@dataclass(frozen=True, slots=True)
class Token:
    """A token with its strongest features, the strongest first."""

    position: int
    text: str
    active: tuple[Active, ...]
    strength: float  # of its strongest feature: 0 to 1, relative to the text's strongest


@dataclass(frozen=True, slots=True)
class Listing:
    """What one dictionary finds in a text."""

    title: str
    tokens: tuple[Token, ...]


def page(title: str, listings: Iterable[Listing]) -> str:
    """The page; the pointer over a token shows its features, one a line."""
    return "".join(_parts(title, listings))


def _parts(title: str, listings: Iterable[Listing]) -> Iterator[str]:
    yield '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    yield f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
    yield f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n"
    for listing in listings:
        yield f"<h2>{escape(listing.title)}</h2>\n<p>"
        for token in listing.tokens:
            yield _span(token)
        yield "</p>\n"
    yield "</body>\n</html>\n"


def _span(token: Token) -> str:
    features = escape("\n".join(map(str, token.active)))
    style = f"background: rgb(64 128 255 / {0.7 * token.strength:.2f})"
    return f'<span tabindex="0" style="{style}" title="{features}">{escape(token.text)}</span>'
