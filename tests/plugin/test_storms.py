"""Storms of random requests through vLLM's scheduler and all of saesteer: each answer is the plain definition's."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from saesteer.plugin import reasoning
from saesteer.plugin.door import borders
from tests.plugin.storms import Mode, Parser, Servers, Storm

MODES = {
    "V1": Mode(),
    "V1 asynchronous": Mode(asynchronous=True),
    "V1 guesses": Mode(guesses=3),
    "V1 stages": Mode(stages=(3,)),
    "V2": Mode(v2=True),
    "V2 asynchronous": Mode(v2=True, asynchronous=True),
    "V2 sliding window": Mode(v2=True, window=24),
}
# What happens in the quick storms of every mode, and in those of one; a quiet storm proves nothing.
HAPPENS = {"preempted", "cached", "cached spans", "aborted", "choices", "streamed", "stop string", "broken"}
HAPPENS |= {"edited", "cached edits", "flag", "stop", "handle", "reduced", "part", "consumer", "captured"}
ALSO = {"V1 guesses": {"guess held", "guess rejected"}}
QUICK = {  # seeds of storms in which all of that happens
    "V1": (4, 11, 19, 25),  # 4: two flags before an output; 19: a reduction that was preempted between cached tokens
    "V1 asynchronous": (1, 11, 29),
    "V1 guesses": (5, 13, 29),
    "V1 stages": (10, 12, 29),
    "V2": (5, 14, 26),
    "V2 asynchronous": (1, 16, 19, 29),
    "V2 sliding window": (0, 8, 13),
}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory, model_dir: str) -> Iterator[Servers]:
    with pytest.MonkeyPatch.context() as patch:
        for place in (borders, reasoning):  # the model has no tokenizer here
            patch.setattr(place, "parser_of", lambda *_: Parser())
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # tensors are small, and on a busy machine threads mostly wait for each other
        yield Servers(tmp_path_factory.mktemp("servers"), model_dir)
        torch.set_num_threads(threads)


def run(servers: Servers, name: str, seeds: Sequence[int], folder: Path) -> Counter[str]:
    """Storms with these seeds, and what has happened in them."""
    seen = Counter[str]()
    for seed in seeds:
        (folder / str(seed)).mkdir(mode=0o700)
        seen += Storm(servers, MODES[name], seed, folder / str(seed)).run()
    return seen


@pytest.mark.parametrize("name", MODES)
def test_each_answer_is_the_definition(servers: Servers, name: str, tmp_path: Path) -> None:
    seen = run(servers, name, QUICK[name], tmp_path)
    assert not (HAPPENS | ALSO.get(name, set())) - seen.keys(), seen


@pytest.mark.slow  # a second for each
@pytest.mark.parametrize("first", [1000, *(pytest.param(n, marks=pytest.mark.long) for n in (1050, 1100, 1150))])
@pytest.mark.parametrize("name", MODES)
def test_in_many_storms(servers: Servers, name: str, first: int, tmp_path: Path) -> None:
    run(servers, name, range(first, first + 50), tmp_path)
