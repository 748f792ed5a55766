"""How soon does SGLang answer: HiCache without storage, with HiCacheFile, with Mooncake and with transferd, in one run?

    make sglang-gains      runs this where `make sglang-check` runs, and writes docs/sglang.md's tables
    PYTHON_WITH_SGLANG -m benchmarks.sglang_first_token [--format json] [--prompts 4] [--tokens 1500]

SGLang's real server on the CPU (a model of eight layers with made-up weights), the same requests, one after another,
each kind of storage in a server of its own; every kind has two turns, in the opposite order the second time:

    warm-up   another prompt
    cold      new prompts: everything is computed, and stored
    warm      device and host pool are emptied, the same prompts again, now loaded from storage; twice

Seconds are those of a request with one token of answer, as its client sees them. Without storage, a prompt is computed
each time. ratio: beside no storage. HiCacheFile and transferd keep files, Mooncake memory of the server, by tcp; only
transferd has checksums. Copies between device and host pool are the stand-in of tests/machine/with_sglang, the same for
all. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers.driver import cpu_of, tree_of
from tests.machine.with_sglang.serving import PAGE, Server, Storage, of_transferd, tiny_model
from transferd.cli.bench.harness import Row, machine, print_report, report, row
from transferd.cli.pool.local import Master

MODEL = {
    "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 8, "head_dim": 64,
}  # fmt: skip
KINDS = ("no storage", "HiCacheFile", "Mooncake", "transferd")
TURNS = (*KINDS, *reversed(KINDS))  # so that what else the machine does meets all of them
WARM = 2
DEVICE = ("--max-total-tokens", "4096")
STORED_S = 60.0

Phases = dict[str, list[tuple[float, float]]]  # for "cold" and "warm", seconds and CPU seconds of each request


def run(kind: str, prompts: Sequence[list[int]], place: Path) -> Phases:
    """One turn, with a fresh server and an empty storage."""
    with contextlib.ExitStack() as stack:
        server = Server(place, tiny_model(place / "model", **MODEL), _storage(kind, place, stack), DEVICE)
        stack.callback(server.kill)
        server.wait()
        server.ask([499 - token for token in prompts[0]], 1)
        found: Phases = {"cold": [_asked(server, prompt, 0) for prompt in prompts], "warm": []}
        whole = 0 if kind == "no storage" else (len(prompts[0]) - 1) // PAGE * PAGE
        _wait_stored(server, prompts, whole)
        for _ in range(WARM):
            server.forget()
            found["warm"] += [_asked(server, prompt, whole) for prompt in prompts]
        return found


def _storage(kind: str, place: Path, stack: contextlib.ExitStack) -> Storage:
    if kind == "transferd":
        return of_transferd("TransferdHiCache", "transferd.adapters.sglang")
    plain = ["--enable-hierarchical-cache", "--hicache-mem-layout", "page_first"]
    if kind == "HiCacheFile":
        stored = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(place / "file")}
        return Storage([*plain, "--hicache-storage-backend", "file"], {"prefetch_threshold": PAGE}, stored)
    if kind == "Mooncake":
        master = Master(place / "master.log")
        master.start()
        stack.callback(master.stop)
        extra = {
            "master_server_address": master.address, "local_hostname": "127.0.0.1", "protocol": "tcp",
            "metadata_server": "P2PHANDSHAKE", "global_segment_size": 2**30, "prefetch_threshold": PAGE,
        }  # fmt: skip
        return Storage([*plain, "--hicache-storage-backend", "mooncake"], extra)
    return Storage(plain)


def _asked(server: Server, prompt: list[int], cached: int) -> tuple[float, float]:
    before = sum(map(cpu_of, tree_of(server.process.pid)))
    answer = server.ask(prompt, 1)
    if answer.cached != cached:
        raise RuntimeError(f"{answer.cached} tokens were cached, not {cached}: {server.log[-2000:]}")
    return answer.seconds, sum(map(cpu_of, tree_of(server.process.pid))) - before


def _wait_stored(server: Server, prompts: Sequence[list[int]], whole: int) -> None:
    """A request answers before its pages are stored. What is missing yet is computed, and stored, again."""
    give_up = time.monotonic() + STORED_S
    while True:
        server.forget()
        if all(server.ask(prompt, 1).cached == whole for prompt in prompts):
            return
        if time.monotonic() > give_up:
            raise RuntimeError(f"not stored within {STORED_S:g} s: {server.log[-2000:]}")


def rows(runs: dict[str, list[Phases]]) -> list[Row]:
    """Medians over the requests of both turns, beside those without storage."""
    found = []
    for phase in ("cold", "warm"):
        for which, what in enumerate(("first token", "CPU a request")):
            values = {kind: [1e3 * one[which] for turn in turns for one in turn[phase]] for kind, turns in runs.items()}
            limit = statistics.median(values[KINDS[0]])
            found += [row(f"{kind}: {what}, {phase}", values[kind], "ms", limit, f"ms, {KINDS[0]}") for kind in runs]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--format", choices=["text", "json"], default="text")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1500)
    asked = parser.parse_args()
    draw = random.Random(1)
    prompts = [[draw.randrange(3, 500) for _ in range(asked.tokens)] for _ in range(asked.prompts)]
    before = machine()
    runs: dict[str, list[Phases]] = {kind: [] for kind in KINDS}
    for kind in TURNS:
        with tempfile.TemporaryDirectory(prefix="tsg.") as directory:
            began = time.monotonic()
            runs[kind].append(run(kind, prompts, Path(directory)))
            print(f"{kind}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    print_report(report("sglang_first_token", before, rows(runs)), asked.format)


if __name__ == "__main__":
    main()
