"""`saesteer label` and `saesteer find`: on a stand-in for the model, on embedded labels, and slow on the real model."""

import gzip
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from saesteer.commands.embedded import BRIDGE, DEMO_SAE, DICTIONARIES, OCEAN
from saesteer.config.config import SaesteerConfig
from saesteer.config.settings import read_settings
from saesteer.errors import ConfigError, LoadError
from saesteer.labels import places, writing
from saesteer.labels.store import About, Entry, Labels, Spot, Written
from saesteer.loaders import alone, describe, load, max_act
from saesteer.loaders.formats import own
from saesteer.loaders.rows import open_rows
from saesteer.workbench import convert, find, label, windows
from saesteer.workbench.effects import Answers, effects
from saesteer.workbench.effects import run as effects_of
from tests.cli.commands import mistake, saesteer
from tests.cli.stand_ins import Oracle, small

TEXT = "\n\nold bridge by sea\n" * 30


@pytest.fixture
def place(tmp_path: Path) -> str:
    """A small dictionary of features 100 to 139, whose decoder rows are 3 long."""
    return small(tmp_path, long=3.0, feature_ids=tuple(range(100, 140)), can_reconstruct=False)


@pytest.fixture
def oracle(place: str, monkeypatch: pytest.MonkeyPatch) -> Oracle:
    found = Oracle(place, positions=101, lines=True)
    for user in ("label", "features"):  # which find imports it from, when it is needed
        opening = f"saesteer.workbench.{user}.open_model"
        monkeypatch.setattr(opening, lambda model, config: (found, list(config.dictionaries)))
    monkeypatch.setattr(windows, "_BLOCK_BYTES", 4 * 40 * 7)  # seven tokens at once
    monkeypatch.setattr(label, "lens", lambda rows, model, most: (([n, n], [n]) for n in range(len(rows))))
    return found


def write(file: Path, text: str) -> Path:
    file.write_text(text)
    return file


def test_labels_of_a_text_are_saved_and_found(
    oracle: Oracle, place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = read_settings([f"d={place}@resid_post.15"])
    file = write(tmp_path / "text", TEXT)
    with pytest.raises(ConfigError, match=r"label needs a dictionary: --dictionary NAME=PLACE\[@SITE\]"):
        label.run(Console(), "demo", SaesteerConfig(), file, max_tokens=500)  # or the embedded labels would be replaced
    [saved] = label.run(Console(width=200), "any", config, file, max_tokens=500, examples=2)
    assert saved == Path(f"{place}.labels")
    said = capsys.readouterr().out
    # Windows of 100 and the BOS, none of which begins with a blank line; the first three positions do not count.
    assert "d: 38 of 40 features were active on 488 tokens; saved in" in said
    ids = oracle.tokenizer(TEXT, add_special_tokens=False).input_ids
    active = oracle.coder("d", None).encode(oracle.rows[torch.tensor(ids)])
    with Labels.open(saved) as labels:
        assert (labels.about.features, labels.about.tokens, labels.about.source) == (40, 488, "488 tokens of text")
        for row in (0, 7, 37):
            one = labels.feature(100 + row)
            assert one is not None and one.max_act == pytest.approx(float(active[:, row].max()), rel=1e-3)
            assert 0 < (one.density or 0) < 1 and len(one.examples) == 2
            token = one.examples[0].token
            assert active[TEXT.index(token), row] == active[:, row].max()
            assert (one.label_by, one.promotes, one.suppresses) == ("rule", (f"token{row}",) * 2, (f"token{row}",))
        dead = labels.feature(139)
        assert dead is not None and (dead.label, dead.max_act, dead.density) == ("→ token39", 0.0, 0.0)
        assert labels.feature(0) is None
    find.run(Console(width=200), config, "bridge", feature=None, most=3, as_json=False)
    assert "examples from d" in capsys.readouterr().out
    find.run(Console(width=200), config, "", feature=107, most=3, as_json=True)
    with pytest.raises(
        ConfigError, match="--feature 7: dictionary 'd' has 40 features; this is none of those with labels"
    ):
        find.run(Console(), config, "", feature=7, most=3, as_json=False)
    found = json.loads(capsys.readouterr().out)
    assert (found["dictionary"], found["feature"], found["promotes"]) == ("d", 107, ["token7"] * 2)
    # The values serve requests in unit max_act, until calibrate finds better ones.
    assert load(place).info.max_act_from == "labels"
    torch.testing.assert_close(load(place).max_act[7], active[:, 7].max())  # type: ignore[index]
    label.run(Console(), "any", config, file, max_tokens=500, examples=2)
    assert load(place).info.max_act_from == "labels"
    # What calibrate saves next to it changes no label; other weights do.
    max_act.write(Path(place), alone(Path(place)), torch.ones(40), tokens=1)
    with places.opened(describe(place)) as labels:  # type: ignore[union-attr]
        assert labels.feature(100) is not None
    oracle._coder = load(place)
    label.run(Console(), "any", config, file, max_tokens=500, examples=2)
    assert load(place).info.max_act_from == "calibration"
    assert torch.equal(load(place).max_act, torch.ones(40))  # type: ignore[arg-type]
    coder = load(place)
    own.write(place, replace(coder, b_dec=coder.b_dec + 1, max_act=None, info=replace(coder.info, has_max_act=False)))
    Path(f"{place}.max_act").unlink()
    with pytest.raises(LoadError, match="belongs to other weights"):
        find.run(Console(), config, "bridge", feature=None, most=3, as_json=False)


def test_a_text_without_a_token_that_counts_leaves_the_earlier_labels(
    oracle: Oracle, place: str, tmp_path: Path
) -> None:
    config = read_settings([f"d={place}@resid_post.15"])
    [saved] = label.run(Console(), "any", config, write(tmp_path / "text", TEXT), max_tokens=500, examples=2)
    files = {file: file.read_bytes() for file in (saved, Path(f"{place}.max_act"))}
    short, long = write(tmp_path / "short", "ab"), tmp_path / "text"
    told = r"has 0 tokens that the dictionary does not leave alone; expected a longer one"
    with pytest.raises(ConfigError, match=rf"--text-file .*/short {told}"):
        label.run(Console(), "any", config, short, max_tokens=500)
    assert {file: file.read_bytes() for file in files} == files
    for flag, sides in (("--positive", (short, long)), ("--negative", (long, short))):
        with pytest.raises(ConfigError, match=rf"{flag} .*/short {told}"):
            find.run_contrast(Console(), "any", config, *sides, most=1, max_tokens=100)


def test_labels_are_about_the_site_that_was_read(oracle: Oracle, place: str, tmp_path: Path) -> None:
    """An operator who named a wrong site, made labels there, and now names the right one."""
    config = read_settings([f"d={place}@resid_post.15"])
    file = write(tmp_path / "text", TEXT)
    label.run(Console(), "any", config, file, max_tokens=500, examples=2)

    def found(site: str) -> None:
        find.run(Console(), read_settings([f"d={place}@{site}"]), "", feature=100, most=1, as_json=False)

    found("resid_pre.16")  # the same place
    told = r"\.labels: is about what the dictionary reads at resid_post\.15, but it is at resid_post\.3 here"
    with pytest.raises(LoadError, match=told + ".*run `saesteer label` again"):
        found("resid_post.3")
    info = replace(describe(place), site_in="resid_post.3")
    with pytest.raises(LoadError, match=told):
        places.opened(info)
    # Labels of unknown origin, such as Neuronpedia's, are taken for right.
    writing.write(Path(f"{place}.labels"), About(places.place_of(info).dictionary, 40, ""), [], [Entry(100, "x")])
    found("resid_post.3")


def test_what_tells_two_texts_apart(
    oracle: Oracle, place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = read_settings([f"d={place}@resid_post.15"])
    here, there = write(tmp_path / "here", "xxxbbbbbb"), write(tmp_path / "there", "xxxsssssss")
    find.run_contrast(Console(width=200), "any", config, here, there, most=1, max_tokens=100)
    with pytest.raises(ConfigError, match=r"--negative .*: cannot be read"):
        find.run_contrast(Console(), "any", config, here, there.with_name("none"), most=1, max_tokens=100)

    def mean(file: Path) -> torch.Tensor:
        ids = torch.tensor(oracle.tokenizer(file.read_text()).input_ids)
        return oracle.coder("d", None).encode(oracle.rows[ids])[3:].mean(0)

    gain = mean(here) - mean(there)
    assert f"│ {100 + int(gain.argmax())} " in capsys.readouterr().out
    find.run_contrast(Console(), "any", config, here, there, most=1, max_tokens=100, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert (found["dictionary"], found["feature"]) == ("d", 100 + int(gain.argmax()))
    assert found["positive"] - found["negative"] == pytest.approx(float(gain.max()), rel=1e-4)


def test_labels_of_neuronpedia(place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "features").mkdir()
    (tmp_path / "explanations").mkdir()
    line = {"modelId": "m", "layer": "15-res", "index": "101", "maxActApprox": 6.0, "pos_str": ["x"]}
    (tmp_path / "features" / "batch-0.jsonl.gz").write_bytes(gzip.compress(json.dumps(line).encode()))
    lines = [{"index": "101", "description": "Suspension bridges"}, {"index": 7, "description": "not in this file"}]
    text = "\n".join(map(json.dumps, lines))
    (tmp_path / "explanations" / "batch-0.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    config = read_settings([f"d={place}@resid_post.15"])
    saved = label.run_import(Console(width=200), config, tmp_path)
    said = capsys.readouterr().out
    assert "d: 1 of 40 features, 1 with a label; saved in" in said
    assert "d: 39 features have no maximum activation there: unit max_act is refused for them" in said
    with Labels.open(saved) as labels:
        one = labels.feature(101)
        assert labels.about.source == "Neuronpedia, m/15-res"
        assert [found.feature for _, found in labels.find("bridge")] == [101]
    assert one is not None and one.label == "Suspension bridges" and one.max_act == pytest.approx(2.0)
    info, known = load(place).info, load(place).max_act
    assert info.max_act_from == "labels" and known is not None
    assert known.tolist() == pytest.approx([0.0, 2.0] + [0.0] * 38)
    assert [one for one in info.feature_ids or () if info.knows_max_act(one)] == [101]
    convert.run(f"{place}@resid_post.15", tmp_path / "copy.safetensors", dtype=None)
    for copied in (load(tmp_path / "copy.safetensors").info, open_rows(place).info):
        assert copied.max_act_gaps == info.max_act_gaps == (100, 101, 102, 140)
    max_act.write(Path(place), alone(Path(place)), torch.ones(40), tokens=1)
    assert load(place).info.max_act_gaps == ()
    with pytest.raises(ConfigError, match="0 dictionaries were named; expected one"):
        label.run_import(Console(), SaesteerConfig(), tmp_path)


@pytest.mark.parametrize(("kind", "read"), [("attn_in", False), ("mlp_in", False), ("z", False), ("mlp_out", True)])
def test_the_lens_reads_only_rows_that_are_added_to_the_stream(
    kind: str, read: bool, oracle: Oracle, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = replace(oracle.coder("d", None).info, site_in="resid_post.15", site_out=f"{kind}.15")
    monkeypatch.setattr(oracle, "info", lambda name, layer: info)
    config = read_settings([f"d={place}@resid_post.15"])
    [saved] = label.run(Console(), "any", config, write(tmp_path / "text", TEXT), max_tokens=500, examples=2)
    with Labels.open(saved) as labels:
        one = labels.feature(139)
    assert one is not None and (one.promotes, one.suppresses) == (
        (("token39",) * 2, ("token39",)) if read else ((), ())
    )


def test_nothing_in_a_file_speaks_to_the_terminal(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    file, whose, _ = places.place_of(describe(place))
    evil = "[bold]x[/bold] :gold: \x1b[2J\x9b2J\u202e"
    entry = Entry(100, evil, evil, None, None, (evil,), (evil,), (Spot(1.0, 0, 0, len(evil)),))
    writing.write(file, About(whose, 40, evil), [evil], [entry])
    config = read_settings([f"d={place}@resid_post.15"])
    for as_json in (False, True):
        find.run(Console(width=400), config, "", feature=100, most=1, as_json=as_json)
        said = capsys.readouterr().out
        assert not {"\x1b", "\x9b", "\u202e"} & set(said)
        assert said.count("[bold]x[/bold] :gold: ") >= 4
    assert json.loads(said)["label"] == evil


def test_mistakes(place: str, tmp_path: Path) -> None:
    config = read_settings([f"d={place}@resid_post.15"])
    with pytest.raises(ConfigError, match="has no labels; `saesteer label` makes them"):
        find.run(Console(), config, "bridge", feature=None, most=3, as_json=False)
    with pytest.raises(ConfigError, match=r"got '\?!', expected words to look for"):
        find.run(Console(), SaesteerConfig(), "?!", feature=None, most=3, as_json=False)
    write(Path(f"{place}.labels"), "{}")
    with pytest.raises(LoadError, match=r"small\.safetensors\.labels: is no SQLite database; expected a file that"):
        find.run(Console(), config, "bridge", feature=None, most=3, as_json=False)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["label"], "needs --text-file FILE, --from-neuronpedia FOLDER or --effects FEATURE"),
        (["find"], "expected words to look for"),
        (["find", "--positive", "x"], "needs both --positive FILE and --negative FILE, or neither"),
        (["find", "ocean", "--feature", "3"], "find takes one of WORDS, --feature, or --positive with --negative"),
        (["find", "ocean", "--backend", "hf"], "find takes --model and --backend with --positive and --negative"),
        (["find", "ocean", "--model", "m"], "find takes --model and --backend with --positive and --negative"),
        (["find", "ocean", "--positive", "x", "--negative", "x"], "find takes one of WORDS, --feature, or --positive"),
        (["find", "--feature", "99999"], "--feature 99999: dictionary 'demo' has features 0 to 9215; --feature"),
    ],
)
def test_mistakes_on_the_command_line(words: list[str], told: str) -> None:
    assert told in mistake(*words)


def test_what_answers_show_of_a_feature() -> None:
    plain = Answers(-1, 0.0, ["I am here to help with any question."] * 4)
    other = Answers(5, 2.0, ["The story of a woman who went far away.", *plain.texts[:3]])
    weak = Answers(3, 1.0, ["Bridges are old.", *plain.texts[:3]])
    good = Answers(3, 2.0, ["A bridge is here.", "The bridges of a town.", "My bridge!", "I am here to help."])
    broken = Answers(3, 3.0, ["A bridge is here.", "bridge bridge bridge bridge bridge", "1 2 3 4", ""])
    found, nothing = effects([plain, other, broken, weak, good])
    assert (found.feature, found.breaks) == (3, 3.0)
    assert found.writes[0] == Written("bridge", 2.0, 58)  # 2 * 3 of 4 and 1 of 4, none of the largest dose
    assert not {"here", "help", "the"} & {one.word for one in found.writes}  # no more than elsewhere
    assert (nothing.feature, nothing.breaks) == (5, None)


@pytest.mark.slow
def test_effects_of_chosen_features_are_measured(tmp_path: Path) -> None:
    place = tmp_path / "d.safetensors"
    shutil.copy(DEMO_SAE, place)
    shutil.copy(DEMO_SAE.with_name(f"{DEMO_SAE.name}.labels"), f"{place}.labels")
    effects_of(Console(quiet=True), "demo", read_settings([f"d={place}"]), [914, 7081], verbose=False)
    with Labels.open(Path(f"{place}.labels")) as labels:
        car, gold, other = (labels.feature(number) for number in (914, 7081, OCEAN))
    assert car is not None and gold is not None and other is not None
    assert car.writes[0] == "cars" and "coin" in gold.writes and "ocean" in other.writes
    with pytest.raises(ConfigError, match="--effects 9216: dictionary 'd' has no such feature"):
        effects_of(Console(quiet=True), "demo", read_settings([f"d={place}"]), [9216], verbose=False)


@pytest.mark.parametrize(("word", "feature"), [("bridge", BRIDGE), ("ocean", OCEAN)])
def test_known_features_are_among_the_first_three(word: str, feature: int) -> None:
    done = saesteer("find", word, "--limit", "3", "--json")
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert feature in [one["feature"] for one in found if one["dictionary"] == "demo"]
    assert {one["dictionary"] for one in found} == set(DICTIONARIES)
    assert {one["query"] for one in found} == {word} and all(one["score"] > 0 for one in found)
    assert f"{feature} " in saesteer("find", word, "--limit", "3").stdout


@pytest.mark.parametrize("name", DICTIONARIES)
def test_the_embedded_labels_are_of_the_embedded_dictionaries(name: str) -> None:
    with places.opened(describe(DICTIONARIES[name])) as labels:  # type: ignore[union-attr]
        known = [labels.feature(number) for number in range(labels.about.features)]
    assert len(known) == 9216 and None not in known
    active = [one for one in known if one is not None and one.examples]
    assert len(active) > 9000
    assert all(one.label and one.label_by == "rule" and len(one.promotes) == 6 for one in active)


@pytest.mark.slow
@pytest.mark.long  # test_captured.py reads a text through an engine in CI
def test_label_and_contrast_with_the_real_model(tmp_path: Path) -> None:
    bare = tmp_path / "bare.safetensors"
    bare.write_bytes(DEMO_SAE.read_bytes())
    bridges = write(tmp_path / "bridges", "The old bridge lies over the river. Many people walk over the bridge. " * 8)
    others = write(tmp_path / "others", "My cat sleeps all day, and eats in the evening. I read a book about it. " * 8)
    done = saesteer("label", "--dictionary", f"bare={bare}", "--text-file", str(bridges), "--max-tokens", "150")
    assert done.returncode == 0, done.stderr
    assert f"saved in {bare}.labels" in done.stdout
    done = saesteer("find", "--feature", str(BRIDGE), "--dictionary", f"bare={bare}", "--json")
    assert json.loads(done.stdout)["label"] == "bridge"
    words = ["--positive", str(bridges), "--negative", str(others), "--dictionary", f"bare={bare}", "--limit", "30"]
    done = saesteer("find", *words)
    assert done.returncode == 0, done.stderr
    assert f"│ {BRIDGE} " in done.stdout
