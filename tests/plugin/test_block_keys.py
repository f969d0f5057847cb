"""Which blocks of the prefix cache two requests share: by vLLM's own hashes, against the edits position by position."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.request import Request

from saesteer.config.config import KEY, SaesteerConfig
from saesteer.dictionaries.vectors import from_inline, rows_of
from saesteer.engine.engine import Engine
from saesteer.errors import SpecError
from saesteer.language.sites import order
from saesteer.language.spec import from_json
from saesteer.planning.plan import Catalog, Condition, Direction, Plan, Read
from saesteer.planning.planner import plan
from saesteer.plugin import prefix_cache
from saesteer.plugin.door import admission
from tests.rows import row_of
from tests.small_engine import make_engine
from tests.small_world import DOWN, INLINE, SITES, STEP, UP, VECTORS, WIDTH, edits

TOKENS, BLOCK = 32, 4


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return make_engine(tmp_path_factory.mktemp("keys"), max_edits=512)


@pytest.fixture(scope="module", autouse=True)
def hooked() -> Any:
    """The wrap, as the plugin puts it in place."""
    stock = kv_cache_utils.generate_block_hash_extra_keys
    if not hasattr(stock, "__wrapped__"):
        kv_cache_utils.generate_block_hash_extra_keys = prefix_cache._keying(stock)
    yield
    kv_cache_utils.generate_block_hash_extra_keys = stock


def hashes(
    catalog: Catalog,
    spec: Any,
    prompt_len: int,
    *,
    server: str = "server",
    config: SaesteerConfig | None = None,
    salt: str | None = None,
    images: Any = None,
    conversation: Any = None,
) -> list[Any]:
    """vLLM's hashes of the full blocks of a request with TOKENS tokens, of which the first ones are its prompt."""
    kv_cache_utils.init_none_hash(sha256)
    params = SamplingParams(extra_args=None if spec is None else {KEY: spec}, max_tokens=TOKENS)
    asked = SimpleNamespace(prompt_token_ids=[*range(prompt_len)], sampling_params=params)
    if spec is not None:
        admission.Door(server, config).admit(from_json(spec), catalog, asked, conversation)
    request = Request(
        request_id="r",
        prompt_token_ids=[*range(prompt_len)],
        sampling_params=params,
        pooling_params=None,
        cache_salt=salt,
        mm_features=images,
        block_hasher=kv_cache_utils.get_request_block_hasher(BLOCK, sha256),
    )
    request.append_output_token_ids([*range(prompt_len, TOKENS)])
    return list(request.block_hashes)


def shared(first: list[Any], second: list[Any]) -> int:
    """Blocks that both have; none behind the first that differs."""
    assert len(first) == len(second) == TOKENS // BLOCK
    same = [one == two for one, two in zip(first, second, strict=True)]
    count = same.index(False) if False in same else len(same)
    assert not any(same[count:]), "hashes are chained"
    return count


def edited_at(found: Plan, catalog: Catalog, position: int) -> Any:
    """What is edited at a position, written out: by site the groups, and of each the changes that hold there."""
    sites: dict[str, list[Any]] = {}
    for group in found.groups:
        active = [
            (
                numbers(one.target, catalog),
                (one.scale, one.shift, one.low, one.high, one.unit, one.only_if_active, one.gain),
                gates(one.gates, group.site, found.conditions, catalog),
                *(read and reading(read, catalog) for read in (one.held, one.strength)),
            )
            for one in group.changes
            if any(lo <= position < hi for lo, hi in one.windows)
        ]
        if active:
            sites.setdefault(group.site, []).append(active)
    return sites


def numbers(target: Any, catalog: Catalog) -> Any:
    if not isinstance(target, Direction):
        return target
    vectors: Any = catalog.vectors
    rows = vectors[target.vector].rows if isinstance(target.vector, str) else rows_of(target.vector)
    return rows[target.layer].tolist()


def reading(one: Read, catalog: Catalog) -> Any:
    """What is read into a register."""
    bias = catalog.vectors[one.target.vector].bias if isinstance(one.target, Direction) else 0.0  # type: ignore[index]
    return one.site, numbers(one.target, catalog), bias, one.scale, one.shift, one.low, one.high


def gates(bits: int, site: str, conditions: tuple[Condition, ...], catalog: Catalog) -> Any:
    """What a change waits for; a bit that is used again means the last condition up to its site."""
    found = {}
    for one in sorted(conditions, key=lambda one: order(one.site)):
        if one.bit & bits and order(one.site) <= order(site):
            bias = catalog.vectors[one.target.vector].bias if isinstance(one.target, Direction) else 0.0  # type: ignore[index]
            found[one.bit] = one.site, numbers(one.target, catalog), bias, one.above, one.below
    return sorted(map(repr, found.values()))


interval = st.tuples(st.integers(-TOKENS, TOKENS), st.none() | st.integers(-TOKENS, TOKENS))
later = st.tuples(st.integers(BLOCK, TOKENS - 2), st.integers(1, TOKENS)).map(lambda one: (one[0], one[0] + one[1]))
scopes = st.one_of(
    st.sampled_from([None, {"generated": True}, {"prompt": True}, {"skip_first": 9}]),
    st.lists(interval | later, min_size=1, max_size=3).map(lambda found: {"positions": [list(one) for one in found]}),
    st.lists(later, min_size=1, max_size=3).map(lambda found: {"positions": [list(one) for one in found]}),
    st.just({"generated": True}),
)


@st.composite
def placed(draw: Any) -> Any:
    """An edit with a scope of many kinds; `use` has none."""
    found = {name: value for name, value in draw(edits()).items() if name != "scope"}
    scope = draw(scopes) if found["op"] != "use" else None
    return found | ({"scope": scope} if scope else {})


@st.composite
def pairs(draw: Any) -> Any:
    """A spec, and the same mutated in one place."""
    first = draw(st.lists(placed(), min_size=1, max_size=4))
    second = [*first]
    place = draw(st.integers(0, len(first) - 1))
    kind = draw(
        st.sampled_from(["same", "scope", "scope", "other", "gone", "more", "swapped", "value", "value", "vector"])
    )
    if kind == "scope" and first[place]["op"] != "use":
        second[place] = {**first[place], "scope": draw(scopes)}
    elif kind == "other":
        second[place] = draw(placed())
    elif kind == "gone":
        del second[place]
    elif kind == "more":
        second.insert(place, draw(placed()))
    elif kind == "swapped":
        second[place - 1], second[place] = second[place], second[place - 1]
    elif kind == "value":
        second[place] = {**first[place], **{k: turned(v) for k, v in first[place].items() if k in ("value", "scale")}}
    elif kind == "vector" and first[place].get("vector") == "any":
        second[place] = {**first[place], "vector": VECTORS["any"][None].tolist()}  # by content it is the same
    return first, second


def turned(strength: Any) -> Any:
    """A number, or what is read to make one, with the other sign."""
    return {**strength, "slope": -strength.get("slope", 1.0)} if isinstance(strength, dict) else -strength


@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(pairs(), st.integers(2, TOKENS), st.booleans(), st.integers(0, 9))
def test_blocks_are_shared_up_to_the_first_whose_edits_differ(
    engine: Engine, found: Any, prompt_len: int, longer: bool, seed: int
) -> None:
    lengths = prompt_len, TOKENS if longer else prompt_len
    specs = [{"edits": one} for one in found]
    try:
        plans = [plan(from_json(one), engine.catalog, n) for one, n in zip(specs, lengths, strict=True)]
    except SpecError:
        assume(False)  # tested in tests/spec
    here = [[edited_at(one, engine.catalog, p) for p in range(TOKENS)] for one in plans]
    agree = next((p for p in range(TOKENS) if here[0][p] != here[1][p]), TOKENS)
    event(f"blocks shared: {agree // BLOCK} of {TOKENS // BLOCK}")
    made = [hashes(engine.catalog, one, n) for one, n in zip(specs, lengths, strict=True)]
    assert shared(*made) == agree // BLOCK
    plain = next((p for p in range(TOKENS) if here[0][p]), TOKENS)
    assert shared(made[0], hashes(engine.catalog, None, lengths[0])) == plain // BLOCK
    if agree < BLOCK:
        return
    x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed))
    one, two = (streams(engine, spec, n, x) for spec, n in zip(specs, lengths, strict=True))
    # Where keys agree the op does, too; apart from the kernel's form, which is one on a CPU.
    torch.testing.assert_close(one[: agree // BLOCK * BLOCK], two[: agree // BLOCK * BLOCK], rtol=1e-5, atol=1e-5)


def streams(engine: Engine, spec: Any, prompt_len: int, x: torch.Tensor) -> torch.Tensor:
    """x after the edits of all sites."""
    content = row_of(engine, spec, prompt_len)
    engine.fill(1, content)
    engine.positions[:TOKENS] = torch.arange(TOKENS)
    kinds = np.zeros(len(engine.sites), dtype=np.int32) if content is None else content.kinds
    engine.schedule(torch.tensor([0]), 1, torch.tensor([0, TOKENS], dtype=torch.int32), 1, TOKENS, kinds)
    for site in SITES:
        if site.startswith("z"):
            part = x @ UP
            engine.edit(engine.sites[site], part)
            x = x + torch.tanh(part @ DOWN)
            continue
        x = x + torch.tanh(x @ STEP)
        engine.edit(engine.sites[site], x)
    engine.fill(1, None)
    return x


CLAMP = {"op": "clamp", "dictionary": "rect", "feature": 2, "value": 1.5}
GENERATED = {"scope": {"generated": True}}
ADD = {"op": "add", "vector": "any", "site": "resid_post.1"}


def test_a_name_that_means_something_else_shares_nothing(engine: Engine) -> None:
    other = replace(engine.catalog, vectors={**engine.catalog.vectors, "any": from_inline(tuple(INLINE[0]))})
    spec = {"edits": [ADD]}
    assert shared(hashes(engine.catalog, spec, 9), hashes(other, spec, 9)) == 0
    brought = {"edits": [{**ADD, "vector": INLINE[0]}]}
    assert shared(hashes(engine.catalog, brought, 9), hashes(other, spec, 9)) == TOKENS // BLOCK


def test_server_and_tenant_are_kept_apart(engine: Engine) -> None:
    spec = {"edits": [CLAMP | GENERATED]}
    here = hashes(engine.catalog, spec, 16)
    assert shared(here, hashes(engine.catalog, spec, 16, server="another")) == 4, "in edited blocks alone"
    assert shared(here, hashes(engine.catalog, spec, 16, salt="tenant")) == 0
    assert hashes(engine.catalog, spec, 16, salt="tenant") == hashes(engine.catalog, spec, 16, salt="tenant")


def test_who_may_be_refused_shares_its_edited_blocks_with_nobody(engine: Engine) -> None:
    config = SaesteerConfig.from_json({"max_dose": 0.5, "max_dose_action": "refuse"})
    spec = {"edits": [CLAMP | GENERATED]}
    assert shared(*(hashes(engine.catalog, spec, 16, config=config) for _ in range(2))) == 4


def test_a_block_of_an_image_is_keyed_by_the_edits_up_to_its_end(engine: Engine) -> None:
    """Some models let the tokens of an image look ahead; a stand-in for vLLM's feature, which needs pixels."""
    from vllm.multimodal.inputs import PlaceholderRange

    image = SimpleNamespace(identifier="image", mm_position=PlaceholderRange(offset=6, length=9))
    at = {"edits": [{**CLAMP, "scope": {"positions": [[13, 14]]}}]}
    plain, edited = (hashes(engine.catalog, spec, 30, images=[image]) for spec in (None, at))
    assert shared(plain, edited) == 1, "the image begins in the second block"
    assert shared(hashes(engine.catalog, None, 30), hashes(engine.catalog, at, 30)) == 3


def _until_032(_: Any, request: Any) -> int:
    return int(request.num_tokens) - 1


def _from_033(_: Any, request: Any, max_cache_hit_length: int | None = None) -> int:
    return int(request.num_tokens) - 1 if max_cache_hit_length is None else max_cache_hit_length


@pytest.mark.parametrize("stock", [_until_032, _from_033])
def test_the_cache_gives_nothing_that_is_read(stock: Any) -> None:
    """A stand-in for vLLM's get_computed_blocks, which returns how many tokens may come from the cache at most."""

    def most(first: int | None, *limit: int) -> Any:
        params = SamplingParams(extra_args=None if first is None else {KEY: {prefix_cache.FIRST: (first, first)}})
        request = SimpleNamespace(num_tokens=TOKENS, num_preemptions=0, sampling_params=params)
        return prefix_cache._limiting(stock)(None, request, *limit)

    assert [most(first) for first in (None, 0, 6, 31, 32)] == [31, 0, 6, 31, 31]
    if stock is _from_033:  # with routed experts in answers, vLLM says how many tokens it has those of
        assert [most(first, 28) for first in (None, 0, 6, 31, 32)] == [28, 0, 6, 28, 28]
        assert most(6, 4) == 4


def test_what_a_client_says_of_blocks_is_not_heard() -> None:
    words = {prefix_cache.RUNS: [[0, 9, "x"]], prefix_cache.FIRST: (3, 3), f"{KEY}_{prefix_cache.RUNS}": [[0, 9, "x"]]}
    request = SimpleNamespace(num_preemptions=0, sampling_params=SamplingParams(extra_args=words))
    assert not prefix_cache.runs_of(request) and prefix_cache.first_read(request) is None
