"""What does the control plane that transferd replaces cost here?

A model of FastDeploy's pattern, written from its description: one BaseManager server over loopback TCP;
one process per tensor-parallel rank; a task list with a bit mask of who has read its head; rank 0 polls for
work without a pause; shared barriers in front of and behind every hand-over; one answer queue. No bytes
are moved: this is the price of agreeing, to be compared with `transferd bench control` of the same run.

    python benchmarks/fastdeploy_pattern.py [--format json]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import statistics
import threading
import time
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import Any

from transferd.bench.harness import Row, machine, report, row

TASKS = 60
RUNS = 5
KEY = b"benchmark"


class _Shared:
    """The manager's side: what every rank and the engine see through proxies."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.tasks: list[Any] = []
        self.answers: list[Any] = []
        self.mask = 0
        self.flag = 0
        self.lock = threading.Lock()
        self.barriers = [threading.Barrier(ranks) for _ in range(4)]

    def put(self, task: Any) -> None:
        with self.lock:
            self.mask = 0
            self.tasks.append(task)

    def empty(self) -> bool:
        return not self.tasks

    def set_flag(self, value: int) -> None:
        self.flag = value

    def get_flag(self) -> int:
        return self.flag

    def take(self, rank: int) -> Any:
        """The head of the list; the last rank to read it removes it."""
        with self.lock:
            task = self.tasks[0]
            self.mask |= 1 << rank
            if self.mask == (1 << self.ranks) - 1:
                self.tasks.pop(0)
                self.mask = 0
                self.flag = 0
            return task

    def wait(self, barrier: int) -> None:
        self.barriers[barrier].wait()

    def answer(self, item: Any) -> None:
        self.answers.append(item)

    def poll(self) -> Any:
        return self.answers.pop(0) if self.answers else None


class _Manager(BaseManager):
    pass


def _serve(ranks: int, port: Any, ready: Any) -> None:
    shared = _Shared(ranks)
    _Manager.register("shared", callable=lambda: shared)
    manager = _Manager(("127.0.0.1", 0), KEY)
    server = manager.get_server()
    port.value = server.address[1]
    ready.set()
    server.serve_forever()


def _connect(port: int) -> Any:
    _Manager.register("shared")
    manager = _Manager(("127.0.0.1", port), KEY)
    manager.connect()
    return manager.shared()


def _rank(rank: int, port: int) -> None:
    shared = _connect(port)
    while True:
        if rank == 0 and not shared.empty():
            shared.set_flag(1)
        shared.wait(0)
        if not shared.get_flag():
            shared.wait(1)
            continue
        task = shared.take(rank)
        shared.wait(2)
        if task == "stop":
            return
        shared.wait(3)  # all ranks have done their share
        if rank == 0:
            shared.answer(task)


def measure(ranks: int) -> tuple[list[float], float]:
    """(p50 in µs of each run, idle CPU in % of a core of all processes)."""
    context = mp.get_context("spawn")
    port, ready = context.Value("i", 0), context.Event()
    processes = [context.Process(target=_serve, args=(ranks, port, ready))]
    processes[0].start()
    ready.wait(30)
    processes += [context.Process(target=_rank, args=(rank, port.value)) for rank in range(ranks)]
    for process in processes[1:]:
        process.start()
    shared = _connect(port.value)
    _round_trip(shared, "warm-up")
    medians = []
    for _ in range(RUNS):
        trips = [_round_trip(shared, number) for number in range(TASKS)]
        medians.append(statistics.median(trips) * 1e6)
    before = sum(_cpu_seconds(process.pid) for process in processes)
    time.sleep(2.0)
    idle = (sum(_cpu_seconds(process.pid) for process in processes) - before) / 2.0 * 100
    shared.put("stop")
    for process in processes[1:]:
        process.join(30)
    processes[0].kill()
    processes[0].join()
    return medians, idle


def _round_trip(shared: Any, task: Any) -> float:
    before = time.perf_counter()
    shared.put(task)
    while shared.poll() is None:
        time.sleep(0.001)  # as its result thread does
    return time.perf_counter() - before


def _cpu_seconds(pid: int | None) -> float:
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--format", choices=["text", "json"], default="text")
    form = parser.parse_args().format
    before = machine()
    rows: list[Row] = []
    for ranks in (1, 2, 4, 8):
        medians, idle = measure(ranks)
        own = statistics.median(medians)
        rows.append(row(f"FastDeploy's pattern, task p50, TP{ranks}", medians, "us", own, "itself"))
        rows.append(row(f"FastDeploy's pattern, idle CPU, TP{ranks}", [idle], "% of a core", 100.0, "% of a core"))
    tree = report("fastdeploy_pattern", before, rows)
    if form == "json":
        print(json.dumps(tree))
    else:
        from rich.console import Console

        from transferd.bench.harness import show

        show(tree, Console())


if __name__ == "__main__":
    main()
