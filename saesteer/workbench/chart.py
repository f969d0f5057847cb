"""A picture of doses and responses as SVG: a panel for each feature, a line for each arm. Knows no model."""

from collections.abc import Mapping, Sequence
from io import StringIO
from typing import NamedTuple

from saesteer.errors import needs

_ACROSS = 3  # panels in a row


class Panel(NamedTuple):
    """One feature: for each arm its points, from the smallest dose to the largest."""

    title: str
    lines: Mapping[str, Sequence[tuple[float, float]]]  # dose in max_act, probability
    mark: float | None  # a dose that a vertical line shows


def chart(panels: Sequence[Panel]) -> str:
    """The picture; all panels have the same lines, and each its own scale.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    with needs("'saesteer[plot]'"):
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    rows = max(1, -(-len(panels) // _ACROSS))
    figure = Figure(figsize=(3.2 * _ACROSS, 2.2 * rows), layout="constrained")
    places = figure.subplots(rows, _ACROSS, squeeze=False).ravel()
    for place, panel in zip(places, panels, strict=False):
        for name, points in panel.lines.items():
            place.plot(*zip(*points, strict=True), label=name)
        if panel.mark is not None:
            place.axvline(panel.mark, color="0.3", linestyle="--")
        place.set_title(panel.title[:44], parse_math=False)
        place.yaxis.set_major_formatter("{x:.1%}")
    for place in places[len(panels) :]:
        place.remove()
    if panels:
        figure.legend(*places[0].get_legend_handles_labels(), loc="outside upper left", ncols=5)
    made = StringIO()
    with rc_context({"svg.fonttype": "none"}):  # letters stay text
        figure.savefig(made, format="svg")
    return made.getvalue()
