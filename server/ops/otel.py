"""Spans: one OpenTelemetry span per request, by the semantic conventions of GenAI, sent over OTLP/HTTP.

Owner: loop, which adds; the SDK's own thread sends. In: RequestTimes when an exchange ends. If the request has a
`traceparent`, the span is a child of the client's span. If a collector does not answer, spans are lost, but no request
is affected.
"""

from __future__ import annotations

import time
from typing import Any

from engine.base.errors import ConfigError
from server.ops.request_times import Generation, RequestTimes

# Route -> gen_ai.operation.name; other routes have no spans.
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/inference/v1/generate": "text_completion",
    "/v1/audio/transcriptions": "transcription",
    "/v1/audio/translations": "translation",
}
QUEUE = 4096  # spans that wait for the collector; further ones are dropped
CLOSE_MS = 2000  # time to send the last spans when the server ends


class Spans:
    """Sends spans to a collector. Raises ConfigError if the SDK is not installed or the endpoint is no URL."""

    def __init__(self, endpoint: str) -> None:
        if not endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"--otlp-traces-endpoint {endpoint}: must be a URL such as http://localhost:4318/v1/traces"
            )
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"--otlp-traces-endpoint: {error.name} is not installed; run pip install "
                "opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
            ) from None
        from server import __version__

        resource = Resource.create({"service.name": "omniloop", "service.version": __version__})
        self._provider = TracerProvider(resource=resource)
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=CLOSE_MS / 1000)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=QUEUE))
        self._tracer = self._provider.get_tracer("omniloop", __version__)

    def add(self, times: RequestTimes) -> None:
        """Add the span of a request that has ended."""
        operation = OPERATIONS.get(times.route)
        if operation is None:
            return
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        clock_offset = time.time() - time.monotonic()  # spans use wall-clock time
        parent = TraceContextTextMapPropagator().extract({"traceparent": times.traceparent})
        span = self._tracer.start_span(
            f"{operation} {times.model}",
            context=parent,
            kind=SpanKind.SERVER,
            attributes=attributes_of(times, operation),
            start_time=nanoseconds(times.arrival + clock_offset),
        )
        for name, begun, _ in times.phases()[1:]:
            span.add_event(name, timestamp=nanoseconds(begun + clock_offset))
        if times.status >= 500:
            span.set_status(Status(StatusCode.ERROR, times.reason))
        span.end(nanoseconds(times.ended + clock_offset))

    def close(self) -> None:
        """Send the waiting spans, in about CLOSE_MS; blocks."""
        self._provider.force_flush(CLOSE_MS)
        self._provider.shutdown()


def nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def attributes_of(times: RequestTimes, operation: str) -> dict[str, Any]:
    """The span's attributes; never text of prompts or answers."""
    found: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "omniloop",
        "gen_ai.request.model": times.model,
        "gen_ai.response.model": times.model,
        "gen_ai.response.id": times.request_id,
        "http.request.method": times.method,
        "http.route": times.route,
        "http.response.status_code": times.status,
        "gen_ai.latency.e2e": times.ended - times.arrival,
    }
    if times.status >= 400:
        found["error.type"] = times.reason or str(times.status)
    if times.first_token:
        found["gen_ai.latency.time_to_first_token"] = times.first_token - times.arrival
    return found if times.generation is None else found | generation_attributes(times.generation)


def generation_attributes(done: Generation) -> dict[str, Any]:
    """The request's parameters, and the counts of the answer."""
    found: dict[str, Any] = {
        "gen_ai.request.choice.count": done.n,
        "gen_ai.request.max_tokens": done.max_tokens,
        "gen_ai.request.temperature": done.temperature,
        "gen_ai.request.top_p": done.top_p,
        "gen_ai.request.presence_penalty": done.presence_penalty,
        "gen_ai.request.frequency_penalty": done.frequency_penalty,
        "gen_ai.usage.input_tokens": done.prompt_tokens,
        "gen_ai.usage.output_tokens": done.generated_tokens,
        "gen_ai.usage.cache_read.input_tokens": done.cached_tokens,
        "gen_ai.response.finish_reasons": done.finish_reasons,
    }
    if done.top_k:
        found["gen_ai.request.top_k"] = done.top_k
    if done.seed is not None:
        found["gen_ai.request.seed"] = done.seed
    if done.queued_s >= 0:
        found["gen_ai.latency.time_in_queue"] = done.queued_s
    return found
