"""The numbers of layout.py as Triton's constants; a kernel may use no other global numbers. Knows none itself."""

from __future__ import annotations

import triton.language as tl

from saesteer.kernels import layout

HEAD_WORDS = tl.constexpr(layout.HEAD)  # kernels call the first block of a row HEAD


def __getattr__(name: str) -> tl.constexpr:
    """Any other name is layout's."""
    return tl.constexpr(getattr(layout, name))
