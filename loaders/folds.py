"""Exact rewritings of a format's arithmetic as ``act(x @ w_enc.T + b_enc)``. Knows no files."""

import math

import torch
from torch import Tensor

from saesteer.dictionaries.coder import blocks


def subtract_from_input(w_enc: Tensor, b_enc: Tensor, b_in: Tensor) -> Tensor:
    """The b_enc' with ``(x - b_in) @ w_enc.T + b_enc == x @ w_enc.T + b_enc'``.

    Takes w_enc [F, d] after it was rounded to its dtype: so the weights' rounding error multiplies x - b_in, which is
    far smaller than x.

    Returns:
        [F] float32.
    """
    shift = torch.cat([w_enc[rows].double() @ b_in.double() for rows in blocks(len(w_enc))])
    return (b_enc.double() - shift).float()


def gated(b_gate: Tensor, b_mag: Tensor, r_mag: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rewrites a gated SAE, whose gate and magnitude share W, as a jumprelu.

    ``f = (x @ W + b_gate > 0) * max(x @ (W * exp(r_mag)) + b_mag, 0)`` is, with g = exp(r_mag), the jumprelu with the
    encoder rows g * W, b_enc = b_mag and threshold = max(0, b_mag - g * b_gate).

    Returns:
        (g, b_enc, threshold), each [F] float32.
    """
    gain = r_mag.double().exp()
    threshold = (b_mag.double() - gain * b_gate.double()).clamp_min(0)
    return gain.float(), b_mag.float(), threshold.float()


def to_decoder_norm(norms: Tensor) -> tuple[Tensor, Tensor]:
    """Factors (for w_enc and b_enc, for w_dec) that move the decoder's row lengths [F] into the feature values.

    A row of length 0 writes nothing, whatever the feature's value is; it stays zero on both sides.
    """
    return norms, torch.where(norms > 0, 1 / norms, 0.0)


def to_raw_units(widths: tuple[int, int], lengths: tuple[float, float]) -> tuple[float, float, float]:
    """Factors (for b_enc and thresholds, for w_dec, for b_dec) of a dictionary of scaled inputs and outputs.

    It was trained on x * s_in and y * s_out with s = sqrt(width) / mean length. The encoder's rows stay, so feature
    values are those of the scaled inputs, divided by s_in.
    """
    s_in, s_out = (math.sqrt(width) / length for width, length in zip(widths, lengths, strict=True))
    return 1 / s_in, s_in / s_out, 1 / s_out


def gate_by_norm(threshold: Tensor, norms: Tensor) -> Tensor:
    """The threshold' with ``pre * norms > threshold  ==  pre > threshold'``; all are [F].

    What a row of length 0 writes is nothing; it never passes, at the largest float32.
    """
    divided = torch.where(norms > 0, threshold.double() / norms.double(), torch.inf)
    return divided.float().clamp_max(torch.finfo(torch.float32).max)


def centre_input(w_enc: Tensor, b_enc: Tensor, b_in: Tensor | None) -> tuple[Tensor, Tensor]:
    """The (w_enc', b_enc') with ``(x - mean(x) - b_in) @ w_enc.T + b_enc == (x - b_in) @ w_enc'.T + b_enc'``.

    Takes w_enc [F, d] in float32, before it is rounded, and b_in [d] or None for 0.
    """
    means = torch.cat([w_enc[rows].double().mean(1) for rows in blocks(len(w_enc))])
    shift = 0.0 if b_in is None else b_in.double().sum()
    return w_enc - means[:, None].float(), (b_enc.double() - shift * means).float()
