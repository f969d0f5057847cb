"""Which tokens a feature makes likely and unlikely: the logit lens on its decoder row. Knows no dictionary's format.

The logit of token t that a direction d adds, if no layer came after it and the length of the stream stayed as it is, is
``(g * W[t]) · d``: g is the gain of the model's final norm, W the output embedding (lm_head). A final LayerNorm also
takes away the mean of d. (nostalgebraist, "interpreting GPT: the logit lens", 2020,
lesswrong.com/posts/AcKRB8wDpdaN6v6ru; applied to a decoder row instead of the stream.)
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from saesteer.models.families import find_trunk

_BLOCK_BYTES = 256 << 20  # size of the logits held at once


@torch.no_grad()
def lens(rows: Tensor, model: Any, most: int) -> Iterator[tuple[list[int], list[int]]]:
    """The tokens that each decoder row promotes and suppresses, strongest first.

    Args:
        rows: [F, d_model], decoder rows that are added to the residual stream.
        model: a Transformers causal language model.
        most: how many tokens of each kind.
    """
    head = _head(model)
    for block in torch.split(rows, max(1, _BLOCK_BYTES // (4 * len(head)))):
        logits = block.float().to(head.device) @ head.T
        likely, unlikely = (logits.topk(most, dim=-1, largest=largest).indices for largest in (True, False))
        yield from zip(likely.tolist(), unlikely.tolist(), strict=True)


def _head(model: Any) -> Tensor:
    """``g * W`` [vocabulary, d_model] float32."""
    trunk, family = find_trunk(model, "transformers")
    norm, out = getattr(trunk, family.norm), model.get_output_embeddings().weight
    # Of +1, -1, +1, ... the mean is 0 and the length 1, so a norm gives back its gain, in whatever form it keeps that:
    # Gemma adds 1 to its weight.
    signs = 1.0 - 2.0 * (torch.arange(out.shape[1], device=out.device) % 2)
    told = (norm(signs.to(out.dtype)[None, None]) - norm(-signs.to(out.dtype)[None, None]))[0, 0]
    head: Tensor = out.float() * (told.float() * signs / 2)
    return head - head.mean(-1, keepdim=True) if isinstance(norm, torch.nn.LayerNorm) else head


@torch.no_grad()
def logits_of(hidden: Tensor, model: Any, tokens: Tensor | None = None) -> Tensor:
    """What lm_head makes of rows that have passed the final norm, with the cap that Gemma 2 puts on it.

    Args:
        hidden: [n, d_model].
        model: a Transformers causal language model.
        tokens: ids; None: the whole vocabulary.

    Returns:
        [n, tokens] float32.
    """
    head = model.get_output_embeddings()
    weight, bias = head.weight, getattr(head, "bias", None)
    if tokens is not None:
        weight, bias = weight[tokens], None if bias is None else bias[tokens]
    logits = torch.nn.functional.linear(hidden.float(), weight.float(), None if bias is None else bias.float())
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    return logits if cap is None else cap * torch.tanh(logits / cap)
