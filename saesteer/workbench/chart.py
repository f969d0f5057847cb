"""A picture of doses and responses as SVG: a panel for each feature, a line for each arm. Knows no model."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import NamedTuple

_WIDE, _HIGH = 300, 190  # of a panel, in pixels
_LEFT, _TOP, _RIGHT, _BOTTOM = 44, 26, 8, 30
_ACROSS = 3  # panels in a row
_COLOURS = ("#1c4ea0", "#c0392b", "#888888", "#2e8b57", "#b8860b")


class Panel(NamedTuple):
    """One feature: for each arm its points, from the smallest dose to the largest."""

    title: str
    lines: Mapping[str, Sequence[tuple[float, float]]]  # dose in max_act, probability
    mark: float | None  # a dose that a vertical line shows


def chart(panels: Sequence[Panel]) -> str:
    """The picture; all panels have the same lines, and each its own scale."""
    wide, high = _WIDE * min(_ACROSS, len(panels)), _HIGH * -(-len(panels) // _ACROSS) + 24
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{high}" viewBox="0 0 {wide} {high}"'
    made, left = [head, ' font-family="sans-serif" font-size="10">\n'], _LEFT
    for name, colour in zip(panels[0].lines if panels else (), _COLOURS, strict=False):
        made.append(f'<text x="{left}" y="14" fill="{colour}">{escape(name)}</text>\n')
        left += 14 + 6 * len(name)
    for number, panel in enumerate(panels):
        row, column = divmod(number, _ACROSS)
        made += [f'<g transform="translate({_WIDE * column},{24 + _HIGH * row})">\n', *_panel(panel), "</g>\n"]
    return "".join([*made, "</svg>\n"])


def _panel(panel: Panel) -> Iterator[str]:
    doses = sorted({dose for line in panel.lines.values() for dose, _ in line})
    most = max([value for line in panel.lines.values() for _, value in line], default=0.0) or 1.0

    def x(dose: float) -> float:
        return round(_LEFT + (_WIDE - _LEFT - _RIGHT) * dose / (doses[-1] or 1.0), 1)

    def y(value: float) -> float:
        return round(_TOP + (_HIGH - _TOP - _BOTTOM) * (1 - value / most), 1)

    yield f'<text x="{_LEFT}" y="{_TOP - 8}" font-weight="bold">{escape(panel.title[:44])}</text>\n'
    yield f'<path d="M{x(0)},{y(most)} V{y(0)} H{x(doses[-1])}" fill="none" stroke="#444"/>\n'
    for value in (0.0, most):
        yield f'<text x="{x(0) - 4}" y="{y(value) + 4}" text-anchor="end">{value:.1%}</text>\n'
    for dose in doses:
        yield f'<text x="{x(dose)}" y="{y(0) + 13}" text-anchor="middle">{dose:g}</text>\n'
    if panel.mark is not None:
        yield f'<path d="M{x(panel.mark)},{y(0)} V{y(most)}" stroke="#444" stroke-dasharray="3 3"/>\n'
    for line, colour in zip(panel.lines.values(), _COLOURS, strict=False):
        points = " ".join(f"{x(dose)},{y(value)}" for dose, value in line)
        yield f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>\n'
