"""What is gathered of activations, and what tells two texts apart: against plain loops over the dense numbers."""

import torch

from saesteer.labels.gather import Active, Gathered, strongest
from saesteer.labels.store import Spot

FEATURES, MOST = 7, 3


def texts() -> list[torch.Tensor]:
    """Activations [tokens, F] in which many are 0 and some are equal; one text has no token that counts."""
    draw = torch.Generator().manual_seed(0)
    dense = [torch.randint(-4, 5, (length, FEATURES), generator=draw).float() for length in (9, 1, 20, 6)]
    for one in dense:
        one[:, 4] = 0
    return dense


def test_it_is_what_loops_find() -> None:
    dense, gathered = texts(), Gathered(FEATURES, MOST)
    for number, one in enumerate(dense):
        gathered.add(number, Active.of(one[2:], 2))
    counted = torch.cat([one[2:] for one in dense])
    assert gathered.tokens == len(counted) == 7 + 0 + 18 + 4
    torch.testing.assert_close(gathered.max_act, counted.abs().amax(0))
    spans = [[(10 * text + at, 10 * text + at + 1) for at in range(len(one))] for text, one in enumerate(dense)]
    for row in range(FEATURES):
        assert gathered.density(row) == int((counted[:, row] != 0).sum()) / len(counted)
        best = []
        for text, one in enumerate(dense):
            sizes = one[2:, row].abs().tolist()
            if any(sizes):
                best.append((-max(sizes), text, 2 + sizes.index(max(sizes))))
        places = [(text, at) for _, text, at in sorted(best)[:MOST]]
        expected = [Spot(float(dense[text][at, row]), text, *spans[text][at]) for text, at in places]
        assert gathered.spots(row, spans) == tuple(expected)
    assert gathered.spots(4, spans) == () and gathered.density(4) == 0


def test_contrast_is_the_difference_of_means() -> None:
    dense, sides = texts(), []
    for part in (dense[:1], dense[2:]):
        side = Gathered(FEATURES, 0)
        for number, one in enumerate(part):
            side.add(number, Active.joined([Active.of(one[1:4], 1), Active.of(one[4:], 4)]))
        sides.append((side, torch.cat([one[1:] for one in part]).double().mean(0)))
    (here, mean), (there, other) = sides
    found = strongest(here, there, most=FEATURES)
    gains = (mean - other).tolist()
    assert [row for row, _, _ in found] == sorted((n for n in range(FEATURES) if gains[n] > 0), key=lambda n: -gains[n])
    for row, *means in found:
        torch.testing.assert_close(torch.tensor(means).double(), torch.stack([mean[row], other[row]]))
    assert strongest(here, there, most=1) == found[:1]
    assert strongest(Gathered(2, 0), Gathered(2, 0), most=2) == []
