"""Which dictionaries belong to the served model, and by which addresses they can be named, from files to a request."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from saesteer import clamp, hf
from saesteer.config.assets import Assets
from saesteer.config.config import SaesteerConfig
from saesteer.config.origins import fit
from saesteer.errors import ConfigError, SpecError
from saesteer.language.spec import from_json
from saesteer.planning.applied import applied
from saesteer.planning.plan import Catalog
from saesteer.planning.planner import plan
from saesteer.plugin.door import frontend
from tests.loaders import writers

ADDRESS = "gemma-2-2b/20-gemmascope-res-16k"
CLAMP = {"op": "clamp", "feature": f"{ADDRESS}/3", "value": 2.0}


@pytest.mark.parametrize(
    ("trained", "served", "expected"),
    [
        ("gemma-2-2b", "google/gemma-2-2b", "same"),
        ("gemma-2-2b", "/models/gemma-2-2b/", "same"),
        ("gemma-2-2b", "/hf/hub/models--google--gemma-2-2b/snapshots/c5ebcd40d208330abc697524c919956e692655cf", "same"),
        ("gemma-2-2b", "google/gemma-2-2b-it", "base"),
        ("gemma-2-2b-it", "google/gemma-2-2b", "other"),
        ("gemma-2-2b-it", "google/gemma-2-2b-it", "same"),
        ("gemma-2-9b", "google/gemma-2-2b", "other"),
        ("gemma-2-2b", "me/my-gemma", "unknown"),
        ("my-gemma", "google/gemma-2-2b", "unknown"),
        ("llama3.1-8b", "meta-llama/Llama-3.1-8B", "same"),
        ("llama3.1-8b", "meta-llama/Meta-Llama-3.1-8B-Instruct", "base"),
        ("deepseek-r1-distill-llama-8b", "meta-llama/Llama-3.1-8B", "other"),
        ("gpt2-small", "openai-community/gpt2", "same"),
        ("Qwen/Qwen3-8B-Base", "Qwen/Qwen3-8B", "base"),
        ("qwen3-8b", "Qwen/Qwen3-8B-Base", "unknown"),
        ("google/gemma-3-4b-pt", "google/gemma-3-4b-it", "base"),
        ("pythia-70m-deduped", "EleutherAI/pythia-70m-deduped", "same"),
    ],
)
def test_models_are_compared_by_name(trained: str, served: str, expected: str) -> None:
    assert fit(trained, served) == expected


def saelens(folder: Path, model: str | None = "gemma-2-2b", **more: Any) -> Path:
    """A dictionary at resid_post.3 whose files name a model and Neuronpedia's source."""
    cfg = writers.saelens_cfg("jumprelu")
    about = cfg.get("metadata", cfg)
    about |= {"model_name": model} | more
    return writers.saelens(folder, cfg, writers.raw())


def catalog(place: Path | str, served: str | None, name: str = "d", **options: Any) -> Catalog:
    told = {"dictionaries": {name: str(place)}, **options}
    return Assets.open(SaesteerConfig.from_json(told)).catalog(width=writers.D, layers=30, model=served)


def test_an_address_names_a_loaded_dictionary(tmp_path: Path) -> None:
    place = saelens(tmp_path / "a", neuronpedia_id=ADDRESS)
    spec = from_json({"edits": [CLAMP]})
    for served, trained_on in (("google/gemma-2-2b", None), ("google/gemma-2-2b-it", "gemma-2-2b")):
        known = catalog(place, served)
        [entry] = applied(plan(spec, known, 9), known)
        assert (entry["dictionary"], entry["feature"], entry.get("trained_on")) == ("d", 3, trained_on)
    with pytest.raises(SpecError, match="not known to be gemma-2-2b"):
        plan(spec, catalog(place, "/models/mine"), 9)
    known = catalog(place, "/models/mine", dictionaries_of=["google/gemma-2-2b"])
    [entry] = applied(plan(spec, known, 9), known)
    assert entry["trained_on"] == "gemma-2-2b"


def test_the_operator_declares_an_address_by_the_name(tmp_path: Path) -> None:
    """Its files say neither model nor source."""
    place = saelens(tmp_path / "a", model=None)
    spec = from_json({"edits": [CLAMP]})
    assert plan(spec, catalog(place, "google/gemma-2-2b", f"np:{ADDRESS}"), 9).groups
    with pytest.raises(SpecError, match="not known to be gemma-2-2b"):
        plan(spec, catalog(place, None, f"np:{ADDRESS}"), 9)
    assert plan(from_json({"edits": [CLAMP | {"dictionary": "d", "feature": 3}]}), catalog(place, None), 9).groups
    with pytest.raises(SpecError, match="which no dictionary of this server has") as caught:
        plan(spec, catalog(place, "google/gemma-2-2b"), 9)
    assert "dictionaries by name: d" in str(caught.value)


def test_transformers_take_addresses(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": writers.D, "num_hidden_layers": 5, "num_attention_heads": 2, "vocab_size": 64}
    model = LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=48, max_position_embeddings=64))
    place = saelens(tmp_path / "a", neuronpedia_id=ADDRESS)
    model.config.name_or_path = "google/gemma-2-2b-it"
    known = hf.Model(model, dictionaries={"d": place})
    doses = [
        known.doses([3, 1, 4, 1], steer=one) for one in (clamp(feature=f"{ADDRESS}/3", value=8.0), clamp("d", 3, 8.0))
    ]
    assert doses[0] == doses[1] and doses[0][0]["max"] > 0
    model.config.name_or_path = ""
    with pytest.raises(SpecError, match="not known to be gemma-2-2b"):
        hf.Model(model, dictionaries={"d": place}).doses([3, 1], steer=CLAMP)
    declared = hf.Model(model, dictionaries={"d": place}, dictionaries_of=["gemma-2-2b"])
    assert declared.doses([3, 1, 4, 1], steer=CLAMP | {"value": 8.0}) == doses[0]


def start(place: Path, served: str, **options: Any) -> None:
    """What a server does at start with the dictionary."""
    shape = SimpleNamespace(model_type="gemma2", num_hidden_layers=30)
    model = SimpleNamespace(model=served, hf_text_config=shape, get_hidden_size=lambda: writers.D)
    assets = Assets.open(SaesteerConfig.from_json({"dictionaries": {"d": str(place)}, **options}))
    alone, outputs = SimpleNamespace(pipeline_parallel_size=1), SimpleNamespace(reasoning_parser="")
    frontend._names(
        assets, SimpleNamespace(model_config=model, parallel_config=alone, structured_outputs_config=outputs)
    )


def test_a_dictionary_of_another_model_is_refused_at_start(tmp_path: Path) -> None:
    place = saelens(tmp_path / "a", model="gemma-2-9b")
    for served in ("google/gemma-2-2b", "google/gemma-2-2b-it"):
        with pytest.raises(ConfigError) as caught:
            start(place, served)
        assert str(caught.value) == (
            f"dictionary 'd' was trained on gemma-2-9b, and this server's model is {served}; expected a dictionary of "
            "this model or its base; --dictionaries-of gemma-2-9b serves it all the same"
        )
        start(place, served, dictionaries_of=["gemma-2-9b"])
    for served in ("google/gemma-2-9b", "google/gemma-2-9b-it", "me/my-gemma", str(tmp_path)):
        start(place, served)
    for model in (None, "somebody/else"):  # nothing is known, so it is served as ever
        start(saelens(tmp_path / "b", model=model), "google/gemma-2-2b")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Dictionaries below a folder, each with the model of its name in its files; all of them read resid_post.3."""
    for model in ("gemma-2-9b", "gemma-2-2b", "somebody"):
        saelens(tmp_path / "all" / model, model=model, neuronpedia_id=None)
    return tmp_path / "all"


def below(folder: Path, served: str | None, *declared: str) -> Catalog:
    told = {"dictionary_folder": str(folder), "sites": ["resid_post.3", "resid_post.5"], "dictionaries_of": declared}
    return Assets.open(SaesteerConfig.from_json(told)).catalog(width=writers.D, layers=30, model=served)


def clamped(known: Catalog, name: str) -> dict[str, Any]:
    """What an answer reports about a clamp of a dictionary's feature."""
    [entry] = applied(plan(from_json({"edits": [clamp(name, 3, 2.0)]}), known, 9), known)
    return entry


@pytest.mark.parametrize("alias", ["gemma-2-9b", "gemma-2-9b@resid_post.3"])
def test_a_dictionary_of_another_model_below_a_folder_is_refused_in_the_request(alias: str, folder: Path) -> None:
    with pytest.raises(SpecError) as caught:
        clamped(below(folder, "google/gemma-2-2b"), alias)
    assert (caught.value.field, caught.value.code) == ("saesteer.edits[0].dictionary", "not_served")
    words = f"dictionary '{alias}' was trained on gemma-2-9b, and this server's model is google/gemma-2-2b; expected"
    assert words in str(caught.value) and "--dictionaries-of gemma-2-9b serves it all the same" in str(caught.value)
    gate = clamp("gemma-2-2b", 3, 2.0, when={"dictionary": alias, "feature": 1, "above": 0.0})
    with pytest.raises(SpecError, match=r"saesteer\.edits\[0\]\.when\.dictionary: .* was trained on gemma-2-9b"):
        plan(from_json({"edits": [gate]}), below(folder, "google/gemma-2-2b"), 9)
    assert clamped(below(folder, "google/gemma-2-2b", "gemma-2-9b"), alias)["trained_on"] == "gemma-2-9b"
    assert "trained_on" not in clamped(below(folder, "google/gemma-2-9b"), alias)
    assert clamped(below(folder, "google/gemma-2-9b-it"), alias)["trained_on"] == "gemma-2-9b"
    assert "trained_on" not in clamped(below(folder, None), alias)


@pytest.mark.parametrize("site", ["resid_post.5", "resid_post.5:resid_post.5", "resid_post.3:resid_post.5"])
def test_a_client_may_not_move_a_dictionary(site: str, folder: Path) -> None:
    with pytest.raises(SpecError, match=r"is of resid_post\.3, as its files have it; got resid_post\.5") as caught:
        clamped(below(folder, "google/gemma-2-2b"), f"gemma-2-2b@{site}")
    assert (caught.value.field, caught.value.code) == ("saesteer.edits[0].dictionary", "not_served")


def test_a_site_that_a_file_has_may_be_named_and_an_empty_one_may_not(folder: Path) -> None:
    known = below(folder, "google/gemma-2-2b")
    for name in ("gemma-2-2b@resid_pre.4", "gemma-2-2b@resid_post.3:resid_post.3"):
        assert clamped(known, name)["site"] == "resid_post.3"
    with pytest.raises(SpecError, match=r"got 'gemma-2-2b@' \(did you mean 'gemma-2-2b'\?\), expected") as caught:
        clamped(known, "gemma-2-2b@")
    assert caught.value.code == "unknown_name"
