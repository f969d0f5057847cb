"""The names of sites."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saesteer.errors import ConfigError
from saesteer.language.sites import KINDS, MAX_LAYER, canonical, expand_sites, parse


@given(st.sampled_from(KINDS), st.integers(0, MAX_LAYER))
def test_every_site_is_read_and_has_one_canonical_name(kind: str, layer: int) -> None:
    name = f"{kind}.{layer}"
    assert parse(name) == (kind, layer)
    assert canonical(canonical(name)) == canonical(name)
    assert (canonical(name) == name) == (kind != "resid_pre" or layer == 0)


def test_resid_pre_is_the_resid_post_of_the_layer_before() -> None:
    assert canonical("resid_pre.16") == "resid_post.15"
    assert canonical("resid_pre.1") == "resid_post.0"
    assert canonical("resid_pre.0") == "resid_pre.0"


@pytest.mark.parametrize(
    "name",
    ["", "resid_post", "resid_post.", "resid_post.-1", "resid_post.01", "resid_post.1\n", " resid_post.1",
     "resid_post.١", "resid_pst.3", "Resid_Post.3", "resid_post.1.2", "resid_post.99999", "resid_post.1e1"],
)  # fmt: skip
def test_what_is_no_site_is_refused_with_the_kinds(name: str) -> None:
    for read in (parse, canonical):
        with pytest.raises(ConfigError, match=r"expected a layer of a kind.*mlp_in_pregain"):
            read(name)


def test_all_is_every_layer_of_the_model() -> None:
    assert expand_sites(["resid_mid.1", "resid_post.all", "z.0"], 2) == (
        "resid_mid.1", "resid_post.0", "resid_post.1", "z.0"
    )  # fmt: skip
    assert expand_sites([], 2) == ()
    for name in ("all", "resid_pst.all", "resid_post.ALL", "resid_post.all.1", "resid_post"):
        with pytest.raises(ConfigError, match="is not a site"):
            expand_sites([name], 2)
