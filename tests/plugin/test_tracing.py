"""vLLM's span of a request says what was applied to it, and spans of others are as they were."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.metrics.stats import IterationStats, RequestStateStats

from saesteer.plugin.configured import configure
from saesteer.plugin.results.report import Report

CLAMP = {"op": "clamp", "site": "resid_post.15", "dictionary": "demo", "feature": 3, "version": "ab"}
COUNTED = {"tokens_edited": 4, "tokens_cached": 1}


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """What vLLM's tracer exports; OpenTelemetry sets one provider in a process, so vLLM is given this one by hand."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    yield exporter
    provider.shutdown()


def ended(answer: Report | None) -> Any:
    """As much of a RequestState as its span is made of."""
    state = SimpleNamespace(
        stats=RequestStateStats(num_generation_tokens=5, arrival_time=1.0),
        prompt_token_ids=[1, 2, 3],
        prompt_embeds=None,
        external_req_id="request-1",
        top_p=None,
        max_tokens_param=5,
        temperature=0.0,
        n=1,
    )
    if answer is not None:
        state.saesteer = answer
    return state


def span_of(spans: InMemorySpanExporter, answer: Report | None) -> dict[str, Any]:
    """The attributes of the span that vLLM makes for a request."""
    configure()
    spans.clear()
    processor: Any = OutputProcessor.__new__(OutputProcessor)
    processor.do_tracing(SimpleNamespace(trace_headers=None), ended(answer), IterationStats())
    (span,) = spans.get_finished_spans()
    assert span.name == "llm_request"
    return dict(span.attributes or {})


def test_a_span_says_what_was_applied(spans: InMemorySpanExporter) -> None:
    plain = span_of(spans, None)
    assert plain["gen_ai.usage.prompt_tokens"] == 3
    assert not [name for name in plain if name.startswith("saesteer")]
    answer = Report(lambda: [CLAMP]).of_choice()
    answer.fields["applied"] += [CLAMP | COUNTED]
    steered = span_of(spans, answer)
    ours = {name: steered.pop(name) for name in list(steered) if name.startswith("saesteer.")}
    assert ours == {
        "saesteer.edits": 1,
        "saesteer.tokens_edited": 4,
        "saesteer.ops": ("clamp",),
        "saesteer.sites": ("resid_post.15",),
        "saesteer.dictionaries": ("demo",),
    }
    varies = {"gen_ai.latency.e2e"}
    assert {k: v for k, v in steered.items() if k not in varies} == {k: v for k, v in plain.items() if k not in varies}
    assert span_of(spans, None).keys() == plain.keys(), "the next one says nothing of it"
