"""What do the steps of a training loop cost? FastDeploy's own control functions, with a daemon that holds host blocks.

The workers create the device memory (shared memory stands in for a device), the daemon has HOST_GIB of host blocks.
Each step is measured with host memory that stays (FastDeploy's default) and with FD_ENABLE_SWAP_SPACE_CLEARING=1, which
frees it at each sleep. Without a GPU, pinning is mlock; on one, registering the same pages with the driver is added.

    build/fastdeploy/venv/bin/python -m benchmarks.fastdeploy_loop --tree DIRECTORY [--steps N] [--format json]

DIRECTORY holds FastDeploy's source. The two sides take turns, each in a process of its own. value: with the variable;
limit: without it; medians of the rounds' medians, in milliseconds; spread: (highest - lowest) / median of the rounds'
ratios.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.fastdeploy_real import BLOCK_SIZE, DIM, HEADS, LAYERS
from transferd.cli.bench.harness import Row

ROOT = Path(__file__).resolve().parents[1]
BLOCK_BYTES = 2 * LAYERS * HEADS * BLOCK_SIZE * DIM * 2  # keys and values, bfloat16
HOST_GIB = 4
DEVICE_BLOCKS = 64
ROUNDS = 3
STEPS = 4  # of the loop in a round; the first of them warms up and does not count
SIDE_TIMEOUT_S = 400
FREES_VARIABLE = "FD_ENABLE_SWAP_SPACE_CLEARING"


def measure(steps: int) -> dict[str, float]:
    """The median milliseconds of each request, in this process."""
    from tests.machine.with_fastdeploy import engine as harness
    from tests.machine.with_fastdeploy.test_control import Service, weights

    harness.LAYERS, harness.HEADS, harness.BLOCK_SIZE, harness.DIM = LAYERS, HEADS, BLOCK_SIZE, DIM
    place = Path(os.environ["XDG_RUNTIME_DIR"])
    host_blocks = HOST_GIB * 1024**3 // BLOCK_BYTES
    model = str(weights(place, 0))
    taken: dict[str, list[float]] = {}

    def timed(what: str, call: Callable[[], Any]) -> None:
        before = time.perf_counter()
        call()
        taken.setdefault(what, []).append((time.perf_counter() - before) * 1000)

    with harness.engine(gpu_blocks=DEVICE_BLOCKS, cpu_blocks=host_blocks, model=model) as made:
        service = Service(made)
        for step in range(1, steps + 1):
            timed("pause", lambda: service.ask("pause"))
            weights(place, step)
            timed("update_weights", lambda: service.ask("update_weights"))
            timed("resume", lambda: service.ask("resume"))
            service.ask("pause")
            timed("sleep", lambda: service.transfer("sleep", tags="kv_cache"))
            made.make_anew()
            harness.wait_for(made.signals["cache_ready_signal"].value.all)
            timed("wakeup", lambda: service.transfer("wakeup", tags="kv_cache"))
            service.ask("resume")
        service.close()
    return {what: statistics.median(times[1:]) for what, times in taken.items()}


def _side(tree: str, steps: int, *, frees: bool) -> dict[str, float]:
    """Measure in a fresh process."""
    with tempfile.TemporaryDirectory(prefix="tfd.") as scratch:
        variables = os.environ | {
            "PYTHONPATH": os.pathsep.join((tree, str(ROOT))), "XDG_RUNTIME_DIR": scratch, "FD_LOG_DIR": scratch,
            "FD_PLUGINS": "transferd", "TRANSFERD_CACHE__DEVICE": "shm", FREES_VARIABLE: str(int(frees)),
        }  # fmt: skip
        command = [sys.executable, "-m", "benchmarks.fastdeploy_loop", "--side", "--steps", str(steps)]
        done = subprocess.run(
            command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=SIDE_TIMEOUT_S, check=False
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
        measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return measured


def rows(tree: str, rounds: int, steps: int) -> list[Row]:
    """A row for each request, from rounds in which the sides take turns."""
    measured: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    for number in range(rounds):
        for frees in (False, True) if number % 2 == 0 else (True, False):
            measured[frees].append(_side(tree, steps, frees=frees))
    found = []
    for what in measured[False][0]:
        stays, freed = ([max(one[what], 0.01) for one in measured[frees]] for frees in (False, True))
        ratios = [a / b for a, b in zip(freed, stays, strict=True)]
        spread = (max(ratios) - min(ratios)) / statistics.median(ratios)
        name = f"{what}, {HOST_GIB} GiB of host blocks"
        found.append(Row(name, statistics.median(freed), "ms freed", statistics.median(stays), "ms kept", spread))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tree", help="FastDeploy's source")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument("--side", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(json.dumps(measure(options.steps)))
        return
    from transferd.cli.bench.harness import machine, print_report, report

    where = machine()
    tree = report("fastdeploy_loop", where, rows(options.tree, options.rounds, options.steps))
    print_report(tree, options.format)


if __name__ == "__main__":
    main()
