"""What does FastDeploy gain? The same PrefixCacheManager with its own queue and transfer processes, and with transferd.

Both sides run FastDeploy's unmodified PrefixCacheManager and its way of waiting. One has its EngineCacheQueue and one
cache_transfer_manager.py for each rank, with operators that copy by memmove (fastdeploy_transfer_process.py); the other
has the plugin and a daemon with shared memory standing in for devices. Every byte is compared after every transfer.

    make fastdeploy-gains                  measures, and writes the table of docs/fastdeploy_details.md
    build/fastdeploy/venv/bin/python -m benchmarks.fastdeploy_real --tree DIRECTORY [--rounds N] [--format json]

DIRECTORY holds FastDeploy's source. Each round runs both sides at each size, in processes of their own, the other side
first than in the round before. value and limit are medians of the rounds' medians; ratio: how many times transferd's
time FastDeploy's own takes; spread: (highest - lowest) / median of the rounds' own ratios.

Idle CPU is that of the engine's process and all that it started, in which the PrefixCacheManager itself looks for
answers every millisecond.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from transferd.cli.bench.harness import Row

ROOT = Path(__file__).resolve().parents[1]
GROUPS = (1, 2, 4)
BLOCKS = 16  # in one transfer
LAYERS, HEADS, BLOCK_SIZE, DIM = 8, 2, 64, 128  # 512 KiB a block and rank, bfloat16
ROUNDS = 5
TIMES = 8  # transfers of each kind in a round; the first of them warms up and does not count
IDLE_S = 3.0
SETTLE_S = 2.0
SIDE_TIMEOUT_S = 400
SEGMENTS = "TRANSFERD_BENCH_SEGMENTS"


def segment(name: str) -> Path:
    """Where a tensor of this name lies, in place of a device."""
    return Path("/dev/shm") / f"{os.environ[SEGMENTS]}.{name}"


def measure(tp: int, *, ours: bool) -> dict[str, float]:
    """One side at one size, in this process: median milliseconds of each transfer, and % of a core when idle."""
    from tests.machine.with_fastdeploy import engine as harness

    harness.LAYERS, harness.HEADS, harness.BLOCK_SIZE, harness.DIM = LAYERS, HEADS, BLOCK_SIZE, DIM
    from fastdeploy.cache_manager.cache_data import CacheStatus
    from fastdeploy.cache_manager.cache_tasks import ReadStorageTask, WriteStorageTask

    shape = harness.Shape(tp=tp, backend="file", gpu_blocks=4 * BLOCKS, cpu_blocks=2 * BLOCKS)
    made = (harness.Engine if ours else _own(harness))(shape)
    made.start()
    manager = made.manager
    here, there, host = list(range(BLOCKS)), list(range(BLOCKS, 2 * BLOCKS)), list(range(BLOCKS))
    taken: dict[str, list[float]] = {"swap out": [], "swap in": [], "write": [], "read": []}

    def timed(what: str, call: Any) -> Any:
        before = time.perf_counter()
        value = call()
        taken[what].append((time.perf_counter() - before) * 1000)
        return value

    def check(blocks: list[int], number: int) -> None:
        for block in blocks:
            for worker in made.workers:
                worker.check(block, f"{number}/{block % BLOCKS}")

    nobody = [None] * BLOCKS
    try:
        for number in range(TIMES):
            for block in here:
                for worker in made.workers:
                    worker.fill(block, f"{number}/{block}")
            out, back = f"out-{number}", f"in-{number}"
            timed("swap out", lambda: manager.issue_swap_task(out, nobody, here, host, CacheStatus.SWAP2CPU))  # noqa: B023
            timed("swap in", lambda: manager.issue_swap_task(back, nobody, there, host, CacheStatus.SWAP2GPU))  # noqa: B023
            check(there, number)
            keys = [f"{number:08}{block:056}" for block in here]
            write = WriteStorageTask(task_id=f"w{number}", keys=keys, token_ids=None, gpu_block_ids=here)
            timed("write", lambda: manager.issue_write_back_storage_task(write))  # noqa: B023
            there_too = [block + BLOCKS for block in there]
            read = ReadStorageTask(
                task_id=f"r{number}", keys=keys, token_ids=None, gpu_block_ids=there_too, start_read_block_idx=0
            )
            assert timed("read", lambda: manager.issue_prefetch_storage_task(read)) == there_too  # noqa: B023
            check(there_too, number)
        time.sleep(SETTLE_S)
        before, since = _cpu_s(os.getpid()), time.perf_counter()
        time.sleep(IDLE_S)
        idle = (_cpu_s(os.getpid()) - before) / (time.perf_counter() - since) * 100
    finally:
        made.close()
    return {**{what: statistics.median(times[1:]) for what, times in taken.items()}, "idle": idle}


def _own(harness: Any) -> Any:
    """The engine with FastDeploy's own queue and processes."""

    class Own(harness.Engine):  # type: ignore[misc]
        def start(self) -> None:
            module = harness.fastdeploy_manager
            real = subprocess.Popen

            def popen(command: Any, *args: Any, **kwargs: Any) -> Any:
                if isinstance(command, str):
                    words = command.split()
                    script = next(i for i, word in enumerate(words) if word.endswith("cache_transfer_manager.py"))
                    words[script] = "-m benchmarks.fastdeploy_transfer_process"
                    command = " ".join(words)
                return real(command, *args, **kwargs)

            module.subprocess.Popen = popen
            try:
                super().start()
            finally:
                module.subprocess.Popen = real

        def attach(self, *, again: bool = False) -> None:  # noqa: ARG002 - the signature it has
            import numpy as np

            shape = (self.shape.gpu_blocks, HEADS, BLOCK_SIZE, DIM)
            for rank in range(self.shape.tp):
                caches = {
                    plane: [
                        np.memmap(segment(f"{plane}_caches_{i}_rank{rank}.device{rank}"), np.uint16, "r+", shape=shape)
                        for i in range(LAYERS)
                    ]
                    for plane in ("key", "value")
                }
                self.workers.append(harness.Worker(rank, caches))

        def close(self) -> None:
            for process in self.processes:
                os.killpg(os.getpgid(process.pid), 15)
                process.wait()
            self.manager.cache_task_queue = harness.Ended()
            self.queue.manager.shutdown()
            for one in self.signals.values():
                one.clear()
            for path in Path("/dev/shm").glob(f"{os.environ[SEGMENTS]}.*"):
                path.unlink()

    return Own


def _cpu_s(root: int) -> float:
    """Seconds of CPU of this process and all below it."""
    parents: dict[int, int] = {}
    used: dict[int, float] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry.name)] = int(fields[1])
            used[int(entry.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    family, grown = {root}, True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in family} - family
        grown = bool(more)
        family |= more
    return sum(used.get(pid, 0.0) for pid in family)


def _side(tree: str, tp: int, *, ours: bool) -> dict[str, float]:
    """Measure in a fresh process."""
    with tempfile.TemporaryDirectory(prefix="tfd.") as scratch:
        variables = os.environ | {
            "PYTHONPATH": os.pathsep.join((tree, str(ROOT))), "TRANSFERD_CACHE__DEVICE": "shm",
            "XDG_RUNTIME_DIR": scratch, "FD_LOG_DIR": scratch, "FILE_BACKEND_STORAGE_DIR": f"{scratch}/pool",
            SEGMENTS: f"bench.{os.getpid()}",
        }  # fmt: skip
        variables.pop("FD_PLUGINS", None)
        if ours:
            variables["FD_PLUGINS"] = "transferd"
        command = [sys.executable, "-m", "benchmarks.fastdeploy_real", "--side", "ours" if ours else "own", str(tp)]
        done = subprocess.run(
            command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=SIDE_TIMEOUT_S, check=False
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
        measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return measured


def _rows(tree: str, tp: int, rounds: int) -> list[Row]:
    """All figures of one size, from rounds in which the sides take turns."""
    measured: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    for number in range(rounds):
        for ours in (False, True) if number % 2 == 0 else (True, False):
            measured[ours].append(_side(tree, tp, ours=ours))
    rows = []
    for what in measured[False][0]:
        own, with_us = ([max(one[what], 0.01) for one in measured[ours]] for ours in (False, True))
        ratios = [a / b for a, b in zip(own, with_us, strict=True)]
        name = f"idle CPU, TP{tp}" if what == "idle" else f"{what} of {BLOCKS} blocks, TP{tp}"
        units = ("% of a core, own", "% transferd") if what == "idle" else ("ms FastDeploy's own", "ms transferd")
        spread = (max(ratios) - min(ratios)) / statistics.median(ratios)
        rows.append(Row(name, statistics.median(own), units[0], statistics.median(with_us), units[1], spread))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tree", help="FastDeploy's source")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument("--side", nargs=2, metavar=("SIDE", "TP"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(json.dumps(measure(int(options.side[1]), ours=options.side[0] == "ours")))
        return
    from transferd.cli.bench.harness import machine, print_report, report

    where = machine()
    rows = [row for tp in GROUPS for row in _rows(options.tree, tp, options.rounds)]
    tree = report("fastdeploy_real", where, rows)
    print_report(tree, options.format)


if __name__ == "__main__":
    main()
