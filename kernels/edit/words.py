"""The numbers of layout.py as Triton's constants. It knows none of them itself.

A kernel imports each by name. Triton takes no other global numbers, and its cache of compiled kernels would not notice
that a number behind a module's name (``layout.SLOT``) has changed.
"""

import triton.language as tl

from saesteer.kernels import layout


def __getattr__(name: str) -> tl.constexpr:
    """Any name is layout's."""
    return tl.constexpr(getattr(layout, name))
