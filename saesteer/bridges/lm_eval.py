"""lm-evaluation-harness on a steered server: a model that sends a spec with every request, and a comparison.

    python -m saesteer.bridges.lm_eval --spec bridge.json --tasks TASK --model-args model=...,base_url=...,tokenizer=...

answers the tasks without and with the spec and prints both scores. Importing this file registers the model `saesteer`.
"""

import argparse
from collections.abc import Sequence
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.registry import register_model
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.tasks import TaskManager
from rich.console import Console
from rich.table import Table

from saesteer.bridges.specs import need_edited, need_prompt_edits, need_report, read_spec
from saesteer.language.fields import Fields, Json


@register_model("saesteer")
class Steered(LocalCompletionsAPI):
    """The harness's `local-completions`, with a spec in each request.

    Args:
        spec: a file of JSON; empty: no spec.
        **rest: as of `local-completions`, such as ``base_url=http://localhost:8000/v1/completions``.

    Raises:
        ConfigError: the spec is wrong, or could not change a log-likelihood that a task asks for.
    """

    def __init__(self, spec: str = "", **rest: Any) -> None:
        self._spec = read_spec(spec) if spec else None
        super().__init__(**rest)

    def _create_payload(self, messages: Any, *rest: Any, **named: Any) -> Json:
        payload: Json = super()._create_payload(messages, *rest, **named)
        return payload if self._spec is None else payload | {"saesteer": self._spec}

    def _loglikelihood_tokens(self, requests: Any, **rest: Any) -> Any:
        if self._spec is not None:
            need_prompt_edits(self._spec)
        return super()._loglikelihood_tokens(requests, **rest)

    def parse_logprobs(self, outputs: Any, tokens: Any = None, ctxlens: Any = None, **rest: Any) -> Any:
        """The harness's own, after a look at what was applied."""
        for output in self._steered(outputs):
            for choice, applied in zip(output["choices"], need_report(output), strict=True):
                scored = len(choice["logprobs"]["token_logprobs"]) - 1  # the last one was generated
                need_edited(applied, scored)
        return LocalCompletionsAPI.parse_logprobs(outputs, tokens=tokens, ctxlens=ctxlens, **rest)

    def parse_generations(self, outputs: Any, **rest: Any) -> Any:
        """The harness's own, after a look at whether anything was applied."""
        for output in self._steered(outputs):
            need_report(output)
        return LocalCompletionsAPI.parse_generations(outputs, **rest)

    def _steered(self, outputs: Any) -> list[Any]:
        """The answers that say what was applied: all, or none without a spec."""
        if self._spec is None:
            return []
        return outputs if isinstance(outputs, list) else [outputs]


def compare(tasks: Sequence[str], spec: str, model: Fields, **rest: Any) -> list[Json]:
    """The scores of tasks without and with a spec.

    Args:
        tasks: names, as the harness takes them.
        spec: a file.
        model: arguments of ``Steered``.
        **rest: of ``simple_evaluate``.

    Returns:
        For each task and metric: ``task``, ``metric``, ``plain``, ``steered``, and the standard errors of both.
    """
    plain, steered = (
        simple_evaluate(model=Steered(**model, spec=one), tasks=list(tasks), **rest)["results"] for one in ("", spec)
    )
    rows = []
    for task, scores in plain.items():
        for name, value in scores.items():
            metric, _, way = name.partition(",")
            if isinstance(value, int | float) and not metric.endswith("_stderr") and way:
                errors = [one[task].get(f"{metric}_stderr,{way}") for one in (plain, steered)]
                rows.append({"task": task, "metric": metric, "plain": value, "steered": steered[task][name]})
                rows[-1] |= {"plain_stderr": errors[0], "steered_stderr": errors[1]}
    return rows


def main(words: Sequence[str] | None = None) -> None:
    """Compare, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m saesteer.bridges.lm_eval", description=__doc__)
    parser.add_argument("--spec", required=True, help="a file with a spec as JSON")
    parser.add_argument("--tasks", required=True, help="names with commas between them")
    parser.add_argument("--model-args", required=True, help="of local-completions: model, base_url, tokenizer, ...")
    parser.add_argument("--include-path", help="a folder with tasks of your own")
    parser.add_argument("--limit", type=int, help="samples of each task")
    given = parser.parse_args(words)
    model = dict(one.split("=", 1) for one in given.model_args.split(","))
    manager = TaskManager(include_path=given.include_path)
    rows = compare(given.tasks.split(","), given.spec, model, limit=given.limit, task_manager=manager)
    table = Table("task", "metric", "plain", "steered", "difference")
    for row in rows:
        numbers = (f"{row[side]:.4f} ± {_number(row[f'{side}_stderr'])}" for side in ("plain", "steered"))
        table.add_row(row["task"], row["metric"], *numbers, f"{row['steered'] - row['plain']:+.4f}")
    Console().print(table)


def _number(error: Any) -> str:
    return f"{error:.4f}" if isinstance(error, int | float) else "?"


if __name__ == "__main__":
    main()
