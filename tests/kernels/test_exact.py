"""What must be exact, of the reference and of every way through the kernels: bounds, ties, borders, untouched bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from saesteer.kernels import layout
from saesteer.kernels.layout import BARE, NORMED, PAIR
from saesteer.kernels.reference import rms_norm_ref
from tests.kernels.exact import NOTHING, WIDTH, Run, along, edit, ramp
from tests.kernels.harness import EPS, GPU, OFFSET, SPANS, TILED, TOKEN, Call, Path, State, bits, kinds_of, work_of
from tests.kernels.tables import Entry, Groups, make_positions, make_table, make_work

ONE = along(1.0)  # a token
PATHS = [TOKEN, TILED, *([SPANS] if GPU else [])]  # the interpreter takes seconds for the last


@pytest.fixture(params=[0, 8], ids=["few", "many"])
def filler(request: pytest.FixtureRequest) -> list[Entry]:
    return NOTHING[: request.param]


def test_a_threshold_is_strict(run: Run, filler: list[Entry]) -> None:
    above = 0.5 + 2**-20
    out = run(ramp(0.5, above, 0.25), [[Entry(0, scale=2.0, threshold=0.5), *filler]])
    assert out.stream[:, 0].tolist() == [0.5, 2 * above, 0.25]
    assert out.counts[1, 0] == 1


def test_zero_is_not_active(run: Run, filler: list[Entry]) -> None:
    out = run(ramp(0.0, -1.0, 1.0), [[Entry(0, scale=0.0, shift=5.0, only_if_active=True), *filler]])
    assert out.stream[:, 0].tolist() == [0.0, -1.0, 5.0]
    out = run(ramp(0.0, -1.0, 1.0), [[Entry(0, scale=0.0, shift=5.0), *filler]])
    assert out.stream[:, 0].tolist() == [5.0, 4.0, 5.0]


def test_identity_is_a_threshold_of_minus_infinity(run: Run, filler: list[Entry]) -> None:
    out = run(ramp(-3.0, 4.0), [[Entry(0, scale=0.0, shift=1.0, threshold=-torch.inf), *filler]])
    assert out.stream[:, 0].tolist() == [1.0, 1.0]
    out = run(ramp(-3.0, 4.0, 0.0, 2.0), [[Entry(0, low=-1.0, high=2.0, threshold=-torch.inf), *filler]])
    assert out.stream[:, 0].tolist() == [-1.0, 2.0, 0.0, 2.0]
    assert out.counts[1, 0] == 2


@pytest.mark.parametrize("lo", [0, 6, 68, 69, 70])
@pytest.mark.parametrize("path", [None, TILED], ids=["reference", "tiled"])
def test_windows_are_half_open_across_items(path: Path | None, filler: list[Entry], lo: int) -> None:
    """The second item begins at position 5 + TILE."""
    out = edit(path, ramp(*[1.0] * 70), [[Entry(0, shift=1.0, lo=lo, hi=lo + 2), *filler]], start=5)
    assert out.stream[:, 0].tolist() == [1.0 + (lo <= 5 + t < lo + 2) for t in range(70)]


def test_windows_are_half_open(run: Run, filler: list[Entry]) -> None:
    for lo, want in ((4, [1.0, 1.0, 1.0]), (5, [2.0, 1.0, 1.0]), (6, [2.0, 2.0, 1.0]), (8, [1.0, 1.0, 2.0])):
        window = [Entry(0, shift=1.0, lo=lo - 1, hi=lo + 1), *filler]
        assert run(ramp(1.0, 1.0, 1.0), [window], start=5).stream[:, 0].tolist() == want


def test_a_group_reads_one_x_and_groups_follow_each_other(run: Run) -> None:
    double = Entry(0, scale=2.0)

    def first(groups: Groups) -> float:
        return float(run(ramp(1.0), groups).stream[0, 0])

    assert first([[double] * 3]) == 4.0  # 1 + 1 + 1 + 1
    assert first([[double] * 67]) == 68.0
    assert first([[double], [double], [double]]) == 8.0
    assert first([[double] * 5, [double] * 9, [double]]) == 6 * 10 * 2
    assert first([[double] * 5, [Entry(0, scale=0.0, shift=1.0)]]) == 1.0


def test_gain_multiplies_the_delta(run: Run, filler: list[Entry]) -> None:
    assert run(ramp(2.0), [[Entry(0, scale=0.0, shift=6.0, gain=0.5), *filler]]).stream[0, 0] == 4.0
    assert run(ramp(2.0), [[Entry(0, scale=0.0, shift=6.0, gain=0.0), *filler]]).stream[0, 0] == 2.0


def test_deltas_are_not_rounded_before_they_are_summed(run: Run, filler: list[Entry]) -> None:
    """Neither 1000.3 nor 1000.05 is a number of 16 bits; their difference is."""
    x = torch.tensor(ramp(1.0, 2.0), dtype=torch.float16)
    out = run(x, [[Entry(0, shift=1000.3), Entry(0, shift=-1000.05), *filler]])
    torch.testing.assert_close(out.stream[:, 0].float(), torch.tensor([1.25, 2.25]), atol=2e-3, rtol=0)
    out = run(x, [[Entry(0, shift=1e6), Entry(0, shift=2.0 - 1e6), *filler]])  # they are beyond fp16
    torch.testing.assert_close(out.stream[:, 0].float(), torch.tensor([3.0, 4.0]), atol=0.5, rtol=0)
    assert torch.equal(out.stream[:, 1:], x[:, 1:])


def test_a_matched_delta_is_in_lengths_of_x(run: Run) -> None:
    x = [[3.0, 4.0, *[0.0] * 6]]
    along_0 = Entry(0, shift=1.0, flags=layout.MATCH)
    assert run(x, [[along_0]]).stream[0].tolist() == [8.0, 4.0, *[0.0] * 6]
    out = run(x, [[along_0, Entry(2, shift=2.0)], [Entry(1, scale=2.0)]])
    assert out.stream[0].tolist() == [8.0, 8.0, 2.0, *[0.0] * 5]


# Activations 9 | 3 5 3 3 1 | 9 with the dictionary in the middle; the order is 2, 1, 3, 4, 5.
TIED, ORDER = (9.0, 3.0, 5.0, 3.0, 3.0, 1.0, 9.0), [2, 1, 3, 4, 5]


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
def test_ties_in_topk_go_to_the_lower_index(run: Run, k: int) -> None:
    group = [Entry(i, scale=2.0, flags=layout.RANKED, size=5, k=k, counter=1) for i in (1, 2, 3, 4, 5)]
    out = run(ONE, [group], encoder=along(*TIED), dense=(1, 5))
    assert {i for i in range(1, 6) if out.stream[0, i] == TIED[i]} == set(ORDER[:k])
    assert out.counts[1, 1] == k


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_ranks_by_magnitude_keep_the_sign(run: Run, k: int) -> None:
    values = (1.0, -3.0, 2.0, 3.0, -4.0)
    flags = layout.RANKED | layout.MAGNITUDE
    common: dict[str, Any] = {"flags": flags, "size": 4, "k": k, "threshold": -torch.inf}
    out = run(ONE, [[Entry(i, scale=2.0, **common) for i in (1, 2, 3, 4)]], encoder=along(*values), dense=(1, 4))
    assert {i for i in range(1, 5) if out.stream[0, i] == values[i]} == {4, 1, 3, 2} - set([4, 1, 3, 2][k:])


def test_a_range_within_the_dictionary_has_its_own_ranks(run: Run) -> None:
    """As of groupmax: the strongest of features 0 to 2 and of 3 to 5, if above 0."""
    encoder = along(2.0, 4.0, 4.0, -1.0, -2.0, -1.0)
    group = [Entry(i, shift=8.0, only_if_active=True, flags=layout.RANKED, size=3, k=1) for i in range(6)]
    out = run(ONE, [group], encoder=encoder, dense=(0, 6))
    assert out.stream[0].tolist() == [1.0, 8.0, *[0.0] * 6]


def test_ranks_count_the_bias_of_the_others(run: Run) -> None:
    for bias, active in ((0.5, False), (-0.5, True)):
        entry = Entry(1, scale=3.0, flags=layout.RANKED, size=3, k=1)
        out = run(ONE, [[entry]], encoder=along(1.0, 1.0, 1.0), b_enc=[bias, 0.0, -2.0], dense=(0, 3))
        assert out.stream[0, 1] == (2.0 if active else 0.0)


def test_ranked_entries_and_their_neighbours_in_one_chunk(run: Run) -> None:
    ranked: dict[str, Any] = {"flags": layout.RANKED, "size": 4, "k": 1}
    group = [Entry(0, scale=2.0), Entry(2, scale=2.0, **ranked), Entry(3, scale=2.0, **ranked)]
    out = run(ONE, [group], encoder=along(1.0, 2.0, 3.0, 4.0), dense=(0, 4))
    assert out.stream[0].tolist() == [2.0, 0.0, 0.0, 4.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_a_reconstruction_ties_at_its_border_to_the_lower_index(run: Run, k: int) -> None:
    flags = layout.RECONSTRUCT | layout.RANKED
    whole = Entry(0, flags=flags, size=5, k=k, counter=2)
    out = run(ONE, [[whole]], encoder=along(*TIED), dense=(1, 5), b_dec=[0.5] * WIDTH)
    want = [0.5 + (i in ORDER[:k]) * TIED[i] if i < 7 else 0.5 for i in range(WIDTH)]
    assert out.stream[0].tolist() == want
    assert out.counts[1].tolist() == [0, 0, 1, 0]


def test_a_reconstruction_has_strict_thresholds_and_clamps_and_a_window(run: Run) -> None:
    whole = Entry(0, flags=layout.RECONSTRUCT, size=4, lo=1, hi=3, gain=0.5, counter=1)
    # Feature 3 is clamped from 4 to 6, as the reconstruction at half the strength.
    group = [Entry(3, shift=2.0, gain=0.5, lo=1, hi=3), whole]
    encoder, threshold = along(1.0, 2.0, 3.0, 4.0), [0.0, 2.0, 2.0, 3.0]
    out = run(ONE * 4, [group], encoder=encoder, threshold=threshold, dense=(0, 4), b_dec=[1.0] * WIDTH)
    # Half of x = (1, 0, ...) and half of (1 + 1, 1, 3 + 1, 6 + 1, 1, ...)
    assert out.stream[1].tolist() == out.stream[2].tolist() == [1.5, 0.5, 2.0, 3.5, 0.5, 0.5, 0.5, 0.5]
    assert out.stream[0].tolist() == out.stream[3].tolist() == ONE[0]
    assert out.counts[1].tolist() == [2, 2, 0, 0]


def test_a_register_scales_a_reconstruction(run: Run) -> None:
    whole = Entry(0, flags=layout.RECONSTRUCT | layout.SCALED, size=4, factor=1, counter=1)
    x = [ONE[0]] * 3
    out = run(
        x, [[whole]], encoder=along(1.0, 2.0, 3.0, 4.0), dense=(0, 4), registers=[[9.0, f] for f in (0.0, 0.5, 1.0)]
    )
    # x = (1, 0, ...) becomes (1, 2, 3, 4, 0, ...) at full strength.
    assert out.stream[:, :4].tolist() == [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.5, 2.0], [1.0, 2.0, 3.0, 4.0]]
    assert out.counts[1].tolist() == [0, 2, 0, 0]


@pytest.mark.parametrize("bit", [0, 7, 31])
def test_gates_are_strict_and_read_x_before_every_edit(run: Run, bit: int) -> None:
    mask = 1 << bit
    key = Entry(1, low=1.0, high=3.0, gates=mask, flags=layout.GATE, threshold=-torch.inf)
    x = [[0.0, v, *[0.0] * 6] for v in (1.0, 1.0 + 2**-20, 2.0, 3.0 - 2**-20, 3.0)]
    # The edit in between would open and close gates if it were read.
    out = run(x, [[key], [Entry(1, shift=1.5)], [Entry(0, shift=1.0, gates=mask, counter=1)]], cells=[0, -1, 8, -1, -1])
    assert out.stream[:, 0].tolist() == [0.0, 1.0, 1.0, 1.0, 0.0]
    assert out.counts[1].tolist() == [5, 3, 0, 0]
    word = mask - (1 << 32 if bit == 31 else 0)
    assert out.cells.tolist() == [0, -1, 8 | word, -1, ~word]


def test_every_gate_of_an_entry_must_hold(run: Run) -> None:
    keys = [Entry(i, low=0.0, gates=1 << i, flags=layout.GATE) for i in range(1, 4)]
    x = [[0.0, a, b, c, *[0.0] * 4] for a in (0.0, 1.0) for b in (0.0, 1.0) for c in (0.0, 1.0)]
    out = run(x, [keys, [Entry(0, shift=1.0, gates=2 | 8), Entry(4, shift=1.0)]])
    assert out.stream[:, 0].tolist() == [0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0]
    assert out.stream[:, 4].tolist() == [1.0] * 8


@pytest.mark.parametrize("entries", [1, 20], ids=["alone", "parts"])
def test_cells_of_an_earlier_site_open_a_single_group(run: Run, entries: int) -> None:
    group = [Entry(0, shift=1.0, gates=1 << 31), *[Entry(1, shift=1.0, gates=5)] * (entries - 1)]
    out = run(ramp(0.0, 0.0, 0.0, 0.0), [group], cells=[-(2**31), 5, -(2**31) | 5, 4])
    assert out.stream[:, 0].tolist() == [1.0, 0.0, 1.0, 0.0]
    assert out.stream[:, 1].tolist() == [1.0, entries, entries, 1.0]
    assert out.cells.tolist() == [-(2**31), 5, -(2**31) | 5, 4]


@pytest.mark.parametrize("many", [False, True], ids=["few", "many"])
def test_what_is_read_is_kept_for_later_groups(run: Run, many: bool) -> None:
    """A read sees x before every edit; its law bounds what is kept."""
    reads = [
        Entry(1, scale=1.0 + 2.0, shift=0.5, high=4.0, gates=3, flags=layout.READ, threshold=-torch.inf),
        Entry(2, scale=1.0 + 1.0, gates=0, flags=layout.READ, threshold=1.0),
    ]
    held = Entry(7, scale=0.0, shift=10.0, only_if_active=True, size=0, flags=layout.HELD, counter=1)
    scaled = Entry(6, shift=1.0, factor=3, gain=2.0, flags=layout.SCALED, counter=2)
    filler = [Entry(5, shift=1.0, hi=0)] * (8 * many)
    x = [[0.0, a, b, *[0.0] * 5] for a, b in ((1.0, 1.0), (3.0, 2.0), (-1.0, 3.0))]
    out = run(x, [reads, [Entry(1, shift=1.5), Entry(2, shift=9.0)], [held, scaled, *filler]])
    assert out.registers[:3, 3].tolist() == [2.5, 4.0, -1.5]
    assert out.registers[:3, 0].tolist() == [0.0, 2.0, 3.0]
    assert out.stream[:, 7].tolist() == [0.0, 8.0, 7.0], "10 less what is held, where that is active"
    assert out.stream[:, 6].tolist() == [5.0, 8.0, -3.0]
    assert out.counts[1].tolist() == [6, 2, 3, 0]


@pytest.mark.parametrize("entries", [1, 20], ids=["alone", "parts"])
def test_registers_of_an_earlier_site_serve_a_single_group(run: Run, entries: int) -> None:
    group = [Entry(0, scale=3.0, size=1, flags=layout.HELD)]
    group += [Entry(1, shift=1.0, factor=2, size=1, flags=layout.SCALED | layout.HELD)] * (entries - 1)
    out = run(ramp(9.0, 9.0), [group], registers=[[9.0, 1.0, 2.0], [9.0, 0.0, 3.0]])
    assert out.stream[:, 0].tolist() == [11.0, 9.0]
    assert out.stream[:, 1].tolist() == [1.0 + 2.0 * (entries - 1), 1.0 + 3.0 * (entries - 1)]
    assert out.registers.tolist() == [[9.0, 1.0, 2.0], [9.0, 0.0, 3.0]]


@pytest.mark.parametrize("others", [False, True], ids=["alone", "beside reads"])
@pytest.mark.parametrize("ranked", [False, True], ids=["thresholds", "ranked"])
def test_what_a_transcoder_makes_is_kept_where_it_reads(run: Run, others: bool, ranked: bool) -> None:
    """Features behind its size are a skip connection: active whatever they are. The token keeps its bits."""
    flags = layout.READ | layout.RECONSTRUCT | layout.RANKED * ranked
    groups = [[Entry(0, flags=flags, size=4, k=2, lo=0)]]
    if others:
        read = Entry(1, gates=2, flags=layout.READ, scale=2.0, threshold=-torch.inf)
        groups = [[*groups[0], read], [Entry(0, shift=1.0, counter=1)]]
    encoder, threshold = along(1.0, 4.0, 3.0, 2.0, -5.0), [0.0, 4.0, 2.0, 1.0, -torch.inf]
    given = {"encoder": encoder, "threshold": threshold, "dense": (0, 5), "b_dec": [1.0] * WIDTH}
    out = run(ONE * 3, groups, **given, kept=[[9.0] * WIDTH] * 3)
    # Of the two strongest, one is not above its threshold; without ranks, three are.
    made = [1.0, 1.0, 4.0, 1.0, -4.0] if ranked else [2.0, 1.0, 4.0, 3.0, -4.0]
    assert out.kept is not None
    assert out.kept.tolist() == [[*made, 1.0, 1.0, 1.0]] * 3
    assert out.stream.tolist() == [[1.0 + others, *ONE[0][1:]]] * 3
    assert out.counts[1].tolist() == [0, 3 * others, 0, 0]
    if others:
        assert out.registers[:3, 2].tolist() == [4.0] * 3


@pytest.mark.parametrize("entries", [1, 8, 20], ids=["few", "many", "parts"])
def test_what_is_kept_takes_the_place_of_the_token(run: Run, entries: int) -> None:
    """With the deltas of its group, in its window, behind its gates, at its strength."""
    flags = layout.HELD | layout.RECONSTRUCT
    whole = Entry(0, flags=flags | layout.SCALED, factor=1, gain=0.5, lo=1, hi=4, gates=4, counter=1)
    group = [whole, *[Entry(3, shift=1.0)] * entries]
    registers = [[0.0, factor] for factor in (9.0, 2.0, 1.0, 0.0, 9.0)]
    out = run(ramp(*[1.0] * 5), [group], registers=registers, kept=[[5.0] * WIDTH] * 5, cells=[4, 5, 4, 4, 4])
    x = ramp(1.0)[0]
    for at, factor in enumerate((0.0, 1.0, 0.5, 0.0, 0.0)):
        wanted = [one + factor * (5.0 - one) + entries * (slot == 3) for slot, one in enumerate(x)]
        assert out.stream[at].tolist() == wanted
    assert out.counts[1].tolist() == [5 * entries, 2, 0, 0]
    out = run(ramp(*[1.0] * 5), [group], registers=registers, kept=[[5.0] * WIDTH] * 5, cells=[0, 3, 0, 0, 1])
    assert out.counts[1].tolist() == [5 * entries, 0, 0, 0]


def test_what_is_kept_is_not_decoded_with_the_dictionary_of_a_condition(run: Run) -> None:
    """Only the condition needs one encoded whole here: it is of another dictionary, and ranked."""
    key = Entry(2, low=0.5, gates=4, flags=layout.GATE | layout.RANKED, size=5, k=2)
    whole = Entry(0, flags=layout.HELD | layout.RECONSTRUCT, gates=4, counter=1)
    given = {"encoder": along(0.0, 1.0, 4.0, 3.0, 2.0), "dense": (0, 5), "b_dec": [9.0] * WIDTH}
    out = run(ramp(1.0, -1.0), [[key], [whole]], **given, kept=[[5.0] * WIDTH] * 2)
    assert out.stream.tolist() == [[5.0] * WIDTH, *ramp(-1.0)]
    assert out.counts[1].tolist() == [0, 1, 0, 0]


ZERO_DELTAS: dict[str, Sequence[Sequence[Entry]]] = {
    "set-inactive-to-0": [[Entry(0, scale=0.0, shift=0.0)], [Entry(2, high=100.0)]],
    "gain": [[Entry(3, shift=1.0, gain=0.0)]],
    "window": [[Entry(3, shift=1.0, lo=7)]],
    "gate": [[Entry(3, shift=1.0, gates=4)]],
    "only-if-active": [[Entry(0, shift=1.0, only_if_active=True)]],
    "scale-1": [[Entry(3, scale=1.0)] * 3],
    "parts": [[Entry(3, scale=1.0)] * 40],
    "key": [[Entry(3, low=0.0, gates=1, flags=layout.GATE)], [Entry(4, shift=1.0, gates=2)]],
}


@pytest.mark.parametrize("form", [NORMED, PAIR], ids=["normed", "pair"])
@pytest.mark.parametrize("case", ZERO_DELTAS)
def test_a_token_whose_deltas_are_all_zero_keeps_its_bits(run: Run, case: str, form: int) -> None:
    stream = torch.tensor(ramp(-1.0, -0.0, -2.0), dtype=torch.float16)
    stream[1, 3] = -0.0
    second = torch.full_like(stream, -0.125)  # not the norm of anything: it would change if it were made anew
    out = run(stream, ZERO_DELTAS[case], form=form, second=second)
    assert torch.equal(bits(out.stream), bits(stream))
    assert out.second is not None
    assert torch.equal(bits(out.second), bits(second))
    assert not out.counts.any()


@pytest.mark.parametrize("entries", [1, 8], ids=["few", "many"])
@pytest.mark.parametrize("path", [None, TOKEN, TILED], ids=["reference", "span1", "tiled"])
def test_the_norm_is_of_the_stream_as_it_was_rounded(path: Path | None, entries: int) -> None:
    stream = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0)).half()
    weight, w = torch.rand(1000).half(), torch.full((1, 1000), 1 / 32, dtype=torch.float16)
    table = make_table([[[[Entry(0, shift=0.3), *[Entry(0, hi=0)] * (entries - 1)]]]], 1)
    listed = [(t, 1, t) for t in range(4)]
    work, none = work_of(listed, table, path or TOKEN, 4), torch.zeros(1)
    site = torch.zeros(1, dtype=torch.int32)
    weights = (w, w, none, none, torch.zeros(1, 1000))
    where = make_positions(listed, 4)
    call = Call(weight, table, site, work, where, kinds_of(listed, table, 1), weights, NORMED, 0, False)
    state = State(stream, torch.zeros_like(stream), torch.zeros(4).int(), torch.zeros(2, 1).int())
    if path is None:
        call.reference(state)
    else:
        call.kernel(state, path)
    # Of what was there before the rounding, two elements in five would differ.
    assert state.second is not None
    assert (state.second == rms_norm_ref(state.stream, weight, EPS, OFFSET)).float().mean() > 0.98


SITES = [[[Entry(0, shift=1.0)]], [], [[Entry(1, shift=10.0)], [Entry(1, shift=20.0)]]]


def plain(table: Tensor, site: int, items: list[tuple[int, int, int]], path: Path, tokens: int) -> State:
    """Zeros through every kernel of a path, with unit vectors."""
    eye, zeros = torch.eye(WIDTH), torch.zeros(WIDTH)
    weights = (eye, eye, zeros, zeros, torch.zeros(1, WIDTH))
    kinds = torch.tensor([7], dtype=torch.int32)
    work, where = make_work(items, tokens, span=path.span), make_positions(items, tokens)
    call = Call(None, table, torch.tensor([site], dtype=torch.int32), work, where, kinds, weights, BARE, 0, False)
    state = State(torch.zeros(tokens, WIDTH), None, torch.zeros(tokens).int(), torch.zeros(len(table), 1).int())
    call.kernel(state, path)
    return state


@pytest.mark.parametrize("path", PATHS, ids=str)
def test_only_the_listed_site_counts(path: Path) -> None:
    table = make_table([SITES], 3)
    for site, want in ((0, [1.0, 0.0]), (1, [0.0, 0.0]), (2, [0.0, 30.0])):
        out = plain(table, site, [(0, 1, 0)], path, 1)
        assert out.stream[0, :2].tolist() == want


@pytest.mark.parametrize("path", PATHS, ids=str)
def test_a_site_without_edits_is_left_before_a_row_is_looked_at(path: Path) -> None:
    table = make_table([SITES], 3)
    assert plain(table, 2, [(0, 1, 0)], path, 1).stream.any()
    out = plain(table, ~2, [(0, 1, 0)], path, 1)
    assert not out.stream.any()
    assert not out.counts.any()


@pytest.mark.parametrize("path", PATHS, ids=str)
def test_row_0_and_an_empty_list_do_nothing(path: Path) -> None:
    table = make_table([SITES], 3)
    for items in ([], [(0, 0, 5), (1, 0, 6)]):
        out = plain(table, 0, items, path, 2)
        assert not out.stream.any()
        assert not out.counts.any()


@pytest.mark.parametrize("entries", [1, 8], ids=["one", "eight"])
@pytest.mark.parametrize("path", [None, *PATHS], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_nothing_that_overflows_is_left_in_the_stream(path: Path | None, entries: int, dtype: torch.dtype) -> None:
    """It would stay in the cache of keys and values when its request has gone."""
    huge = 3.4e38
    groups = [
        [Entry(at, scale=0.0, shift=(-1) ** at * huge, gain=4.0) for at in range(entries)],
        [Entry(0, shift=-huge)],
    ]
    table = make_table([[groups[: 1 + (entries > 1)]]], 1)
    tokens = [(0, 1, 1), (1, 1, 2)]
    work, where = work_of(tokens, table, path or TOKEN, 2), make_positions(tokens, 2)
    rows = torch.ones(entries, WIDTH, dtype=dtype)
    zeros = torch.zeros(entries)
    weights = (rows, rows, zeros, zeros, torch.zeros(1, WIDTH))
    site = torch.zeros(1, dtype=torch.int32)
    call = Call(None, table, site, work, where, kinds_of(tokens, table, 1), weights, NORMED, 0, False)
    state = State(torch.ones(2, WIDTH, dtype=dtype), torch.ones(2, WIDTH, dtype=dtype), zeros_int(2), zeros_int(2, 1))
    call.reference(state) if path is None else call.kernel(state, path)
    assert state.counts.any()
    assert state.stream.isfinite().all()
    assert state.second is not None
    assert state.second.isfinite().all()


def zeros_int(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.int32)
