"""What does vLLM gain: no offload, its own tiers (`fs`, `obj`), TransferdTier and TransferdConnector, in one run?

    make vllm-gains                        runs this beside `make vllm-check`, and writes docs/vllm_details.md's table
    PYTHON_WITH_VLLM -m benchmarks.vllm_offload [--format json] [--prompts 6] [--tokens 900]

The same engine (vLLM on the CPU, a model of eight layers with made-up weights), the same requests, one after another,
each kind in a process of its own; every kind has two turns, in the opposite order the second time:

    warm-up   another prompt: compiles kernels, connects
    cold      new prompts: everything is computed, and stored
    warm      GPU cache and host pool are emptied, the same prompts again, now loaded from storage; twice

Of the tiers, the copies between KV memory and host pool are the stand-in of tests/machine/with_vllm, the same for both.
The engine steps as under `vllm serve`, and a transfer lasts until its last byte is there (probe.py there). Answers are
too short to fill a block, so all kinds store and load the same blocks. ratio = beside vLLM without offload for cold,
decode, steps and CPU, beside its fs tier for warm and for bytes. Run it on a quiet machine.

Three kinds store in a bucket of a real S3 server (SeaweedFS) on this machine: "obj" is vLLM's own tier, by NIXL;
"object" is TransferdTier above a daemon whose only storage is the bucket; "levels" is TransferdConnector above a daemon
with memory above the bucket. Their first token when warm is compared with obj's. Without the server or NIXL they are
left out.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.machine.with_vllm import nursery, play
from tests.support.s3_server import SECRET, USER, S3Server, weed
from transferd.cli.bench.harness import Row, machine, print_report, report, row

MODEL = {
    "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 8, "head_dim": 64,
}  # fmt: skip
KINDS = ("none", "fs", "tier", "connector")
IN_A_BUCKET = ("obj", "object", "levels")
LEVELS = {"object": ["object"], "levels": ["memory", "object"]}  # of the daemon
ADAPTER = {"object": "tier", "levels": "connector"}
POOL = 512 * 2**20  # bytes of vLLM's host memory
WARM = 2
ANSWER = 28  # tokens; with a prompt of 900, the last block of 32 stays open
START_S = 900
DAEMON_S = 60

Play = list[list[dict[str, Any]]]  # for each round the answers


@contextlib.contextmanager
def serving(levels: list[str], place: Path, server: S3Server) -> Iterator[str]:
    """A daemon with these levels, the last of which is a new prefix of the bucket. Yields its endpoint."""
    endpoint, config = f"ipc://{place}/daemon.sock", place / "daemon.toml"
    config.write_text(
        f"""[server]
endpoint = "{endpoint}"
[storage]
levels = {json.dumps(levels)}
memory.capacity = {POOL}
[storage.object]
url = "s3://blocks/{place.name}"
endpoint = "{server.endpoint}"
region = "us-east-1"
""",
        encoding="utf-8",
    )
    with (place / "daemon.log").open("wb") as log:
        daemon = subprocess.Popen(
            [sys.executable, "-m", "transferd", "serve", "--config", str(config)], stdout=log, stderr=log
        )
    try:
        give_up = time.monotonic() + DAEMON_S
        while not (place / "daemon.sock").exists():
            if daemon.poll() is not None or time.monotonic() > give_up:
                raise RuntimeError(f"the daemon did not start: {(place / 'daemon.log').read_text()[-2000:]}")
            time.sleep(0.05)
        yield endpoint
    finally:
        daemon.terminate()
        daemon.wait(60)


def extra(kind: str, place: Path, server: S3Server | None, bucket: contextlib.ExitStack) -> dict[str, Any]:
    """The adapter's settings, and what they need: in `bucket`, a daemon."""
    pool = {"cpu_bytes_to_use": POOL}
    if kind == "fs":
        return pool | {"root_dir": str(place / "fs")}
    if kind == "obj":
        assert server is not None
        where = {"bucket": "blocks", "endpoint_override": server.endpoint, "region": "us-east-1"}
        keys = {"access_key": USER, "secret_key": SECRET}
        return pool | {"store_config": where | keys, "prefix": place.name}
    if kind in LEVELS:
        assert server is not None
        endpoint = {"endpoint": bucket.enter_context(serving(LEVELS[kind], place, server))}
        return endpoint | (pool if ADAPTER[kind] == "tier" else {})
    return pool if kind == "tier" else {}


def run(kind: str, prompts: int, tokens: int, place: Path, server: S3Server | None) -> Play:
    """Play the rounds with one kind of offload, in a fresh process, on an empty store."""
    with contextlib.ExitStack() as bucket:
        return play_with(kind, prompts, tokens, place, extra(kind, place, server, bucket))


def play_with(kind: str, prompts: int, tokens: int, place: Path, settings: dict[str, Any]) -> Play:
    draw = random.Random(1)
    asked = [[draw.randrange(3, 500) for _ in range(tokens)] for _ in range(prompts)]
    script = {
        "model": str(play.tiny_model(place / "model", **MODEL)),
        "kind": ADAPTER.get(kind, kind),
        "extra": settings,
        "llm": {"num_gpu_blocks_override": 200, "max_num_seqs": 1},
        "max_tokens": ANSWER,
        "rounds": [[[499 - token for token in asked[0]]], asked, *[asked] * WARM],
        "alone": True,
    }
    (place / "script").write_text(json.dumps(script), encoding="ascii")
    variables = {"XDG_RUNTIME_DIR": str(place), "XDG_CACHE_HOME": str(place / "cache"), "PYTHONPATH": os.getcwd()}
    log = place / "log"
    with log.open("wb") as written:
        argv, variables = [str(place / "script"), str(place / "out")], os.environ | play.ENVIRONMENT | variables
        engine = nursery.start(argv, variables, written)
    try:
        code = engine.wait(START_S)
    finally:
        engine.kill()
        engine.stdin.close()
    if code:
        raise RuntimeError(f"{kind}: the engine ended with {code}: {log.read_text(errors='replace')[-3000:]}")
    played: Play = json.loads((place / "out").read_text(encoding="ascii"))
    return played


def rows(runs: dict[str, list[Play]]) -> list[Row]:
    """Medians over the requests or rounds of a phase. runs: of "none" and "fs", and of what is beside them."""

    def rounds(kind: str, phase: slice) -> Play:
        return [answers for played in runs[kind] for answers in played[phase]]

    def figures(kind: str, phase: slice, name: str, scale: float) -> list[float]:
        return [answer[name] * scale for answers in rounds(kind, phase) for answer in answers]

    def steps(kind: str, phase: slice) -> list[float]:
        return [1e6 * statistics.median(answers[0]["seen"]["steps"]) for answers in rounds(kind, phase)]

    def speeds(kind: str, phase: slice, what: str) -> list[float]:
        moved = [answers[0]["seen"][what] for answers in rounds(kind, phase)]
        return [statistics.median(nbytes / took for nbytes, took in one) / 2**20 for one in moved if one]

    def cpu(kind: str, phase: slice) -> list[float]:
        return [1e3 * answers[0]["cpu"] / len(answers) for answers in rounds(kind, phase)]

    cold, warm = slice(1, 2), slice(2, None)
    found = []

    def compared(kind: str, what: str, unit: str, beside: str, measured: Callable[[str], list[float]]) -> None:
        if beside not in runs:
            return
        values, others = measured(kind), measured(beside)
        if values and others:
            found.append(row(f"{kind}: {what}", values, unit, statistics.median(others), f"{unit}, {beside}"))

    per_token = 1e3 / (ANSWER - 1)
    for kind in runs:
        compared(kind, "first token, cold", "ms", "none", lambda k: figures(k, cold, "ttft", 1e3))
        beside = "obj" if kind in IN_A_BUCKET else "fs"
        compared(kind, "first token, warm", "ms", beside, lambda k: figures(k, warm, "ttft", 1e3))
        compared(kind, "token after token, cold", "ms", "none", lambda k: figures(k, cold, "decode", per_token))
        compared(kind, "scheduler, a step, cold", "us", "none", lambda k: steps(k, cold))
        compared(kind, "scheduler, a step, warm", "us", "none", lambda k: steps(k, warm))
        compared(kind, "CPU a request, cold", "ms", "none", lambda k: cpu(k, cold))
        compared(kind, "CPU a request, warm", "ms", "none", lambda k: cpu(k, warm))
        compared(kind, "stored", "MiB/s", "fs", lambda k: speeds(k, cold, "stores"))
        compared(kind, "loaded", "MiB/s", "fs", lambda k: speeds(k, warm, "loads"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--format", choices=["text", "json"], default="text")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=900)
    parser.add_argument("--only", nargs="*", default=[], help="kinds")
    asked = parser.parse_args()
    before = machine()
    with_nixl = weed() is not None and importlib.util.find_spec("nixl") is not None
    kinds = [k for k in (*KINDS, *(IN_A_BUCKET if with_nixl else ())) if k in asked.only or not asked.only]
    os.environ |= {"AWS_ACCESS_KEY_ID": USER, "AWS_SECRET_ACCESS_KEY": SECRET}
    os.environ["NIXL_TELEMETRY_ENABLE"] = "y"  # vLLM's obj tier asks for it after each transfer, and fails without
    runs: dict[str, list[Play]] = {kind: [] for kind in kinds}
    for kind in [*kinds, *reversed(kinds)]:  # so that what else the machine does meets all of them
        with tempfile.TemporaryDirectory(prefix="tv.") as directory, contextlib.ExitStack() as stack:
            server = None
            if kind in IN_A_BUCKET:
                server = S3Server(Path(directory) / "s3")
                server.start()
                stack.callback(server.kill)
            played = run(kind, asked.prompts, asked.tokens, Path(directory), server)
            runs[kind].append(played)
            hits = [answer["cached"] for answers in played[2:] for answer in answers]
            print(f"{kind}: {min(hits)} to {max(hits)} of {asked.tokens} tokens loaded when warm", file=sys.stderr)
    tree = report("vllm_offload", before, rows(runs))
    print_report(tree, asked.format)


if __name__ == "__main__":
    main()
