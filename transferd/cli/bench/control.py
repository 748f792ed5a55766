"""Control plane: what a task costs besides moving bytes, compared with a bare ZeroMQ echo on the same machine.

The daemon and the echo each run in their own process, as in production. Blocks are tiny, because this benchmark does
not measure copies. Each run of a row is followed by a run of the echo, and the median of these is the row's limit,
because the time to wake another process changes from minute to minute.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from fractions import Fraction
from pathlib import Path

import zmq

from transferd.cli.bench.harness import RUNS, Row, Rows, row
from transferd.cli.replay.kvdata import KvData
from transferd.client.client import Client
from transferd.client.launch import DaemonProcess, running
from transferd.errors import InvariantError
from transferd.runtime.address import socket_path
from transferd.tasks import ReadStorageTask, Status, SwapInTask, SwapOutTask, Task, TaskResult, WriteStorageTask

TASKS = 1000  # per run of a latency row
PIPELINED = 10_000  # tasks of a pipelined run
IN_FLIGHT = 256
CANCELLED = 4000  # a daemon queues 4096
BETWEEN = 10  # tasks between two pieces of plain Python
IDLE_S = 3.0
KEYS = [f"bench-key-{i}" for i in range(8)]
BLOCKS = 64  # the device blocks that swaps use
TARGET = BLOCKS  # the device block that reads fill


def run() -> Rows:
    """Measure all rows; takes about a minute."""
    with tempfile.TemporaryDirectory(prefix="transferd-bench-") as directory, echo(Path(directory)) as limit:
        limit.round_trip_us(TASKS)  # warm-up
        for ranks in (1, 8):
            with running(config(ranks), Path(directory), name=f"tp{ranks}") as daemon:
                new = asyncio.run(_measure(daemon, ranks, limit))
            yield from new


def config(ranks: int) -> dict[str, dict[str, object]]:
    """The configuration of a daemon with tiny blocks and storage in memory."""
    cache: dict[str, object] = {"ranks": ranks, "layers": 2, "kv_heads": 1, "head_dim": 16, "block_size": 16}
    return {
        "cache": cache | {"device_blocks": BLOCKS + 1, "host_blocks": BLOCKS},
        "host": {"staging": "1MiB"},
        "storage": {"backend": "memory"},
        "server": {"max_results": 1024},
    }


class TaskMaker:
    """Makes one-block and eight-key tasks, each with its own id."""

    def __init__(self) -> None:
        self._number = 0

    def _next(self) -> int:
        self._number += 1
        return self._number

    def swap(self) -> Task:
        i = self._next()
        return SwapOutTask(task_id=f"t{i}", gpu_block_ids=[i % BLOCKS], cpu_block_ids=[i % BLOCKS])

    def read_missing(self) -> Task:
        keys = [f"no-{key}" for key in KEYS]
        return ReadStorageTask(task_id=f"t{self._next()}", keys=keys, gpu_block_ids=list(range(len(keys))))

    def write_stored(self) -> Task:
        return WriteStorageTask(task_id=f"t{self._next()}", keys=KEYS, gpu_block_ids=list(range(len(KEYS))))

    def read_one(self) -> Task:
        return ReadStorageTask(task_id=f"t{self._next()}", keys=KEYS[:1], gpu_block_ids=[TARGET])


async def _measure(daemon: DaemonProcess, ranks: int, limit: Echo) -> list[Row]:
    tasks = TaskMaker()
    kinds: list[tuple[str, Callable[[], Task]]] = [
        ("swap of one block", tasks.swap),
        ("read of one stored block", tasks.read_one),
        ("read of 8 keys, none stored", tasks.read_missing),
        ("write of 8 keys, all stored", tasks.write_stored),
    ]
    rows: list[Row] = []
    async with Client(daemon.endpoint) as client:
        data = await prepare(client, tasks, ranks)
        echoes: list[float] = []
        for name, make in kinds[:2]:
            rows.append(await _cpu_row(f"{name}, CPU of daemon and client, TP{ranks}", daemon.pid, client, make))
        for name, make in kinds:
            await p50_us(client.submit, make)  # warm-up
            beside, medians = [], []
            for _ in range(RUNS):
                beside.append(limit.round_trip_us(TASKS))
                medians.append(await p50_us(client.submit, make))
            rows.append(row(f"{name}, p50, TP{ranks}", medians, "us", statistics.median(beside), "us raw echo"))
            echoes += beside
        rows.append(row(f"raw echo beside them, p50, TP{ranks}", echoes, "us", statistics.median(echoes), "itself"))
        beside, rates = [], []
        for _ in range(RUNS):
            beside.append(limit.rate(PIPELINED, IN_FLIGHT))
            rates.append(await _rate(client, tasks.swap))
        most = statistics.median(beside)
        rows.append(row(f"swaps pipelined, TP{ranks}", rates, "tasks/s", most, "messages/s raw echo"))
        cancels = [await _cancelled(client, tasks.swap) for _ in range(RUNS)]
        name = f"{CANCELLED} tasks cancelled at once"
        rows.append(row(f"{name}, CPU each, TP{ranks}", [cpu for cpu, _ in cancels], "us", 1e6 / most, "us an echo"))
        rows.append(row(f"{name}, the loop stands still, TP{ranks}", [gap for _, gap in cancels], "ms", 50.0, "ms"))
        await _check(client, data)
        idle = [await _idle_percent(daemon.pid) for _ in range(RUNS)]
        rows.append(row(f"idle CPU, one client connected, TP{ranks}", idle, "% of a core", 100.0, "% of a core"))
    return rows


async def prepare(client: Client, tasks: TaskMaker, ranks: int) -> KvData:
    """Fill every block, and store the eight keys."""
    data = KvData([await client.attach(rank) for rank in range(ranks)])
    data.poison([TARGET])
    for block in range(BLOCKS):
        data.fill(block, block)
    await client.submit(tasks.write_stored())
    return data


async def p50_us(
    submit: Callable[[Task], Awaitable[TaskResult]], make: Callable[[], Task], count: int | None = None
) -> float:
    """Median microseconds from push to result, one task at a time. Raises RuntimeError for a bad result.

    count: how many; default TASKS.
    """
    trips: list[float] = []
    for _ in range(count or TASKS):
        task = make()
        before = time.perf_counter()
        result = await submit(task)
        trips.append(time.perf_counter() - before)
        if result.status not in (Status.OK, Status.MISS):
            raise RuntimeError(f"a benchmark task ended badly: {result}")
    return statistics.median(trips) * 1e6


async def _cpu_row(name: str, pid: int, client: Client, make: Callable[[], Task]) -> Row:
    """What a task costs beside a fixed piece of plain Python between the tasks, whose caches are as cold as theirs."""
    await p50_us(client.submit, make)  # warm-up
    costs, beside = [], []
    for _ in range(RUNS):
        before, yardstick = cpu_seconds(pid) + time.process_time(), 0.0
        for _ in range(TASKS // BETWEEN):
            yardstick += yardstick_s()
            await p50_us(client.submit, make, BETWEEN)
        spent = cpu_seconds(pid) + time.process_time() - before - yardstick
        costs.append(spent / TASKS * 1e6)
        beside.append(yardstick / (TASKS // BETWEEN) * 1e6)
    return row(name, costs, "us", statistics.median(beside), "us of plain Python")


def yardstick_s() -> float:
    """Seconds of CPU of a fixed piece of plain Python: calls, attributes, numbers and strings."""
    before = time.thread_time()
    kept = {f"piece {number}": Fraction(number, 3) for number in range(50)}  # arithmetic in Python
    assert sum(kept.values()) == Fraction(1225, 3)
    return time.thread_time() - before


async def _rate(client: Client, make: Callable[[], Task]) -> float:
    tasks = [make() for _ in range(PIPELINED)]
    remaining = iter(tasks)
    bad: list[TaskResult] = []

    async def lane() -> None:
        for task in remaining:
            result = await client.submit(task)
            if result.status is not Status.OK:
                bad.append(result)

    before = time.perf_counter()
    await asyncio.gather(*(lane() for _ in range(IN_FLIGHT)))
    seconds = time.perf_counter() - before
    if bad:
        raise RuntimeError(f"{len(bad)} benchmark tasks ended badly, e.g. {bad[0]}")
    return PIPELINED / seconds


async def _cancelled(client: Client, make: Callable[[], Task]) -> tuple[float, float]:
    """Cancel so many queued tasks in one turn of the loop.

    Returns the client's CPU time, microseconds a task, and how long the loop stood still at most, milliseconds.
    """
    gaps, over = [0.0], asyncio.Event()

    async def watch() -> None:
        before = time.perf_counter()
        while not over.is_set():
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            gaps.append(now - before)
            before = now

    await client.pause()
    calls = [asyncio.ensure_future(client.submit(make())) for _ in range(CANCELLED)]
    await asyncio.sleep(0)
    await client.ping()  # the daemon has read them all
    watching = asyncio.ensure_future(watch())
    await asyncio.sleep(0.01)
    before = time.process_time()
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)
    spent = time.process_time() - before
    over.set()
    await watching
    await client.resume()
    return spent / CANCELLED * 1e6, max(gaps) * 1e3


async def _check(client: Client, data: KvData) -> None:
    """Check that reads and swaps moved the right bytes."""
    blocks = list(range(BLOCKS))
    data.poison(blocks)
    back = await client.submit(SwapInTask(task_id="check", gpu_block_ids=blocks, cpu_block_ids=blocks))
    wrong = [data.verify(block, block) for block in blocks] + [data.verify(TARGET, 0)]
    if back.status is not Status.OK or any(wrong):
        raise InvariantError(
            f"the benchmark's tasks moved wrong bytes: {back.status}, {next(filter(None, wrong), None)}"
        )


async def _idle_percent(pid: int) -> float:
    """CPU use of an idle process, including one client's heartbeats."""
    before = cpu_seconds(pid)
    await asyncio.sleep(IDLE_S)
    return (cpu_seconds(pid) - before) / IDLE_S * 100


def cpu_seconds(pid: int) -> float:
    """User and system time from schedstat, which counts nanoseconds (stat counts ticks of 10 ms)."""
    total = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        total += int((thread / "schedstat").read_text().split()[0])
    return total / 1e9


PAYLOAD = b"x" * 200  # about as long as a one-block task
PATIENCE_MS = 30_000  # the time limit of one echo

_PROGRAM = """
import sys, zmq
socket = zmq.Context().socket(zmq.ROUTER)
socket.bind(sys.argv[1])
while True:
    frames = socket.recv_multipart()
    socket.send_multipart(frames)
"""


class Echo:
    """A DEALER connected to that process. Its calls block, so measure it between other rows, not at the same time."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket

    def round_trip_us(self, messages: int) -> float:
        """Median microseconds from send to receive, one message at a time."""
        trips: list[float] = []
        for _ in range(messages):
            before = time.perf_counter()
            self._socket.send(PAYLOAD)
            self._socket.recv()
            trips.append(time.perf_counter() - before)
        return statistics.median(trips) * 1e6

    def rate(self, messages: int, in_flight: int) -> float:
        """Round trips per second, with `in_flight` messages at a time."""
        before = time.perf_counter()
        for _ in range(in_flight):
            self._socket.send(PAYLOAD)
        for _ in range(messages - in_flight):
            self._socket.recv()
            self._socket.send(PAYLOAD)
        for _ in range(in_flight):
            self._socket.recv()
        return messages / (time.perf_counter() - before)


@contextlib.contextmanager
def echo(directory: Path) -> Iterator[Echo]:
    """Start the process on a unix socket in `directory`; stop it at the end."""
    with socket_path(directory, "echo.sock") as path:
        yield from _echo(f"ipc://{path}")


def _echo(endpoint: str) -> Iterator[Echo]:
    process = subprocess.Popen([sys.executable, "-c", _PROGRAM, endpoint])
    context = zmq.Context()
    try:
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.RCVTIMEO, PATIENCE_MS)
        socket.connect(endpoint)
        try:
            yield Echo(socket)
        finally:
            socket.close(0)
    finally:
        process.kill()
        process.wait()
        context.term()
