"""Neuronpedia's names of sources: what the table holds, and what is said of a name that it does not have."""

from pathlib import Path

import pytest
import yaml

from saesteer.errors import LoadError
from saesteer.loaders import describe
from saesteer.loaders.neuronpedia import Source, resolved, source_of
from tools import neuronpedia_table

ADDRESS = "gemma-2-2b/20-gemmascope-res-16k"
NAME = f"np:{ADDRESS}"
PLACE = "google/gemma-scope-2b-pt-res/layer_20/width_16k/average_l0_71"


def test_a_name_leads_to_a_place() -> None:
    assert source_of(NAME) == Source(PLACE, "gemma-2-2b", None, ADDRESS)
    assert resolved(NAME) == PLACE
    assert [resolved(place) for place in ("org/repo", Path("a"))] == ["org/repo", Path("a")]
    assert source_of("gemma-2-2b/20-gemmascope-res-16k") is None
    found = source_of("np:gpt2-small/0-att_128k-oai")
    assert found is not None and found.site == "attn_out.0"


@pytest.mark.parametrize(
    "name", ["np:gemma-2-2b/20-gemmascope-res-16", "np:", "np:../../etc/passwd", "np:org/repo/more"]
)
def test_an_unknown_name_is_refused_with_similar_ones(name: str) -> None:
    with pytest.raises(
        LoadError, match="no source of Neuronpedia that SAELens lists; expected np:MODEL/SOURCE"
    ) as told:
        describe(name)
    assert str(told.value).startswith(f"{name}: ")
    assert (f"such as {NAME}" in str(told.value)) == name.startswith("np:gemma")


def test_the_table_is_made_of_saelens_file() -> None:
    text = """
    sae_bench: {model: gemma-2-2b, repo_id: org/bench, saes: [
      {id: blocks.12.hook_resid_post__trainer_0, path: a/b, neuronpedia: gemma-2-2b/12-bench},
      {id: blocks.12.attn.hook_z, neuronpedia: gemma-2-2b/12-z},
      {id: no-dashboard, path: c}]}
    clt: {model: gemma-2-2b, repo_id: org/clt, saes: [{id: layer_0, path: 0, neuronpedia: gemma-2-2b/0-clt}]}
    """
    assert list(neuronpedia_table.rows(yaml.safe_load(text))) == [
        ("gemma-2-2b/12-bench", "org/bench/a/b", "gemma-2-2b", "resid_post.12"),
        ("gemma-2-2b/12-z", "org/bench/blocks.12.attn.hook_z", "gemma-2-2b", "z.12"),
    ]
