"""What a bridge knows of a spec before and after the server has seen it."""

import json
from pathlib import Path
from typing import Any

import pytest

from saesteer.bridges.specs import need_edited, need_prompt_edits, need_report, read_spec
from saesteer.errors import ConfigError


def clamp(**scope: Any) -> dict[str, Any]:
    return {"op": "clamp", "dictionary": "demo", "feature": 1, "value": 2.0, "scope": scope}


@pytest.mark.parametrize(
    "scope", [{"generated": True}, {"prompt": False}, {"generated": True, "skip_first": 3}], ids=str
)
def test_generated_tokens_alone_score_nothing(scope: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"saesteer.edits\[1\] edits generated tokens alone, but log-likelihoods"):
        need_prompt_edits({"edits": [clamp(), clamp(**scope)]})


@pytest.mark.parametrize(
    "scope",
    [{}, {"prompt": True}, {"generated": True, "prompt": True}, {"positions": [[4, 9]]}, {"positions": [[-1, None]]}],
    ids=str,
)
def test_what_a_prompt_has_is_scored(scope: dict[str, Any]) -> None:
    need_prompt_edits({"edits": [clamp(**scope), {"op": "use", "module": "any"}]})


def test_what_was_applied_is_looked_at() -> None:
    here, behind = [{"edit": "saesteer.edits[0]", "positions": [[1, None]]}], [{"edit": "m", "positions": [[9, None]]}]
    need_edited([], 9)
    need_edited(here, 9)
    need_edited(behind, 10)
    with pytest.raises(ConfigError, match="m edits generated tokens alone"):
        need_edited(here + behind, 9)


def test_a_server_that_says_nothing_has_not_steered() -> None:
    """vLLM without saesteer ignores the field."""
    one: dict[str, Any] = {"applied": [{"edit": "a"}]}
    other: dict[str, Any] = {"applied": []}
    assert need_report({"choices": [{"index": 0}], "saesteer": one}) == [one["applied"]]
    assert need_report({"choices": [{"saesteer": one}, {"saesteer": other}], "saesteer": one}) == [[{"edit": "a"}], []]
    silent: list[dict[str, Any]] = [{"choices": [{"index": 0}]}, {"choices": [{"saesteer": None}], "saesteer": None}]
    for answer in silent:
        with pytest.raises(ConfigError, match="the server runs without saesteer, and nothing was steered"):
            need_report(answer)


@pytest.mark.parametrize("text", ["", "[", '{"edits": [{"op": "clamp"}]}', '{"edit": []}'])
def test_a_wrong_file_is_refused_by_name(text: str, tmp_path: Path) -> None:
    file = tmp_path / "spec.json"
    with pytest.raises(ConfigError, match=r"spec .*spec.json: "):
        read_spec(str(file))
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"spec .*spec.json: "):
        read_spec(str(file))
    file.write_text(json.dumps({"edits": [clamp()]}))
    assert read_spec(str(file)) == {"edits": [clamp()]}
