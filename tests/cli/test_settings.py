"""What an operator may say at start, in words, in a file and on the wire; and how mistakes are told."""

import json
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from saesteer.commands import serve
from saesteer.commands.embedded import DEMO_SAE
from saesteer.config.assets import Assets
from saesteer.config.config import LIMITS, DoseAction, SaesteerConfig
from saesteer.config.modules import read_modules
from saesteer.config.settings import read_settings
from saesteer.config.sources import DictionarySource, VectorSource
from saesteer.errors import ConfigError, LoadError, SaesteerError
from saesteer.language.sites import KINDS
from saesteer.language.spec import from_json
from tests.spec.strategies import edits

MODULE = {"edits": [{"op": "add", "vector": "happy", "site": "resid_post.1", "scale": 4.0}]}

names = st.text(min_size=1, max_size=128).filter(str.isprintable)
paths = st.text(max_size=20)
some_sites = st.lists(
    st.sampled_from([f"{kind}.{layer}" for kind in KINDS for layer in ("0", "33", "all")]), max_size=3
)
unlimited = st.builds(
    SaesteerConfig,
    st.dictionaries(names, st.builds(DictionarySource, paths, st.none() | paths, st.booleans()), max_size=3),
    some_sites.map(tuple),
    some_sites.map(tuple),
    *(
        st.integers(LIMITS["max_read_mib"][0], LIMITS["max_read_mib"][2]),
        st.integers(LIMITS["max_edits"][0], LIMITS["max_edits"][2]),
        st.dictionaries(names, st.builds(VectorSource, paths, st.none() | st.floats(-9, 9)), max_size=3),
        st.dictionaries(names, paths | edits.map(lambda one: {"edits": [one.to_json()]}), max_size=2),
        st.integers(LIMITS["pool_rows"][0], LIMITS["pool_rows"][2]),
        st.integers(LIMITS["inline_rows"][0], LIMITS["inline_rows"][2]),
    ),
)
limits = st.fixed_dictionaries(
    {"max_dose": st.floats(0, 1e6, exclude_min=True), "max_dose_action": st.sampled_from(get_args(DoseAction))}
)
captures = st.fixed_dictionaries(
    {
        "consumers": st.dictionaries(names, st.fixed_dictionaries({}, optional={"all": st.just(False)}), max_size=2),
        "capture": some_sites.filter(bool).map(tuple),
        "capture_folder": paths,
    }
)
configs = st.builds(
    lambda config, *more: replace(config, **dict(chain.from_iterable(one.items() for one in more))),
    unlimited,
    st.just({}) | limits,
    st.just({}) | captures,
)


@given(configs)
def test_the_wire_form_is_the_config(config: SaesteerConfig) -> None:
    wire = json.loads(json.dumps(config.to_json()))
    assert SaesteerConfig.from_json(wire) == config
    assert SaesteerConfig.from_json(config.to_json()) == config


def test_what_is_not_said_is_as_usual() -> None:
    assert SaesteerConfig.from_json({}) == SaesteerConfig() == read_settings()
    assert (SaesteerConfig().max_edits, SaesteerConfig().pool_rows, SaesteerConfig().inline_rows) == (64, 64, 1)
    assert (SaesteerConfig().max_dose, SaesteerConfig().max_dose_action) == (None, "clamp")
    assert SaesteerConfig.from_json({"max_dose": 1, "max_dose_action": None}) == SaesteerConfig(max_dose=1.0)


def test_a_dictionary_may_stay_in_its_file(tmp_path: Path) -> None:
    (tmp_path / "scope").mkdir()
    told = "dictionaries: {a: 'rows:scope@mlp_in.1:mlp_out.1'}\ndictionary_folder: scope"
    (tmp_path / "settings.yaml").write_text(told)
    config = read_settings(["b=rows:org/repo/x", "c=org/repo/rows"], file=tmp_path / "settings.yaml")
    scope = str(tmp_path / "scope")
    assert config.dictionary_folder == scope
    assert config.dictionaries == {
        "a": DictionarySource(scope, "mlp_in.1:mlp_out.1", rows=True),
        "b": DictionarySource("org/repo/x", rows=True),
        "c": DictionarySource("org/repo/rows"),
    }
    parts = {"path": scope, "site": "mlp_in.1:mlp_out.1", "rows": True}
    assert SaesteerConfig.from_json({"dictionaries": {"a": parts}}).dictionaries["a"] == config.dictionaries["a"]
    assert (config.dictionaries["a"].reads, config.dictionaries["b"].reads) == ("mlp_in.1", None)


@pytest.mark.parametrize("exists", [False, True])
def test_folders_that_are_written_to_are_below_the_settings(
    tmp_path: Path, exists: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether they are there yet or not: a second start would write to another place than the first."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    place = tmp_path / "place"
    (place / "rows").mkdir(parents=True)
    if exists:
        (place / "asked").mkdir()
        (place / "captured").mkdir()
    said = "capture: [resid_post.1]\ncapture_folder: captured\n"
    said += "consumers: {filesystem: {folder: asked, shard_mib: 2}, mine: {folder: asked}}\n"
    (place / "settings.yaml").write_text(said)
    config = read_settings(file="place/settings.yaml")
    assert config.capture_folder == "place/captured"
    mine = {"folder": "asked"}  # what it means, its consumer knows
    assert config.consumers == {"filesystem": {"folder": "place/asked", "shard_mib": 2}, "mine": mine}
    for path, found in ((f"{tmp_path}/x", f"{tmp_path}/x"), ("~/x", f"{tmp_path}/x")):
        (place / "settings.yaml").write_text(said.replace("captured", path).replace("asked", path))
        config = read_settings(file=place / "settings.yaml")
        assert config.capture_folder == config.consumers["filesystem"]["folder"] == found
    config = read_settings(file=place / "settings.yaml", capture_folder="rows")
    assert config.capture_folder == "rows", "as on every command line"


def vector(file: Path, *shape: int, seed: int = 0) -> Path:
    np.save(file, np.random.default_rng(seed).normal(size=shape))
    return file


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a model's config (64 wide, 4 layers), vectors, modules and a settings file."""
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    vector(tmp_path / "happy.npy", 64)
    vector(tmp_path / "layers.npy", 4, 64)
    (tmp_path / "module.json").write_text(json.dumps(MODULE))
    (tmp_path / "settings.yaml").write_text(
        f"""
        dictionaries:
          demo: {DEMO_SAE}@resid_post.3
          hub: org/repo/folder
        vectors:
          happy: happy.npy
          sentiment: {{path: layers.npy, bias: -0.5}}
        modules:
          golden: module.json
          calm: {{edits: [{{op: ablate, vector: happy, site: resid_post.2}}, {{op: use, module: golden}}]}}
        sites: [resid_post.all]
        max_edits: 32
        pool_rows: 8
        max_dose: 2
        """
    )
    return tmp_path


def test_a_file_says_all(place: Path) -> None:
    config = read_settings(file=place / "settings.yaml")
    assert config.dictionaries == {
        "demo": DictionarySource(str(DEMO_SAE), "resid_post.3"),
        "hub": DictionarySource("org/repo/folder"),
    }
    assert config.vectors == {
        "happy": VectorSource(str(place / "happy.npy")),
        "sentiment": VectorSource(str(place / "layers.npy"), -0.5),
    }
    assert config.modules["golden"] == str(place / "module.json")
    assert (config.sites, config.max_edits, config.pool_rows, config.inline_rows) == (("resid_post.all",), 32, 8, 1)
    assert (config.max_dose, config.max_dose_action) == (2.0, "clamp")
    modules = read_modules(config.modules, dictionaries=config.dictionaries, vectors=config.vectors)
    vectors = Assets.open(replace(config, dictionaries={}, modules={})).vectors
    assert (vectors["happy"].layers, vectors["sentiment"].layers) == (None, (0, 1, 2, 3))
    assert (vectors["sentiment"].bias, vectors["happy"].width) == (-0.5, 64)
    assert modules["golden"] == from_json(MODULE)
    assert [edit.op for edit in modules["calm"].edits] == ["ablate", "use"]


def test_words_win_over_the_file(place: Path) -> None:
    config = read_settings(
        ["hub=other/repo", "new=x@resid_pre.1"],
        ["resid_mid.1,resid_mid.2", "resid_pre.0"],
        vectors=[f"happy={place}/layers.npy", "a=b=c"],
        modules=["calm=calm.json"],
        file=place / "settings.yaml",
        max_edits=16,
        pool_rows=None,
        max_dose_action="refuse",
    )
    assert config.dictionaries["hub"] == DictionarySource("other/repo")
    assert config.dictionaries["new"] == DictionarySource("x", "resid_pre.1")
    assert sorted(config.dictionaries) == ["demo", "hub", "new"]
    assert config.vectors["happy"].path == f"{place}/layers.npy"
    assert config.vectors["a"].path == "b=c"
    assert (config.modules["calm"], config.modules["golden"]) == ("calm.json", str(place / "module.json"))
    assert config.sites == ("resid_post.all", "resid_mid.1", "resid_mid.2", "resid_pre.0")
    assert (config.max_edits, config.pool_rows) == (16, 8)
    assert (config.max_dose, config.max_dose_action) == (2.0, "refuse")
    assert read_settings(file=place / "settings.yaml", max_dose=0.25).max_dose == 0.25


def test_the_fingerprint_follows_the_content(place: Path) -> None:
    config = read_settings(vectors=[f"happy={place}/happy.npy"], modules=[f"m={place}/module.json"])
    seen = [Assets.open(config).fingerprint]
    same = read_settings(vectors=[f"happy={place}/happy.npy"], modules=[f"m={place}/module.json"])
    assert Assets.open(same).fingerprint in seen
    vector(place / "happy.npy", 64, seed=1)
    seen.append(Assets.open(config).fingerprint)
    (place / "module.json").write_text(json.dumps(MODULE).replace("4.0", "4.5"))
    seen.append(Assets.open(config).fingerprint)
    seen.append(Assets.open(replace(config, vectors={"happy": replace(config.vectors["happy"], bias=1.0)})).fingerprint)
    seen.append(Assets.open(replace(config, pool_rows=65)).fingerprint)
    doses = [replace(config, max_dose=0.5, max_dose_action=action) for action in get_args(DoseAction)]
    seen += [Assets.open(one).fingerprint for one in doses]
    seen.append(Assets.open(replace(config, max_dose=0.25)).fingerprint)
    assert len(set(seen)) == 8


WRONG_WORDS: list[tuple[dict[str, Any], str]] = [
    ({"vectors": ["happy"]}, "--vector happy: expected NAME=FILE, such as happy=happy.gguf"),
    ({"vectors": ["=x"]}, "--vector =x: expected NAME=FILE"),
    ({"vectors": ["a=x", "a=y"]}, "the name 'a' is taken by another --vector"),
    ({"modules": ["a="]}, "--module a=: expected NAME=FILE"),
    ({"vectors": ["a\nb=x"]}, "saesteer.vectors has a wrong name: got 'a\\nb', expected a name of 1 to 128 printable"),
    ({"modules": [f"{'a' * 129}=x"]}, "saesteer.modules has a wrong name: got 'aaaa"),
    ({"sites": ["resid_post.every"]}, "'resid_post.every' is not a site"),
    ({"sites": ["all"]}, "'all' is not a site"),
    ({"pool_rows": -1}, "saesteer.pool_rows: got -1, expected an integer from 0 to 65536"),
    ({"pool_rows": 65537}, "got 65537, expected an integer from 0 to 65536"),
    ({"inline_rows": 65}, "saesteer.inline_rows: got 65, expected an integer from 0 to 64"),
    ({"file": "/no/such.yaml"}, "--saesteer-config /no/such.yaml: cannot be read (No such file or directory)"),
]


@pytest.mark.parametrize(("words", "told"), WRONG_WORDS)
def test_wrong_words(words: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_settings(**words)
    assert told in str(caught.value)


# Nine lists in each other, nine times: 387 million items for who writes them out.
BOMB = "sites:\n- &a0 [x]\n" + "".join(f"- &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9))
WRONG_FILES: list[tuple[str, str]] = [
    ("[1]", "holds a list, expected names and values"),
    ("a: [", "not YAML"),
    ("a: !!python/object/apply:os.system ['echo']", "not YAML"),
    (
        "dictionary: {}",
        "saesteer.dictionary: is not a field (did you mean 'dictionaries'?), expected only dictionaries, sites",
    ),
    ("vectors: {a: x}\nvectors: {b: y}", "the key 'vectors' appears twice"),
    ("vectors: {a: x, a: y}", "the key 'a' appears twice"),
    ("vectors: [x]", "saesteer.vectors: got a list of 1, expected an object of name: place"),
    ("vectors: {1: x}", "saesteer.vectors has a wrong name: got 1, expected a name"),
    ("vectors: {a: 1}", "saesteer.vectors.a: got 1, expected a path or {'path': ..., 'bias': ..., 'function': ...}"),
    (
        "vectors: {a: {path: x, site: y}}",
        "saesteer.vectors.a: got an object of 2, expected a path or {'path': ..., 'bias': ..., 'function': ...}",
    ),
    ("vectors: {a: {path: x, bias: .nan}}", "saesteer.vectors.a.bias: got nan, expected a finite number"),
    ("vectors: {a: {path: x, bias: true}}", "saesteer.vectors.a.bias: got true, expected a number"),
    ("modules: {a: 1}", "saesteer.modules.a: got 1, expected the path of a JSON file or a spec"),
    ("dictionaries: {a: {path: 1}}", "saesteer.dictionaries.a.path: got 1, expected a text"),
    ("sites: resid_post.3", "saesteer.sites: got 'resid_post.3', expected a list"),
    ("sites: 3", "saesteer.sites: got 3, expected a list"),
    ("max_edits: '64'", "saesteer.max_edits: got '64', expected an integer"),
    ("pool_rows: true", "saesteer.pool_rows: got true, expected an integer"),
    ("max_dose: .inf", "saesteer.max_dose: got inf, expected a finite number"),
    ("max_dose: .nan", "saesteer.max_dose: got nan, expected a finite number"),
    ("max_dose: -0.0", "saesteer.max_dose: got -0.0, expected a number above 0, 1000000 at most"),
    ("max_dose: 1000001", "saesteer.max_dose: got 1000001, expected a number above 0, 1000000 at most"),
    ("max_dose: true", "saesteer.max_dose: got true, expected a number"),
    ("max_dose: '1'", "saesteer.max_dose: got '1', expected a number"),
    ("max_dose: [1]", "saesteer.max_dose: got a list of 1, expected a number"),
    ("{max_dose: 1, max_dose_action: warn}", "saesteer.max_dose_action: got 'warn', expected one of clamp, refuse"),
    (
        "{max_dose: 1, max_dose_action: [clamp]}",
        "saesteer.max_dose_action: got a list of 1, expected one of clamp, refuse",
    ),
    (
        "max_dose_action: clamp",
        "saesteer.max_dose_action: got 'clamp' without saesteer.max_dose, expected both",
    ),
    ("&a [*a]", "holds a list"),
    (BOMB, "saesteer.sites[0]: got a list of 1, expected a name"),
    ("\x00", "not YAML"),
    ("[" * 50_000, "not YAML"),
    (" " * ((1 << 20) + 1), "more than 1048576 bytes"),
]


@pytest.mark.parametrize(("text", "told"), WRONG_FILES, ids=[text[:30] for text, _ in WRONG_FILES])
def test_wrong_files(text: str, told: str, tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_settings(file=file)
    assert told in str(caught.value)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def use(*modules: str) -> dict[str, Any]:
    return {"edits": [{"op": "use", "module": name} for name in modules]}


WRONG_MODULES: list[tuple[dict[str, Any], str]] = [
    ({"m": {"edits": [{"op": "add", "vector": "hapy", "site": "resid_post.1"}]}},
     "module 'm': saesteer.edits[0].vector: got 'hapy' (did you mean 'happy'?), expected one of: happy"),
    ({"m": {"edits": [{"op": "clamp", "dictionary": "gs", "feature": 1, "value": 1}]}},
     "module 'm': saesteer.edits[0].dictionary: got 'gs', expected one of: none"),
    ({"m": {"edits": [{"op": "ablate", "vector": "happy", "site": "resid_post.1",
                       "when": [{"probe": "happy", "above": 1}, {"probe": "sad", "above": 1}]}]}},
     "module 'm': saesteer.edits[0].when[1].probe: got 'sad'"),
    ({"m": use("n")}, "module 'm': saesteer.edits[0].module: got 'n'"),
    ({"m": use("m")}, "module 'm': saesteer.edits[0]"),
    ({"a": use("b"), "b": use("c"), "c": use("d", "a"), "d": use()}, "'b' uses 'c'"),
    ({"m": {"edits": [{"op": "add", "vector": "happy", "site": "resid_post.1", "scale": "4"}]}},
     "module 'm': saesteer.edits[0].scale: got '4', expected a number"),
    ({"m": {"return": {"probes": ["happy"]}}}, "module 'm': asks for return, expected edits only"),
    ({"m": {"return": {"dose": True}}}, "module 'm': asks for return, expected edits only"),
    ({"m": "/no/such.json"}, "module 'm' (/no/such.json): cannot be read (No such file"),
    ({"m": "/"}, "module 'm' (/): cannot be read (Is a directory)"),
    ({"m": str(DEMO_SAE)}, "cannot be read"),
]  # fmt: skip


@pytest.mark.parametrize(("modules", "told"), WRONG_MODULES, ids=[str(n) for n in range(len(WRONG_MODULES))])
def test_wrong_modules(modules: dict[str, Any], told: str, place: Path) -> None:
    config = SaesteerConfig(vectors={"happy": VectorSource(str(place / "happy.npy"))}, modules=modules)
    with pytest.raises(ConfigError) as caught:
        serve.check(str(place), config)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_vectors_that_the_model_has_no_place_for(place: Path) -> None:
    wide, deep = vector(place / "wide.npy", 65), vector(place / "deep.npy", 6, 64)
    states = vector(place / "states.npy", 5, 64)
    hint = "row i [+] 1 is resid_post.i, and --vector v=hidden_states:FILE reads them so$"
    for file, told in [
        (wide, "vector 'v' is 65 wide, but this model is 64 wide"),
        (deep, "vector 'v' has 6 rows, but this model has layers 0 to 3; .* --vector v=FILE#3@resid_post.20$"),
        (states, "vector 'v' has 5 rows, but this model has layers 0 to 3; .*" + hint),
        (place / "none.npy", "no such file"),
    ]:
        with pytest.raises(SaesteerError, match=told) as caught:
            serve.check(str(place), read_settings(vectors=[f"v={file}"]))
        assert isinstance(caught.value, ConfigError | LoadError)
