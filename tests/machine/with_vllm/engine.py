"""vLLM's engine in a process of its own, for tests: what it was asked, what it answered, what the witnesses noted."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.machine.with_vllm import nursery, play

START_S = 900.0  # on a busy machine; 30 s on a quiet one


class Engine:
    """One run of tests/machine/with_vllm/play.py. Its notes go to `place`/notes, as those of every run before it."""

    def __init__(self, place: Path, kind: str, rounds: Sequence[Sequence[Sequence[Any]]], **script: Any) -> None:
        self._place = place
        notes = place / "notes"
        notes.mkdir(exist_ok=True)
        for memory in notes.glob("memory.*"):
            memory.unlink()
        number = len(list(place.glob("script*")))
        self._out, self._log_file = place / f"out{number}", place / f"log{number}"
        script_file = place / f"script{number}"
        model = play.tiny_model(place / "tiny")
        whole = {"model": str(model), "kind": kind, "rounds": rounds} | (
            {} if kind in ("none", "fs") else {"notes": str(notes)}
        )
        script_file.write_text(json.dumps(whole | script), encoding="ascii")
        with self._log_file.open("wb") as log:
            variables = os.environ | play.ENVIRONMENT | {"PYTHONPATH": play.path()}
            self.process = nursery.start([str(script_file), str(self._out)], variables, log)

    @property
    def log(self) -> str:
        return self._log_file.read_text(encoding="utf-8", errors="replace")

    def played(self, rounds: int) -> None:
        """Wait until so many rounds are over."""
        give_up = time.monotonic() + START_S
        while f"PLAYED {rounds}\n" not in self.log:
            assert self.process.poll() is None, self.log[-5000:]
            assert time.monotonic() < give_up, self.log[-5000:]
            time.sleep(0.1)

    def go_on(self) -> None:
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def result(self) -> list[list[dict[str, Any]]]:
        """What the engine answered, once it has ended."""
        try:
            code = self.process.wait(START_S)
        finally:
            self.kill()
        assert code == 0, self.log[-5000:]
        answered: list[list[dict[str, Any]]] = json.loads(self._out.read_text(encoding="ascii"))
        return answered

    def daemon(self) -> int:
        """The pid of the daemon that it started last."""
        return int(re.findall(r"started one: pid (\d+)", self.log)[-1])

    def kill(self) -> None:
        """With SIGKILL; vLLM's host pool, which a killed engine leaves behind, is removed."""
        self.process.kill()
        self.process.wait()
        for pool in re.findall(r"/dev/shm/vllm_offload_\S+\.mmap", self.log):
            Path(pool).unlink(missing_ok=True)
        self.process.stdin.close()


def witnessed(place: Path) -> tuple[int, int]:
    """How many blocks were stored and how many loaded, after a check of every loaded one against what was stored."""
    stored: dict[str, set[str]] = {}
    loaded: list[tuple[str, str]] = []
    for file in sorted((place / "notes").glob("*.jsonl")):
        for line in file.read_text(encoding="ascii").splitlines():
            what, key, digest = json.loads(line)
            if what == "stored":
                stored.setdefault(key, set()).add(digest)
            elif what == "loaded":
                loaded.append((key, digest))
    for key, digest in loaded:
        assert digest in stored[key], f"wrong bytes for {key}"
    assert all(len(digests) == 1 for digests in stored.values()), "one key, two contents"
    return len(stored), len(loaded)


def layers_witnessed(place: Path) -> set[str]:
    """The layers whose blocks were loaded, after a check of vLLM's own tensors of each against what was stored.

    Whatever the adapter takes for a block's bytes: a layer that it does not move is seen.
    """
    stored: dict[str, str] = {}
    layers = set()
    for file in sorted((place / "notes").glob("*.jsonl")):
        for line in file.read_text(encoding="ascii").splitlines():
            what, key, digest = json.loads(line)
            if what == "layer stored":
                assert stored.setdefault(key, digest) == digest, f"one key, two contents: {key}"
            elif what == "layer loaded":
                assert stored[key] == digest, f"wrong bytes for {key}"
                layers.add(key.partition(" ")[2])
    return layers
