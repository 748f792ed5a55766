"""The background scrub, on real files in virtual time."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from tests.storage.harness import file_config
from tests.storage.sealed_files import flip, name, sealed
from tests.support.blobs import get, put
from tests.support.simulation.clock import SimClock
from tests.support.simulation.loop import SimLoop, simulate
from tests.support.simulation.threads import SimThreads
from transferd.blocks.formats import FOOTER_BYTES
from transferd.config import Size, StorageSection, from_tree
from transferd.errors import ConfigError
from transferd.runtime.threads import Direction
from transferd.storage.base import STORED, Blob, Found
from transferd.storage.file import FileStorage
from transferd.storage.paths import path_of
from transferd.storage.registry import create_storages
from transferd.storage.scrub import PATIENCE_S, REST_S

RATE = 100_000


def config(path: Path, rate: int = RATE) -> StorageSection:
    return StorageSection(scrub_rate=Size(rate), file=file_config(path, 1024**3))


class Store:
    """A file storage in a simulation, and what a test needs to know of it."""

    def __init__(self, loop: SimLoop, path: Path, rate: int = RATE) -> None:
        self.loop = loop
        self.root = path
        self.threads = SimThreads(rng=loop.stream("threads"))
        section = file_config(path, 1024**3)
        self.storage = FileStorage(section, scrub_rate=rate, clock=SimClock(loop), threads=self.threads)

    async def fill(self, *numbers: int, payload_bytes: int = 1000) -> None:
        blobs = [Blob(name(i), memoryview(bytearray(sealed(i, payload_bytes)))) for i in numbers]
        assert await put(self.storage, blobs) == [STORED] * len(blobs)

    def file(self, number: int) -> Path:
        return self.root / "objects" / path_of(name(number))

    @property
    def scrubbed(self) -> dict[str, int]:
        counts: dict[str, int] = self.storage.statistics()["scrub"]
        return counts


def run(path: Path, program: Callable[[Store], Coroutine[Any, Any, None]], rate: int = RATE) -> None:
    async def main(loop: SimLoop) -> None:
        store = Store(loop, path, rate)
        await store.storage.open()
        await program(store)
        await store.storage.close()

    simulate(main, 0)


async def passes(store: Store, count: int) -> None:
    """Let so many passes end."""
    loop = store.loop
    limit = loop.time() + 3600
    while store.scrubbed["passes"] < count:
        assert loop.time() < limit
        await asyncio.sleep(1.0)


def test_damage_is_found_before_a_read_finds_it_and_a_put_heals_it(tmp_path: Path) -> None:
    async def program(store: Store) -> None:
        await store.fill(*range(20))
        flip(store.file(3), 500)
        flip(store.file(5), 1000 + 40)
        os.truncate(store.file(7), 900)
        store.file(9).write_bytes(sealed(10))
        before = store.scrubbed["passes"]
        await passes(store, before + 2)
        assert store.storage.statistics()["corrupt"] == 4
        assert store.scrubbed["damaged"] == 4
        assert store.scrubbed["errors"] == store.scrubbed["unsealed"] == 0
        bad = {3, 5, 7, 9}
        assert await store.storage.exists([name(i) for i in range(20)]) == [i not in bad for i in range(20)]
        assert len(list((store.root / "quarantine").iterdir())) == 4
        await store.fill(*bad)
        await passes(store, before + 4)
        assert store.scrubbed["damaged"] == 4

    run(tmp_path, program)


def test_a_scrub_never_reads_faster_than_its_rate_and_does_not_catch_up(tmp_path: Path) -> None:
    async def program(store: Store) -> None:
        await passes(store, 1)  # of the empty store
        await store.fill(*range(30), payload_bytes=20_000)
        nbytes = 30 * (20_000 + FOOTER_BYTES)
        await asyncio.sleep(REST_S)
        began, read = store.loop.time(), store.scrubbed["bytes"]
        while store.scrubbed["bytes"] < read + nbytes / 2:
            await asyncio.sleep(0.01)
            allowed = RATE * (store.loop.time() - began + PATIENCE_S) + 20_000
            assert store.scrubbed["bytes"] - read <= allowed
        assert store.loop.time() - began >= nbytes / 2 / RATE - 1

    run(tmp_path, program)


def test_with_a_rate_of_zero_there_is_no_task_and_no_timer(tmp_path: Path) -> None:
    async def program(store: Store) -> None:
        await store.fill(1)
        await asyncio.sleep(10)  # the store has looked at its disk once more, and written the order of use
        steps = store.loop.steps
        assert [task.get_name() for task in store.loop.pending()] == ["main-1"]
        await asyncio.sleep(1000)
        assert store.loop.steps - steps < 5
        assert store.scrubbed == dict.fromkeys(store.scrubbed, 0)

    run(tmp_path, program, rate=0)


def test_an_empty_store_is_looked_at_once_a_minute(tmp_path: Path) -> None:
    async def program(store: Store) -> None:
        steps = store.loop.steps
        await asyncio.sleep(10 * REST_S)
        assert 9 <= store.scrubbed["passes"] <= 11
        assert store.loop.steps - steps < 300

    run(tmp_path, program)


def test_a_scrub_yields_to_traffic_for_a_bounded_time(tmp_path: Path) -> None:
    async def program(store: Store) -> None:
        await passes(store, 1)
        await store.fill(*range(5))
        with store.storage._traffic:
            await asyncio.sleep(2 * REST_S)
        # Every step waits for its patience: a footer, a payload, what was found; one directory at the end.
        assert store.scrubbed["objects"] >= 5
        read = store.scrubbed["objects"]
        with store.storage._traffic:
            store.storage._scrub.set_rate(0)
            await asyncio.sleep(REST_S)
            store.storage._scrub.set_rate(RATE)
            await asyncio.sleep(PATIENCE_S * 0.9)
            assert store.scrubbed["objects"] == read

    run(tmp_path, program)


def test_a_reload_switches_it_on_and_off(tmp_path: Path) -> None:
    async def program(store: Store) -> None:
        await store.fill(*range(5))
        store.storage.reconfigure(config(tmp_path))
        await passes(store, 1)
        store.storage.reconfigure(config(tmp_path, 0))
        await asyncio.sleep(1)
        read = store.scrubbed["bytes"]
        await asyncio.sleep(10)  # a report has had the disk looked at
        assert [task.get_name() for task in store.loop.pending()] == ["main-1"]
        store.storage.reconfigure(config(tmp_path))
        store.storage.reconfigure(config(tmp_path, 0))
        store.storage.reconfigure(config(tmp_path))
        await passes(store, 2)
        assert store.scrubbed["bytes"] > read

    run(tmp_path, program, rate=0)


def test_a_close_waits_for_the_piece_that_is_being_read(tmp_path: Path) -> None:
    async def main(loop: SimLoop) -> None:
        store = Store(loop, tmp_path)
        await store.storage.open()
        await store.fill(1)
        store.threads.gates[Direction.OUT].hold()
        await asyncio.sleep(2 * REST_S)
        closing = loop.create_task(store.storage.close())
        await asyncio.sleep(5)
        assert not closing.done()
        store.threads.gates[Direction.OUT].release()
        await closing

    simulate(main, 0)


def test_an_unsealed_object_is_counted_and_left_alone(tmp_path: Path) -> None:
    async def program(store: Store) -> None:
        await put(store.storage, [Blob("someone/elses/object", memoryview(b"raw bytes"))])
        await passes(store, 2)
        assert store.scrubbed["unsealed"] >= 1
        assert store.scrubbed["damaged"] == 0
        assert await store.storage.exists(["someone/elses/object"]) == [True]

    run(tmp_path, program)


def test_a_scrub_needs_a_backend_that_can_list_its_objects() -> None:
    with pytest.raises(ConfigError, match=r"storage.scrub_rate: requires a backend that can list its objects.*memory"):
        create_storages(from_tree({"storage": {"backend": "memory", "scrub_rate": "1MiB"}}))


def test_a_directory_that_cannot_be_read_is_counted_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def program(store: Store) -> None:
        await store.fill(1)

        def broken(_path: str) -> Any:
            raise PermissionError("no")

        with monkeypatch.context() as patch:
            patch.setattr(os, "scandir", broken)
            await asyncio.sleep(2.5 * REST_S)
        assert store.scrubbed["errors"] >= 2
        await passes(store, store.scrubbed["passes"] + 1)
        assert (await get(store.storage, [Blob(name(1), memoryview(bytearray(1128)))]))[0].found is Found.FOUND

    run(tmp_path, program)
