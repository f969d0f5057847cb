"""Models with real weights, steered at each site, agree with hooks on Transformers however their rows are computed."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from saesteer.commands.embedded import GEMMA
from tests.plugin.conftest import CUDA, Answer, answer, preemptions
from tests.plugin.real import BLOCK, MODELS, TOLERANCE, Real, again, ask, cold
from tests.shared import Shared

pytestmark = pytest.mark.slow

SHORT, LONG, LONGEST = 10, 600, 2000  # tokens; Gemma's window has 512, of which blocks are given up
FEW = ("resid_post.9", "mlp_out.5", "attn_out.12")  # Gemma's layers 5, 11 and 17 see everything
KINDS = ("resid_pre", "attn_in", "z", "attn_out", "resid_mid", "mlp_in", "mlp_out", "resid_post")
# Few enough that some of 8 requests have to wait and begin again. Six kinds of layers share Gemma's blocks.
CROWDED: dict[str, Any] = {"enable_prefix_caching": False, "max_model_len": 256, "max_num_seqs": 8}
CROWDED |= {"kv_cache_memory_bytes": 256 << 20}
BLOCKS = {"demo": 12, GEMMA: 72}


def tokens(one: Answer) -> list[int]:
    return [token for token, _ in one]


def gap(made: Answer, expected: Sequence[float]) -> float:
    """The largest difference of the logprobs."""
    return max(abs(logprob - one) for (_, logprob), one in zip(made, expected, strict=True))


def report(capsys: Any, found: dict[str, float]) -> None:
    worst = max(found, key=found.__getitem__)
    with capsys.disabled():
        print(f"\n{len(found)} answers differ by at most {found[worst]:.2g} from Transformers ({worst})")
    assert not {name: one for name, one in found.items() if one >= TOLERANCE}


def both_ways(llm: Any, real: Real, names: Sequence[str | None], lengths: Sequence[int]) -> dict[str, float]:
    """How far answers are off that are computed as a whole, and whose rows come from the prefix cache."""
    specs, found = [None if name is None else real.specs[name] for name in names], {}
    for length in lengths:
        ids = real.ids[:length]
        made = cold(llm, ids, specs)
        assert len({tuple(one) for one in made}) == len(names), "each edit does something of its own"
        for name, spec, first, cached in zip(names, specs, made, again(llm, ids, made, specs), strict=True):
            assert tokens(first) == tokens(cached)
            expected = real.logprobs(ids, tokens(first), spec)
            for way, one in (("cold", first), ("cached", cached)):
                found[f"{name}, {length} tokens, {way}"] = gap(one, expected)
    return found


def test_three_sites_of_a_real_gemma(tmp_path: Path, capsys: Any) -> None:
    real = Real(GEMMA, tmp_path, FEW)
    with real.engine() as llm:
        report(capsys, both_ways(llm, real, [None, *FEW], (SHORT, LONG)))


@pytest.fixture(scope="module", params=MODELS)
def real(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Real:
    return Real(request.param, tmp_path_factory.mktemp("real"))


@pytest.fixture
def llm(real: Real, shared: Shared) -> Any:
    return shared.get(f"real {real.name}", real.engine)


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", KINDS)
def test_every_site(real: Real, llm: Any, kind: str, capsys: Any) -> None:
    """With prompts that are computed in pieces, and of which Gemma's window has left most behind."""
    sites = [site for site in real.specs if site.startswith(f"{kind}.")]
    for at in range(0, len(sites), 6):  # whose prompts the cache has room for
        report(capsys, both_ways(llm, real, [None, *sites[at : at + 6]], (SHORT, LONGEST)))


def few(real: Real) -> list[str]:
    """A site of each kind, each at another depth."""
    found = []
    for n, kind in enumerate(KINDS):
        sites = [site for site in real.specs if site.startswith(f"{kind}.")]
        found.append(sites[n * len(sites) // len(KINDS)])
    return found


@pytest.mark.long
def test_second_turns_go_on_from_the_prefix_cache(real: Real, llm: Any, capsys: Any) -> None:
    specs, first, found = [real.specs[site] for site in few(real)], real.ids[:LONG], {}
    turns = [[*first, *tokens(one), *real.ids[700:740]] for one in cold(llm, first, specs)]
    outputs = ask(llm, turns, specs)
    for site, ids, spec, output in zip(few(real), turns, specs, outputs, strict=True):
        assert output.num_cached_tokens >= LONG // BLOCK * BLOCK, "the first turn comes from the cache"
        made = answer(output.outputs[0])
        found[site] = gap(made, real.logprobs(ids, tokens(made), spec))
    report(capsys, found)


@pytest.mark.long
def test_three_answers_to_one_prompt(real: Real, llm: Any, capsys: Any) -> None:
    specs, ids, found = [real.specs[site] for site in few(real)], real.ids[:LONG], {}
    outputs = ask(llm, [ids] * len(specs), specs, n=3, temperature=1.0)
    for site, spec, output in zip(few(real), specs, outputs, strict=True):
        made = [answer(one) for one in output.outputs]
        assert len({(*tokens(one),) for one in made}) == 3
        for n, one in enumerate(made):
            found[f"{site}, answer {n}"] = gap(one, real.logprobs(ids, tokens(one), spec))
    report(capsys, found)


@pytest.mark.long
def test_preempted_requests_go_on_as_they_were(real: Real, capsys: Any) -> None:
    specs, found = [real.specs[site] for site in few(real)], {}
    prompts = [real.ids[30 * n : 30 * n + 60 + n] for n in range(len(specs))]
    with real.engine(num_gpu_blocks_override=BLOCKS[real.name] * (2 if CUDA else 1), **CROWDED) as llm:
        outputs = ask(llm, prompts, specs, tokens=64)
        assert preemptions(llm) > 0
    for site, ids, spec, output in zip(few(real), prompts, specs, outputs, strict=True):
        made = answer(output.outputs[0])
        found[site] = gap(made, real.logprobs(ids, tokens(made), spec))
    report(capsys, found)
