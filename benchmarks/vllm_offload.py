"""What does vLLM gain: no offload, its own `fs` tier, TransferdTier and TransferdConnector, in one run?

    make vllm-gains                        runs this where `make vllm-check` runs, and writes docs/vllm.md's table
    PYTHON_WITH_VLLM -m benchmarks.vllm_offload [--format json] [--prompts 6] [--tokens 900]

The same engine (vLLM on the CPU, a model of eight layers with made-up weights), the same requests, one after another,
each kind in a process of its own; every kind has two turns, in the opposite order the second time:

    warm-up   another prompt: compiles kernels, connects
    cold      new prompts: everything is computed, and stored
    warm      GPU cache and host pool are emptied, the same prompts again, now loaded from storage; twice

Of the tiers, the copies between KV memory and host pool are tests/with_vllm's stand-in, the same for both. The engine
steps as under `vllm serve`, and a transfer lasts until its last byte is there (tests/with_vllm/probe.py). Answers are
too short to fill a block, so all kinds store and load the same blocks. ratio = beside vLLM without offload for cold,
decode, steps and CPU, beside its fs tier for warm and for bytes. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.with_vllm import nursery, play
from transferd.cli.bench.harness import Row, machine, print_report, report, row

MODEL = {
    "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 8, "head_dim": 64,
}  # fmt: skip
KINDS = ("none", "fs", "tier", "connector")
TURNS = (*KINDS, *reversed(KINDS))  # so that what else the machine does meets all of them
WARM = 2
ANSWER = 28  # tokens; with a prompt of 900, the last block of 32 stays open
START_S = 900

Play = list[list[dict[str, Any]]]  # for each round the answers


def run(kind: str, prompts: int, tokens: int, place: Path) -> Play:
    """Play the rounds with one kind of offload, in a fresh process, on an empty store."""
    draw = random.Random(1)
    asked = [[draw.randrange(3, 500) for _ in range(tokens)] for _ in range(prompts)]
    script = {
        "model": str(play.tiny_model(place / "model", **MODEL)),
        "kind": kind,
        "extra": {"root_dir": str(place / "fs")} if kind == "fs" else {},
        "llm": {"num_gpu_blocks_override": 200, "max_num_seqs": 1},
        "max_tokens": ANSWER,
        "rounds": [[[499 - token for token in asked[0]]], asked, *[asked] * WARM],
        "alone": True,
    }
    if kind in ("fs", "tier"):
        script["extra"]["cpu_bytes_to_use"] = 512 * 2**20  # type: ignore[index]
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
    """Medians over the requests or rounds of a phase; `runs` has "none" and "fs", and what is beside them."""

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
        values, others = measured(kind), measured(beside)
        if values and others:
            found.append(row(f"{kind}: {what}", values, unit, statistics.median(others), f"{unit}, {beside}"))

    per_token = 1e3 / (ANSWER - 1)
    for kind in runs:
        compared(kind, "first token, cold", "ms", "none", lambda k: figures(k, cold, "ttft", 1e3))
        compared(kind, "first token, warm", "ms", "fs", lambda k: figures(k, warm, "ttft", 1e3))
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
    asked = parser.parse_args()
    before = machine()
    runs: dict[str, list[Play]] = {kind: [] for kind in KINDS}
    for kind in TURNS:
        with tempfile.TemporaryDirectory(prefix="tv.") as directory:
            played = run(kind, asked.prompts, asked.tokens, Path(directory))
            runs[kind].append(played)
            hits = [answer["cached"] for answers in played[2:] for answer in answers]
            print(f"{kind}: {min(hits)} to {max(hits)} of {asked.tokens} tokens loaded when warm", file=sys.stderr)
    tree = report("vllm_offload", before, rows(runs))
    print_report(tree, asked.format)


if __name__ == "__main__":
    main()
