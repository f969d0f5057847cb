"""`saesteer features` and `saesteer calibrate`: on a stand-in for the model, and where it says slow on the real one."""

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from saesteer.commands.embedded import DEMO_SAE
from saesteer.config.config import SaesteerConfig
from saesteer.config.settings import read_settings
from saesteer.errors import ConfigError, LoadError
from saesteer.loaders import alone, load, max_act
from saesteer.loaders.formats import own
from saesteer.workbench import calibrate, features, label, windows
from tests.cli.commands import saesteer
from tests.cli.stand_ins import Oracle, Tokenizer, small
from tests.loaders.formats import apollo


@pytest.fixture
def place(tmp_path: Path) -> str:
    """A small dictionary without max_act."""
    return small(tmp_path)


def test_largest_activations_are_found_saved_and_used(
    place: str, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    oracle = Oracle(place)
    monkeypatch.setattr(calibrate, "open_model", lambda model, config: (oracle, list(config.dictionaries)))
    monkeypatch.setattr(windows, "_BLOCK_BYTES", 4 * 40 * 7)  # seven tokens at once
    found = calibrate.run(Console(width=200), "any", read_settings([f"d={place}@resid_post.15"]), text, max_tokens=1200)
    assert [len(window) for window in oracle.read] == [512, 512, 179]
    assert {window[0] for window in oracle.read} == {1}
    seen = torch.cat([oracle.rows[torch.tensor(window)][3:] for window in oracle.read])
    expected = load(place).encode(seen).amax(dim=0)
    torch.testing.assert_close(found["d"].max_act, expected)
    assert found["d"].tokens == len(seen) == 512 + 512 + 179 - 9
    again = load(place)
    assert again.info.has_max_act
    assert torch.equal(again.max_act, found["d"].max_act)  # type: ignore[arg-type]
    said = capsys.readouterr().out
    assert "38 of 40 features were active on 1,194 tokens" in said
    assert "2 were not: in unit max_act their values are 0" in said
    assert f"{place}.max_act" in said
    # Once more, in place of what is there, and two at once.
    oracle.rows *= 2
    other = Path(shutil.copy(place, Path(place).with_name("other.safetensors")))
    both = read_settings([f"d={place}@resid_post.15", f"e={other}@resid_post.15"])
    calibrate.run(Console(), "any", both, text, max_tokens=1200)
    assert len(oracle.read) == 6
    for one in (place, other):
        more = load(one).max_act
        assert more is not None and (more[:38] > expected[:38]).all()


def test_signed_activations_are_as_strong_as_they_are_large(
    place: str, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coder = load(place)
    info = replace(coder.info, activation="abstopk", k=3)
    own.write(place, replace(coder, info=info, threshold=None, b_enc=torch.linspace(-9, 9, 40)))
    oracle = Oracle(place)
    monkeypatch.setattr(calibrate, "open_model", lambda model, config: (oracle, list(config.dictionaries)))
    found = calibrate.run(Console(), "any", read_settings([f"d={place}@resid_post.15"]), text, max_tokens=300)["d"]
    seen = load(place).encode(torch.cat([oracle.rows[torch.tensor(window)][3:] for window in oracle.read]))
    assert ((seen.amax(0) == 0) & (seen.amin(0) < 0)).any(), "some are active with this sign alone"
    assert torch.equal(found.max_act > 0, (seen != 0).any(0))
    torch.testing.assert_close(found.max_act, seen.abs().amax(0))


def test_what_a_failure_leaves(place: str, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    max_act.write(Path(place), alone(Path(place)), torch.ones(40), tokens=1)

    def fail(model: str, config: SaesteerConfig) -> Any:
        raise ConfigError("no such model")

    monkeypatch.setattr(calibrate, "open_model", fail)
    for one in (place, str(DEMO_SAE)):  # the latter's file has max activations, which do not count as much
        with pytest.raises(ConfigError, match="no such model"):
            calibrate.run(Console(), "any", read_settings([f"d={one}@resid_post.15"]), text)
    assert torch.equal(load(place).max_act, torch.ones(40))  # type: ignore[arg-type]


@pytest.mark.parametrize("words", ["ab", "=" * 600])
def test_a_text_without_a_token_that_counts_leaves_the_earlier_file(
    words: str, place: str, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle = Oracle(place)
    monkeypatch.setattr(calibrate, "open_model", lambda model, config: (oracle, list(config.dictionaries)))
    if "=" in words:
        monkeypatch.setattr(Tokenizer, "decode", lambda self, ids: "=" * len(ids))
    max_act.write(Path(place), alone(Path(place)), torch.ones(40), tokens=1)
    before = Path(f"{place}.max_act").read_bytes()
    text.write_text(words)
    with pytest.raises(ConfigError, match=r"the text has 0 tokens that .* not leave alone; expected a longer one"):
        calibrate.run(Console(), "any", read_settings([f"d={place}@resid_post.15"]), text)
    assert Path(f"{place}.max_act").read_bytes() == before and not oracle.read


def test_calibrate_is_refused_in_one_sentence(place: str, text: Path, tmp_path: Path) -> None:
    config = read_settings([f"d={place}@resid_post.15"])
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "ended").write_text("one\0two")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"file": Path("/no/such")}, r"--text-file /no/such: cannot be read \(No such file"),
        ({"file": tmp_path}, "cannot be read"),
        ({"file": tmp_path / "binary"}, "expected a text in UTF-8"),
        ({"file": tmp_path / "empty"}, "is empty"),
        ({"file": tmp_path / "ended"}, "has a NUL character"),
        ({"max_tokens": 0}, "--max-tokens is 0"),
        ({"config": SaesteerConfig()}, "needs a dictionary"),
    ]
    for words, told in cases:
        arguments: dict[str, Any] = {"model": "demo", "config": config, "file": text, **words}
        with pytest.raises(ConfigError, match=told):
            calibrate.run(Console(), **arguments)
    with pytest.raises(LoadError, match="no such file"):
        calibrate.run(Console(), "demo", read_settings(["d=/no/such.safetensors@resid_post.15"]), text)


def test_what_is_found_of_one_dictionary_has_no_place_next_to_a_file_of_several(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The values of the last one would be refused for all others, so no server could start."""
    place = apollo.write(tmp_path, apollo.TWO)
    monkeypatch.setattr(calibrate, "open_model", lambda model, config: (None, []))
    for dictionary in (f"d={place}", f"d={place}@resid_pre.5"):
        with pytest.raises(LoadError, match=r"samples_100\.pt: holds 2 dictionaries; expected .*convert .*@resid_pre"):
            calibrate.run(Console(), "any", read_settings([dictionary]), text)
    with pytest.raises(LoadError, match="holds 2 dictionaries"):
        label.run_import(Console(), read_settings([f"d={place}@resid_pre.5"]), tmp_path)


NAME = "d[/b]"  # is no markup


@pytest.fixture
def spoken(place: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """`features` on a model that answers with these rows of a dictionary at resid_post.15; gives what it prints."""

    class Words:
        def decode(self, ids: list[int]) -> str:
            return ["<s>", " <b>", "\n", " end"][ids[0]]

    config = read_settings([f"{NAME}={place}@resid_post.15"])
    monkeypatch.setattr(features, "_resolved", lambda model, config: (model, config, {}))
    monkeypatch.setattr(features, "tokenizer_of", lambda place: Words())
    monkeypatch.setattr(features, "tokens_of", lambda tokenizer, text, chat: [0, 1, 2, 3])

    def run(rows: list[dict[str, Any]], **how: Any) -> str:
        """What a console, made with these options, prints."""

        def read(place: str, config: Any, options: Any, prompts: Any, returns: Any, **_: Any) -> Any:
            scope = {"skip_first": 1}
            assert (prompts, returns) == (
                [[0, 1, 2, 3]],
                [{"features": [{"dictionary": NAME, "top_k": 2, "scope": scope}]}],
            )
            return [{"features": [{"dictionary": NAME, "site": "resid_post.15", "at": "before", "rows": rows}]}]

        monkeypatch.setattr(features, "read", read)
        console = Console(width=200, file=StringIO(), **how)
        features.run(console, "any", config, "x", top_k=2, backend="vllm")
        said: str = console.file.getvalue()  # type: ignore[attr-defined]
        return said

    return run


ROWS: list[dict[str, Any]] = [
    {"position": 1, "top": [[7, 4.0], [9, 1.0]]},
    {"position": 2, "top": []},
    {"position": 3, "top": [[39, 2.0]]},
]


def test_features_are_a_table(place: str, spoken: Callable[..., str]) -> None:
    largest = torch.zeros(40)
    largest[7], largest[39] = 8.0, 4.0  # 9 was never active, so its share is unknown
    max_act.write(Path(place), alone(Path(place)), largest, tokens=1)
    said = spoken(ROWS)
    table = [[cell.strip() for cell in line.split("│")[1:-1]] for line in said.splitlines() if line.startswith("│")]
    assert table == [
        ["", "token", f"strongest features of {NAME}, at resid_post.15"],
        ["1", "<b>", "7 4.00 (50%)   9 1.00"],
        ["3", "end", "39 2.00 (50%)"],
    ]


def test_the_colour_of_an_activation_is_its_size(spoken: Callable[..., str]) -> None:
    for sign in (1, -1):  # activations may be signed
        rows = [{**row, "top": [[one, sign * value] for one, value in row["top"]]} for row in ROWS]
        said = spoken(rows, force_terminal=True, color_system="truecolor")
        assert re.findall(r"48;2;(\d+;\d+;\d+)m", said) == ["20;70;160", "10;35;80"]
    assert "strongest features" in spoken([{"position": 1, "top": [[7, 0.0]]}])


@pytest.mark.slow
@pytest.mark.long  # test_captured.py reads through an engine in CI
def test_features_of_the_real_model() -> None:
    done = saesteer("features", "--text", "The bridge over the bay.", "--top-k", "3")
    assert done.returncode == 0, done.stderr
    assert "resid_post.15" in done.stdout and "mlp_in.12" in done.stdout
    rows = [line.split("│") for line in done.stdout.splitlines() if line.startswith("│")]
    found = [row[3] for row in rows if row[2].strip() == "bridge"]  # in the SAE and in the transcoder
    assert [len(one.split("%")) for one in found] == [4, 4], "three features each, with their parts of max_act"
    words = ["--top-k", "3", "--backend", "hf"]
    again = saesteer("features", "--text", "The bridge over the bay.", *words)
    assert again.returncode == 0, again.stderr
    numbers = [re.findall(r"(\d+) \d+\.\d\d \(", one.stdout) for one in (done, again)]
    assert numbers[0] == numbers[1], "Transformers finds the same features"
    assert len(numbers[0]) > 20
    done = saesteer("features", "--text", "Who?", "--chat")
    assert "assistant" in done.stdout
    assert saesteer("features", "--text", "").returncode == 2
