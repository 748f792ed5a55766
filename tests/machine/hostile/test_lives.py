"""Every engine is served again, whatever ended and began anew: the daemon, the engine, the cache; in any order."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.test_engines import LAYOUT, Memory, described
from tests.integration.own_memory import code, read, write
from tests.support.waits import stats_until, until
from transferd import Client, Status
from transferd.client.launch import DaemonProcess, start
from transferd.errors import TransferError
from transferd.observability.concerns import concerns, find
from transferd.observability.report import read as typed
from transferd.runtime.compat import Self, wait_for

pytestmark = pytest.mark.one_loop

TREE: dict[str, Any] = {"storage": {"backend": "file"}, "host": {"staging": "1MiB"}}
CACHE = LAYOUT | {"ranks": 1, "host_blocks": 0, "ownership": "attach", "device": "shm"}
SERVED_S = 60.0  # for a daemon on a busy machine to be noticed, and to map what clients offer again by themselves


class Engine:
    """An engine of one rank and one client, and what its program does. name: "" is the engine of [cache]."""

    def __init__(self, endpoint: str, name: str, value: int) -> None:
        self.endpoint, self.name, self.value = endpoint, name, value
        self.generations, self.gone = 0, ""
        self.memory = Memory(1)
        self.client = self._client()

    def _client(self) -> Client:
        client = Client(self.endpoint, engine=self.name, await_ready=False, connect_timeout=SERVED_S)
        client.on_new_boot = lambda: None
        return client

    async def come(self) -> None:
        await self.memory.__aenter__()
        await self.client.connect()
        if self.name:
            await surely(lambda: self.client.register(described()))
        await surely(lambda: self.client.offer(0, self.memory.handle()))

    async def leave(self) -> None:
        await self.client.close()
        await self.memory.__aexit__()

    async def restart(self) -> None:
        await self.leave()
        self.memory, self.client = Memory(1), self._client()
        await self.come()

    async def again(self) -> None:
        """Unregister and register, as an engine that changes its model."""
        if self.name:
            await surely(self.client.unregister, but="unknown_engine")
            await surely(lambda: self.client.register(described()))
            await surely(lambda: self.client.offer(0, self.memory.handle()))

    async def clear(self) -> None:
        self.generations += 1
        generation = f"{self.name}{self.generations}"

        async def cleared() -> None:
            await self.client.clear_cache()
            await self.client.restore_cache(generation)
            await self.client.offer(0, self.memory.handle())

        await surely(cleared)

    async def serves(self, what: str) -> None:
        await until(lambda: self.client.boot_id not in ("", self.gone), "sees the new daemon", within=SERVED_S)
        await self.client.wait_ready(SERVED_S)
        self.memory.paint(1, self.value)
        self.memory.paint(2, 0)
        key = f"{self.name} {what}"
        assert (await self.client.submit(write(f"w{what}", [key], [1]))).status is Status.OK
        assert (await self.client.submit(read(f"r{what}", [key], [2]))).block_ids == [2]
        assert self.memory.holds(2, self.value)


async def surely(act: Callable[[], Awaitable[object]], but: str = "") -> None:
    """An engine's own code repeats what it asked of a daemon that was restarted meanwhile."""

    async def go() -> None:
        while True:
            try:
                await act()
            except TransferError as error:
                if error.reason == but:
                    return
                await asyncio.sleep(0.05)
            else:
                return

    await wait_for(go(), 3 * SERVED_S)


class World:
    """A daemon and its engines."""

    def __init__(self, directory: Path, engines: int, own: bool) -> None:
        self._tree, self._directory = TREE | ({"cache": CACHE} if own else {}), directory
        self.daemon = start(self._tree, directory, wait=False)
        names = ([""] if own else []) + [f"e{number}" for number in range(engines)]
        self.engines = [Engine(self.daemon.endpoint, name, 7 + i) for i, name in enumerate(names)]

    async def kill(self) -> None:
        for engine in self.engines:
            engine.gone = engine.client.boot_id or engine.gone
        await asyncio.to_thread(self.daemon.kill)
        self.daemon = await asyncio.to_thread(start, self._tree, self._directory, wait=False)

    async def __aenter__(self) -> Self:
        for engine in self.engines:
            await engine.come()
        return self

    async def __aexit__(self, *_: object) -> None:
        for engine in self.engines:
            with contextlib.suppress(TransferError):
                await engine.leave()
        self.daemon.stop()


@pytest.mark.parametrize("own", [False, True], ids=["registered", "of the configuration too"])
@pytest.mark.parametrize(
    "before", [["restart"], ["clear"], ["again"], ["restart", "clear"], ["clear", "restart"], ["again", "clear"]]
)
async def test_a_killed_daemon_serves_engines_in_any_of_their_lives(
    tmp_path: Path, before: list[str], own: bool
) -> None:
    async with World(tmp_path, 2, own) as world:
        for what in before:
            await getattr(world.engines[-1], what)()
        if own:
            await world.engines[0].clear()
        await world.kill()
        await asyncio.gather(*(engine.serves("one") for engine in world.engines))
        await world.kill()
        await asyncio.gather(*(engine.serves("two") for engine in world.engines))


@pytest.mark.parametrize("seed", range(5))
async def test_in_any_order_and_number_everyone_is_served_again(tmp_path: Path, seed: int) -> None:
    print(f"seed {seed}")
    dice = random.Random(seed)
    async with World(tmp_path, engines=1 + seed, own=bool(seed % 2)) as world:
        done: list[str] = []
        for _ in range(6):
            what = dice.choice(["kill", "restart", "again", "clear", "clear", "serves"])
            engine = dice.choice(world.engines)
            done.append(f"{what} {engine.name}")
            if what == "kill":
                await world.kill()
            elif what == "serves":
                await engine.serves(f"{len(done)}")
            else:
                await getattr(engine, what)()
        print(done)
        await asyncio.gather(*(engine.serves("last") for engine in world.engines))
        for engine in world.engines:
            for other in world.engines:
                if other is not engine and other.name and engine.name:
                    engine.memory.paint(3, 0)
                    result = await engine.client.submit(read(f"x{other.name}", [f"{other.name} last"], [3]))
                    assert result.block_ids == [] or engine.memory.holds(3, other.value)


async def test_what_a_client_turns_away_itself_is_seen_at_the_daemon(tmp_path: Path) -> None:
    tree = TREE | {"cache": CACHE | {"ownership": "create"}}
    daemon = start(tree, tmp_path)
    try:
        async with Client(daemon.endpoint) as engine:
            await engine.attach(0)
            before = engine.boot_id
            daemon.kill()
            daemon = start(tree, tmp_path)
            await until(lambda: engine.connected and engine.boot_id != before, "the client sees the new daemon")
            assert {code(await engine.submit(write(f"w{n}", ["k"], [0]))) for n in range(20)} == {"not_attached"}
            await stats_until(engine, lambda report: report["rejects"].get("not_attached") == 20)
            report = await engine.stats()
            assert report["server"]["turned_away"] == {"not_attached": 20}
            assert report["engines"]["default"]["unattached_s"] >= 0
            (said,) = [text for text in concerns(typed(report)) if "not_attached" in text]
            assert "rank 0" in said
            await until(lambda: "client turned tasks away" in daemon.log, "it is logged")
            assert daemon.log.count("client turned tasks away") < 5
            await engine.reattach()
            assert (await engine.submit(write("good", ["k"], [0]))).status is Status.OK
            report = await engine.stats()
            assert report["engines"]["default"]["unattached_s"] is None
            assert report["rejects"]["not_attached"] == 20, "they are counted once"
    finally:
        daemon.stop()


async def test_tasks_with_a_bad_id_are_no_missing_memory(tmp_path: Path) -> None:
    daemon = start(TREE | {"cache": CACHE | {"ownership": "create"}}, tmp_path)
    try:
        async with Client(daemon.endpoint) as engine:
            await engine.attach(0)
            for number in range(2):
                assert code(await engine.submit(write(f"w{number}", ["k"], [999]))) == "id_out_of_range"
            await engine.detach(0)
            assert not [text for text in concerns(typed(await engine.stats())) if "attached" in text]
    finally:
        daemon.stop()


async def test_an_engine_without_memory_is_a_concern(tmp_path: Path) -> None:
    daemon: DaemonProcess = start(TREE, tmp_path, wait=False)
    try:
        async with Client(daemon.endpoint, engine="e", await_ready=False, connect_timeout=SERVED_S) as engine:
            await engine.register(described())
            report = await engine.stats()
            assert report["engines"]["e"]["unattached_s"] >= 0
            (said,) = [text for text in concerns(typed(report)) if "'e'" in text]
            assert "no engine has offered the memory of rank 0" in said
            report["engines"]["e"]["unattached_s"] = 60.0  # as it says after a minute
            (said,) = [trouble.text for trouble in find(typed(report)) if "'e'" in trouble.text]
            assert "the memory of rank 0 is not attached, since 1 min" in said
    finally:
        daemon.stop()
