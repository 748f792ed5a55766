"""What the rows found: printed as it comes, written after each row, and the table at the end."""

from __future__ import annotations

import datetime as dt
import json
import os
import re
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from transferd.tiers.cuda.driver import DeviceInfo

CHECKS, BENCH = "gpu-check.json", "copy-cuda.json"
GOOD = ("right", "fast", "slow")
NOT_RUN = "not run"
VERSION = Path("/proc/driver/nvidia/version")


def driver_release(cuda: int, version: Path = VERSION) -> str:
    """The driver's release, as 580.65.06; without the kernel module's file the CUDA version that it supports."""
    with suppress(OSError):
        found = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", version.read_text(errors="replace"))
        if found:
            return found[1]
    return f"CUDA {cuda // 1000}.{cuda % 1000 // 10}"


def rows_in(file: Path) -> list[dict[str, Any]]:
    """The rows that a run has written; none if there is no such file."""
    return list(json.loads(file.read_text())["checks"]) if file.exists() else []


def _now() -> str:
    return dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds")


class Results:
    """The verdicts and figures of all GPUs that were checked. where: of the JSON; None: none is written or read.

    Rows are kept by GPU's name and driver; each has the UUID that it ran on. What a later run finds is added, and what
    an earlier one found stays in the files: the last row of a name counts. resume: rows that were good on any GPU of
    this name with this driver count as run.
    """

    def __init__(self, where: Path | None, gpu: DeviceInfo, driver: str, seed: int, *, resume: bool = False) -> None:
        self.gpu = gpu
        self.where = where
        self.seed = seed
        self.failed = 0
        self._here = {"gpu": gpu.name, "driver": driver, "uuid": gpu.uuid}
        earlier = self._read(CHECKS)
        self._environments: dict[str, dict[str, Any]] = earlier.get("environments", {})
        self.facts: dict[str, Any] = {}
        self._rows: list[dict[str, Any]] = earlier.get("checks", [])
        bench = self._read(BENCH)
        self._bench: list[dict[str, Any]] = bench.get("rows", [])
        self._machines: dict[str, dict[str, Any]] = bench.get("machines", {})
        good = (name for name, row in self._last().items() if row["verdict"] in GOOD)
        self.known: set[str] = set(good) if resume else set()

    def _last(self) -> dict[str, dict[str, Any]]:
        """What counts for this kind of GPU, by name."""
        here = (self._here["gpu"], self._here["driver"])
        return {row["name"]: row for row in self._rows if (row["gpu"], row["driver"]) == here}

    def _read(self, name: str) -> dict[str, Any]:
        if self.where is None or not (self.where / name).exists():
            return {}
        try:
            found: dict[str, Any] = json.loads((self.where / name).read_text())
            if all("gpu" in row for row in found.get("checks", found.get("rows", []))):
                return found
        except ValueError:
            pass
        aside = self.where / f"{name}.unreadable-{time.time_ns()}"  # cut short, or of another release
        os.replace(self.where / name, aside)
        print(f"      {name} cannot be read: kept as {aside}", flush=True)
        return {}

    def _write(self, name: str, tree: dict[str, Any]) -> None:
        if self.where is None:
            return
        self.where.mkdir(parents=True, exist_ok=True)
        draft = self.where / f"{name}.draft"
        draft.write_text(json.dumps(tree, indent=1, default=str) + "\n")
        os.replace(draft, self.where / name)

    def set_facts(self, facts: dict[str, Any]) -> None:
        self.facts = facts
        self._environments[self.gpu.uuid] = facts

    def begins(self, words: str) -> None:
        if sys.stdout.isatty():
            print(f"      {words} …", end="\r", flush=True)

    def heard(self, row: dict[str, Any]) -> None:
        """A row has ended."""
        self.failed += row["verdict"] == "wrong"
        before = self._last().get(row["name"])
        if before is not None and before["verdict"] == "skipped":
            self._rows.remove(before)  # it says nothing
        if before is None or row["verdict"] != "skipped" or before["verdict"] == "skipped":
            self._rows.append(row | self._here | {"seed": self.seed, "at": _now()})
        print(f"{row['verdict']:<7} {row['check']}: {row['note']} ({row['seconds']:.1f} s)", flush=True)
        self._write(CHECKS, {"environments": self._environments, "checks": self._rows})

    def measured(self, rows: list[dict[str, Any]]) -> None:
        """Rows of the benchmark."""
        if self.gpu.uuid not in self._machines:
            self._machines[self.gpu.uuid] = self._facts_of_machine()
        for row in rows:
            self._bench.append(row | self._here | {"at": _now()})
            print(
                f"      {row['name']:<72} {row['value']:8.2f} of {row['limit']:8.2f} GB/s  {row['ratio']:5.2f}",
                flush=True,
            )
        self._write(BENCH, {"bench": "copy-cuda", "machines": self._machines, "rows": self._bench})

    def _facts_of_machine(self) -> dict[str, Any]:
        from tests.machine.gpu import copy_speeds
        from transferd.cli.bench import harness

        return harness.machine() | copy_speeds.machine(self.gpu.index)

    def conclude(self, names: list[str]) -> int:
        """Print the table of these rows. Returns the exit code."""
        last = self._last()
        rows = [last[name] for name in names if name in last]
        width = max((len(row["check"]) for row in rows), default=0)
        print()
        for row in rows:
            print(f"{row['check']:<{width}}  {row['verdict']}")
        measured = [line for row in rows for line in row["figures"].get("measured", ())]
        if measured:
            print("\nThe best figures beside a busy neighbour, for MEASURED in transferd/tiers/cuda/tuning.py:\n")
            print("\n".join(measured))
        if self.where is not None:
            print(f"\nwritten to {self.where}: {CHECKS}, {BENCH}")
        failed = self.failed or any(row["verdict"] == "wrong" for row in rows)
        left = [row["name"] for row in rows if row["note"].startswith(NOT_RUN)]
        if left:
            print(f"\nnot run: {', '.join(left)}")
        also = f"; {len(left)} rows were not run: make gpu-check ARGS=--resume" if left else ""
        print(("FAILED" if failed else "all good") + also)
        return 1 if failed else 0
