"""Widths, types, forms and ways through the kernels that tests draw from: on a GPU few, where each is compiled."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from saesteer.kernels.layout import BARE, NORMED, PAIR
from tests.kernels.harness import GPU, SPANS, TILED, TOKEN

# The interpreter has no bf16 to speak of: its dot is wrong, and fp32 is cut off instead of rounded.
DTYPES = [torch.float16, torch.float32, *([torch.bfloat16] if GPU else [])]
MOST_EDITS, WIDEST = (1024, 8192) if GPU else (40, 600)
# Few on a GPU, where each is compiled.
WIDTHS = [1, 37, 130, 576, 2304, 5376, 8191, 8192] if GPU else [1, 2, 3, 17, 37, 64, 127, 130, 576]
DRAWN = settings(
    max_examples=100 if GPU else 15,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],  # the numbers come from a seed: there is little to shrink, and the interpreter is slow
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
# Width, dtype and form: few together on a GPU, where every choice is compiled.
COMPILED = [
    (1, torch.float32, BARE),
    (37, torch.bfloat16, NORMED),
    (130, torch.float32, PAIR),
    (576, torch.float16, NORMED),
    (2304, torch.bfloat16, NORMED),
    (5376, torch.bfloat16, PAIR),
    (8192, torch.float16, BARE),
]
ANY_SHAPE = st.tuples(
    st.sampled_from(WIDTHS) | st.integers(1, WIDEST), st.sampled_from(DTYPES), st.sampled_from([BARE, NORMED, PAIR])
)
SHAPES = st.sampled_from(COMPILED) if GPU else ANY_SHAPE
Shape = tuple[int, torch.dtype, int]
# The edit kernel on items costs the interpreter seconds, for it looks at every place of every item.
PATHS = [TOKEN, TILED, *([SPANS] if GPU else [])]
