"""What does the control plane that transferd replaces cost, beside transferd's in the same run?

A model of FastDeploy's cache task queue, written from its description and with its number of calls: one
manager process behind loopback TCP that holds a task list, a bit mask of who has read its head, two locks
and the barriers; one process per tensor-parallel rank, whose main loop goes through two barriers for every
turn, idle or not; a pool with one thread that does the work between two more barriers; an answer from
rank 0 alone, and an engine that looks for it every millisecond. Two things are kinder than the original: the
barriers are never reset from outside (which breaks them), and no bytes are moved. So this is the price of
agreeing, and a lower bound.

    python benchmarks/fastdeploy_pattern.py [--format json]

ratio = how many times transferd's one-block swap it takes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing as mp
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import managers
from multiprocessing.managers import BaseManager, ListProxy, ValueProxy
from pathlib import Path
from typing import Any, cast

from transferd.cli.bench import control
from transferd.cli.bench.harness import RUNS, Row, machine, print_report, report, row
from transferd.client.client import Client
from transferd.client.launch import running

TASKS = 60
IDLE_S = 1.0
KEY = b"benchmark"
LOOP_BARRIERS, TASK_BARRIERS = ("turn", "none", "taken"), ("begin", "end")


untyped: Any = managers  # typeshed leaves out the classes that only FastDeploy's way of working needs


class _Manager(BaseManager):
    """Serves proxies, as FastDeploy's BaseManager does."""


def _register(ranks: int | None = None) -> None:
    """Names and proxy types for both sides; the server's also say what is behind them."""

    def one(thing: Any) -> Any:
        return (lambda: thing) if ranks is not None else None

    _Manager.register("tasks", one([]), ListProxy)
    _Manager.register("answers", one([]), ListProxy)
    _Manager.register("mask", one(untyped.Value("i", 0)), ValueProxy)
    _Manager.register("task_lock", one(threading.Lock()), untyped.AcquirerProxy)
    _Manager.register("answer_lock", one(threading.Lock()), untyped.AcquirerProxy)
    for name in (*LOOP_BARRIERS, *TASK_BARRIERS):
        _Manager.register(name, one(threading.Barrier(ranks or 1)), untyped.BarrierProxy)


def _serve(ranks: int, port: Any, ready: Any) -> None:
    _register(ranks)
    server = _Manager(("127.0.0.1", 0), KEY).get_server()
    port.value = cast("tuple[str, int]", server.address)[1]
    ready.set()
    server.serve_forever()


class _Queue:
    """The shared queue as one process sees it. Every line of its methods that touches a proxy is a call."""

    def __init__(self, port: int, ranks: int) -> None:
        _register()
        manager: Any = _Manager(("127.0.0.1", port), KEY)
        manager.connect()
        self.everybody = (1 << ranks) - 1
        self.tasks, self.answers, self.mask = manager.tasks(), manager.answers(), manager.mask()
        self.task_lock, self.answer_lock = manager.task_lock(), manager.answer_lock()
        self.barriers = {name: getattr(manager, name)() for name in (*LOOP_BARRIERS, *TASK_BARRIERS)}

    def put(self, task: Any) -> None:
        self.task_lock.acquire()
        while 0 < self.mask.get() < self.everybody:
            self.task_lock.release()
            time.sleep(0.001)
            self.task_lock.acquire()
        self.mask.set(0)
        self.tasks.append(task)
        self.task_lock.release()

    def take(self, rank: int) -> tuple[Any, bool]:
        """The head of the list, and whether this was the last rank to read it."""
        self.task_lock.acquire()
        task = self.tasks[0]
        mask = self.mask.get() | 1 << rank
        last = mask >= self.everybody
        if last:
            self.tasks.pop(0)
            mask = 0
        self.mask.set(mask)
        self.task_lock.release()
        return task, last

    def answer(self, task: Any) -> None:
        self.answer_lock.acquire()
        self.answers.append(task)
        self.answer_lock.release()

    def poll(self) -> Any:
        self.answer_lock.acquire()
        found = self.answers.pop(0) if len(self.answers) else None
        self.answer_lock.release()
        return found

    def wait(self, barrier: str) -> None:
        self.barriers[barrier].wait()


def _rank(rank: int, ranks: int, port: int, flag: Any) -> None:
    queue = _Queue(port, ranks)

    def work(task: Any) -> None:
        queue.wait("begin")
        queue.wait("end")
        if rank == 0:
            queue.answer(task)

    with ThreadPoolExecutor(1) as pool:
        while True:
            if rank == 0 and len(queue.tasks):
                flag.value = 1
            queue.wait("turn")
            if not flag.value:
                queue.wait("none")
                continue
            task, last = queue.take(rank)
            if last:
                flag.value = 0
            if task != "stop":
                pool.submit(work, task)
            queue.wait("taken")
            if task == "stop":
                return


@contextlib.contextmanager
def _pattern(ranks: int) -> Iterator[tuple[_Queue, list[Any]]]:
    """All its processes running: (the engine's view of the queue, the processes)."""
    context = mp.get_context("spawn")
    port, flag, ready = context.Value("i", 0), context.Value("i", 0), context.Event()
    server = context.Process(target=_serve, args=(ranks, port, ready))
    server.start()
    processes = [server]
    try:
        if not ready.wait(30):
            raise RuntimeError("the manager did not start")
        for rank in range(ranks):
            processes.append(context.Process(target=_rank, args=(rank, ranks, port.value, flag)))
            processes[-1].start()
        queue = _Queue(port.value, ranks)
        yield queue, processes
        queue.put("stop")
        for process in processes[1:]:
            process.join(30)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _round_trip_us(queue: _Queue, task: Any) -> float:
    before = time.perf_counter()
    queue.put(task)
    while queue.poll() is None:
        time.sleep(0.001)
    return (time.perf_counter() - before) * 1e6


def _idle_percent(processes: list[Any]) -> float:
    before = sum(control.cpu_seconds(process.pid) for process in processes)
    time.sleep(IDLE_S)
    return (sum(control.cpu_seconds(process.pid) for process in processes) - before) / IDLE_S * 100


def measure(ranks: int) -> list[Row]:
    """transferd's run and the pattern's, in turn; the one that is not measured does not run meanwhile."""
    ours, theirs, idle = [], [], []
    for number in range(RUNS + 1):
        with (
            tempfile.TemporaryDirectory(prefix="transferd-bench-") as directory,
            running(control.config(ranks), Path(directory)) as daemon,
        ):
            ours.append(asyncio.run(_transferd_us(daemon.endpoint, ranks)))
        if number == 0:
            continue  # warm-up of the machine
        with _pattern(ranks) as (queue, processes):
            _round_trip_us(queue, "warm-up")
            theirs.append(statistics.median(_round_trip_us(queue, i) for i in range(TASKS)))
            idle.append(_idle_percent(processes))
    limit = statistics.median(ours[1:])
    return [
        row(f"FastDeploy's pattern, task p50, TP{ranks}", theirs, "us", limit, "us transferd"),
        row(f"FastDeploy's pattern, idle CPU, TP{ranks}", idle, "% of a core", 100.0, "% of a core"),
    ]


async def _transferd_us(endpoint: str, ranks: int) -> float:
    tasks = control.TaskMaker()
    async with Client(endpoint) as client:
        await control.prepare(client, tasks, ranks)
        await control.p50_us(client.submit, tasks.swap, TASKS)
        return await control.p50_us(client.submit, tasks.swap, 5 * TASKS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", choices=["text", "json"], default="text")
    form = parser.parse_args().format
    before = machine()
    tree = report("fastdeploy_pattern", before, [item for ranks in (1, 2, 4, 8) for item in measure(ranks)])
    print_report(tree, form)


if __name__ == "__main__":
    main()
