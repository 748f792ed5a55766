"""/metrics, /healthz, /readyz and /status over real sockets; bad requests are answered, never fatal."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import json
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import get_args

import h11
import pytest
import structlog
from prometheus_client.parser import text_string_to_metric_families

from tests.support.exposed import exposed
from tests.support.named_peers import NamedPeers
from tests.support.simulation.pool import SIM_MASTER, SimPool
from tests.support.waits import until
from transferd.config import from_tree
from transferd.control import instructions
from transferd.daemon.daemon import Daemon
from transferd.daemon.preflight import device_bytes
from transferd.daemon.reload import Reloader
from transferd.daemon.systemd import Notifier
from transferd.errors import ConfigError, StorageUnavailable
from transferd.observability import logs
from transferd.observability.http import ANSWER_BYTES, MAX_CONNECTIONS, MAX_HEADER_BYTES, HttpServer, Page
from transferd.observability.http import _Connection as HttpConnection
from transferd.observability.metrics import exposition, families
from transferd.observability.report import HoldingReport, Report, StorageReport
from transferd.observability.status_server import StatusServer
from transferd.observability.task_log import ENDED, MISSED, TaskLog, TaskMetrics
from transferd.runtime.clock import Clock
from transferd.runtime.compat import timeout, wait_for
from transferd.storage.mooncake import MooncakeStorage, error_codes
from transferd.tasks import ErrorInfo, Lane, RankOutcome, RankResult, Status, SwapInTask, TaskResult
from transferd.workers.job import Job
from transferd.workers.rank import HUNG_S


async def request(port: int, raw: bytes) -> tuple[int, bytes, bytes]:
    """(status, head, body) of one exchange."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(raw)
    async with timeout(60):
        answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]) if head else 0, head, body


async def get(port: int, path: str) -> tuple[int, bytes]:
    status, _, body = await request(port, f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
    return status, body


@pytest.fixture
async def server() -> AsyncIterator[HttpServer]:
    http = HttpServer("127.0.0.1:0", {"/page": lambda _: Page(b"hello")})
    await http.start()
    yield http
    await http.close()


async def test_a_page_is_served_and_the_connection_closed(server: HttpServer) -> None:
    assert await get(server.port, "/page") == (200, b"hello")
    assert await get(server.port, "/page?x=1") == (200, b"hello")
    assert await get(server.port, "http://host:9464/page?x=1") == (200, b"hello")  # as a proxy's client writes it
    status, head, body = await request(server.port, b"HEAD /page HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert (status, body) == (200, b"")
    assert b"content-length: 5" in head.lower()


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"GET /elsewhere HTTP/1.1\r\nhost: localhost\r\n\r\n", 404),
        (b"POST /page HTTP/1.1\r\nhost: localhost\r\nContent-Length: 0\r\n\r\n", 405),
        (b"complete nonsense\r\n\r\n", 400),
        (b"\x00\x01\x02\r\n\r\n", 400),
        (b"GET /page HTTP/1.1\r\nhost: localhost\r\nX: " + b"y" * (2 * MAX_HEADER_BYTES) + b"\r\n\r\n", 431),
        (b"GET /page HTTP/1.1\r\nhost: localhost\r\nX: " + b"y" * 1024 * 1024 + b"\r\n\r\n", 431),
    ],
)
async def test_bad_requests_get_an_answer_and_the_next_one_is_served(
    server: HttpServer, raw: bytes, status: int
) -> None:
    assert (await request(server.port, raw))[0] == status
    assert await get(server.port, "/page") == (200, b"hello")


async def test_nothing_of_a_connection_that_has_ended_waits_for_the_collector(server: HttpServer) -> None:
    """It runs rarely, and thousands of scrapes would be kept until then."""
    kinds = HttpConnection, h11.Connection  # by identity: other tests' classes have these names, too
    gc.collect()
    gc.disable()
    try:
        assert await get(server.port, "/page") == (200, b"hello")
        assert (await request(server.port, b"complete nonsense\r\n\r\n"))[0] == 400
        await until(lambda: not any(type(one) in kinds for one in gc.get_objects()), "they have gone")
    finally:
        gc.enable()


async def test_each_refusal_is_one_line_with_who_it_was_and_a_count(server: HttpServer) -> None:
    with structlog.testing.capture_logs() as logs:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        host, port = writer.get_extra_info("sockname")
        writer.write(b"GET /page HTTP/1.1\r\nhost: localhost\r\nX: " + b"y" * 1024 * 1024 + b"\r\n\r\n")
        answer = await wait_for(reader.read(), 60)
        writer.close()
        assert answer.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
        await request(server.port, b"\x00\r\n\r\n")
    lines = [(line["event"], line["reason"]) for line in logs]
    assert lines == [("http request refused", "http_too_large"), ("http request refused", "http_bad_request")]
    assert logs[0]["peer"] == f"{host}:{port}"
    assert server.refused == {
        "http_too_large": 1,
        "http_bad_request": 1,
        "http_silent": 0,
        "http_crowded_out": 0,
        "http_wrong_host": 0,
    }


async def test_a_thousand_silent_connections_do_not_block_a_client_and_the_oldest_go(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transferd.observability.http.REQUEST_TIMEOUT_S", 3600.0)  # no timer thins the crowd
    with structlog.testing.capture_logs() as logs:
        crowd = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(1000)]
        assert await get(server.port, "/page") == (200, b"hello")
        assert server.refused["http_silent"] == 0
        async with timeout(60):  # the oldest have been ended by now, and nobody else has
            for reader, _ in crowd[: 1000 - MAX_CONNECTIONS]:
                with contextlib.suppress(ConnectionError):
                    assert await reader.read() == b""
        assert not any(reader.at_eof() for reader, _ in crowd[-MAX_CONNECTIONS // 2 :])
        for _, writer in crowd:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
    assert server.refused["http_crowded_out"] == len(logs) == 1001 - MAX_CONNECTIONS


async def test_silent_connections_that_return_for_ever_do_not_block_a_client(server: HttpServer) -> None:
    """Connections that stay silent and are made again as soon as they are ended, for as long as the probes last."""

    async def silent() -> None:
        while True:
            with contextlib.suppress(ConnectionError):
                reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
                try:
                    await reader.read()
                finally:
                    writer.close()

    crowd = [asyncio.create_task(silent()) for _ in range(MAX_CONNECTIONS + 100)]
    try:
        while server.refused["http_crowded_out"] < 500:  # noqa: ASYNC110 - a count, which tells nobody
            await asyncio.sleep(0)
        for _ in range(10):
            assert await get(server.port, "/page") == (200, b"hello")
    finally:
        for task in crowd:
            task.cancel()
        await asyncio.gather(*crowd, return_exceptions=True)


async def test_a_connection_that_stays_silent_is_ended_and_counted(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transferd.observability.http.REQUEST_TIMEOUT_S", 0.01)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"GET /page HTT")
    with contextlib.suppress(ConnectionError):
        assert await wait_for(reader.read(), 60) == b""
    writer.close()
    assert server.refused["http_silent"] == 1


async def test_a_large_answer_is_written_in_turns_and_shared(server: HttpServer) -> None:
    """Nobody reads: of each answer, the daemon keeps what the kernel does not take of a piece, and the body once."""
    body = bytes(16 << 20)  # more than the kernel takes
    server.routes["/large"] = lambda _: Page(body)
    peers = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(3)]
    for _, writer in peers:
        writer.write(b"GET /large HTTP/1.1\r\nhost: localhost\r\n\r\n")
    await until(lambda: sum(bool(one._rest) for one in server._connections) == len(peers))
    for one in server._connections:
        assert one._transport.get_write_buffer_size() <= ANSWER_BYTES + 1024
        assert one._rest.obj is body
    for _, writer in peers[1:]:
        writer.transport.abort()
    reader, writer = peers[0]
    writer.write_eof()  # the rest comes all the same
    answer = await reader.read()
    writer.close()
    assert answer.partition(b"\r\n\r\n")[2] == body


async def test_a_port_in_use_is_one_clear_error(server: HttpServer) -> None:
    with pytest.raises(ConfigError, match=r"metrics\.listen: cannot bind: .*in use"):
        await HttpServer(f"127.0.0.1:{server.port}", {}).start()


class NoTransport(NamedPeers):
    """Nobody connects; one kind of refusal is counted, at 0."""

    def start(self, *_: object) -> None: ...
    def send(self, peer: bytes, payload: bytes) -> bool:
        return True

    def refused(self) -> dict[str, int]:
        return {"unknown_key": 0}


@pytest.fixture
async def daemon() -> AsyncIterator[Daemon]:
    tree = {"cache": {"device_blocks": 4, "host_blocks": 4}, "host": {"staging": "2MiB"}}
    config = from_tree(tree | {"storage": {"backend": "memory"}, "metrics": {"listen": "127.0.0.1:0"}})
    built = Daemon(config, transport=NoTransport())
    await built.reports.start()
    yield built
    await built.stop(lambda: 5.0)


def port_of(reports: StatusServer) -> int:
    assert reports.http is not None
    return reports.http.port


async def test_readiness_follows_the_daemon_and_says_why_not(daemon: Daemon) -> None:
    port = port_of(daemon.reports)
    status, body = await get(port, "/readyz")
    assert (status, body) == (503, b"the daemon is starting\n")
    assert daemon.default.dispatcher.gate.draining is False, "it starts, and nobody asked it to drain"
    await daemon.default.cache.open()
    assert await get(port, "/readyz") == (200, b"ready\n")
    assert b"\ntransferd_ready 1.0\n" in (await get(port, "/metrics"))[1]
    await daemon.default.coordinator.drain()
    assert await get(port, "/readyz") == (503, b"draining\n")
    assert b"\ntransferd_ready 0.0\n" in (await get(port, "/metrics"))[1]
    assert await get(port, "/healthz") == (200, b"ok\n")


async def test_a_hung_device_is_not_ready_in_the_metrics_either(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = port_of(daemon.reports)
    await daemon.default.cache.open()
    monkeypatch.setattr(type(daemon.default.workers[0].context.device), "waiting_s", HUNG_S + 1)
    assert (await get(port, "/readyz"))[0] == 503
    assert b"\ntransferd_ready 0.0\n" in (await get(port, "/metrics"))[1]


async def test_a_pause_leaves_readiness_green_and_is_named_with_its_holder(daemon: Daemon) -> None:
    """ADR 30: tasks are admitted and wait, and the pause ends with its client."""
    port = port_of(daemon.reports)
    await daemon.default.cache.open()
    daemon.default.dispatcher.hold(daemon.clock.monotonic(), "pause", b"client", "me")
    assert await get(port, "/readyz") == (200, b"ready\n")
    assert b"\ntransferd_ready 1.0\n" in (await get(port, "/metrics"))[1]
    report = json.loads((await get(port, "/status"))[1])
    (held,) = report["held"]
    assert (report["paused"], held["what"], held["holder"]) == (True, "pause", "me")
    live = json.loads((await get(port, "/live"))[1])["report"]["concerns"]
    (trouble,) = [one["text"] for one in live if one["name"] == "held"]
    assert trouble.endswith(", held by me")
    assert Reloader(daemon, Notifier(""), None).status().startswith("paused by me for ")


async def test_metrics_parse_and_count(daemon: Daemon) -> None:
    result = TaskResult(task_id="t", status=Status.OK, duration=0.002)
    daemon.tasks.ended("default", SwapInTask(task_id="t", gpu_block_ids=[], cpu_block_ids=[]), result)
    status, body = await get(port_of(daemon.reports), "/metrics")
    assert status == 200
    families = {family.name: family for family in text_string_to_metric_families(body.decode())}
    counts = [s for s in families["transferd_task_duration_seconds"].samples if s.name.endswith("_count")]
    taken = {(s.labels["kind"], s.labels["status"]): s.value for s in counts}
    assert (taken.pop(("swap_in", "ok")), set(taken.values())) == (1, {0})
    assert families["transferd_ready"].samples[0].value == 0
    assert families["transferd_log_dropped"].samples[0].value == logs.statistics()["log_dropped"]
    assert families["transferd_log_left_out"].samples[0].value == logs.statistics()["log_left_out"]
    refused = {s.labels["reason"]: s.value for s in families["transferd_refused"].samples if s.name.endswith("_total")}
    assert refused == {"unknown_key": 0} | dict.fromkeys(daemon.reports.refused(), 0)
    assert families["transferd_staging_capacity_bytes"].samples[0].value > 0
    assert len(families["transferd_lane_done"].samples) == 12, "two ranks, six lanes"


async def test_label_values_are_there_at_0_and_no_label_changes_with_each_start(daemon: Daemon) -> None:
    _, body = await get(port_of(daemon.reports), "/metrics")
    samples = [sample for family in text_string_to_metric_families(body.decode()) for sample in family.samples]

    def values(name: str, label: str) -> dict[str, float]:
        return {sample.labels[label]: sample.value for sample in samples if sample.name == name}

    assert values("transferd_tasks_total", "status") == dict.fromkeys(map(str, Status), 0)
    assert {"queue_full", "not_attached", "malformed"} <= set(values("transferd_rejects_total", "code"))
    assert values("transferd_storage_evictions_total", "reason") == dict.fromkeys(
        ("capacity", "medium_full", "shrink", "reserve"), 0
    )
    assert values("transferd_storage_breaker_state", "state") == {"closed": 1, "open": 0, "half_open": 0}
    assert values("transferd_effects_failed_total", "effect").keys() == {
        one.__name__ for one in get_args(instructions.Instruction)
    }
    assert {"process_resident_memory_bytes", "process_start_time_seconds", "process_open_fds"} <= {
        sample.name for sample in samples
    }
    assert not any("boot_id" in sample.labels for sample in samples)
    assert not any(sample.name.endswith("_created") for sample in samples)


async def test_a_tasks_time_is_counted_by_stage_and_a_missed_deadline_by_cause(daemon: Daemon) -> None:
    task = SwapInTask(task_id="t", gpu_block_ids=[], cpu_block_ids=[])
    late = ErrorInfo("expired", "too late")
    ranks = [RankResult(rank=n, status=Status.OK, queue_s=1.0, copy_s=2.0, storage_s=4.0) for n in range(2)]
    observe = functools.partial(daemon.tasks.ended, "default")
    observe(task, TaskResult(task_id="t", status=Status.PARTIAL, ranks=ranks, error=late))
    observe(task, TaskResult(task_id="t", status=Status.EXPIRED, error=late))
    _, body = await get(port_of(daemon.reports), "/metrics")
    families = {family.name: family for family in text_string_to_metric_families(body.decode())}
    spent = {s.labels["stage"]: s.value for s in families["transferd_stage_seconds"].samples if s.value}
    assert spent == {"queue": 2.0, "copy": 4.0, "storage": 8.0}
    missed = {s.labels["cause"]: s.value for s in families["transferd_deadlines_missed"].samples if s.value}
    assert missed == {"storage": 1, "queue": 1}


@pytest.mark.parametrize(
    ("times", "cause"),
    [
        ([], "queue"),  # (queue, copy, storage) of each rank
        ([(9.0, 1.0, 0.0), (9.0, 2.0, 0.0)], "queue"),
        ([(0.1, 3.0, 2.0), (0.1, 1.0, 1.0)], "copy"),
        ([(0.1, 3.0, 2.0), (0.1, 1.0, 4.0)], "storage"),
        ([(0.1, 3.0, 2.0), (0.0, 0.0, 0.0)], "absent_rank"),
    ],
)
async def test_a_missed_deadline_is_counted_by_what_took_the_time(
    daemon: Daemon, times: list[tuple[float, float, float]], cause: str
) -> None:
    ranks = [
        RankResult(rank=n, status=Status.EXPIRED, queue_s=queue, copy_s=copy, storage_s=storage)
        for n, (queue, copy, storage) in enumerate(times)
    ]
    task = SwapInTask(task_id="t", gpu_block_ids=[], cpu_block_ids=[])
    late = ErrorInfo("expired", "too late")
    daemon.tasks.ended("default", task, TaskResult(task_id="t", status=Status.EXPIRED, ranks=ranks, error=late))
    page = exposed(daemon)
    found = re.findall(r'transferd_deadlines_missed_total{cause="(\w+)",engine="default",kind="swap_in"} (\d)', page)
    assert dict(found) == dict.fromkeys(MISSED, "0") | {cause: "1"}


async def test_promised_metrics_exist_from_the_start_at_0(daemon: Daemon) -> None:
    samples: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(exposed(daemon)):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    zero = "task_duration_seconds_count stage_seconds_total barrier_skew_seconds_total deadlines_missed_total"
    zero += " storage_evictions_total lane_bytes_total refused_total storage_bytes"
    for name in (f"transferd_{name}" for name in zero.split()):
        assert {value for _, value in samples[name]} == {0}, name
    assert {labels["rank"] for labels, _ in samples["transferd_barrier_skew_seconds_total"]} == {"0", "1"}
    assert samples["transferd_storage_capacity_bytes"][0][1] > 0
    assert "transferd_log_dropped_total" in samples
    owned = {labels["owner"]: value for labels, value in samples["transferd_memory_bytes"]}
    assert owned.pop("staging") == samples["transferd_staging_capacity_bytes"][0][1]
    assert owned.pop("host_pool") == samples["transferd_host_pool_bytes"][0][1]
    assert owned == dict.fromkeys(
        ("device_cache", "peer_staging", "stored_objects", "carried", "task_arguments", "results"), 0
    )
    await daemon.default.cache.open()
    page = exposed(daemon)
    (made,) = re.findall(r'transferd_memory_bytes{owner="device_cache"} (\S+)', page)
    assert float(made) == 2 * device_bytes(daemon.default.layout)


async def test_a_rank_that_arrives_after_another_is_skewed_by_the_time_between() -> None:
    now = [100.0]
    clock = Clock(monotonic=lambda: now[0])
    tree = {"cache": {"device_blocks": 4, "ranks": 3}, "storage": {"backend": "none"}, "metrics": {"listen": ""}}
    config = from_tree(tree)
    daemon = Daemon(config, transport=NoTransport(), clock=clock)
    job = Job(SwapInTask(task_id="t", gpu_block_ids=[], cpu_block_ids=[]), 0, "", now[0], now[0], 0.0)
    for rank, passes in ((2, 1.0), (0, 0.25), (1, 0.5)):  # in this order, each so much after the one before
        now[0] += passes
        daemon.default.coordinator.rank_arrived(job, RankOutcome(rank))
    assert daemon.stats()["barrier"]["skew_s"] == [0.25, 0.75, 0.0]
    await daemon.stop(lambda: 5.0)


async def test_a_pool_that_dies_is_noticed_without_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transferd.storage.mooncake.store.HEARTBEAT_S", 0.01)
    tree = {"storage": {"backend": "mooncake", "mooncake": {"master_server_addr": SIM_MASTER, "probe_interval": 0.01}}}
    pool, config = SimPool(), from_tree(tree | {"cache": {"host_blocks": 0}, "metrics": {"listen": ""}})
    storage = MooncakeStorage.from_config(config, set_up=pool.set_up)

    async def until(opened: int, state: str) -> None:
        async with timeout(30):
            while (now := storage.statistics())["breaker_opened"] < opened or now["breaker"] != state:  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    await storage.open()
    await until(0, "closed")
    for times in (1, 2):  # the heart goes on beating
        pool.answer("exists", error_codes.RPC_FAIL)
        await until(times, "closed")  # noticed, and its return, too
    await storage.close()


async def test_arrivals_that_the_barrier_dropped_reach_the_operator(daemon: Daemon) -> None:
    merged = TaskResult(task_id="t", status=Status.FAILED)
    daemon.default.barrier.open("t", lambda _: merged)
    daemon.default.barrier.expire("t")
    for rank in range(2):
        daemon.default.barrier.arrive("t", RankOutcome(rank))
    _, body = await get(port_of(daemon.reports), "/metrics")
    families = {family.name: family for family in text_string_to_metric_families(body.decode())}
    told = {name: family.samples[0].value for name, family in families.items() if name.startswith("transferd_barrier_")}
    assert told == {
        "transferd_barrier_rounds": 1,
        "transferd_barrier_rounds_expired": 1,
        "transferd_barrier_late_arrivals": 2,
        "transferd_barrier_rounds_open": 0,
        "transferd_barrier_ranks_owing": 0,
        "transferd_barrier_skew_seconds": 0,
    }


async def test_a_pools_own_counts_and_its_availability_are_metrics() -> None:
    tree = {"storage": {"backend": "mooncake", "mooncake": {"master_server_addr": SIM_MASTER, "probe_interval": 60}}}
    pool, config = SimPool(), from_tree(tree | {"cache": {"host_blocks": 0}, "metrics": {"listen": ""}})
    pooled = Daemon(config, transport=NoTransport(), storage=MooncakeStorage.from_config(config, set_up=pool.set_up))

    def storage_samples() -> dict[str, float]:
        families = text_string_to_metric_families(exposed(pooled))
        return {s.name: s.value for f in families for s in f.samples if s.labels.get("backend") == "mooncake"}

    await pooled.open()
    prefix = "transferd_storage_"
    expected = ["wrong_length", "waited_for_room", "contested", "taken_over", "held", "other_layout", "breaker_opened"]
    before = storage_samples()
    assert [before[f"{prefix}{name}_total"] for name in expected] == [0] * len(expected)
    assert storage_samples()[f"{prefix}available"] == 1
    pool.answer("exists", error_codes.RPC_FAIL)
    with pytest.raises(StorageUnavailable):
        await pooled.storage.exists(["x"])  # type: ignore[union-attr]
    after = storage_samples()
    assert (after[f"{prefix}available"], after[f"{prefix}breaker_opened_total"], after[f"{prefix}errors_total"]) == (
        0,
        1,
        1,
    )
    await pooled.stop(lambda: 5.0)


async def test_status_is_the_stats_report_with_every_key_of_the_contract(daemon: Daemon) -> None:
    status, body = await get(port_of(daemon.reports), "/status")
    report = json.loads(body)
    assert status == 200
    assert report["boot_id"] == daemon.boot_id
    promised = (
        "version boot_id uptime_s ready endpoint generation ranks tasks queued running rejects host staging storage"
    )
    assert set(promised.split()) <= set(report)
    assert {"rank", "device", "lanes"} <= set(report["ranks"][0])
    assert {"queued", "running", "done", "failed", "bytes"} <= set(report["ranks"][0]["lanes"]["read"])
    assert {"blocks", "bytes", "pinned"} <= set(report["host"])
    assert {"capacity", "used", "peak"} <= set(report["staging"])
    assert {"backend", "objects", "bytes", "hits", "misses", "corrupt", "errors"} <= set(report["storage"])


async def test_every_metric_is_listed_in_the_docs(daemon: Daemon) -> None:
    docs = Path(__file__).parents[2] / "docs"
    text = (docs / "metrics.md").read_text() + (docs / "mooncake.md").read_text()  # the pool's are beside the pool
    listed: set[str] = set()
    for written in re.findall(r"`(transferd_[a-z_{},]+)", text):
        names = [""]
        for part in re.split(r"(?<=_)\{([a-z_,]+)\}", written):  # braces after `_` are parts of names, others labels
            names = [one + other for one in names for other in part.partition("{")[0].split(",")]
        listed.update(one.removesuffix("_total") for one in names)
    page = exposed(daemon)
    exported = {family.name for family in text_string_to_metric_families(page) if family.name.startswith("transferd_")}
    assert len(exported) > 40
    assert exported - listed == set()


def test_engines_that_have_left_are_one_row_however_many_there_were() -> None:
    rows = [HoldingReport(engine=f"gone-{number}", objects=1, bytes=10) for number in range(100)]
    rows.append(HoldingReport(engine="here", there=True, objects=1, bytes=7, share=5))
    report = Report(storage=StorageReport(holdings=rows))
    (family,) = [one for one in families(report) if one.name == "transferd_storage_engine_bytes"]
    assert {sample.labels["engine"]: sample.value for sample in family.samples} == {"": 1000, "here": 7}


def ended(metrics: TaskMetrics, engine: str, duration: float) -> None:
    task = SwapInTask(task_id="t", gpu_block_ids=[], cpu_block_ids=[])
    result = TaskResult(task_id="t", status=Status.OK, duration=duration)
    TaskLog(observers=[metrics.ended]).ended(engine, task, result)


def test_for_the_text_of_many_engines_the_loop_only_copies_what_was_counted() -> None:
    """The rest is for a thread: 7,000 lines of histograms for 60 engines would hold the loop up for 0.1 s."""
    metrics, calls = TaskMetrics(), 0
    for number in range(60):
        ended(metrics, f"e{number}", 0.002)
    begin = exposition(lambda: "", metrics)

    def called(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    gc.collect()  # finalizers of other tests' garbage would be calls, too
    gc.disable()
    sys.setprofile(called)
    try:
        begin(Report())
    finally:
        sys.setprofile(None)
        gc.enable()
    assert calls < 5 * 60


def test_what_an_engine_never_did_takes_few_lines_and_its_first_task_is_seen() -> None:
    """100 engines took 8 MB a scrape, nearly all of it zeros."""
    metrics = TaskMetrics("e")
    ended(metrics, "e", 0.002)
    text = exposition(lambda: "", metrics)(Report())().decode()
    (family,) = [one for one in text_string_to_metric_families(text) if one.name == "transferd_task_duration_seconds"]
    counts = {(one.labels["kind"], one.labels["status"]) for one in family.samples if one.name.endswith("_count")}
    assert counts == {(str(lane), "ok") for lane in Lane} | {("swap_in", str(status)) for status in ENDED}


def test_the_text_has_what_was_counted_when_it_was_asked_for() -> None:
    metrics, name = TaskMetrics(), 'a "b"\\\nc'
    ended(metrics, name, 0.002)
    text = exposition(lambda: "", metrics)(Report())
    ended(metrics, name, 0.002)
    found = {one.name: one.samples for one in text_string_to_metric_families(text().decode())}
    samples = found["transferd_task_duration_seconds"]
    mine = {"engine": name, "kind": "swap_in", "status": "ok"}
    (count,) = [one.value for one in samples if one.name.endswith("_count") and one.labels == mine]
    (seconds,) = [one.value for one in samples if one.name.endswith("_sum") and one.labels == mine]
    below = {one.labels["le"]: one.value for one in samples if one.labels | mine == one.labels and "le" in one.labels}
    assert (count, seconds, below.pop("0.001"), below.pop("0.0025"), below.pop("+Inf")) == (1, 0.002, 0, 1, 1)
