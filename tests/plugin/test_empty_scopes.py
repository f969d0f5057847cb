"""Edits and rules that no token of a request has: refused in its own list, and a warning in the answer for modules."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="vLLM is not installed")

from saesteer.config.config import KEY
from saesteer.engine.engine import Engine
from saesteer.engine.wire import decode
from saesteer.errors import SpecError
from saesteer.language.spec import from_json
from saesteer.planning.plan import END, Catalog
from saesteer.plugin import reasoning
from saesteer.plugin.door import borders
from saesteer.plugin.door.admission import Door
from saesteer.plugin.results.report import Report
from tests.small_engine import forward, make_engine
from tests.small_world import TOKENS, WIDTH

ADD = {"op": "add", "vector": [1.0] * WIDTH, "site": "resid_mid.1"}
CLAMP = {"op": "clamp", "dictionary": "rect", "feature": 3, "value": 1.5}
FLAG = {"op": "flag", "when": {"dictionary": "rect", "feature": 3, "above": 0.5}}
LATE = {"positions": [[TOKENS, None]]}
CLOSES = 7  # the token that ends the reasoning

bounds = st.integers(0, TOKENS + 3)
intervals = st.one_of(
    st.builds(lambda lo, size: [lo, lo + size], bounds, st.integers(1, 4)),
    st.builds(lambda lo: [lo, None], bounds),
    st.builds(lambda lo: [-lo, None], st.integers(1, TOKENS)),
)
flags = st.sampled_from([{}, {"prompt": True}, {"generated": True}, {"prompt": True, "generated": True}])
more = st.fixed_dictionaries(
    {}, optional={"skip_first": bounds, "positions": st.lists(intervals, min_size=1, max_size=3)}
)
scopes = st.builds(lambda one, two: one | two, flags, more)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return make_engine(Path(tmp_path_factory.mktemp("small")))


def admit(catalog: Catalog, edits: list[Any], ids: list[int], max_tokens: int | None, config: Any = None) -> Any:
    """The sampling parameters of a request, once it has been admitted."""
    params = SimpleNamespace(extra_args=None, max_tokens=max_tokens, stop=[], n=1)
    request = SimpleNamespace(prompt_token_ids=ids, sampling_params=params)
    Door("server", vllm_config=config).admit(from_json({"edits": edits}), catalog, request)
    return params


def used(catalog: Catalog, edits: list[Any]) -> tuple[Catalog, list[Any]]:
    """The same edits, each in a module of its own: what the server then has, and a request's list."""
    names = [f"m{number}" for number in range(len(edits))]
    modules = {name: from_json({"edits": [edit]}) for name, edit in zip(names, edits, strict=True)}
    return replace(catalog, modules=modules), [{"op": "use", "module": name} for name in names]


@contextmanager
def refused(words: str) -> Iterator[None]:
    """The first edit is refused in what follows, since its scope is empty."""
    with pytest.raises(SpecError, match=words) as error:
        yield
    assert (error.value.field, error.value.code) == ("saesteer.edits[0].scope", "empty_scope")


def applied_of(params: Any, end: int, counts: Sequence[int] = (0,) * 9, border: int = END) -> list[dict[str, Any]]:
    """What the answer to a request reports that has computed so many tokens."""
    made: Report = params.saesteer_report.of_choice()
    made.keep(np.array([0, *counts], np.int32).tobytes(), end)
    made.fill(border, end)
    applied: list[dict[str, Any]] = made.fields["applied"]
    return applied


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([ADD, CLAMP]), scopes), min_size=1, max_size=3), st.integers(1, TOKENS))
def test_what_is_admitted_edits_a_token_or_says_that_it_does_not(engine: Engine, asked: Any, prompt_len: int) -> None:
    """With TOKENS inputs, those of the prompt included. In a module, an edit without a token counts none."""
    sites = "resid_mid.1", "resid_post.1", "resid_mid.2"
    edits = [{**edit, "scope": scope} for edit, scope in asked]
    edits = [{**one, "site": site} if one["op"] == "add" else one for one, site in zip(edits, sites, strict=False)]
    ids, most = [1] * prompt_len, TOKENS + 1 - prompt_len
    params = admit(*used(engine.catalog, edits), ids, most)
    row = engine.make_row(params.extra_args[KEY])
    assert row is not None
    x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(prompt_len))
    forward(engine, [{}], prompt_len, x, lambda *_: row)
    applied = applied_of(params, TOKENS, engine.counted(1, row.counters).tolist())
    for edit, entry in zip(edits, applied, strict=True):
        assert ("warning" in entry) == (entry["tokens_edited"] == 0)
        with nullcontext() if entry["tokens_edited"] else refused("holds no"):
            admit(engine.catalog, [edit], ids, most)


@pytest.mark.parametrize("edit", [ADD, CLAMP, FLAG], ids=["add", "clamp", "flag"])
@pytest.mark.parametrize(
    ("scope", "prompt_len", "max_tokens", "met"),
    [
        ({"generated": True}, 5, 1, False),
        ({"generated": True}, 5, 2, True),
        ({"positions": [[6, None]]}, 5, 2, False),
        ({"positions": [[6, None]]}, 5, 3, True),
        ({"positions": [[900, 901]]}, 5, 16, False),
        ({"positions": [[900, 901]]}, 5, None, True),
        ({"positions": [[1000, None]]}, 5, None, False),
        ({"positions": [[98, 99], [998, None]]}, 5, None, True),
        ({"positions": [[999, None]]}, 5, 5000, False),
        ({"prompt": True, "positions": [[0, 1]]}, 1, 1, True),
    ],
)
def test_the_last_token_of_a_request_is_no_input(
    engine: Engine, edit: Any, scope: Any, prompt_len: int, max_tokens: int | None, met: bool
) -> None:
    """A model of 1,000 positions; without max_tokens, a request may have all of them."""
    config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=1000, dtype=torch.float32))
    ids, edits = [1] * prompt_len, [{**edit, "scope": scope}]
    if met:
        admit(engine.catalog, edits, ids, max_tokens, config)
        return
    with refused("holds none of the .* tokens that this request computes"):
        admit(engine.catalog, edits, ids, max_tokens, config)


def test_the_default_module_applies_to_no_token_and_the_answer_says_so(engine: Engine) -> None:
    """Also where no prompt of this length has a token for it; the edits and rules behind it are as they were."""
    module = [{**ADD, "scope": LATE}, {**CLAMP, "scope": {"prompt": True, "skip_first": 9}}, {**FLAG, "scope": LATE}]
    catalog = replace(engine.catalog, modules={"late": from_json({"edits": module})}, default="late")
    params = admit(catalog, [ADD], [1] * 5, 3)
    assert len(decode(params.extra_args[KEY]["plan"]).lines) == 3, "each group of a row has an entry"
    applied = applied_of(params, 7)
    assert [(one["edit"], one["positions"], "warning" in one) for one in applied] == [
        ("saesteer.defaults.edits[0]", [[TOKENS, None]], True),
        ("saesteer.defaults.edits[1]", [], True),
        ("saesteer.edits[0]", [[1, None]], False),
    ]
    assert applied[0]["warning"] == "its scope holds no token of this request"
    for end, late in ((20, False), (TOKENS, True)):  # of the second, the model has ended the answer
        warned = ["warning" in one for one in applied_of(admit(catalog, [ADD], [1] * 12, 9), end)]
        assert warned == [late, False, False]


class Parser:
    """Of vLLM's reasoning parsers what the door asks."""

    vocab = {str(n): n for n in range(9)}  # noqa: RUF012  # nobody changes it

    def is_reasoning_end(self, ids: list[int]) -> bool:
        return CLOSES in ids

    def is_reasoning_end_streaming(self, ids: list[int], new: list[int]) -> bool:
        return CLOSES in new


@pytest.mark.parametrize(
    ("prompt", "part", "max_tokens", "met"),
    [
        ([1, CLOSES], "reasoning", 9, False),
        ([1, CLOSES], "answer", 2, True),
        ([1, CLOSES], "answer", 1, False),
        ([1, 1], "reasoning", 2, True),
        ([1, 1], "reasoning", 1, False),
        ([1, 1], "answer", 2, False),  # the first token may end the reasoning, and the second one is no input
        ([1, 1], "answer", 3, True),
    ],
)
def test_parts_that_this_prompt_cannot_have(
    engine: Engine, prompt: list[int], part: str, max_tokens: int, met: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in (borders, reasoning):
        monkeypatch.setattr(place, "parser_of", lambda *_: Parser())
    config: Any = SimpleNamespace(speculative_config=None, model_config=None)
    catalog = replace(engine.catalog, parts=True)
    for edit in (ADD, CLAMP, FLAG):
        edits = [{**edit, "scope": {"part": part}}]
        border = 1 if CLOSES in prompt else 2 if part == "answer" else END
        params = admit(*used(catalog, edits), prompt, max_tokens, config)
        for entry in applied_of(params, len(prompt) + max_tokens - 1, border=border):
            assert ("warning" in entry) == (not met)
        if met:
            admit(catalog, edits, prompt, max_tokens, config)
            continue
        with refused("holds none of the"):
            admit(catalog, edits, prompt, max_tokens, config)
