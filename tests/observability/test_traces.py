"""Spans of tasks, as a collector gets them: over HTTP, decoded with OpenTelemetry's own messages."""

from __future__ import annotations

import http.server
import importlib.util
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from transferd import SyncClient
from transferd.client.launch import running
from transferd.config import from_tree
from transferd.control.admission import content_hash
from transferd.daemon.preflight import build, examine
from transferd.errors import ConfigError
from transferd.observability import traces
from transferd.observability.report import TracesReport
from transferd.observability.task_log import Ran, TaskLog
from transferd.observability.traces import MAX_WAITING, Traces
from transferd.runtime.clock import Clock
from transferd.tasks import ErrorInfo, Status, TaskResult, WriteStorageTask

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def task(task_id: str, **more: Any) -> WriteStorageTask:
    return WriteStorageTask(task_id=task_id, keys=[task_id], gpu_block_ids=[1], **more)


class Collector:
    """An OTLP receiver on a port of its own. spans: what has come, oldest first."""

    def __init__(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        self.spans: list[Any] = []
        self.resources: list[dict[str, str]] = []
        self._came = threading.Condition()
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = ExportTraceServiceRequest()
                request.ParseFromString(self.rfile.read(int(self.headers["content-length"])))
                self.send_response(200)
                self.end_headers()
                collector.take(request)

            def log_message(self, *_: Any) -> None: ...

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"

    def take(self, request: Any) -> None:
        with self._came:
            for group in request.resource_spans:
                self.resources.append({one.key: one.value.string_value for one in group.resource.attributes})
                for scope in group.scope_spans:
                    self.spans += scope.spans
            self._came.notify_all()

    def wait_for(self, *task_ids: str) -> list[Any]:
        """The tasks' own spans, once all have come."""
        with self._came:
            assert self._came.wait_for(lambda: set(task_ids) <= {task_of(span) for span in self.spans}, timeout=60)
            return [next(span for span in self.spans if task_of(span) == one) for one in task_ids]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def attributes(span: Any) -> dict[str, Any]:
    return {one.key: one.value.string_value or one.value.int_value or one.value.double_value for one in span.attributes}


def task_of(span: Any) -> str | None:
    return attributes(span).get("transferd.task_id")


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A close waits for the spans that a test reads, and their request for its answer, however busy the machine is."""
    monkeypatch.setattr(traces, "CLOSE_S", 60.0)
    monkeypatch.setattr(traces, "EXPORT_TIMEOUT_S", 60.0)


@pytest.fixture
def collector() -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    made = Collector()
    yield made
    made.close()


@pytest.mark.one_loop
def test_a_daemon_sends_the_spans_of_a_task_in_the_trace_of_its_engine(collector: Collector, tmp_path: Path) -> None:
    tree = {"traces": {"endpoint": collector.url}, "cache": {"device_blocks": 4, "host_blocks": 0}}
    with running(tree, tmp_path) as daemon, SyncClient(daemon.endpoint) as client:
        for rank in range(2):
            client.attach(rank)
        unsampled = f"00-{'1' * 32}-{PARENT}-00"
        assert client.submit(task("unsampled", traceparent=unsampled)).status == "ok"
        assert client.submit(task("garbage", traceparent="x" * 500)).status == "ok"
        assert client.submit(task("alone")).status == "ok"
        result = client.submit(task("joined", traceparent=f"00-{TRACE}-{PARENT}-01"))
        assert result.status == "ok"
        joined, alone, garbage = collector.wait_for("joined", "alone", "garbage")
        assert client.stats()["traces"]["dropped"] == 0
    assert (joined.trace_id.hex(), joined.parent_span_id.hex(), joined.name) == (TRACE, PARENT, "transferd.write")
    told = attributes(joined)
    assert (told["transferd.status"], told["transferd.blocks"], told["transferd.bytes"]) == ("ok", 1, result.bytes)
    assert joined.end_time_unix_nano - joined.start_time_unix_nano == round(result.duration * 1e9)
    below = [span for span in collector.spans if span.parent_span_id == joined.span_id]
    assert sorted(span.name for span in below) == ["queue", "rank 0", "rank 1"]
    for span in below:
        assert joined.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.trace_id == joined.trace_id
    ranks = [span for span in below if span.name.startswith("rank")]
    assert all(attributes(span)["transferd.storage_s"] > 0 for span in ranks)
    for span in (alone, garbage):  # a trace of its own
        assert (len(span.trace_id), span.parent_span_id) == (16, b"")
        assert span.trace_id != joined.trace_id
    assert "unsampled" not in {task_of(span) for span in collector.spans}
    assert collector.resources[0]["service.name"] == "transferd"


def log_of(traces: Traces) -> TaskLog:
    return TaskLog(Clock(monotonic=lambda: 10.0), [traces.ended])


async def test_a_failed_task_is_an_error_with_its_code(collector: Collector) -> None:
    made = Traces(collector.url, 1.0, "x", wall=lambda: 1000.0)
    made.start()
    error = ErrorInfo("storage_unavailable", "it does not answer")
    log_of(made).ended(
        "default", task("bad"), TaskResult(task_id="bad", status=Status.FAILED, error=error, duration=0.5)
    )
    await made.close()
    (span,) = collector.wait_for("bad")
    assert attributes(span)["error.type"] == "storage_unavailable"
    assert (span.status.code, span.status.message) == (2, "it does not answer")
    assert (span.start_time_unix_nano, span.end_time_unix_nano) == (999_500_000_000, 1000_000_000_000)
    assert made.statistics() == TracesReport(exported=1, dropped=0, failed=0)


async def test_spans_name_the_engine_so_tasks_with_one_id_differ(collector: Collector) -> None:
    made = Traces(collector.url, 1.0, "x", wall=lambda: 1000.0)
    made.start()
    ran = {"a": Ran(9.0, 9.25, [(0, 9.5)]), "b": Ran(9.5, 9.5, [(0, 9.75), (1, 9.875)])}
    for engine, duration in (("a", 1.0), ("b", 0.5)):
        result = TaskResult(task_id="t", status=Status.OK, duration=duration)
        log_of(made).ended(engine, task("t"), result, ran[engine])
    await made.close()
    collector.wait_for("t")
    roots = {attributes(span)["transferd.engine"]: span for span in collector.spans if not span.parent_span_id}
    below = {
        engine: sorted(span.name for span in collector.spans if span.parent_span_id == root.span_id)
        for engine, root in roots.items()
    }
    assert below == {"a": ["queue", "rank 0"], "b": ["queue", "rank 0", "rank 1"]}
    assert roots["b"].start_time_unix_nano - roots["a"].start_time_unix_nano == 500_000_000


async def test_tasks_beyond_the_queue_are_dropped_and_counted() -> None:
    made = Traces("http://127.0.0.1:9/", 1.0, "x", wall=lambda: 0.0)  # not started: nobody takes
    for number in range(MAX_WAITING + 7):
        log_of(made).ended("default", task(str(number)), TaskResult(task_id=str(number), status=Status.OK))
    assert made.statistics() == TracesReport(exported=0, dropped=7, failed=0)
    kept = made._queue.queue[0]
    assert not any(isinstance(part, msgspec.Struct) for part in kept), "neither the task nor its result"
    await made.close()


async def test_a_collector_that_is_dead_or_silent_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    monkeypatch.setattr(traces, "CLOSE_S", 0.01)
    monkeypatch.setattr(traces, "EXPORT_TIMEOUT_S", 0.5)  # of the thread that is left behind
    silent = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)  # listens, and never accepts
    try:
        for port in (9, silent.server_port):
            made = Traces(f"http://127.0.0.1:{port}/v1/traces", 1.0, "x", wall=lambda: 0.0)
            made.start()
            log_of(made).ended("default", task("t"), TaskResult(task_id="t", status=Status.OK))
            await made.close()
            assert made.statistics().exported == 0
    finally:
        silent.server_close()


async def test_a_batch_without_a_sampled_task_says_nothing_about_the_collector() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    made = Traces("http://127.0.0.1:9/v1/traces", 0.0, "x", wall=lambda: 0.0)
    made.start()
    log_of(made).ended("default", task("t"), TaskResult(task_id="t", status=Status.OK))
    await made.close()
    assert made.statistics() == TracesReport(exported=0, dropped=0, failed=0)


async def test_the_collector_accepts_the_tasks_that_are_sampled(collector: Collector) -> None:
    made = Traces(collector.url, 0.0, "x", wall=lambda: 1000.0)
    made.start()
    sampled = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    for name, more in (("no", {}), ("yes", sampled)):
        result = TaskResult(task_id=name, status=Status.OK, duration=1.0)
        log_of(made).ended("default", task(name, **more), result, Ran(9.0, 9.25, [(0, 9.5)]))
    await made.close()
    collector.wait_for("yes")
    assert made.statistics() == TracesReport(exported=1, dropped=0, failed=0)


def test_without_an_endpoint_nothing_of_opentelemetry_is_imported() -> None:
    code = "import sys, transferd.daemon.process, transferd.observability.traces; print('opentelemetry' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "False\n"


def test_an_endpoint_without_the_packages_is_refused_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str, package: str | None = None) -> None:
        raise ModuleNotFoundError(name)

    config = from_tree({"traces": {"endpoint": "http://127.0.0.1:4318/v1/traces"}, "storage": {"backend": "none"}})
    monkeypatch.setattr(importlib.util, "find_spec", absent)
    with pytest.raises(ConfigError, match=r"traces\.endpoint: needs the Python package opentelemetry"):
        examine(config, build(config))


def test_an_endpoint_that_is_no_url_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"traces\.endpoint: expected http"):
        from_tree({"traces": {"endpoint": "localhost:4317"}})


def test_a_task_is_the_same_task_in_another_trace() -> None:
    assert content_hash(task("t")) == content_hash(task("t", traceparent=f"00-{TRACE}-{PARENT}-01"))
