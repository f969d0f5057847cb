"""What commands read of texts through an engine: whole, in order, and as Transformers has it."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from saesteer.consumers.consumer import Array, Rows
from saesteer.consumers.shards import Place, Shard
from saesteer.errors import SaesteerError
from saesteer.workbench.reading import captured, tensors_of

SITES = ("resid_post.3", "mlp_in.4")


def value(text: int, site: int, position: int) -> float:
    return 100.0 * text + 10 * site + position / 8


def rows(text: int, site: int, positions: list[int]) -> Rows:
    numbers = np.array([[value(text, site, at), -1.0] for at in positions], "<f4")
    array = Array("float32", numbers.shape, numbers.tobytes())
    tokens = np.array(positions, dtype=np.int64)
    return Rows("activation", {"site": SITES[site], "at": "before"}, tokens.copy(), tokens, {"data": array})


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    cuts=st.lists(st.integers(1, 4), min_size=1, max_size=40),
    order=st.randoms(use_true_random=False),
    first=st.integers(0, 30),
    lost=st.booleans(),
)
def test_pieces_of_texts_are_put_together(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], cuts: list[int], order: Any, first: int, lost: bool
) -> None:
    """However steps cut them, in whichever shard they lie; a row that is missing is an error."""
    steps, sizes = [], iter(cuts * 40)
    for text, length in enumerate(lengths):
        at = 0
        while at < length:
            size = min(next(sizes), length - at)
            steps += [(text, site, [*range(at, at + size)]) for site in range(2)]
            at += size
    order.shuffle(steps)
    gone = steps.pop() if lost else None
    folder = tmp_path_factory.mktemp("shards")
    place = Place(folder)
    for start in range(0, len(steps), 5):
        shard = Shard()
        for text, site, positions in steps[start : start + 5]:
            shard.add(str(first + text), 0, rows(text, site, positions))
        place.publish(shard, "captured")
    place.close()
    found = tensors_of(folder, SITES, [[7] * length for length in lengths])
    if gone is not None:
        with pytest.raises(SaesteerError, match=r"the engine has lost rows of (resid_post\.3|mlp_in\.4) in text"):
            list(found)
        return
    for text, (length, streams) in enumerate(zip(lengths, found, strict=True)):
        for site, name in enumerate(SITES):
            expected = [[value(text, site, at), -1.0] for at in range(length)]
            assert torch.equal(streams[name], torch.tensor(expected))


@pytest.mark.slow
def test_an_engine_gives_what_transformers_has() -> None:
    """Texts that begin alike, and one that takes several steps."""
    from saesteer import hf
    from saesteer.commands.serve import resolve
    from saesteer.config.config import SaesteerConfig

    place, _, options = resolve("demo", SaesteerConfig())
    oracle = hf.Model(place, sites=SITES)
    ids = list(oracle.tokenizer("The bridge over the bay is long and old. " * 12).input_ids)
    prompts = [ids, ids[:40], [*ids[:40], 9, 8, 7], ids[3:9]]
    small = {**options, "max_num_batched_tokens": 64, "max_num_seqs": 4}
    with captured(place, SITES, small, prompts) as found:
        for prompt, streams in zip(prompts, found, strict=True):
            expected = oracle.streams(prompt)
            for site in SITES:
                assert streams[site].shape == expected[site].shape
                torch.testing.assert_close(streams[site], expected[site], rtol=1e-3, atol=1e-3)
