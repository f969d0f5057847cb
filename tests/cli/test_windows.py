"""Which tokens count where dictionaries are measured: calibrate, measure, label and find leave the same ones out."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from saesteer.dictionaries.coder import CoderInfo
from saesteer.errors import ConfigError
from saesteer.workbench import measure, reads
from saesteer.workbench.windows import need_tokens, parts_of

WORDS = ["<s>", "=", "----", "\n", " ", " ==\n", "a", "7", "\ufffd", "", "и", "==x", "…"]
INFO = CoderInfo("saesteer", 4, 4, 6, "relu", site_in="resid_post.1", site_out="resid_post.1", skip_first=0)


class Tokenizer:
    """Knows words by their numbers; a text is made of the numbers, and BOS is 0."""

    def __init__(self, begins: bool) -> None:
        self.bos_token_id, self.begins = 0, begins

    def __call__(self, text: str, add_special_tokens: bool = True, **_: Any) -> Any:
        ids = [6] if text == "x" else [int(one) for one in text.split()]
        spans, at = [], 0
        for one in text.split():
            spans.append((at, at + len(one)))
            at += len(one) + 1
        begin = [0] if self.begins and add_special_tokens else []
        return SimpleNamespace(input_ids=begin + ids, offset_mapping=spans)

    def decode(self, ids: list[int]) -> str:
        return "".join(WORDS[one] for one in ids).removeprefix(" ")  # as tokenizers of SentencePiece do


class Oracle:
    """A model of ten positions whose streams are outliers on filler at the beginning."""

    def __init__(self, begins: bool) -> None:
        self.tokenizer = Tokenizer(begins)
        config = SimpleNamespace(max_position_embeddings=10)
        self.model = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: config))
        self.read: list[list[int]] = []

    def coder(self, name: str, layer: None) -> Any:
        return SimpleNamespace(info=INFO, encode=lambda x: x.repeat(1, 2)[:, :6], decode=lambda f, like: f[:, :4])

    def info(self, name: str, layer: None) -> CoderInfo:
        return INFO

    def streams(self, ids: list[int]) -> dict[str, torch.Tensor]:
        self.read.append(list(ids))
        rows, outlier = torch.ones(len(ids), 4) + torch.tensor(ids)[:, None] / 100, True
        for at, one in enumerate(ids):
            outlier &= at == 0 or one in range(1, 6)
            rows[at] *= 1000 if outlier else 1
        return {"resid_post.1": rows}


def test_a_window_begins_with_a_letter_or_a_digit() -> None:
    def begins(ids: list[int]) -> list[tuple[int, int]]:
        return [(part.start, part.stop) for part in parts_of(Oracle(begins=False), ids)]

    assert begins([1, 2, 3, 4, 5, 12, 6, 1, 1]) == [(6, 16)]
    for counted in (6, 7, 8, 9, 10, 11):  # a part of a character and a token without a text may be a letter's
        assert begins([4, counted, 1]) == [(1, 11)], WORDS[counted]
    assert begins([6] * 10 + [1, 2, 1, 6, 6]) == [(0, 10), (13, 23)]
    assert begins([1, 2, 3]) == begins([]) == []
    assert [(part.start, part.stop) for part in parts_of(Oracle(begins=True), [6] * 10)] == [(0, 9), (9, 18)]


@pytest.mark.parametrize("begins", [False, True])
def test_every_command_leaves_the_same_tokens_out(begins: bool, tmp_path: Path) -> None:
    ids = [1, 2, 3, 6, 7, 1, 6, 6, 6, 6, 6, 6, *[10] * (not begins), 1, 3, 3, 6, 10]
    (tmp_path / "text").write_text(" ".join(map(str, ids)))
    oracle, begin = Oracle(begins), [0] if begins else []
    windows = reads.windows_of(oracle, (tmp_path / "text").read_text(), 100)
    expected = [begin + [6, 7, 1, 6, 6, 6, 6, 6, 6] + [10] * (not begins), [*begin, 6, 10]]
    assert windows == expected
    tokens = sum(len(one) - 1 for one in expected)
    assert measure.measure(oracle, [None], windows, Console(quiet=True))[None].tokens == tokens
    asked = {"d": reads.Asked("d", None, INFO, oracle.coder("d", None))}
    texts = reads.texts_of(oracle, asked, tmp_path / "text", 100)
    assert [text.ids for text in texts] == expected
    assert [text.text.split() for text in texts] == [[str(one) for one in ids[len(begin) :]] for ids in expected]
    with reads.reads("hf", "any", oracle, asked, texts) as told:
        gathered = [one["d"] for one in told]
    assert sum(one.tokens for one in gathered) == tokens
    assert all(float(one.values.max()) < 2 for one in gathered)
    (tmp_path / "text").write_text("1 2 3 " * 9)
    with pytest.raises(
        ConfigError, match=r"--negative .*text has 0 tokens that .*; expected a longer one, with letters"
    ):
        reads.texts_of(oracle, asked, tmp_path / "text", 100, "--negative")


def test_tokens_count_for_each_dictionary() -> None:
    strict = CoderInfo("saesteer", 4, 4, 6, "relu", skip_first=3)
    need_tokens("the text", [[1, 2, 3, 4]], [INFO, strict])
    need_tokens("the text", [[1, 2], [1, 2]], [INFO], least=2)
    for windows, infos, least, tokens in (
        ([[1, 2, 3]], [INFO, strict], 1, 0),
        ([], [INFO], 1, 0),
        ([[1], [1, 2]], [INFO], 2, 1),
    ):
        told = f"the text has {tokens} tokens that the dictionary does not leave alone; expected a longer one"
        with pytest.raises(ConfigError, match=told):
            need_tokens("the text", windows, infos, least)
