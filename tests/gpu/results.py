"""What the rows found: printed as it comes, written after each row, and the table at the end."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from transferd.tiers.cuda.driver import DeviceInfo

CHECKS, BENCH = "gpu-check.json", "copy-cuda.json"
GOOD = ("right", "fast", "slow")
NOT_RUN = "not run"


class Results:
    """The verdicts and figures of a GPU. where: of the JSON; None: none is written.

    partial: some rows only; then rows of an earlier run stay in the files. resume: they count as run, too.
    """

    def __init__(self, where: Path | None, gpu: DeviceInfo, seed: int, *, partial: bool, resume: bool) -> None:
        self.gpu = gpu
        self.where = where
        self.seed = seed
        self.facts: dict[str, Any] = {}
        self.failed = 0
        self._rows: dict[str, dict[str, Any]] = {}
        self._bench: dict[str, dict[str, Any]] = {}
        self._machine: dict[str, Any] = {}
        self.known: set[str] = set()
        earlier = self._read(CHECKS) if partial or resume else {}
        if earlier.get("environment", {}).get("uuid") == gpu.uuid:
            self._rows = {row["name"]: row for row in earlier["checks"]}
            bench = self._read(BENCH)
            self._bench = {row["name"]: row for row in bench.get("rows", [])}
            self._machine = bench.get("machine", {})
            if resume:
                self.known = {name for name, row in self._rows.items() if row["verdict"] in GOOD}

    def _read(self, name: str) -> dict[str, Any]:
        if self.where is None:
            return {}
        try:
            found: dict[str, Any] = json.loads((self.where / name).read_text())
        except (OSError, ValueError):
            return {}
        return found

    def _write(self, name: str, tree: dict[str, Any]) -> None:
        if self.where is None:
            return
        self.where.mkdir(parents=True, exist_ok=True)
        draft = self.where / f"{name}.draft"
        draft.write_text(json.dumps(tree, indent=1, default=str) + "\n")
        os.replace(draft, self.where / name)

    def set_facts(self, facts: dict[str, Any]) -> None:
        self.facts = facts

    def begins(self, words: str) -> None:
        if sys.stdout.isatty():
            print(f"      {words} …", end="\r", flush=True)

    def heard(self, row: dict[str, Any]) -> None:
        """A row has ended."""
        self.failed += row["verdict"] == "wrong"
        before = self._rows.get(row["name"], {})
        if not (row["verdict"] == "skipped" and before.get("verdict") in GOOD):
            self._rows[row["name"]] = row
        print(f"{row['verdict']:<7} {row['check']}: {row['note']} ({row['seconds']:.1f} s)", flush=True)
        self._write(CHECKS, {"environment": self.facts, "seed": self.seed, "checks": list(self._rows.values())})

    def measured(self, rows: list[dict[str, Any]]) -> None:
        """Rows of the benchmark."""
        self._machine = self._machine or self._facts_of_machine()
        for row in rows:
            self._bench[row["name"]] = row
            print(
                f"      {row['name']:<72} {row['value']:8.2f} of {row['limit']:8.2f} GB/s  {row['ratio']:5.2f}",
                flush=True,
            )
        tree = {"bench": "copy-cuda", "machine": self._machine, "rows": list(self._bench.values())}
        self._write(BENCH, tree)

    def _facts_of_machine(self) -> dict[str, Any]:
        from transferd.cli.bench import copy_cuda, harness

        return harness.machine() | copy_cuda.machine(self.gpu.index)

    def conclude(self, names: list[str]) -> int:
        """Print the table of these rows. Returns the exit code."""
        rows = [self._rows[name] for name in names if name in self._rows]
        width = max((len(row["check"]) for row in rows), default=0)
        print()
        for row in rows:
            print(f"{row['check']:<{width}}  {row['verdict']}")
        settings = [line for row in rows for line in row["figures"].get("settings", ())]
        if settings:
            print("\nThe best settings beside a busy neighbour, for the daemon's configuration:\n")
            print("\n".join(settings))
        if self.where is not None:
            print(f"\nwritten to {self.where}: {CHECKS}, {BENCH}")
        failed = self.failed or any(row["verdict"] == "wrong" for row in rows)
        left = sum(row["note"].startswith(NOT_RUN) for row in rows)
        also = f"; {left} rows were not run: make gpu-check ARGS=--resume" if left else ""
        print(("FAILED" if failed else "all good") + also)
        return 1 if failed else 0
