"""A spec for a harness, from a file, and whether it can change the score of a text. Knows no harness."""

import json
from pathlib import Path
from typing import Any

from saesteer.errors import ConfigError
from saesteer.language.edits import Use
from saesteer.language.fields import Json
from saesteer.language.spec import from_json
from saesteer.planning.windows import windows

_LONGEST = 1 << 30  # tokens of a prompt: positions that a scope counts from its beginning are below


def read_spec(file: str) -> Json:
    """The spec in a file of JSON, checked as far as it can be without a server.

    Raises:
        ConfigError: naming the file and what is wrong.
    """
    try:
        found = json.loads(Path(file).expanduser().read_text(encoding="utf-8-sig"))
        from_json(found)
    except (OSError, ValueError) as exc:
        raise ConfigError(f"spec {file}: {exc}; expected a JSON object such as {{'edits': [...]}}") from exc
    return dict(found)


def need_prompt_edits(spec: Json) -> None:
    """Refuse a spec that edits generated tokens alone where a given text is scored: all its tokens are a prompt.

    What a module edits is known to the server alone; ``need_edited`` looks at its answer.

    Raises:
        ConfigError: an edit would do nothing.
    """
    for number, edit in enumerate(from_json(spec).edits):
        if not isinstance(edit, Use) and all(start >= _LONGEST for start, _ in windows(edit.scope, _LONGEST)):
            raise _useless(f"saesteer.edits[{number}]")


def need_report(answer: Json) -> list[list[Json]]:
    """What was applied to each choice of an answer to a request with a spec.

    Args:
        answer: a body of the OpenAI API.

    Returns:
        ``applied`` of each choice.

    Raises:
        ConfigError: the answer does not say it, so nothing was steered.
    """
    found: list[Any] = [one.get("saesteer") or answer.get("saesteer") for one in answer["choices"]]
    if not all(found):
        message = "the answer says nothing of the spec: the server runs without saesteer, and nothing was steered"
        raise ConfigError(f"{message}; expected one that `saesteer serve` has started")
    return [one["applied"] for one in found]


def need_edited(applied: list[Json], tokens: int) -> None:
    """Refuse an answer of which some edit stands behind all tokens of the prompt.

    Args:
        applied: as the server reported.
        tokens: of the prompt.

    Raises:
        ConfigError: an edit has done nothing.
    """
    for one in applied:
        if all(start >= tokens for start, _ in one["positions"]):
            raise _useless(str(one["edit"]))


def _useless(edit: str) -> ConfigError:
    found = f"{edit} edits generated tokens alone, but log-likelihoods score the tokens of a prompt"
    return ConfigError(f"{found}; expected a scope that holds them, such as {{'prompt': true, 'generated': true}}")
