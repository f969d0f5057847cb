"""Whether dictionaries fit the model that vLLM runs: they are finite, and explain what the engine computes.

Knows the tensors that an engine has captured, not how.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields

from torch import Tensor

from saesteer.dictionaries.coder import CoderInfo, SparseCoder, inputs
from saesteer.workbench.measure import Figures
from saesteer.workbench.windows import first_counted

# Of unlike kinds, so that their mean explains little, and long enough to tell a dictionary's site from others.
TEXTS = (
    "The harbour was quiet that morning. Two fishing boats came in before sunrise, and the gulls followed them "
    "over the breakwater, crying, until the nets had been lifted onto the quay and the first buyers arrived from "
    "the town.",
    "In 1905 Albert Einstein published four papers. One explained the photoelectric effect, another Brownian "
    "motion, and the third introduced special relativity; the last one derived the equivalence of mass and "
    "energy.",
    "def mean(values):\n"
    "    total = 0.0\n"
    "    for value in values:\n"
    "        total += value\n"
    "    return total / len(values)\n",
    "Preheat the oven to 200 degrees. Mix the flour, the butter and the sugar, add two eggs, and knead the dough "
    "until it is smooth. Let it rest for an hour, then roll it out and cut it into thin strips.",
    "The court held that the contract was void, because neither party had signed the amended terms before the "
    "deadline, and ordered the defendant to return the deposit with interest within thirty days.",
    "“You never told me!” she said, laughing. “I did,” he answered, “but you were reading, and when you read you "
    "hear nothing at all.” They walked on through the rain, sharing one umbrella, and missed the last bus.",
)
# Sound dictionaries leave 0.05 to 0.5 of the variance. The mean alone leaves 1; one at a wrong site has left 7.
MOST_LEFT = 1.0
_TIMES_OFF = 4  # the number of active features, of what the files say; texts differ by less


def sites_of(infos: Iterable[CoderInfo]) -> list[str]:
    """Where the engine must be read, canonical names."""
    return sorted({site for info in infos for site in (info.read, info.written)})


def figures(coder: SparseCoder, info: CoderInfo, captured: Iterable[Mapping[str, Tensor]]) -> Figures:
    """What a dictionary makes of some texts.

    Args:
        coder: the dictionary.
        info: with the sites that it has here.
        captured: for each text, the tensors [tokens, d] at ``sites_of``, by site.
    """
    found, skipped = Figures(), first_counted(info)
    for streams in captured:
        x, y = inputs(info, streams).float(), streams[info.written].float()
        found.add(coder, x[skipped:], y[skipped:])
    return found


def oddities(coder: SparseCoder, info: CoderInfo, found: Figures) -> Iterator[str]:
    """What is wrong with a dictionary, if anything is."""
    tensors = ((field.name, getattr(coder, field.name)) for field in fields(coder))
    for name, tensor in tensors:
        if isinstance(tensor, Tensor) and not bool(tensor.isfinite().all()):
            yield f"{name} holds NaN or infinity"
    if not found.active:
        yield "no feature is active"
    elif info.l0 and not info.l0 / _TIMES_OFF <= found.l0 <= info.l0 * _TIMES_OFF:
        yield f"{found.l0:.0f} features are active in a token, its files say {info.l0:g}"
    if info.can_reconstruct and not found.fvu < MOST_LEFT:
        yield f"it leaves {found.fvu:.2f} of the variance, the mean alone leaves 1: of another site, layer or model?"


def in_words(info: CoderInfo, found: Figures) -> str:
    """The figures, for people."""
    fvu = f"FVU {found.fvu:.2f}, " if info.can_reconstruct else ""
    return f"{fvu}{found.l0:.0f} features active in a token, over {found.tokens} tokens at {info.site_in}"
