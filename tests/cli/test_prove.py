"""`saesteer prove`: its numbers, its requests and its files; where it says slow, on the real model in an engine."""

import json
import os
import subprocess
import sys
from base64 import b64encode
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from rich.console import Console

from saesteer.commands.embedded import BRIDGE, DEMO_SAE, FRENCH, GOLD, OCEAN, ensure_model
from saesteer.config.settings import read_settings
from saesteer.errors import ConfigError
from saesteer.loaders import load
from saesteer.plugin.job import Batch, Completion
from saesteer.workbench import evidence, prove, reading, trials
from saesteer.workbench.trials import ARMS, CLAMP, DOSES, FLIPPED, NOISE, Key, Subject
from tests.rows import row_of
from tests.small_engine import make_engine
from tests.small_world import CODERS, KINDS, TOKENS, WIDTH

KNOWN = (BRIDGE, OCEAN, GOLD, FRENCH)
DRAW = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("", 0),
        ("gold", 0),
        ("gold coin", 0),
        ("a b c d e", 0),
        ("gold gold gold gold", 0.5),
        (". \n. \n. \n. \n. \n", 2 / 3),
    ],
)
def test_repetition_by_hand(text: str, share: float) -> None:
    assert evidence.repetition(text) == pytest.approx(share)
    assert evidence.has_collapsed(text) == (share >= 0.5)


def test_probabilities_are_those_of_a_softmax() -> None:
    logits = DRAW.normal(size=(5, 30)) * 4
    log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    sampled = DRAW.integers(0, 30, 5)
    steps = np.arange(5)
    found = evidence.probabilities(logits[:, [3, 8]], logits[steps, sampled], log_p[steps, sampled])
    np.testing.assert_allclose(found, np.exp(log_p[:, [3, 8]]).sum(1))


def test_output_score_by_hand() -> None:
    logits = np.log(np.array([0.1, 0.4, 0.2, 0.05, 0.25]))
    assert evidence.output_score(logits + 7, [1]) == pytest.approx(0.4)  # rank 0
    assert evidence.output_score(logits, [0, 2]) == pytest.approx((1 - 2 / 5) * 0.2)
    assert evidence.output_score(logits, [3]) == pytest.approx((1 - 4 / 5) * 0.05)


def test_the_interval_holds_chance_and_no_more() -> None:
    others = DRAW.uniform(0, 0.01, (20, 8))
    far = evidence.difference(others.mean(0) + DRAW.uniform(0.02, 0.05, 8), others)
    assert 0.02 < far.low < far.mean < far.high < 0.05
    same = evidence.difference(others[0], others)
    assert same.low < 0 < same.high
    one = evidence.difference(np.full(8, 0.5), np.full((20, 8), 0.2))
    assert (one.low, one.mean, one.high) == pytest.approx((0.3, 0.3, 0.3))
    assert evidence.difference(others[0], others, seed=3) == evidence.difference(others[0], others, seed=3)


def subject(feature: int = BRIDGE) -> Subject:
    coder = load(str(DEMO_SAE))
    assert coder.max_act is not None
    e, d = coder.w_enc[feature].float(), coder.w_dec[feature].float()
    return Subject("demo", feature, float(coder.max_act[feature]), d.numpy(), "resid_post.15", float(e @ d))


@pytest.mark.parametrize("name", ["jump", "length", "layer"])
def test_controls_move_as_far_under_an_input_norm(name: str, tmp_path: Path) -> None:
    coder, feature = CODERS[name], 3
    assert coder.max_act is not None
    site, norm = KINDS[name][3], coder.info.in_norm
    one = Subject(name, feature, float(coder.max_act[feature]), coder.w_dec[feature].numpy(), site, None, norm)
    engine = make_engine(tmp_path)
    x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(3)) * torch.arange(1, TOKENS + 1)[:, None]

    def change(spec: Mapping[str, Any]) -> torch.Tensor:
        """What the op of the site does to x, without a layer around it."""
        row = row_of(engine, {"edits": spec["edits"]}, 4)
        assert row is not None
        engine.fill(1, row)
        engine.positions[:TOKENS] = torch.arange(TOKENS)
        engine.schedule(torch.tensor([0]), 1, torch.tensor([0, TOKENS], dtype=torch.int32), 1, TOKENS, row.kinds)
        moved = x.clone()
        engine.edit(engine.sites[site], moved)
        return (moved - x)[3:]  # a dictionary may leave the first positions alone

    every = {key: spec for key, spec in (*trials.clamps(one, 1), *trials.controls(one, 1, seed=0)) if key.dose == 2}
    clamp, flipped, noise = (change(every[Key(arm, 0, 2.0, feature)]) for arm in (CLAMP, FLIPPED, NOISE))
    further = x.norm(dim=1) / (x - x.mean(1, keepdim=True)).norm(dim=1) if norm == "layer_norm" else torch.ones(TOKENS)
    assert clamp.norm(dim=1).min() > 0 and further.max() < 1.2
    torch.testing.assert_close(flipped, -clamp * further[3:, None], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(noise.norm(dim=1), flipped.norm(dim=1), rtol=1e-3, atol=1e-4)
    cosine = (noise * clamp).sum(1) / (noise.norm(dim=1) * clamp.norm(dim=1))
    assert (cosine.abs() < 0.9).all(), "noise has a direction of its own"


class Engine:
    """In place of vLLM: under a clamp, answers come from hidden states that lead to the words of a clamped feature."""

    def __init__(self) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.batches: Sequence[Batch] = ()
        model = AutoModelForCausalLM.from_pretrained(ensure_model())
        self.head = model.get_output_embeddings().weight.detach().double().numpy()
        tokenizer = AutoTokenizer.from_pretrained(ensure_model())
        self.words = {BRIDGE: tokenizer(" bridge").input_ids[0], OCEAN: tokenizer(" ocean").input_ids[0]}

    @cache  # noqa: B019  # one engine
    def towards(self, token: int | None) -> tuple[Any, float]:
        """A hidden state that raises this token's logit to 20, and others' as little as it can; log p of token 5."""
        row = np.zeros(self.head.shape[1])
        if token is not None:
            row = np.linalg.solve(self.head.T @ self.head, self.head[token])
            row *= 20 / (self.head[token] @ row)
        logits = self.head @ row
        return row, float(logits[5] - np.log(np.exp(logits).sum()))

    def run(self, place: str, batches: Sequence[Batch], **rest: Any) -> list[list[Completion]]:
        self.batches, self.options = batches, rest["options"]
        return [[self.answer(spec) for spec in batch.steer] for batch in batches]

    def answer(self, spec: Mapping[str, Any] | None) -> Completion:
        assert spec is not None
        edit: dict[str, Any] = next(iter(spec["edits"]), {})
        word = None
        if edit.get("op") == "clamp" and edit["value"] < 4 and edit["feature"] in self.words:
            word = self.words[edit["feature"]]
        row, logprob = self.towards(word)
        rows = np.stack([row, row])
        collapsed = edit.get("op") == "clamp" and edit["value"] == 4
        entry = {
            "dtype": "float32",
            "shape": list(rows.shape),
            "data": b64encode(rows.astype("<f4").tobytes()).decode(),
        }
        if "positions" in spec["return"]["hidden"]["scope"]:
            entry |= {"shape": [1, rows.shape[1]], "data": b64encode(rows[:1].astype("<f4").tobytes()).decode()}
        saw = [{"rows": [{"position": 1, "features": {"1": 2.0}}]}] if "features" in spec["return"] else []
        said = "go go go go go" if collapsed else "a quiet day"
        return Completion(said, [1], [5, 5, 5], [0.0, logprob, logprob], 0, {"hidden": [entry], "features": saw})


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine()


def test_a_proof_from_answers(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reading, "run", engine.run)
    file, plot = tmp_path / "found.json", tmp_path / "found.svg"
    console = Console(width=220)
    bridge, ocean = prove.run(
        console, "demo", read_settings([]), [BRIDGE, OCEAN, BRIDGE], random=3, json_file=file, plot=plot
    )
    shared, own, _ = engine.batches
    prompts = len(trials.PROMPTS)
    assert len(shared.prompts) == prompts * (1 + 3 * len(DOSES))
    assert len(own.prompts) == prompts * 3 * len(DOSES) + 1, "everything for one feature is one batch"
    assert engine.options["max_model_len"] >= prove.TOKENS + max(map(len, own.prompts))
    assert (bridge.feature, bridge.label, ocean.feature) == (BRIDGE, "bridge", OCEAN)
    assert {" bridge", " Bridge"} <= set(bridge.tokens)
    clamp = bridge.arms[CLAMP]
    assert [one.context > 0.9 for one in clamp] == [True, True, True, False], "collapsed answers do not count"
    assert [one.collapsed for one in clamp] == [0, 0, 0, 1]
    assert bridge.collapses_at == 4
    assert bridge.plain.context == pytest.approx(len(bridge.tokens) / len(engine.head), rel=1e-4)
    assert max(one.context for arm in (FLIPPED, NOISE) for one in bridge.arms[arm]) < 0.01
    assert 0.6 < bridge.difference.low <= bridge.difference.mean <= bridge.difference.high
    assert bridge.stronger_than == 1.0
    assert bridge.reads_back == pytest.approx([2.0 / (dose * bridge.max_act) for dose in DOSES])
    assert bridge.factor == pytest.approx(subject().factor)
    assert bridge.output_score == pytest.approx(evidence.output_score(np.zeros(len(engine.head)), [0]))
    said = capsys.readouterr().out
    assert "bridge" in said and "output score" in said
    written = json.loads(file.read_text())
    assert [one["feature"] for one in written["features"]] == [BRIDGE, OCEAN]
    assert written["features"][0]["difference"]["low"] == bridge.difference.low
    ElementTree.fromstring(plot.read_text())


@pytest.mark.parametrize(
    ("dictionaries", "features", "said"),
    [
        ([], [9216], "--feature 9216: dictionary 'demo' has no such feature"),
        ([f"a={DEMO_SAE}", f"b={DEMO_SAE}"], [], "one dictionary is measured, 2 are named"),
    ],
)
def test_mistakes_are_told(dictionaries: list[str], features: list[int], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        prove.run(Console(quiet=True), "demo", read_settings(dictionaries), features)


def test_a_dictionary_without_labels_is_refused(tmp_path: Path) -> None:
    (tmp_path / DEMO_SAE.name).symlink_to(DEMO_SAE)
    with pytest.raises(ConfigError, match="has no labels; `saesteer label` makes them"):
        prove.run(Console(quiet=True), "demo", read_settings([f"mine={tmp_path / DEMO_SAE.name}"]), [BRIDGE])


@pytest.mark.slow
@pytest.mark.long
def test_known_features_do_what_their_labels_say(tmp_path: Path) -> None:
    """Against clamps of 20 random features: the bootstrap 95 % intervals of the differences lie above 0."""
    file, words = tmp_path / "found.json", [word for one in KNOWN for word in ("--feature", str(one))]
    command = [sys.executable, "-m", "saesteer", "prove", *words, "--json", str(file)]
    done = subprocess.run(command, env={**os.environ, "COLUMNS": "200"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = {one["feature"]: one for one in json.loads(file.read_text())["features"]}
    assert set(found) == set(KNOWN)
    for one in found.values():
        assert one["difference"]["low"] > 0, one["label"]
        clamp, *controls = (np.mean([at["context"] for at in one["arms"][arm]]) for arm in ARMS)
        assert clamp > 5 * max(controls), one["label"]
        assert all(0.1 < part < 1 for part in one["reads_back"])
    assert found[OCEAN]["collapses_at"] == 4
    assert "bridge" in done.stdout
