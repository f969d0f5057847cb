"""Places with a dictionary for each layer: what they hold, which of it is meant, and which sets are refused."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from saesteer.errors import ConfigError, LoadError
from saesteer.loaders import arrays, load
from saesteer.loaders.aliases import layer_in
from saesteer.workbench.inspect import report
from tests.loaders import writers
from tests.loaders.formats import apollo, circuit_tracer, qwen_scope
from tests.loaders.sets import opened, scope

PLT = {**circuit_tracer.ARRAYS, "W_dec": writers.raw()["W_dec"], "b_dec": writers.raw()["b_dec"]}


def saelens(root: Path, *layers: int, architecture: str = "standard", kind: str = "hook_resid_post") -> Path:
    for layer in layers:
        arrays = {key: one for key, one in writers.raw(seed=layer).items() if key != "threshold"}
        hook = f"blocks.{layer}.{kind}"
        writers.saelens(root / hook, writers.saelens_cfg(architecture, hook=hook, k=3), arrays)
    return root


def manifest(root: Path, *layers: tuple[int, str]) -> Path:
    return writers.manifest(root, writers.manifest_tensors(writers.raw(), writers.SEEN), layers=layers)


WHOLE: list[tuple[Callable[[Path], Path], str, tuple[int, ...], tuple[str, ...]]] = [
    (lambda at: scope(at, 3, 20, 7), "", (3, 7, 20), ("resid_post.3", "resid_post.7", "resid_post.20")),
    (lambda at: scope(at, 3, 20), "/layer_*/width_16k/*", (3, 20), ("resid_post.3", "resid_post.20")),
    (lambda at: saelens(at, 2, 10), "", (2, 10), ("resid_post.2", "resid_post.10")),
    (lambda at: circuit_tracer.write(at, PLT, (9, 10, 11)), "", (9, 10, 11), ("mlp_in.9", "mlp_in.10", "mlp_in.11")),
    (lambda at: circuit_tracer.write(at, PLT, (9, 10, 11)), "@9,11", (9, 11), ("mlp_in.9", "mlp_in.11")),
    (lambda at: circuit_tracer.write(at, PLT, (9, 10, 11)), "@mlp_in.9-10", (9, 10), ("mlp_in.9", "mlp_in.10")),
    (lambda at: circuit_tracer.unsaid(at, PLT, (1, 3)), "@mlp_in.3,1:mlp_out.3,1", (1, 3), ("mlp_in.1", "mlp_in.3")),
    (lambda at: circuit_tracer.unsaid(at, PLT, (1, 4)), "@resid_mid:mlp_out", (1, 4), ("resid_mid.1", "resid_mid.4")),
    (lambda at: qwen_scope.write(at, qwen_scope.ARRAYS, (4, 12)), "", (4, 12), ("resid_post.4", "resid_post.12")),
    (lambda at: manifest(at, (20, "post_block"), (4, "pre_attn")), "@resid_post", (20,), ("resid_post.20",)),
    (lambda at: manifest(at, (20, "post_block"), (4, "post_block")), "", (4, 20), ("resid_post.4", "resid_post.20")),
    (lambda at: apollo.write(at, apollo.TWO), "", (5, 6), ("resid_pre.5", "resid_pre.6")),
]  # fmt: skip


@pytest.mark.parametrize(("write", "choice", "layers", "reads"), WHOLE, ids=[str(n) for n in range(len(WHOLE))])
def test_what_a_place_holds(
    write: Callable[[Path], Path], choice: str, layers: tuple[int, ...], reads: tuple[str, ...], tmp_path: Path
) -> None:
    assets = opened(f"{write(tmp_path)}{choice}")
    assert tuple(info.site_in for info in assets.infos.values()) == reads
    if len(layers) == 1:
        assert (assets.sets, list(assets.infos)) == ({}, ["gs"])
    else:
        assert assets.sets == {"gs": layers}
        assert list(assets.infos) == [f"gs@{layer}" for layer in layers]
    for info in assets.infos.values():
        coder = load(info.source, site=info.site_in)
        assert (coder.info.fingerprint, coder.info.features) == (info.fingerprint, info.features)
    assert assets.catalog(width=writers.D, layers=30).sets == assets.sets


def test_only_the_layers_asked_for_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repo = scope(tmp_path, 1, 2, 3)
    hashed: list[str] = []

    def fingerprint(files: list[Path], more: str) -> str:
        hashed.append(str(files[-1]))
        return "x"

    monkeypatch.setattr("saesteer.loaders.draft.fingerprint", fingerprint)
    opened(f"{repo}@2,3")
    assert [re.findall(r"layer_(\d)", one) for one in hashed] == [["2"], ["3"]]
    monkeypatch.setattr(arrays.Arrays, "matrix", None)  # headers are enough
    assert "layer 2" in report(repo)


WRONG: list[tuple[str, Callable[[Path], Path], str, str]] = [
    ("missing", lambda at: scope(at, 1, 2, 4, 5), "",
     r"gemma-scope-2b-pt-res: layer 3: missing; expected every layer from 1 to 5"),
    ("width", lambda at: scope(scope(at, 1).parent, 2, d_in=32, d_out=32), "",
     r"layer_2/.*: width of the input: 32; expected 24, as at layer 1 \(.*layer_1/"),
    ("activation", lambda at: saelens(saelens(at, 1), 2, architecture="topk"), "",
     r"blocks.2.hook_resid_post: activation: topk; expected relu, as at layer 1"),
    ("kind", lambda at: saelens(saelens(at, 1), 2, kind="hook_resid_mid"), "",
     r"blocks.2.hook_resid_mid: sites: resid_mid -> resid_mid; expected resid_post -> resid_post"),
    ("two", lambda at: scope(scope(at, 1, 2).parent, 1, width="65k"), "",
     r"layer 1: two: .*16k.* and .*65k.*; expected one, chosen by a pattern such as .*layer_\*/width_65k"),
    ("two-kinds", lambda at: manifest(at, (4, "post_block"), (4, "post_attn")), "",
     r"layer 4: two: .*; expected one, chosen by a kind, as in @resid_mid"),
    ("cut", lambda at: _cut(scope(at, 1, 2)), "", r"layer_2/.*params.npz: .*not readable"),
    ("empty", lambda at: at, "", r"a folder with nothing; expected one of the formats"),
    ("no-layer", lambda at: _nowhere(at), "",
     r"a: layer: named by neither the files nor the path; expected a name such as layer_20"),
    ("pattern", lambda at: scope(at, 1), "/layer_*/width_1m", r"nothing fits this pattern; expected files or folders"),
    ("manifest", lambda at: _without(manifest(at, (4, "post_block"), (5, "post_block"))), "",
     r"manifest.json: layers: \[5, 'post_block'\] without its file; expected layer_5_post_block.safetensors"),
]  # fmt: skip


def _cut(repo: Path) -> Path:
    [file] = (repo / "layer_2").rglob("params.npz")
    file.write_bytes(file.read_bytes()[:100])
    return repo


def _without(folder: Path) -> Path:
    (folder / "layer_5_post_block.safetensors").unlink()
    return folder


def _nowhere(root: Path) -> Path:
    for name in ("a", "b"):
        writers.gemma_scope(root / name, writers.raw())
    return root


@pytest.mark.parametrize(("write", "choice", "words"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_wrong_sets(write: Callable[[Path], Path], choice: str, words: str, tmp_path: Path) -> None:
    place = f"{write(tmp_path)}{choice}"
    with pytest.raises(LoadError, match=words) as caught:
        opened(place)
    assert "\n" not in str(caught.value)
    with pytest.raises(LoadError, match=words):
        report(place)


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ("5", r"dictionary 'gs': .* has no dictionary of layer 5; expected layers among 1, 2, 4"),
        ("1-4", "has no dictionary of layer 3; expected layers among"),
        ("resid_mid", r"reads resid_post; expected one of these behind @, got 'resid_mid'"),
        ("4-1", "got '4-1', expected layers such as 9,17-20"),
        ("1,x", "got 'x', expected layers"),
        ("resid_pots.1,2", "'resid_pots.1,2' is not a site"),
        ("resid_post.1:mlp_out.2,4", "expected a site, or two with the same layers"),
        ("1,2:mlp_out.1,2", "expected a site, or two with the same layers"),
        ("resid_post.", "is not a site"),
    ],
)
def test_wrong_choices(choice: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        opened(f"{scope(tmp_path, 1, 2, 4)}@{choice}")


def test_inspect_lists_the_dictionaries_of_a_set(tmp_path: Path) -> None:
    said = report(f"{circuit_tracer.write(tmp_path, PLT, (9, 10, 11))}@9,11")
    lines = dict(re.split(r"  +", line, maxsplit=1) for line in said.splitlines())
    assert lines["set"] == "2 dictionaries, of layer 9, 11"
    assert lines["kind"] == "transcoder"
    assert lines["activation"] == "relu"
    assert lines["layer 9"].startswith("38 features, mlp_in.9 -> mlp_out.9, ")
    assert lines["layer 11"].startswith("40 features, mlp_in.11 -> mlp_out.11, ")
    assert lines["max_act"] == "unknown at layer 9, 11"
    assert lines["in memory"].startswith("8.0 kB in float16")  # (38 + 40) * (48 * 2 + 4) + 2 * 24 * 4 bytes


@pytest.mark.parametrize(
    ("path", "layer"),
    [
        ("a/layer_20/width_16k/average_l0_71", 20),
        ("resid_post/layer_9_width_16k_l0_small", 9),
        ("saes/blocks.8.hook_resid_pre", 8),
        ("x/resid_post_layer_12/trainer_0", 12),
        ("layers.5.mlp", 5),
        ("layer3.sae.pt", 3),
        ("autoencoders/11.pt", 11),
        ("width_16k/l0_9", None),
        ("Llama3_1-8B-Base-L15R-8x", 15),
        ("400M-Slimpajama/L9R", 9),
        ("Llama3_1-8B-Base-L3TC-8x/checkpoints", 3),
    ],
)
def test_the_layer_in_a_path(path: str, layer: int | None) -> None:
    assert layer_in(Path(path)) == layer
