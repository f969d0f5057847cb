"""Token ids of what a caller passes: ids in any form, or a message in a chat template. Knows no model and no server."""

from collections.abc import Sequence
from operator import index
from typing import Any

from saesteer.errors import ConfigError


def token_ids(prompt: Any, tokenizer: Any, vocabulary: int) -> list[int]:
    """The token ids of a text, in a flat sequence of integers, or in a tensor or an array of one dimension.

    Args:
        prompt: what was passed.
        tokenizer: of Transformers, which texts need.
        vocabulary: how many token ids the model has.

    Raises:
        ConfigError: it is text without a tokenizer, or something else, is empty, or holds an id that the model lacks.
    """
    if isinstance(prompt, str):
        prompt = _known(tokenizer, "text")(prompt).input_ids
    expected = f"expected a flat list of at least one token id from 0 to {vocabulary - 1}"
    kind, shape = type(prompt).__name__, getattr(prompt, "shape", None)
    if shape is not None and len(shape) != 1:
        raise ConfigError(f"prompt: got a {kind} of shape {list(shape)}, {expected}")
    listed = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if not isinstance(listed, Sequence) or isinstance(listed, bytes):
        raise ConfigError(f"prompt: got a {kind}, {expected}")
    if not listed:
        raise ConfigError(f"prompt: got no token, {expected}")
    found = []
    for at, one in enumerate(listed):
        try:
            token = -1 if isinstance(one, bool) else index(one)
        except TypeError:
            token = -1
        if not 0 <= token < vocabulary:
            got = one if isinstance(one, int | float) else f"a {type(one).__name__}"
            raise ConfigError(f"prompt[{at}]: got {got}, {expected}")
        found.append(token)
    return found


def chat_ids(tokenizer: Any, message: str, otherwise: str) -> list[int]:
    """Token ids of one user message in a tokenizer's chat template, ready for the answer.

    Args:
        tokenizer: of Transformers.
        message: the text.
        otherwise: what to do without a template, for the error.

    Raises:
        ConfigError: there is no tokenizer, or it has no chat template.
    """
    tokenizer = _known(tokenizer, "a message")
    turns = [{"role": "user", "content": message}]
    try:
        text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    except ValueError as exc:  # nothing else tells it for every tokenizer
        raise ConfigError(f"the model's tokenizer has no chat template; {otherwise}") from exc
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def _known(tokenizer: Any, what: str) -> Any:
    if tokenizer is None:
        raise ConfigError(f"this model was given without a tokenizer, expected token ids instead of {what}")
    return tokenizer
