"""`saesteer inspect --measure`: L0 and FVU of a dictionary on a tiny model, against numbers computed here."""

from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from saesteer import hf
from saesteer.commands.embedded import DEMO_SAE
from saesteer.config.assets import Assets
from saesteer.config.settings import read_settings
from saesteer.dictionaries.coder import CoderInfo, SparseCoder
from saesteer.errors import ConfigError, LoadError
from saesteer.loaders import load
from saesteer.loaders.formats import own
from saesteer.workbench import calibrate, features, measure, windows
from tests.cli.commands import saesteer
from tests.cli.stand_ins import Tokenizer
from tests.loaders import across

WIDTH, LAYERS, FEATURES = 24, 3, 40


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM  # it imports Triton, which tests/kernels has to do first

    torch.manual_seed(1)
    sizes: dict[str, Any] = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 2}
    sizes |= {"vocab_size": 64, "intermediate_size": 48, "max_position_embeddings": 128}
    return LlamaForCausalLM(LlamaConfig(**sizes)).eval()


@pytest.fixture(autouse=True)
def loaded(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The tiny model in place of one on disk; gives the windows that it has read."""
    read: list[list[int]] = []

    def load_model(place: str, dictionaries: Any, sites: Any) -> Any:
        fresh = type(model)(model.config)
        fresh.load_state_dict(model.state_dict())
        oracle = hf.Model(fresh, tokenizer=Tokenizer(), dictionaries=dictionaries, sites=sites)
        streams = oracle.streams

        def remembering(window: list[int]) -> Any:
            read.append(list(window))
            return streams(window)

        oracle.streams = remembering  # type: ignore[method-assign, assignment]
        return oracle

    monkeypatch.setattr(measure, "load_model", load_model)
    monkeypatch.setattr(measure, "resolve", lambda model, config: (model, config, {}))
    monkeypatch.setattr(measure, "check", lambda folder, config: None)
    return read


def written(folder: Path, name: str, seed: int, **facts: Any) -> Path:
    draw = torch.Generator().manual_seed(seed)
    info = CoderInfo("saesteer", WIDTH, WIDTH, FEATURES, "relu", skip_first=3, **facts)
    wide = torch.randn(FEATURES, WIDTH, generator=draw), torch.randn(FEATURES, WIDTH, generator=draw) / 8
    coder = SparseCoder(wide[0], torch.randn(FEATURES, generator=draw), wide[1], torch.randn(WIDTH) / 9, info)
    folder.mkdir(exist_ok=True)
    own.write(folder / f"{name}.safetensors", coder)
    return folder / f"{name}.safetensors"


def speaking(oracle: hf.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calibrate and features get this model in place of one on disk, and features a text of five tokens."""
    tokenizer = SimpleNamespace(decode=lambda ids: str(ids[0]))
    monkeypatch.setattr(calibrate, "open_model", lambda model, config: (oracle, list(config.dictionaries)))
    monkeypatch.setattr(features, "_resolved", lambda model, config: (model, config, {}))
    monkeypatch.setattr(features, "load_model", lambda place, dictionaries: oracle)
    monkeypatch.setattr(features, "tokenizer_of", lambda place: tokenizer)
    monkeypatch.setattr(features, "tokens_of", lambda tokenizer, text, chat: [3, 1, 4, 1, 5])


def truth(model: Any, windows: list[list[int]], modules: tuple[Any, Any], file: Path, normed: bool) -> Any:
    """L0 and FVU by hooks of the test's own, in numpy."""
    seen: list[Any] = [[], []]

    def hook(keep: list[Any]) -> Any:
        return lambda _m, args, out: keep.append((args[0] if normed and keep is seen[0] else out)[0, 3:])

    handles = [module.register_forward_hook(hook(keep)) for module, keep in zip(modules, seen, strict=True)]
    with torch.no_grad():
        for window in windows:
            model(torch.tensor([window]))
    for handle in handles:
        handle.remove()
    x, y = (torch.cat([one.reshape(-1, WIDTH) for one in keep]).double().numpy() for keep in seen)
    if normed:
        x = x / np.sqrt((x**2).mean(1, keepdims=True))
    coder = load(file)
    w_enc, b_enc, w_dec, b_dec = (getattr(coder, key).double().numpy() for key in ("w_enc", "b_enc", "w_dec", "b_dec"))
    f = np.maximum(x @ w_enc.T + b_enc, 0)
    left = ((f @ w_dec + b_dec - y) ** 2).sum()
    return (f > 0).sum(1).mean(), left / ((y - y.mean(0)) ** 2).sum()


def recovered(model: Any, windows: list[list[int]], modules: tuple[Any, Any], file: Path, site: str) -> float:
    """By hooks of the test's own that put the reconstruction, or zeros, in the place of what is written."""
    coder, read = load(file), list[Any]()

    def put(value: Any) -> Any:
        def hook(_m: Any, args: Any, out: Any) -> Any:
            made = out.clone()
            made[0, 3:] = value(read[-1] if modules[0] is not modules[1] else out[0])[3:]
            return made

        return hook

    def decoded(x: Any) -> Any:
        return coder.decode(
            coder.encode(x * (x.shape[-1] ** 0.5 / x.norm(dim=-1, keepdim=True)) if "pregain" in site else x)
        )

    def loss() -> float:
        with torch.no_grad():
            made = [model(torch.tensor([window])).logits[0, 3:-1].log_softmax(-1) for window in windows]
        return -float(sum(one.gather(1, torch.tensor(w)[4:, None]).sum() for one, w in zip(made, windows, strict=True)))

    keep = modules[0].register_forward_hook(
        lambda _m, args, out: read.append((args[0] if "pregain" in site else out)[0])
    )
    losses = [loss()]
    for value in (decoded, torch.zeros_like):
        handle = modules[1].register_forward_hook(put(value))
        losses.append(loss())
        handle.remove()
    keep.remove()
    plain, steered, without = losses
    return (without - steered) / (without - plain)


@pytest.mark.parametrize(
    ("site", "ends"),
    [
        ("resid_post.1", lambda layers: (layers[1], layers[1])),
        ("mlp_in.1:mlp_out.1", lambda layers: (layers[1].post_attention_layernorm, layers[1].mlp)),
        ("mlp_in_pregain.1:mlp_out.1", lambda layers: (layers[1].post_attention_layernorm, layers[1].mlp)),
    ],
)
def test_figures_are_those_of_the_definition(
    site: str, ends: Any, model: Any, text: Path, loaded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path, "one", 5)
    monkeypatch.setattr(windows, "_BLOCK_BYTES", 4 * FEATURES * 7)  # seven tokens at once
    console = Console(width=120, record=True, quiet=True)
    [figures] = measure.run(console, "any", f"{file}@{site}", text, max_tokens=300).values()
    l0, fvu = truth(model, loaded, ends(model.model.layers), file, normed="pregain" in site)
    assert figures.tokens == sum(len(window) - 3 for window in loaded)
    assert figures.l0 == pytest.approx(l0, rel=1e-3)
    assert figures.fvu == pytest.approx(fvu, rel=1e-4)
    windows_ = [window for window in loaded if len(window) > 4]
    assert figures.recovered == pytest.approx(
        recovered(model, windows_, ends(model.model.layers), file, site), rel=1e-2
    )


def test_calibrate_and_features_take_every_dictionary_of_a_set(
    model: Any, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    for layer in (0, 2):
        written(tmp_path / "set", f"layer_{layer}", layer)
    config = read_settings([f"gs={tmp_path}/set@resid_post"])
    oracle = hf.Model(model, tokenizer=Tokenizer(), dictionaries=dict(config.dictionaries))
    speaking(oracle, monkeypatch)
    found = calibrate.run(Console(width=200), "any", config, text, max_tokens=300)
    assert list(found) == ["gs@0", "gs@2"]
    for layer in (0, 2):
        known = load(tmp_path / "set" / f"layer_{layer}.safetensors").max_act
        assert known is not None and torch.equal(known, found[f"gs@{layer}"].max_act)
    assert not torch.equal(found["gs@0"].max_act, found["gs@2"].max_act)
    assert all(info.has_max_act for info in Assets.open(config).infos.values())
    capsys.readouterr()
    features.run(Console(width=200), "any", config, "a text")
    said = capsys.readouterr().out
    assert "gs, at resid_post.0" in said and "gs, at resid_post.2" in said


def test_of_a_centred_stream_the_mean_is_nobodys_to_explain() -> None:
    """The encoder's rows have no mean, so x - mean(x) is all that it can know."""
    eye = torch.eye(4) - 0.25
    info = CoderInfo(format="saesteer", d_in=4, d_out=4, features=8, activation="relu", centred=True)
    rows = torch.cat([eye, -eye])
    coder = SparseCoder(w_enc=rows, b_enc=torch.zeros(8), w_dec=rows, b_dec=torch.zeros(4), info=info)
    x = torch.randn(100, 4, generator=torch.Generator().manual_seed(0)) + 5 * torch.arange(100)[:, None]
    found, without = measure.Figures(), measure.Figures()
    found.add(coder, x, x)
    without.add(replace(coder, info=replace(info, centred=False)), x, x)
    assert found.fvu < 1e-6 < 0.9 < without.fvu


def test_a_dictionary_by_rows_is_read_whole(
    model: Any, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = f"{written(tmp_path, 'one', 5)}@resid_post.1"
    [[alone], [by_rows]] = (
        measure.run(Console(quiet=True), "any", one, text, max_tokens=300).values() for one in (place, f"rows:{place}")
    )
    assert (alone.tokens, alone.l0, alone.fvu) == (by_rows.tokens, by_rows.l0, by_rows.fvu)
    config = read_settings([f"d=rows:{place}"])
    oracle = hf.Model(model, tokenizer=Tokenizer(), dictionaries=dict(config.dictionaries))
    speaking(oracle, monkeypatch)
    found = calibrate.run(Console(quiet=True), "any", config, text, max_tokens=300)["d"].max_act
    rows = Assets.open(config).rows
    assert [rows.row("d", feature, torch.float32).max_act for feature in range(FEATURES)] == found.tolist()
    said = StringIO()
    features.run(Console(width=200, file=said), "any", config, "a text")
    assert "d, at resid_post.1" in said.getvalue()


def test_a_cross_layer_transcoder_is_measured_and_read_layer_by_layer(
    model: Any, text: Path, loaded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Each MLP's output is what all layers up to it have written there."""
    made = across.layers(LAYERS, FEATURES, WIDTH)
    place = across.gemma_scope_2(tmp_path / "clt", made)
    figures = list(measure.run(Console(quiet=True), "any", str(place), text, max_tokens=300).values())
    seen: dict[str, list[Any]] = {}
    for layer, block in enumerate(model.model.layers):
        for name, module in (("x", block.post_attention_layernorm), ("y", block.mlp)):
            keep = seen.setdefault(f"{name}{layer}", [])
            module.register_forward_hook(lambda _m, _args, out, keep=keep: keep.append(out[0, 1:].double().numpy()))
    with torch.no_grad():
        for window in loaded:
            model(torch.tensor([window]))
    for block in model.model.layers:
        for module in (block.post_attention_layernorm, block.mlp):
            module._forward_hooks.clear()
    streams = {name: np.concatenate(keep) for name, keep in seen.items()}
    features_of = []
    for layer, one in enumerate(made):
        pre = streams[f"x{layer}"] @ one.w_enc + one.b_enc
        features_of.append(np.where(pre > np.maximum(one.threshold, 0), pre, 0))
        y = streams[f"y{layer}"]
        left = one.b_dec + sum(f @ made[at].w_dec[layer] for at, f in enumerate(features_of)) - y
        assert figures[layer].l0 == pytest.approx((features_of[layer] > 0).sum(1).mean(), rel=1e-3)
        assert figures[layer].fvu == pytest.approx((left**2).sum() / ((y - y.mean(0)) ** 2).sum(), rel=1e-3)

    config = read_settings([f"clt={place}"])
    speaking(hf.Model(model, tokenizer=Tokenizer(), dictionaries=dict(config.dictionaries)), monkeypatch)
    calibrate.run(Console(quiet=True), "any", config, text, max_tokens=300)
    assets = Assets.open(config)
    for layer, f in enumerate(features_of):
        rows = [assets.rows.row(f"clt@{layer}", n, torch.float32) for n in range(FEATURES)]
        largest = np.array([row.max_act for row in rows])
        np.testing.assert_allclose(largest, f.max(0), rtol=1e-3, atol=1e-4)
    features.run(Console(width=200), "any", config, "a text", backend="vllm")
    said = capsys.readouterr().out
    assert all(f"clt, at mlp_in.{layer}" in said for layer in range(LAYERS))


def test_mistakes_are_one_sentence(text: Path, tmp_path: Path) -> None:
    file = written(tmp_path, "one", 5, site_in="resid_post.1", site_out="resid_post.1")
    with pytest.raises(ConfigError, match="--measure needs a text that the model reads: --text-file FILE"):
        measure.run(Console(), "any", str(file), None, max_tokens=9)
    with pytest.raises(ConfigError, match="expected a longer one"):
        measure.run(Console(), "any", str(file), text, max_tokens=1)
    with pytest.raises(LoadError, match="no such file"):
        measure.run(Console(), "any", "/no/such", text, max_tokens=9)


@pytest.mark.slow
def test_the_embedded_dictionary_measures_as_its_training_did(tmp_path: Path) -> None:
    """L0 31 and FVU 0.08 on the model's own text; a text of another kind is not far from it."""
    (tmp_path / "text").write_text("The old bridge lies over the river, and many people walk over it every day. " * 60)
    done = saesteer("inspect", str(DEMO_SAE), "--measure", "--text-file", f"{tmp_path}/text", "--max-tokens", "800")
    assert done.returncode == 0, done.stderr
    [line] = [line for line in done.stdout.splitlines() if line.startswith("│") and "resid_post.15" in line]
    _, _, tokens, l0, _, fvu, recovered, _ = line.split("│")
    assert int(tokens) > 700
    assert 15 < float(l0) < 60
    assert float(fvu) < 0.3
    assert 0.8 < float(recovered) < 1.05, line
