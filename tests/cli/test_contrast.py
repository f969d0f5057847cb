"""`saesteer vector` and `saesteer probe`: formulas, files and refusals; where it says slow, on the real model."""

import json
from base64 import b64encode
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from safetensors import safe_open

from saesteer.errors import ConfigError
from saesteer.loaders.vectors import read_vectors
from saesteer.workbench import contrast, separation, texts
from saesteer.workbench.reads import read_text
from saesteer.workbench.separation import Direction, Rows, Separation, split
from saesteer.workbench.texts import read_lines
from tests.cli.commands import saesteer

D, SITES = 12, ("resid_post.3", "resid_post.5")
GENERATOR = np.random.default_rng(0)
WARM, COLD = "warm", "cold"


def rows(count: int, shift: float) -> Rows:
    """Random rows, shifted along the first axis; the last number is the same in all."""
    found = np.random.default_rng(count).normal(size=(count, D)) * np.linspace(0.1, 30, D)
    found[:, 0] += shift
    found[:, -1] = 4.0
    return found


def test_cohens_d_is_numpys() -> None:
    p, n = rows(9, 2.0)[:, 0], rows(14, 0.0)[:, 0]
    pooled = ((8 * np.var(p, ddof=1) + 13 * np.var(n, ddof=1)) / 21) ** 0.5
    assert separation.cohens_d(p, n) == pytest.approx((p.mean() - n.mean()) / pooled)
    assert separation.cohens_d(n, p) == pytest.approx(-separation.cohens_d(p, n))
    same = np.ones(3)
    assert separation.cohens_d(same, same) == 0
    assert separation.cohens_d(same, 2 * same) == -np.inf


def test_auc_is_scikit_learns() -> None:
    metrics = pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed")
    for spread in (3, 1000):  # with many ties, and with few
        p, n = (GENERATOR.integers(0, spread, count).astype(np.float64) for count in (31, 17))
        labels = np.arange(48) < 31
        assert separation.auc(p, n) == pytest.approx(metrics.roc_auc_score(labels, np.concatenate([p, n])))


@pytest.mark.parametrize(("count", "held"), [(4, 2), (10, 2), (23, 5), (1000, 200)])
def test_rows_are_held_out(count: int, held: int) -> None:
    every = np.arange(count, dtype=np.float64)[:, None]
    learned, out = split(every)
    assert len(out) == held
    assert sorted([*learned[:, 0], *out[:, 0]]) == every[:, 0].tolist()
    assert np.array_equal(split(every + 7)[1], out + 7), "the same rows at every site"


def test_accuracy_counts_both_sides() -> None:
    line = Direction(np.array([1.0], np.float32), bias=-1.0)
    found = Separation.of(line, np.array([[0.0], [2.0], [3.0], [4.0]]), np.array([[1.0], [5.0]]))
    assert found.accuracy == 4 / 6


def test_a_probe_is_scikit_learns_on_raw_rows() -> None:
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    p, n = rows(40, 1.0), rows(30, 0.0)
    both = np.concatenate([p, n])
    expected = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000)).fit(both, np.arange(70) < 40)
    found = separation.logistic_regression(p, n)
    np.testing.assert_allclose(found.scores(both), expected.decision_function(both), atol=1e-5)
    probability = 1 / (1 + np.exp(-found.scores(both)))
    np.testing.assert_allclose(probability, expected.predict_proba(both)[:, 1], atol=1e-5)


class World:
    """In place of model and engine: a word is a token, and rows of warm and cold texts differ most at SITES[1]."""

    def __init__(self) -> None:
        self.returns: Any = None
        self.rows: dict[str, list[Any]] = {site: [] for site in SITES}

    def tokens(self, _: Any, text: str) -> list[int]:
        return [0, *(int(word == WARM) for word in text.split())]

    def read(self, place: str, config: Any, options: Any, prompts: Sequence[list[int]], returns: Any, **_: Any) -> Any:
        self.returns = returns
        draw = np.random.default_rng(5)
        answers = []
        for ids in prompts:
            entries = []
            for site, shift in zip(SITES, (0.5, 9.0), strict=True):
                row = (draw.normal(size=D) + shift * ids[-1] * np.eye(D)[0]).astype(np.float32)
                self.rows[site].append(row)
                entries.append({"site": site, "data": b64encode(row.tobytes()).decode(), "dtype": "float32"})
            answers.append({"activations": entries})
        return answers


def wanted(begin: int, end: int) -> dict[str, Any]:
    """What is asked for at each site."""
    scope = {"positions": [[begin, end]]}
    return {"activations": [{"site": one, "scope": scope, "reduce": "mean"} for one in SITES]}


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    monkeypatch.setattr(contrast, "resolve", lambda model, config: (model, config, {}))
    monkeypatch.setattr(contrast, "check", lambda place, config: None)
    monkeypatch.setattr(contrast, "layers_of", lambda place: 8)
    monkeypatch.setattr(contrast, "tokenizer_of", lambda place: None)
    monkeypatch.setattr(texts, "tokens_of", made.tokens)
    monkeypatch.setattr(contrast, "read", made.read)
    return made


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    found = tmp_path / "positive", tmp_path / "negative"
    found[0].write_text(f"it is {WARM}\n\n" * 20)  # empty lines are left out
    found[1].write_text(f"it is {COLD}\n" * 15)
    return found


def test_a_vector_is_written_and_read_back(
    world: World, files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "v.safetensors"
    contrast.vector(Console(width=200), "any", *files, [",".join(SITES)], out=out)
    found = read_vectors(out)
    assert found.layers == (3, 5)
    assert found.bias == 0
    for site, layer in zip(SITES, (3, 5), strict=True):
        every = np.array(world.rows[site], np.float64)
        p, n = split(every[:20])[0], split(every[20:])[0]
        np.testing.assert_allclose(found.rows[layer], p.mean(0) - n.mean(0), rtol=1e-6)
    with safe_open(out, "np") as opened:
        about = {"made_by": "saesteer vector", "model": "any", "tokens": "mean"}
        assert opened.metadata() == about
    said = capsys.readouterr().out
    assert "resid_post.5 separates best" in said
    assert f"--vector NAME={out}" in said
    assert "accuracy" not in said
    assert found.kind == "resid_post"
    assert world.returns[0] == wanted(1, 4)


def test_a_probe_is_written_and_read_back(
    world: World, files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    out = tmp_path / "p.safetensors"
    contrast.probe(Console(width=200), "any", *files, SITES, out=out, tokens="last")
    found = read_vectors(out)
    assert found.layers == (5,), "the best site alone, since a file has one bias"
    every = np.array(world.rows[SITES[1]], np.float64)
    scores = every @ found.rows[5].astype(np.float64) + found.bias
    assert ((scores > 0) == (np.arange(35) < 20)).all()
    said = capsys.readouterr().out
    assert "100.0%" in said
    assert "resid_post.5 separates best" in said
    assert world.returns[0] == wanted(3, 4)


class Chats:
    """A tokenizer of letters, with a template that strips texts and puts a word behind them."""

    def apply_chat_template(self, chat: Any, *, tokenize: bool, continue_final_message: bool) -> str:
        assert continue_final_message and not tokenize
        whole = "".join(f"<{one['role']}>{one['content'].strip()}<end>" for one in chat)
        return whole.removesuffix("<end>") if "lost" not in whole else whole

    def __call__(self, text: str, *, add_special_tokens: bool, return_offsets_mapping: bool) -> Any:
        spans = [(at, at + 1) for at in range(len(text))]
        return SimpleNamespace(input_ids=[ord(letter) for letter in text], offset_mapping=spans)


def test_the_answers_of_chats_are_read(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what the template puts around them; a text may have several lines."""
    monkeypatch.setattr(contrast, "tokenizer_of", lambda place: Chats())
    places = []
    for name, answer in (("good", " (A)\n"), ("bad", "(B) ")):
        chat = [{"role": "user", "content": "which?"}, {"role": "assistant", "content": answer}]
        lines = [json.dumps({"messages": chat})] * 3 + [json.dumps(chat), json.dumps(f"it\nis {WARM}")]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
        places.append(tmp_path / f"{name}.jsonl")
    words: dict[str, Any] = {"sites": SITES, "out": tmp_path / "v.safetensors"}
    words |= {"positive": places[0], "negative": places[1]}
    whole = len("<user>which?<end><assistant>(A)")
    for tokens, (begin, end) in {"mean": (3, 0), "last": (1, 0), "second-last": (2, 1)}.items():
        with suppress(ConfigError):  # all rows are as random as the last token says
            contrast.vector(Console(), "any", **words, tokens=tokens)
        assert world.returns[0] == wanted(whole - begin, whole - end)
        assert world.returns[-1] == {"mean": wanted(1, 4), "last": wanted(3, 4), "second-last": wanted(2, 3)}[tokens]
    for line, message in (
        ({"role": "assistant", "content": "x"}, "line 5 is no text or chat, expected a JSON string"),
        ([{"role": "user", "content": "x"}], "line 5 is no text or chat"),
        ([{"role": "assistant", "content": "lost"}], "line 5: the model's chat template changes the answer"),
        ([3, {"role": "assistant", "content": "x"}], r"line 5: the model's chat template .* \(TypeError\)"),
    ):
        places[0].write_text("\n".join([*places[1].read_text().split("\n")[:4], json.dumps(line)]))
        with pytest.raises(ConfigError, match=message):
            contrast.vector(Console(), "any", **words)


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path: Path) -> None:
    (tmp_path / "marked").write_text("one\ntwo\nthree\nfour\n", encoding="utf-8-sig")
    assert read_lines("--positive", tmp_path / "marked")[0] == (1, "one")
    assert read_text(tmp_path / "marked", 100).startswith("one")


def test_what_is_refused(world: World, files: tuple[Path, Path], tmp_path: Path) -> None:
    good, other = files
    names = {"few": "a\nb\nc\n", "short": "a b\na b\na b\n \u3000\na b\n", "one": "a b\na b\n\t.\na b\na b\n"}
    for name, text in names.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    out = tmp_path / "v.safetensors"
    cases: list[tuple[dict[str, Any], str]] = [
        ({"out": tmp_path / "v.npy"}, r"--out .*v.npy: expected .* \.safetensors"),
        ({"out": tmp_path / "no" / "v.safetensors"}, r"--out .*/no/v.safetensors: its folder does not exist"),
        ({"positive": tmp_path / "none"}, r"--positive .*none: cannot be read \(No such file"),
        ({"negative": tmp_path / "binary"}, r"--negative .*binary: cannot be read .*UTF-8"),
        ({"positive": tmp_path / "few"}, "3 lines with a text, expected at least 4"),
        ({"sites": ["resid_post.3,mlp_out.3"]}, "--site names mlp_out and resid_post; expected one kind"),
        ({"sites": ["nowhere.3"]}, "'nowhere.3' is not a site"),
        (
            {"sites": ["resid.15"], "positive": tmp_path / "none", "out": tmp_path / "v.npy"},
            r"--out .*v.npy.*'resid.15' is not a site.*--positive .*none: cannot be read",  # all at once
        ),
        ({"sites": [","]}, "--site names no site"),
        ({"negative": good}, "the texts of both files are the same at resid_post.3"),
    ]
    words: dict[str, Any] = {"positive": good, "negative": other, "sites": SITES, "out": out}
    ones = b64encode(np.ones(D, np.float32).tobytes()).decode()
    same = {"activations": [{"site": one, "data": ones} for one in SITES]}
    for changed, message in cases:
        with pytest.MonkeyPatch.context() as patched:
            # All else is known before an engine starts.
            answers = [same] * 40 if changed.get("negative") is good else None
            patched.setattr(contrast, "read", lambda *_, found=answers, **__: found or pytest.fail("an engine starts"))
            with pytest.raises(ConfigError, match=message):
                contrast.vector(Console(), "any", **{**words, **changed})
    assert not out.exists()


def test_limits_are_told_with_their_numbers(
    world: World, files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            contrast.vector(Console(), "any", *files, ["resid_post.all"], out=tmp_path / "v.safetensors")

    with monkeypatch.context() as patched:
        patched.setattr(contrast, "MAX_ROWS", 279)
        refused("texts times sites are 280, expected at most 279")
    with monkeypatch.context() as patched:
        patched.setattr(texts, "MAX_BYTES", 100)
        refused("--positive .*: 240 bytes, expected at most 100")
    with monkeypatch.context() as patched:
        patched.setattr(texts, "MAX_TOKENS", 3)
        refused("positive: line 1 has 4 tokens, expected 2 to 3")


def test_without_scikit_learn_it_says_what_to_install(files: tuple[Path, Path], tmp_path: Path) -> None:
    words = ["--positive", str(files[0]), "--negative", str(files[1]), "--site", "resid_post.3"]
    before = "import sys; sys.modules['sklearn'] = None"
    done = saesteer("probe", *words, "--out", str(tmp_path / "p.safetensors"), before=before)
    assert done.returncode == 2
    said = "sklearn is not installed; pip install 'saesteer[probe]' (docs/install.md)"
    assert done.stderr == f"saesteer: {said}\n"


GOOD = [
    "I love this wonderful day, everything is beautiful.",
    "What a great film, I enjoyed every minute of it.",
    "The food was delicious and the waiters were kind.",
    "She smiled happily and thanked us for the gift.",
    "This is the best book that I have ever read.",
    "We had a lovely walk in the sun and laughed a lot.",
    "The hotel was clean, friendly and perfect for us.",
    "I am so glad that you came, it was a pleasure.",
]
BAD = [
    "I hate this awful day, everything is ugly.",
    "What a terrible film, I was bored every minute of it.",
    "The food was disgusting and the waiters were rude.",
    "She cried sadly and complained about the gift.",
    "This is the worst book that I have ever read.",
    "We had a miserable walk in the rain and argued a lot.",
    "The hotel was dirty, hostile and horrible for us.",
    "I am so angry that you came, it was a nightmare.",
]


@pytest.fixture
def moods(tmp_path: Path) -> list[str]:
    (tmp_path / "good").write_text("\n".join(GOOD))
    (tmp_path / "bad").write_text("\n".join(BAD))
    return ["--positive", str(tmp_path / "good"), "--negative", str(tmp_path / "bad")]


@pytest.mark.slow
def test_a_probe_of_the_real_model_scores_in_the_server(moods: list[str], tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    from saesteer.commands.embedded import engine_options, ensure_model
    from saesteer.plugin.job import Batch, run

    out = tmp_path / "mood.safetensors"
    done = saesteer("probe", *moods, "--tokens", "last", "--site", "resid_post.8,resid_post.15", "--out", str(out))
    assert done.returncode == 0, done.stderr
    [layer] = read_vectors(out).layers or ()
    assert f"resid_post.{layer} separates best" in done.stdout
    learned = split(np.arange(8, dtype=np.float64)[:, None])[0][:, 0].astype(int)
    texts = [kind[place] for kind in (GOOD, BAD) for place in learned]
    steer = {"return": {"probes": [{"probe": "mood", "scope": {"positions": [[-1, None]]}}]}}
    options = {**engine_options(), "vectors": {"mood": str(out)}}
    batch = Batch(texts, [steer] * len(texts), max_tokens=1)
    [answers] = run(str(ensure_model()), [batch], dictionaries={}, options=options)
    scores = [one.saesteer["probes"][0]["scores"][0] for one in answers]
    assert [score > 0 for score in scores] == [True] * len(learned) + [False] * len(learned), json.dumps(scores)
