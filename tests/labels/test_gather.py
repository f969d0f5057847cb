"""What is gathered of activations, and what tells two texts apart: against plain loops over the dense numbers."""

import torch

from saesteer.labels.contrast import Mean, strongest
from saesteer.labels.gather import Active, Gathered
from saesteer.labels.store import Spot

FEATURES, MOST = 7, 3


def texts() -> list[torch.Tensor]:
    """Activations [tokens, F] in which many are 0 and some are equal; one text has no token that counts."""
    draw = torch.Generator().manual_seed(0)
    dense = [torch.randint(-4, 5, (length, FEATURES), generator=draw).clamp_min(0).float() for length in (9, 1, 20, 6)]
    for one in dense:
        one[:, 4] = 0
    return dense


def test_it_is_what_loops_find() -> None:
    dense, gathered = texts(), Gathered(FEATURES, MOST)
    for number, one in enumerate(dense):
        gathered.add(number, Active.of(one[2:], 2))
    counted = torch.cat([one[2:] for one in dense])
    assert gathered.tokens == len(counted) == 7 + 0 + 18 + 4
    torch.testing.assert_close(gathered.max_act, counted.amax(0))
    spans = [[(10 * text + at, 10 * text + at + 1) for at in range(len(one))] for text, one in enumerate(dense)]
    for row in range(FEATURES):
        assert gathered.density(row) == int((counted[:, row] > 0).sum()) / len(counted)
        best = []
        for text, one in enumerate(dense):
            values = one[2:, row].tolist()
            if values and max(values) > 0:
                best.append((-max(values), text, 2 + values.index(max(values))))
        expected = [Spot(-value, text, *spans[text][at]) for value, text, at in sorted(best)[:MOST]]
        assert gathered.spots(row, spans) == tuple(expected)
    assert gathered.spots(4, spans) == () and gathered.density(4) == 0


def test_contrast_is_the_difference_of_means() -> None:
    dense, sides = texts(), []
    for part in (dense[:1], dense[2:]):
        mean = Mean.of(FEATURES)
        for one in part:
            mean.add(Active.joined([Active.of(one[1:4], 1), Active.of(one[4:], 4)]))
        torch.testing.assert_close(mean.value, torch.cat([one[1:] for one in part]).double().mean(0))
        sides.append(mean)
    here, there = sides
    found = strongest(here, there, most=FEATURES)
    gains = (sides[0].value - sides[1].value).tolist()
    assert [row for row, _, _ in found] == sorted((n for n in range(FEATURES) if gains[n] > 0), key=lambda n: -gains[n])
    assert all(one - other > 0 for _, one, other in found)
    assert strongest(here, there, most=1) == found[:1]
    assert strongest(Mean.of(2), Mean.of(2), most=2) == []
