"""An adapter for an engine of its own, on what all adapters have in common, and the conformance script's way to it.

    python examples/own_adapter.py
    python -m transferd.adapters.conformance examples.own_adapter:make

The engine keeps its KV blocks in shared memory, in one array for each of two layers. The adapter finds or starts a
daemon, offers it this memory, and stores and loads blocks in place. docs/adapters.md explains it part by part.
"""

from __future__ import annotations

import itertools
import mmap
import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from transferd import ReadStorageTask, WriteStorageTask
from transferd.adapters.common.entry import EngineFacts, OfferedMemory
from transferd.adapters.common.link import Link
from transferd.adapters.common.memory import shared_memory_at
from transferd.adapters.common.program import Program
from transferd.adapters.common.settings import CommonSettings, parsed
from transferd.adapters.conformance import Trial
from transferd.errors import ConfigError, TierError

TINY = Program("Tiny", "tiny.transferd", store="tiny")  # its name in messages, its logger, its directories
LAYERS, BLOCKS, PAGE = 2, 64, 4096


class TinyEngine:
    """Stands for your engine: it owns the memory. private: in a way that no other process can map."""

    def __init__(self, model: str, *, private: bool = False) -> None:
        self.model = model
        self._file = os.memfd_create("tiny-kv") if not private else -1
        if not private:
            os.ftruncate(self._file, LAYERS * BLOCKS * PAGE)
        flags = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
        self._memory = mmap.mmap(self._file, LAYERS * BLOCKS * PAGE, flags=flags)
        self.kv = np.frombuffer(self._memory, dtype=np.uint8).reshape(LAYERS, BLOCKS, PAGE)


class TinyAdapter:
    """Stores and loads blocks of the engine. given: the operator's settings. Raises ConfigError in one line."""

    def __init__(self, engine: TinyEngine, given: Mapping[str, Any]) -> None:
        self._chosen = parsed("tiny", given, CommonSettings)
        address = engine.kv.__array_interface__["data"][0]
        try:
            mapped = shared_memory_at(address, engine.kv.nbytes)
        except TierError as error:
            raise ConfigError("tiny.shared_memory", f"must be on: {error}", False) from error
        facts = EngineFacts(
            name=self._chosen.name or f"tiny-{os.getpid()}",
            model=engine.model,
            generation=self._chosen.generation,
            identity="tiny/LBP",
            ranks=1,
            blocks=BLOCKS,
            page_bytes=[PAGE] * LAYERS,
            memory=OfferedMemory(0, mapped, [(layer * BLOCKS * PAGE, PAGE) for layer in range(LAYERS)]),
            # All that a block's bytes depend on. If in doubt, different: that costs a miss, sameness wrong text.
            fingerprint={"engine": "tiny 1", "weights": self._chosen.weights, "KV dtype": "uint8"},
        )
        self.link = Link(self._chosen.finder(TINY, facts), facts.name, facts.enter)
        self.link.wait_ready(self._chosen.start_timeout)  # without a daemon, the engine runs and everything misses
        self._numbers = itertools.count()

    def exists(self, keys: Sequence[str]) -> list[bool]:
        return self.link.exists(keys)

    def store(self, keys: Sequence[str], blocks: Sequence[int]) -> list[bool]:
        """Returns when nothing reads the blocks any more: `carry_out` gives settled results only."""
        task = WriteStorageTask(
            task_id=self._task_id(), keys=list(keys), gpu_block_ids=list(blocks), timeout=self._chosen.timeout
        )
        return self.link.carry_out(task).mask(task)

    def load(self, keys: Sequence[str], blocks: Sequence[int]) -> list[bool]:
        """Returns when nothing writes to the blocks any more. What was not loaded is computed."""
        task = ReadStorageTask(
            task_id=self._task_id(),
            keys=list(keys),
            gpu_block_ids=list(blocks),
            timeout=self._chosen.timeout,
            prefix=False,
        )
        return self.link.carry_out(task).mask(task)

    def close(self) -> None:
        self.link.close(5.0)

    def _task_id(self) -> str:
        return f"{self.link.life}-{next(self._numbers)}"  # no other engine, and no later life of this one, has it


class Tried(TinyAdapter):
    """The adapter with its engine, as transferd.adapters.conformance asks for them."""

    blocks, block_bytes = BLOCKS, LAYERS * PAGE

    def __init__(self, trial: Trial) -> None:
        self.engine = TinyEngine(trial.model, private=trial.private)
        super().__init__(self.engine, trial.settings())

    def fill(self, block: int, content: bytes) -> None:
        self.engine.kv[:, block] = np.frombuffer(content, dtype=np.uint8).reshape(LAYERS, PAGE)

    def read(self, block: int) -> bytes:
        return self.engine.kv[:, block].tobytes()


def make(trial: Trial) -> Tried:
    return Tried(trial)


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        os.environ |= {"XDG_RUNTIME_DIR": directory, "XDG_CACHE_HOME": directory}
        engine = TinyEngine("tiny-1")
        adapter = TinyAdapter(engine, {"weights": "random"})  # starts a daemon, which ends with this process
        engine.kv[:, [3, 5]] = 42  # "compute" two blocks
        stored = adapter.store(["a", "b"], [3, 5])
        loaded = adapter.load(["b", "nobody's", "a"], [10, 11, 12])
        print(stored, adapter.exists(["a", "c"]), loaded, engine.kv[:, [10, 11, 12], 0].tolist())
        adapter.close()


if __name__ == "__main__":
    main()
