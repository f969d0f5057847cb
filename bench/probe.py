"""How long saesteer's own code runs on the host in each step: its wraps less what they wrap. Knows no engine.

A wrap of saesteer.plugin holds vLLM's original: on an instance as a partial's first argument, on a class in a closure.
The wrap gets a clock around it and the original one inside it; what is between the two is ours, whatever the wraps of a
version are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter_ns
from typing import Any

Function = Callable[..., Any]


@dataclass(slots=True)
class Step:
    """One step of the engine."""

    admitted: int = 0  # requests that were new in it
    requests: int = 0
    tokens: int = 0
    hooks_ns: int = 0  # in saesteer's wraps
    ops_ns: int = 0  # in the op's Python body, outside of graphs


class Probe:
    """Clocks around saesteer's wraps; `steps` grows as the engine runs.

    Args:
        home: what the modules' names begin with whose wraps are meant.
    """

    def __init__(self, home: str = "saesteer.") -> None:
        self._home = home
        self.steps: list[Step] = []
        self.names: list[str] = []  # of what has a clock
        self._step = Step()  # work before the first step belongs to nobody

    def attach(self, *owners: Any) -> None:
        """Put clocks around the wraps on these objects.

        Raises:
            AssertionError: a wrap whose original is not to be found.
        """
        for owner in owners:
            for name, function in list(vars(owner).items()):
                if self._is_ours(function):
                    self._clock(owner, name, function)

    def on_steps(self, runner: Any) -> None:
        """Begin a step whenever the runner executes its model."""
        execute = runner.execute_model

        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            self.begin(
                len(scheduler_output.scheduled_new_reqs),
                len(scheduler_output.num_scheduled_tokens),
                scheduler_output.total_num_scheduled_tokens,
            )
            return execute(scheduler_output, *args, **kwargs)

        runner.execute_model = execute_model

    def on_ops(self) -> None:
        """Time the op's Python body, which runs in steps outside of graphs: its checks and its launches."""
        from saesteer.kernels import ops
        from saesteer.kernels.edit import launch
        from saesteer.kernels.step import publish

        timed = ((ops, "check_edit"), (launch, "edit_triton"), (ops, "check_publish"), (publish, "publish_triton"))
        for module, name in timed:
            setattr(module, name, self._timed_op(getattr(module, name)))

    def begin(self, admitted: int, requests: int, tokens: int) -> None:
        """A new step."""
        self._step = Step(admitted, requests, tokens)
        self.steps.append(self._step)

    def _clock(self, owner: Any, name: str, function: Any) -> None:
        original = function.__wrapped__
        message = f"{name}: saesteer's wrap does not hold the original that it wraps"

        def inside(*args: Any, **kwargs: Any) -> Any:
            begin = perf_counter_ns()
            try:
                return original(*args, **kwargs)
            finally:
                self._step.hooks_ns -= perf_counter_ns() - begin

        def around(*args: Any, **kwargs: Any) -> Any:
            begin = perf_counter_ns()
            try:
                return function(*args, **kwargs)
            finally:
                self._step.hooks_ns += perf_counter_ns() - begin

        if isinstance(function, partial):
            assert function.args == (original,), message
            function = partial(function.func, inside)
        else:
            cells = [cell for cell in function.__closure__ or () if cell.cell_contents is original]
            assert len(cells) == 1, message
            cells[0].cell_contents = inside
        setattr(owner, name, around)
        self.names.append(name)

    def _timed_op(self, function: Function) -> Function:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = perf_counter_ns()
            try:
                return function(*args, **kwargs)
            finally:
                self._step.ops_ns += perf_counter_ns() - begin

        return timed

    def _is_ours(self, function: Any) -> bool:
        home = getattr(getattr(function, "func", function), "__globals__", {}).get("__name__", "")
        return hasattr(function, "__wrapped__") and home.startswith(self._home)
