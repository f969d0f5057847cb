"""vLLM's span of a request says what was applied to it, and spans of others are as they were."""

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.metrics.stats import IterationStats, RequestStateStats

from saesteer.plugin.configured import configure
from saesteer.plugin.results.report import Report
from tests.plugin.conftest import BRIDGE, PROMPTS
from tests.plugin.serving import served

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
    answer = Report([CLAMP]).of_choice()
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


@pytest.mark.slow
@pytest.mark.long  # a server of its own
def test_a_collector_gets_the_counts_of_a_server(tmp_path: Path) -> None:
    """Over OTLP, as a collector takes it; the span is made when the last output has been counted."""
    got: list[dict[str, Any]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            sent = ExportTraceServiceRequest.FromString(body)
            spans = (span for one in sent.resource_spans for part in one.scope_spans for span in part.spans)
            got.extend({one.key: one.value for one in span.attributes} for span in spans if span.name == "llm_request")
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        flags = ["demo", "--otlp-traces-endpoint", f"http://127.0.0.1:{collector.server_port}/v1/traces"]
        environment = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", "OTEL_BSP_SCHEDULE_DELAY": "100"}
        try:
            with served(flags, tmp_path / "log", environment=environment, fork=False) as client:
                asked = {"model": "demo", "prompt": PROMPTS[0], "max_tokens": 4, "ignore_eos": True}
                spec = {"edits": [BRIDGE], "return": {"dose": True}}
                plain = client.post("/v1/completions", json=asked)
                steered = client.post("/v1/completions", json=asked | {"saesteer": spec})
                assert (plain.status_code, steered.status_code) == (200, 200), steered.text
                deadline = time.monotonic() + 30
                while len(got) < 2 and time.monotonic() < deadline:
                    time.sleep(0.1)
        finally:
            collector.shutdown()
    first, second = got
    said = steered.json()["saesteer"]
    assert not [name for name in first if name.startswith("saesteer")]
    assert second["saesteer.tokens_edited"].int_value == said["applied"][0]["tokens_edited"] > 0
    assert second["saesteer.dose.max"].double_value == pytest.approx(said["dose"][0]["max"])
    assert [one.string_value for one in second["saesteer.dictionaries"].array_value.values] == ["demo"]
