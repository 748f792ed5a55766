"""Control plane: what a task costs besides moving bytes, against a bare ZeroMQ echo on the same machine.

The daemon runs in a process of its own, as in production; so does the echo. Blocks are tiny, because
their bytes are not what is measured.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import zmq

from transferd.bench.harness import RUNS, Row, row
from transferd.client import Client
from transferd.launch import DaemonProcess, running
from transferd.tasks import ReadStorageTask, Status, SwapOutTask, Task, TaskResult, WriteStorageTask

TASKS = 1000  # per run of a latency row
PIPELINED = 10_000  # tasks of a pipelined run
IN_FLIGHT = 256
IDLE_S = 3.0
KEYS = [f"bench-key-{i}" for i in range(8)]
BLOCKS = 64

_ECHO = """
import sys, zmq
socket = zmq.Context().socket(zmq.ROUTER)
socket.bind(sys.argv[1])
while True:
    frames = socket.recv_multipart()
    socket.send_multipart(frames)
"""


def run() -> list[Row]:
    """All rows; takes about a minute."""
    with tempfile.TemporaryDirectory(prefix="transferd-bench-") as directory:
        rows, echo_us, echo_rate = _echo(Path(directory))
        for ranks in (1, 8):
            tree = _config(ranks)
            with running(tree, Path(directory), name=f"tp{ranks}") as daemon:
                rows += asyncio.run(_daemon_rows(daemon, ranks, echo_us, echo_rate))
        return rows


def _config(ranks: int) -> dict[str, dict[str, object]]:
    cache: dict[str, object] = {"ranks": ranks, "layers": 2, "kv_heads": 1, "head_dim": 16, "block_size": 16}
    return {
        "cache": cache | {"device_blocks": BLOCKS, "host_blocks": BLOCKS},
        "host": {"staging": "1MiB"},
        "storage": {"backend": "memory"},
        "server": {"max_results": 1024},
    }


def _echo(directory: Path) -> tuple[list[Row], float, float]:
    """Round trip and rate of the bare transport: the limit that the other rows are compared with."""
    endpoint = f"ipc://{directory}/echo.sock"
    process = subprocess.Popen([sys.executable, "-c", _ECHO, endpoint])
    context = zmq.Context()
    try:
        socket = context.socket(zmq.DEALER)
        socket.connect(endpoint)
        payload = b"x" * 200  # about as long as a one-block task
        medians = [_echo_p50(socket, payload) for _ in range(RUNS + 1)][1:]
        rates = [_echo_rate(socket, payload) for _ in range(RUNS)]
        socket.close(0)
    finally:
        process.kill()
        process.wait()
        context.term()
    p50, rate = statistics.median(medians), statistics.median(rates)
    rows = [
        row("raw echo, round trip p50", medians, "us", p50, "itself"),
        row("raw echo, pipelined", rates, "messages/s", rate, "itself"),
    ]
    return rows, p50, rate


def _echo_p50(socket: zmq.Socket[bytes], payload: bytes) -> float:
    trips: list[float] = []
    for _ in range(TASKS):
        before = time.perf_counter()
        socket.send(payload)
        socket.recv()
        trips.append(time.perf_counter() - before)
    return statistics.median(trips) * 1e6


def _echo_rate(socket: zmq.Socket[bytes], payload: bytes) -> float:
    before = time.perf_counter()
    for _ in range(IN_FLIGHT):
        socket.send(payload)
    for _ in range(PIPELINED - IN_FLIGHT):
        socket.recv()
        socket.send(payload)
    for _ in range(IN_FLIGHT):
        socket.recv()
    return PIPELINED / (time.perf_counter() - before)


async def _daemon_rows(daemon: DaemonProcess, ranks: int, echo_us: float, echo_rate: float) -> list[Row]:
    number = iter(range(10**9))
    blocks = list(range(len(KEYS)))

    def swap() -> Task:
        i = next(number)
        return SwapOutTask(task_id=f"t{i}", gpu_block_ids=[i % BLOCKS], cpu_block_ids=[i % BLOCKS])

    def read_missing() -> Task:
        return ReadStorageTask(task_id=f"t{next(number)}", keys=[f"no-{key}" for key in KEYS], gpu_block_ids=blocks)

    def write_stored() -> Task:
        return WriteStorageTask(task_id=f"t{next(number)}", keys=KEYS, gpu_block_ids=blocks)

    def read_one() -> Task:
        return ReadStorageTask(task_id=f"t{next(number)}", keys=KEYS[:1], gpu_block_ids=[9])

    kinds: list[tuple[str, Callable[[], Task]]] = [
        ("swap of one block", swap),
        ("read of one stored block", read_one),
        ("read of 8 keys, none stored", read_missing),
        ("write of 8 keys, all stored", write_stored),
    ]
    async with Client(daemon.endpoint) as client:
        await client.submit(write_stored())
        rows = []
        for name, make in kinds:
            medians = [await _p50(client.submit, make) for _ in range(RUNS + 1)]
            rows.append(row(f"{name}, p50, TP{ranks}", medians[1:], "us", echo_us, "us raw echo"))
        rates = [await _rate(client, swap) for _ in range(RUNS)]
        rows.append(row(f"swaps pipelined, TP{ranks}", rates, "tasks/s", echo_rate, "messages/s raw echo"))
        idle = [await _idle_percent(daemon.pid) for _ in range(RUNS)]
        rows.append(row(f"idle CPU, one client connected, TP{ranks}", idle, "% of a core", 100.0, "% of a core"))
    return rows


async def _p50(submit: Callable[[Task], Awaitable[TaskResult]], make: Callable[[], Task]) -> float:
    trips: list[float] = []
    for _ in range(TASKS):
        task = make()
        before = time.perf_counter()
        result = await submit(task)
        trips.append(time.perf_counter() - before)
        if result.status not in (Status.OK, Status.MISS):
            raise RuntimeError(f"a benchmark task ended badly: {result}")
    return statistics.median(trips) * 1e6


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


async def _idle_percent(pid: int) -> float:
    """CPU of a process that has nothing to do, heartbeats of one client included."""
    before = _cpu_seconds(pid)
    await asyncio.sleep(IDLE_S)
    return (_cpu_seconds(pid) - before) / IDLE_S * 100


def _cpu_seconds(pid: int) -> float:
    """User and system time from schedstat, which counts nanoseconds (stat counts ticks of 10 ms)."""
    total = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        total += int((thread / "schedstat").read_text().split()[0])
    return total / 1e9
