"""What the stages of a pipeline have counted and read of a step, put together. Knows no request's meaning.

worker     an earlier stage has no output of its own: its Snapshot is what it returns (worker/earlier.py)
executor   MultiprocExecutor lets its kv_output_aggregator put the outputs of all ranks together. vLLM has it for KV
           connectors, which are refused. Here it adds the earlier stages' Tables to that of the last one, whose output
           the scheduler gets

Each site is on one stage, so each counter and each read-out comes from one of them: on others it is zero, or absent.
"""

from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np

from saesteer.config.config import KEY
from saesteer.engine.brought import Brought
from saesteer.plugin.assets import assets_of
from saesteer.plugin.results.forms import Table
from saesteer.plugin.wrap import Original, around


class Gathering:
    """Takes the place of vLLM's KVOutputAggregator.

    Args:
        ranks: of tensor parallelism in each stage; the first one speaks for its stage.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def aggregate(self, outputs: Sequence[Any], output_rank: int = 0) -> Any:
        """The output of the last stage, with what the earlier ones have brought.

        Args:
            outputs: of all ranks, in order; those of an earlier stage are its Table, or what vLLM returns there.
            output_rank: the one with the step's tokens.
        """
        made = outputs[output_rank]
        own: Table | None = getattr(made, KEY, None)
        if own is not None:
            earlier = (one for one in outputs[: output_rank : self._ranks] if isinstance(one, Table))
            made.saesteer = reduce(joined, earlier, own)
        return made


def joined(last: Table, earlier: Table) -> Table:
    """The Table of two stages of one step.

    Args:
        last: of the stage whose requests count: the other may lack one that has failed there.
        earlier: of a stage before it.
    """
    counted = last.counted
    if earlier.names == last.names and earlier.counted.shape == counted.shape:
        counted = counted | earlier.counted
    else:
        counted = np.zeros((len(last.names), max(counted.shape[1], earlier.counted.shape[1])), dtype=np.int32)
        for one in (last, earlier):
            for name, words in zip(one.names, one.counted, strict=True):
                if name in last.names:
                    counted[last.names.index(name), : len(words)] |= words
    reads = [one.read for one in (earlier, last) if one.read is not None]
    read = reduce(Brought.joined, reads) if reads else None
    return last._replace(counted=counted, failed={**earlier.failed, **last.failed}, read=read)


@around
def _gathering(original: Original, self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
    original(self, vllm_config, *args, **kwargs)
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1 and assets_of(vllm_config) is not None:
        self.kv_output_aggregator = Gathering(parallel.tensor_parallel_size)
