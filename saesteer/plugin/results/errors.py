"""The errors of requests that have failed, in the front end. Knows no text and no HTTP.

A SpecRefused goes into the request's queue instead of what waits there, and its other choices (n > 1) end. LLM has no
queues: once all its prompts have ended, generate or chat raises what failed. For the rest of the batch, it is as if a
client had disconnected during its answer.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from vllm.exceptions import VLLMValidationError

from saesteer.config.config import KEY
from saesteer.errors import PromptsFailed, SpecError
from saesteer.language.fields import show
from saesteer.plugin.http.exchange import exchange
from saesteer.plugin.results import consuming, metrics
from saesteer.plugin.results.forms import BROKEN, COLLAPSED, DOSE, GONE, NON_FINITE, SHARED
from saesteer.plugin.wrap import Original, around

logger = logging.getLogger("vllm.saesteer")
WORDS = (GONE, DOSE, BROKEN, consuming.SPACE, SHARED, NON_FINITE, COLLAPSED)  # codes of SpecErrors
_ACTIVATIONS = f"{KEY}.return.activations"


class SpecRefused(SpecError, VLLMValidationError):
    """A SpecError that vLLM's front ends answer with a 400 whose ``param`` is the field."""

    def __init__(self, error: SpecError) -> None:
        VLLMValidationError.__init__(self, f"{error} [{error.code}]", parameter=error.field)
        self.field = error.field
        self.code = error.code
        if (found := exchange()) is not None:
            found.refused = self
        metrics.refused(error.code)  # here, since every refusal becomes a SpecRefused

    def __str__(self) -> str:
        return str(self.args[0])


def reason(code: str, doses: Sequence[Mapping[str, Any]], limit: float | None) -> SpecError:
    """The error for the client of a failed request.

    Args:
        code: GONE, DOSE or SHARED, or BROKEN, NON_FINITE or COLLAPSED with a detail.
        doses: the request's doses, as saesteer.engine.doses reports them.
        limit: the server's limit for a dose.
    """
    if code == DOSE:
        worst = max(doses, key=lambda one: one["max"] or 0.0)
        found = f"the edits change a token at {worst['site']} by {worst['max']} of its length"
        message = f"{found}, expected {limit:g} at most, the limit of this server (--max-dose)"
        return SpecError(message, field=f"{KEY}.edits", code=code)
    code, _, detail = code.partition(":")
    message = {
        GONE: "names in this request were replaced or deleted, and what they stood for is gone; send it again",
        SHARED: "another request with the same edits failed while this one was reading its cache; send it again",
        BROKEN: f"the server could not apply the edits ({detail.strip()}), so the request was ended",
        NON_FINITE: f"the {detail.strip()} held NaN or infinity, so the request was ended (--fail-fast); expected "
        "weaker edits, or a model and dictionaries whose weights are finite",
        COLLAPSED: f"the answer repeats itself (period in tokens: {detail.strip()}), so the request was ended "
        "(--fail-fast); expected weaker edits, or a sound model",
    }[code]
    return SpecError(message, field=KEY, code=code)


def unwritten(error: OSError) -> SpecError:
    """The error for the client of a request whose result could not be kept."""
    why = f"could not be kept ({error.strerror or error}), so the request was ended"
    message = f"{why}; expected room on the server's disk, or as: inline"
    return SpecError(message, field=_ACTIVATIONS, code=consuming.SPACE)


def raise_there(processor: Any, failed: Sequence[tuple[Any, SpecError]]) -> None:
    """Puts each error where the request's caller waits; vLLM drops what comes after it.

    Args:
        processor: vLLM's OutputProcessor, before it has the step's outputs.
        failed: states of requests, each with its error.
    """
    first: dict[str, tuple[Any, SpecError]] = {}  # several choices of one request may have failed
    for state, error in failed:
        first.setdefault(_asked(state), (state, error))
    for state, error in first.values():
        refused = SpecRefused(error)
        call: dict[str, SpecRefused] | None = getattr(processor, "saesteer_refused", None)
        if state.queue is not None:
            state.queue.put(refused)
        elif call is not None:
            call[consuming.request_of(state)] = refused
        else:  # callers of LLMEngine.step see only finish_reason "error"
            logger.error("request %s was refused: %s", show(state.external_req_id), refused)


def end_with(processor: Any, failed: Sequence[tuple[Any, SpecError]]) -> list[str]:
    """Ends the other choices of failed requests, unless their caller steps the engine by hand.

    Returns:
        Ids that the engine still has to abort.
    """
    called = getattr(processor, "saesteer_refused", None) is not None
    several = (state for state, _ in failed if state.parent_req is not None)
    asked = {_asked(state) for state in several if called or state.queue is not None}
    return [*processor.abort_requests(asked, internal=True)]


def _asked(state: Any) -> str:
    """The id of the whole request, of which a state may be one choice."""
    return str(state.request_id if state.parent_req is None else state.parent_req.request_id)


@around
def _raising(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    processor = self.llm_engine.output_processor
    asked = dict.fromkeys(map(consuming.request_of, processor.request_states.values()))  # in the order of the prompts
    refused: dict[str, SpecError] = {}
    processor.saesteer_refused = refused
    try:
        outputs = original(self, *args, **kwargs)
    finally:
        del processor.saesteer_refused
    answers = {output.request_id: output for output in outputs if output.request_id not in refused}
    late = set[str]()
    for name, output in answers.items():
        try:
            consuming.settle(output, late)
        except SpecError as error:
            refused[name] = SpecRefused(error)
    if refused:
        errors = {index: refused[name] for index, name in enumerate(asked) if name in refused}
        raise PromptsFailed(errors, [None if name in refused else answers[name] for name in asked])
    return outputs
