"""Sets on a hub, of which only what is asked for is fetched; and `inspect`, which fetches headers alone, over HTTP."""

import os
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest

from saesteer.errors import ConfigError, LoadError
from saesteer.loaders import describe, neuronpedia
from saesteer.loaders.hub import is_id
from saesteer.loaders.neuronpedia import Source
from tests.loaders import across, writers
from tests.loaders.formats import circuit_tracer, qwen_scope
from tests.loaders.hub import SHA, FakeHub, Hub, serving
from tests.loaders.sets import opened, scope

LARGE = 70_000  # features, so that files are larger than what is fetched whole


def given(hub: FakeHub) -> set[str]:
    return {name for names in hub.fetched for name in names}


def test_of_a_set_only_the_layers_asked_for_are_fetched(fake_hub: FakeHub) -> None:
    circuit_tracer.write(fake_hub.root / "org" / "set", circuit_tracer.ARRAYS | {"W_dec": np.ones((40, 24), "f4"),
                         "b_dec": np.ones(24, "f4")}, (1, 2, 3))  # fmt: skip
    assets = opened("org/set@1,3")
    assert [info.site_in for info in assets.infos.values()] == ["mlp_in.1", "mlp_in.3"]
    assert given(fake_hub) == {"config.yaml", "layer_1.safetensors", "layer_3.safetensors"}
    assert len(opened("org/set").infos) == 3


def test_a_cross_layer_transcoder_is_fetched_with_its_decoders(fake_hub: FakeHub) -> None:
    across.circuit_tracer(fake_hub.root / "org" / "clt", across.layers())
    assert list(opened("org/clt@1").infos) == ["gs"]
    assert given(fake_hub) == {"config.yaml", "W_enc_1.safetensors", "W_dec_1.safetensors"}
    assert [info.targets for info in opened("org/clt").infos.values()] == [3, 2, 1]
    across.gemma_scope_2(fake_hub.root / "google" / "gemma-scope-2-1b-pt" / "clt" / "width_262k", across.layers())
    infos = opened("google/gemma-scope-2-1b-pt/clt/width_262k").infos
    assert [info.targets for info in infos.values()] == [3, 2, 1]


def test_a_pattern_chooses_among_the_widths_of_a_repository(fake_hub: FakeHub) -> None:
    for width in ("16k", "65k"):
        scope(fake_hub.root / "google", 3, 7, 20, width=width)
    repo = "google/gemma-scope-2b-pt-res"
    words = r"layer 20: two: .*16k.* and .*65k.*; expected one, chosen by a pattern such as .*/layer_\*/width_65k"
    with pytest.raises(LoadError, match=words):
        opened(repo)
    assert given(fake_hub) == set()  # refused before anything is fetched
    assets = opened(f"{repo}/layer_*/width_65k/*@3,20")
    assert [info.site_in for info in assets.infos.values()] == ["resid_post.3", "resid_post.20"]
    assert given(fake_hub) == {f"layer_{n}/width_65k/average_l0_{60 + n}/params.npz" for n in (3, 20)}
    with pytest.raises(LoadError, match=r"none of layer 5; expected among 20, 3, 7"):
        opened(f"{repo}/layer_*/width_65k/*@5")
    with pytest.raises(LoadError, match=r"google/gemma-scope-2b-pt-res/\*/width_1m: "):
        opened(f"{repo}/*/width_1m")


def test_a_source_of_neuronpedia_is_a_place_on_the_hub(fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    name, inside = "np:gemma-2-2b/20-gemmascope-res-16k", "layer_20/width_16k/average_l0_71"
    writers.gemma_scope(fake_hub.root / "google" / "gemma-scope-2b-pt-res" / inside, writers.raw())
    plain = describe(f"google/gemma-scope-2b-pt-res/{inside}")
    info = opened(name).infos["gs"]
    assert (info.source, info.site_in, info.fingerprint) == (name, "resid_post.20", plain.fingerprint)
    assert opened(f"{name}@resid_post.3").infos["gs"].site_in == "resid_post.3"
    # The table's site is used where the files name none.
    elsewhere = fake_hub.root / "org" / "repo"
    writers.gemma_scope(elsewhere, writers.raw())
    rows = {"m/s": Source("org/repo", "m", "resid_mid.2"), "m/t": Source("org/repo", "m", None)}
    monkeypatch.setattr(neuronpedia, "_table", lambda: rows)
    assert opened("np:m/s").infos["gs"].site_in == "resid_mid.2"
    assert opened("np:m/s@resid_post.1").infos["gs"].site_in == "resid_post.1"
    with pytest.raises(ConfigError, match="do not say where they belong"):
        opened("np:m/t")


def test_without_a_network_a_pattern_means_what_the_cache_has(
    fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    scope(fake_hub.root / "google", 3, 7, 20)
    place = "google/gemma-scope-2b-pt-res/layer_*/width_16k/*"
    online = opened(f"{place}@3,20")

    def gone(repo: str) -> list[str]:
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "list_repo_files", gone)
    assert opened(place).infos == opened(f"{place}@3,20").infos == online.infos
    with pytest.raises(LoadError, match="nothing fits this pattern"):
        opened("google/gemma-scope-2b-pt-res/*/width_1m")


REPORTS = """
import sys
from saesteer.workbench.inspect import report
from saesteer.errors import LoadError
for place in sys.argv[1:]:
    try:
        print(report(place), end="\\0")
    except LoadError as error:
        print(f"refused: {error}", end="\\0")
"""


def inspected(hub: Hub, cache: Path, *places: str) -> dict[str, str]:
    """What `inspect` reports of each place, in a process that knows this hub alone."""
    environment = {**os.environ, "HF_ENDPOINT": hub.address, "HF_HOME": str(cache), "HF_HUB_DISABLE_TELEMETRY": "1"}
    command = [sys.executable, "-c", REPORTS, *places]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return dict(zip(places, done.stdout.split("\0")[:-1], strict=True))


GEMMA = "google/gemma-scope-2b-pt-res"
PINNED = "google/pinned-2b-pt-res/layer_9@@v1@resid_post.9"
NAMED, NAMED_PLACE = "np:gemma-2-2b/21-gemmascope-res-16k", f"{GEMMA}/layer_21/width_16k/average_l0_70"
SET, LISTED = (
    f"{GEMMA}/layer_*/width_16k/*@7,3",
    "google/gemma-scope-2b-pt-transcoders/layer_0/width_16k/average_l0_76/params.npz",
)
HEADERS = [  # place, its file, words of what is said
    (f"{GEMMA}/layer_20", "layer_20/params.npz", ["70,000", "resid_post.20"]),
    ("org/sae", "sae_weights.safetensors", ["70,000", "resid_post.3"]),
    ("org/qwen/layer12.sae.pt", "layer12.sae.pt", ["70,000", "resid_post.12"]),
    ("org/set#layer_5", "layer_5.safetensors", ["70,000", "mlp_in.5 -> mlp_out.5"]),
    (PINNED, "layer_9/params.npz", ["70,000", "resid_post.9"]),
    (NAMED, "layer_21/width_16k/average_l0_70/params.npz", ["resid_post.21", f"source        {NAMED_PLACE}\n"]),
    (SET, "layer_3/width_16k/average_l0_63/params.npz", ["2 dictionaries, of layer 3, 7", f"{GEMMA}/layer_3/width"]),
    (LISTED, "", ["mlp_in_pregain.0 -> mlp_out.0"]),
    ("org/lies", "sae_weights.safetensors", ["refused: ", "with a header of 209715200"]),
    ("org/listing#layer_9", "", ["refused: org/listing/layer_9.safetensors: org/listing has no dictionary there"]),
    ("org/listing", "", [f"expected the place of one of them, such as {LISTED}"]),
]  # fmt: skip


def test_inspect_of_what_is_on_the_hub_fetches_headers_alone(tmp_path: Path) -> None:
    with serving(tmp_path / "hub") as hub:
        served = hub.root
        wide = writers.raw(features=LARGE)
        for folder in ("layer_20", "layer_21/width_16k/average_l0_70"):
            writers.gemma_scope(served / GEMMA / folder, wide)
        writers.gemma_scope(served / "google/pinned-2b-pt-res/layer_9", wide)
        scope(served / "google", 3, 7, features=LARGE)
        writers.saelens(served / "org/sae", writers.saelens_cfg("jumprelu", d_sae=LARGE), wide)
        layer = {"W_enc": wide["W_enc"].T, "W_dec": wide["W_dec"], "b_enc": wide["b_enc"], "b_dec": wide["b_dec"]}
        qwen_scope.write(served / "org/qwen", layer | {"W_dec": wide["W_dec"].T}, d_sae=LARGE)
        circuit_tracer.write(served / "org/set", layer, (4, 5))
        writers.gemma_scope((served / LISTED).parent, writers.raw())
        (served / "org/listing").mkdir(parents=True)
        (served / "org/listing/config.yaml").write_text(f"model_kind: transcoder_set\ntranscoders: ['hf://{LISTED}']")
        writers.saelens(served / "org/lies", writers.saelens_cfg("jumprelu"), writers.raw())
        (served / "org/lies/sae_weights.safetensors").unlink()
        with (served / "org/lies/sae_weights.safetensors").open("wb") as stream:
            stream.write((200 << 20).to_bytes(8, "little"))
            stream.truncate(300 << 20)
        found = inspected(hub, tmp_path / "cache", *(place for place, *_ in HEADERS))
        for place, file, words in HEADERS:
            assert all(one in found[place] for one in words), found[place]
            assert "fingerprint   not computed" in found[place] or place in (LISTED, SET) or "refused" in found[place]
            whole = [one.stat().st_size for one in served.rglob("*") if str(one).endswith(file) and file]
            assert all(0 < hub.sent[file] < size / 10 for size in whole), (place, hub.sent)
        assert str(tmp_path) not in found[SET]
        assert "v1" in {one for repo, one in hub.revisions if "pinned" in repo} <= {"v1", SHA}


@pytest.mark.parametrize(
    ("place", "good"),
    [
        ("org/repo", True),
        ("org/repo/layer_*/width_16k", True),
        ("org/repo/gpt2-small_L5_lr1.20e-03_l11.00e+00.pt", True),
        ("org/repo@@0c863dc9", True),
        ("org/repo/layer_*@@refs/pr/1", True),
        ("org/repo@@", False),
        ("org/repo@@a/../b", False),
        ("org/repo@@a@@b", False),
        ("./repo@@v1", False),
        ("repo", False),
        ("org/../repo", False),
        ("/org/repo", False),
        ("org/repo/a b", False),
    ],
)
def test_what_may_be_a_hub_id(place: str, good: bool) -> None:
    assert is_id(place) == good
