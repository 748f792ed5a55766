"""Spans of tasks for an OpenTelemetry collector, in the trace that the engine named (W3C traceparent).

    event loop:  ended() ─ one tuple ─▶ bounded queue ─▶ thread: spans ─▶ OTLP over HTTP

The loop only queues. Everything else happens in the thread, including the wait for a collector that does not answer.
Tasks that do not fit into the queue, or that the collector does not accept, are dropped and counted.

A task is one span, from its admission to its answer. Its children are `queue`, until its ranks began, and a span for
each rank, until that rank arrived. The last rank to arrive is the one that the others waited for.

Only `start` imports OpenTelemetry; without `traces.endpoint` it is never loaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import structlog

from transferd.observability.report import TracesReport
from transferd.observability.task_log import Ended, Ran
from transferd.runtime.threads import Crew
from transferd.runtime.version import VERSION
from transferd.tasks import Status, Task

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

log = structlog.get_logger(__name__)

MAX_WAITING = 4096  # tasks
BATCH = 256  # tasks of one request
GATHER_S = 1.0  # how long a batch is gathered
EXPORT_TIMEOUT_S = 5.0
CLOSE_S = 1.0  # for exporting what is queued at a stop
_ERRORS = frozenset({Status.FAILED, Status.EXPIRED})
_NS = 1_000_000_000


class _Answered(NamedTuple):
    """What the spans of a task say. Not the task: thousands of them may wait for a collector that does not answer."""

    task: Ended
    traceparent: str | msgspec.UnsetType
    wall: float  # when it was answered, in seconds since the epoch
    ran: Ran | None


class Traces:
    """Exports one trace per task. Call it on the event loop.

    exported: tasks that the collector accepted.
    dropped: tasks that did not fit into the queue.
    failed: tasks that the collector did not accept.
    """

    def __init__(self, endpoint: str, sample: float, instance: str, *, wall: Callable[[], float]) -> None:
        """endpoint: a collector's URL, such as http://127.0.0.1:4318/v1/traces.

        sample: the share of tasks to trace among those without a traceparent.
        instance: distinguishes this daemon's traces from those of others.
        """
        self.exported = self.dropped = self.failed = 0
        self._endpoint, self._sample, self._instance = endpoint, sample, instance
        self._wall = wall
        self._queue: queue.Queue[_Answered] = queue.Queue(MAX_WAITING)
        self._closing = threading.Event()
        self._thread = Crew("traces", 1)
        self._done: asyncio.Future[None] | None = None
        self._silent = False  # the last request failed, and that was logged
        self._exporter: Any = None

    def start(self) -> None:
        """Load OpenTelemetry and start the thread. Call it on the event loop."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # we log failures ourselves, once
        self._exporter = OTLPSpanExporter(self._endpoint, timeout=EXPORT_TIMEOUT_S)
        spans = SpanMaker(self._sample, self._instance)
        self._done = self._thread.run(lambda: self._run(spans))

    def ended(self, one: Ended, task: Task, ran: Ran | None) -> None:
        """A task was answered. Never blocks, never raises. An observer of the task log."""
        if self._queue.full():
            self.dropped += 1
        else:
            self._queue.put_nowait(_Answered(one, task.traceparent, self._wall(), ran))

    async def close(self) -> None:
        """Give the thread a second for what is queued, then abandon it: it uses no memory of the daemon's."""
        if self._done is None:
            return
        self._closing.set()
        await asyncio.wait([self._done], timeout=CLOSE_S)
        self._exporter.shutdown()  # wakes the thread if it waits for a retry
        self._thread.close(0.0)

    def statistics(self) -> TracesReport:
        return TracesReport(exported=self.exported, dropped=self.dropped, failed=self.failed)

    def _run(self, spans: SpanMaker) -> None:
        closing = False
        while not closing:
            closing = self._closing.wait(0.0 if self._queue.qsize() >= BATCH else GATHER_S)
            self._export(spans, list(self._waiting(MAX_WAITING if closing else BATCH)))

    def _waiting(self, most: int) -> Iterable[_Answered]:
        with contextlib.suppress(queue.Empty):
            for _ in range(most):
                yield self._queue.get_nowait()

    def _export(self, spans: SpanMaker, answered: Sequence[_Answered]) -> None:
        from opentelemetry.sdk.trace.export import SpanExportResult
        from opentelemetry.trace import SpanKind

        tasks = len(answered)
        try:
            made = spans.of(answered)
            if not made:  # none is sampled, which says nothing about the collector
                return
            tasks = sum(span.kind is SpanKind.SERVER for span in made)
            good = self._exporter.export(made) is SpanExportResult.SUCCESS
            problem = "the collector refused them, or did not answer"
        except Exception as error:  # noqa: BLE001 - a collector, or its library, must not end the thread
            good, problem = False, f"{type(error).__name__}: {error}"
        if good:
            self.exported += tasks
        else:
            self.failed += tasks
        if good is self._silent:
            self._silent = not good
            if good:
                log.info("the trace collector answers again", endpoint=self._endpoint)
            else:
                log.warning("traces are lost: the collector cannot be reached", endpoint=self._endpoint, why=problem)


class SpanMaker:
    """Turns answered tasks into spans. Used by one thread."""

    def __init__(self, sample: float, instance: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        service = {"service.name": "transferd", "service.version": VERSION, "service.instance.id": instance}
        sampler, resource = ParentBased(TraceIdRatioBased(sample)), Resource.create(service)
        provider = TracerProvider(sampler=sampler, resource=resource, shutdown_on_exit=False)
        self._ended = InMemorySpanExporter()
        provider.add_span_processor(SimpleSpanProcessor(self._ended))
        self._tracer = provider.get_tracer("transferd", VERSION)
        self._propagator = TraceContextTextMapPropagator()

    def of(self, answered: Iterable[_Answered]) -> list[ReadableSpan]:
        """All spans of those tasks that are sampled."""
        for one in answered:
            self._add(one)
        made = list(self._ended.get_finished_spans())
        self._ended.clear()
        return made

    def _add(self, one: _Answered) -> None:
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context

        task = one.task
        offset = _ns(one.wall) - _ns(task.at)  # whole nanoseconds: rounding must not reorder times
        began = offset + _ns(task.at - task.seconds if one.ran is None else one.ran.admitted)
        parent = {} if one.traceparent is msgspec.UNSET else {"traceparent": one.traceparent}
        root = self._tracer.start_span(
            f"transferd.{task.kind}",
            self._propagator.extract(parent),  # without a valid traceparent, a new trace begins
            kind=SpanKind.SERVER,
            attributes=_attributes(task),
            start_time=began,
        )
        if task.status in _ERRORS:
            root.set_status(StatusCode.ERROR, "" if task.error is None else task.error.message)
        if root.is_recording() and one.ran is not None:
            below, started = set_span_in_context(root), offset + _ns(one.ran.started)
            self._tracer.start_span("queue", below, start_time=began).end(started)
            ranks = {rank.rank: rank for rank in task.ranks}
            for rank, arrived in one.ran.arrivals:
                outcome = ranks.get(rank)
                span = self._tracer.start_span(f"rank {rank}", below, start_time=started)
                span.set_attribute("transferd.rank", rank)
                if outcome is not None:
                    for name in ("blocks", "bytes", "queue_s", "copy_s", "storage_s"):
                        span.set_attribute(f"transferd.{name}", getattr(outcome, name))
                    if outcome.error is not None:
                        span.set_status(StatusCode.ERROR, outcome.error.message)
                span.end(offset + _ns(arrived))
        root.end(began + _ns(task.seconds))


def _attributes(task: Ended) -> dict[str, str | int]:
    attributes: dict[str, str | int] = {
        "transferd.engine": task.engine,
        "transferd.task_id": task.task_id,
        "transferd.kind": str(task.kind),
        "transferd.status": str(task.status),
        "transferd.blocks": task.blocks,
        "transferd.blocks_moved": task.done,
        "transferd.bytes": task.nbytes,
    }
    if task.error is not None:
        attributes["error.type"] = task.error.code
    return attributes


def _ns(seconds: float) -> int:
    return round(seconds * _NS)
