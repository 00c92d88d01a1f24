"""One OpenTelemetry trace per round, sent by OTLP over HTTP (extra ``otel``; off unless ``--otlp-endpoint`` is set).

Invariant: trace and span ids follow from the round's UID, so the parts that a dead operator sent and those of its
successor are one trace, and a span that two of them send is one span. Sending happens in a thread of the exporter: a
collector that is away delays no round and costs spans only.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from typing import Any

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import NonRecordingSpan, SpanContext, Status, StatusCode, TraceFlags

from rlfleet import __version__
from rlfleet.api.timestamps import epoch_ms
from rlfleet.control.context import Traces
from rlfleet.plan.summary import ledger_row

log = logging.getLogger(__name__)

_MS = 1_000_000
#: Milliseconds for what is queued to be sent when the process ends.
_FLUSH_MS = 2000


class _Ids(IdGenerator):
    """Gives the ids that were set last: spans are made one at a time, by one thread."""

    def __init__(self) -> None:
        self.trace_id = self.span_id = 1

    def generate_trace_id(self) -> int:
        """See IdGenerator."""
        return self.trace_id

    def generate_span_id(self) -> int:
        """See IdGenerator."""
        return self.span_id


class RoundTraces(Traces):
    """Spans of rounds. ``endpoint``: base URL of an OTLP/HTTP collector, such as http://host:4318."""

    def __init__(self, endpoint: str, *, identity: str) -> None:
        self._ids = _Ids()
        resource = Resource.create(
            {"service.name": "rlfleet-operator", "service.version": __version__, "service.instance.id": identity}
        )
        self._provider = TracerProvider(
            sampler=ALWAYS_ON, resource=resource, id_generator=self._ids, shutdown_on_exit=False
        )
        exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=5)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("rlfleet")

    def part(self, obj: Mapping[str, Any], part: str, seconds: float, ended_ms: int) -> None:
        """A part of a round ended: a span below the round's."""
        uid = str(obj["metadata"]["uid"])
        generation = int(((obj.get("status") or {}).get("lease") or {}).get("generation") or 0)
        parent = SpanContext(_id(uid, 16), _id(uid + "/round", 8), is_remote=True, trace_flags=TraceFlags(1))
        self._ids.trace_id = parent.trace_id
        self._ids.span_id = _id(f"{uid}/{part}/{generation}/{ended_ms}", 8)
        started_ms = ended_ms - round(seconds * 1000)
        self._tracer.start_span(
            part,
            context=trace.set_span_in_context(NonRecordingSpan(parent)),
            start_time=started_ms * _MS,
            attributes={"rlfleet.round.uid": uid, "rlfleet.generation": generation},
        ).end(ended_ms * _MS)

    def round_ended(self, obj: Mapping[str, Any]) -> None:
        """A round ended: the trace's root."""
        row, status = ledger_row(obj), obj.get("status") or {}
        uid = str(row["roundUID"])
        ended_ms = epoch_ms(status["finishedAt"]) if status.get("finishedAt") else epoch_ms(row["createdAt"])
        began = status.get("startedAt") or row["createdAt"]
        total = (status.get("timings") or {}).get("totalMs") or 0
        # Times in status are whole seconds: the root covers its parts.
        started_ms = min(epoch_ms(began), ended_ms - total)
        self._ids.trace_id, self._ids.span_id = _id(uid, 16), _id(uid + "/round", 8)
        span = self._tracer.start_span(
            f"{row['kind']} {row['outcome']}",
            start_time=started_ms * _MS,
            attributes={
                "rlfleet.pipeline": row["pipeline"],
                "rlfleet.round": row["round"],
                "rlfleet.round.uid": uid,
                "rlfleet.generation": row["generation"],
                "rlfleet.version": row["version"],
                "rlfleet.transport": row["transport"],
                "rlfleet.outcome": row["outcome"],
                "rlfleet.committed": bool(status.get("committed")),
            },
        )
        failure = status.get("failure")
        if failure:
            span.set_status(Status(StatusCode.ERROR, f"{failure['stage']}: {failure['reason']}"))
        span.end((ended_ms + 1000) * _MS)

    def close(self) -> None:
        """Send what is queued, for two seconds at most, and end."""
        if not self._provider.force_flush(_FLUSH_MS):
            log.warning("traces not sent at shutdown")
        self._provider.shutdown()


def _id(text: str, size: int) -> int:
    """An id of ``size`` bytes, never zero."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:size], "big") or 1
