"""No daemon serves an engine the KV of other weights, whoever died meanwhile. Real daemons, killed; bytes compared."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.own_memory import code, read, write
from tests.machine.hostile.half import Half
from tests.machine.hostile.test_lives import CACHE, SERVED_S, TREE, Engine
from tests.support.waits import stats_until, until, wait_until
from transferd import Client, GroupClient, Status
from transferd.client.launch import DaemonProcess, running, start
from transferd.errors import ConnectTimeout, RequestError
from transferd.runtime.compat import wait_for

pytestmark = pytest.mark.one_loop

OWN = TREE | {"cache": CACHE | {"ownership": "create"}}
TOKEN = "3" * 32


class Restarting:
    """A daemon that can be killed."""

    def __init__(self, tree: dict[str, Any], directory: Path) -> None:
        self.tree, self._directory = tree, directory
        self.process: DaemonProcess = start(tree, directory, wait=False)

    @property
    def endpoint(self) -> str:
        return self.process.endpoint

    async def killed(self, *clients: Client, **storage: str) -> None:
        """Kill and start it; wait until the clients have seen it."""
        before = [client.boot_id for client in clients]
        await asyncio.to_thread(self.process.kill)
        self.tree = self.tree | {"storage": self.tree["storage"] | storage}
        self.process = await asyncio.to_thread(start, self.tree, self._directory, wait=False)
        for client, boot in zip(clients, before, strict=True):
            await until(lambda client=client, boot=boot: client.boot_id != boot, within=SERVED_S)  # type: ignore[misc]


@contextlib.asynccontextmanager
async def restarting(tree: dict[str, Any], directory: Path) -> AsyncIterator[Restarting]:
    daemon = Restarting(tree, directory)
    try:
        yield daemon
    finally:
        daemon.process.stop()


@contextlib.asynccontextmanager
async def own(endpoint: str, **more: Any) -> AsyncIterator[Client]:
    async with Client(endpoint, connect_timeout=SERVED_S, **more) as client:
        client.on_new_boot = lambda: None
        await client.attach(0)
        yield client


async def stored(client: Client, key: str, status: Status = Status.OK) -> None:
    assert (await client.submit(write(f"w {key}", [key], [1]))).status is status


async def found(client: Client, key: str, task_id: str) -> list[int]:
    result = await client.submit(read(task_id, [key], [2]))
    assert result.status in (Status.OK, Status.MISS), result
    return list(result.block_ids)


async def test_the_engine_of_the_configuration_keeps_its_generation_over_a_killed_daemon(tmp_path: Path) -> None:
    async with restarting(OWN, tmp_path) as daemon, own(daemon.endpoint) as engine:
        await stored(engine, "old")
        await engine.set_generation("step 1")
        await stored(engine, "new")
        for number in range(2):
            await daemon.killed(engine)
            await engine.reattach(SERVED_S)
            assert engine.generation == "step 1"
            assert await found(engine, "old", f"old {number}") == []
            assert await found(engine, "new", f"new {number}") == [2]


async def test_a_trainer_that_is_gone_has_told_the_engine(tmp_path: Path) -> None:
    """By the command line, and the daemon is killed as soon as that has ended."""
    async with restarting(OWN, tmp_path) as daemon, own(daemon.endpoint) as engine:
        await stored(engine, "old")
        command = [sys.executable, "-m", "transferd", "generation", "set", "step 1", "--endpoint", daemon.endpoint]
        said = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=True)
        assert "step 1" in said.stdout
        await daemon.killed(engine)
        await engine.reattach(SERVED_S)
        assert await found(engine, "old", "r") == []
        assert engine.generation == "step 1"


async def test_a_registered_engine_says_its_generation_again(tmp_path: Path) -> None:
    async with restarting(TREE, tmp_path) as daemon:
        engine = Engine(daemon.endpoint, "e", 7)
        await engine.come()
        try:
            await engine.client.wait_ready(SERVED_S)
            async with Client(daemon.endpoint, engine="e", token=engine.client.token, await_ready=False) as half:
                half.on_new_boot = lambda: None
                await stored(half, "old")
                await half.set_generation("step 1")
                await daemon.killed(engine.client, half)
                await half.wait_ready(SERVED_S)
                assert await found(half, "old", "r") == []
                assert (await half.stats())["engines"]["e"]["generation"] == "step 1"
        finally:
            await engine.leave()


async def test_clients_that_contradict_each_other_are_served_only_what_they_have_served(tmp_path: Path) -> None:
    """An engine that came with the new daemon uses its generation; the one from before is refused until it is set."""
    async with restarting(OWN, tmp_path) as daemon, own(daemon.endpoint) as before:
        await stored(before, "old")
        await before.set_generation("step 1")
        await before.close()
        await daemon.killed()
        async with own(daemon.endpoint) as fresh:
            assert await found(fresh, "old", "fresh") == [2]
            with pytest.raises(ConnectTimeout, match="served the generation 'step 1'"):
                await before.wait_ready(SERVED_S) if await _opened(before) else None
            result = await before.submit(read("r", ["old"], [3]))
            assert (result.status, code(result)) == (Status.REJECTED, "not_attached")
            with pytest.raises(RequestError, match="step 1") as refused:
                await before.match(["old"])
            assert refused.value.reason == "generation_mismatch"
            await fresh.set_generation("step 1")
            await before.wait_ready(SERVED_S)
            await before.attach(0)
            assert await found(before, "old", "again") == []
        await before.close()


async def _opened(client: Client) -> bool:
    client._await_ready = False
    await client.connect()
    return True


async def test_another_configuration_is_no_licence_to_serve_it_to_a_running_engine(tmp_path: Path) -> None:
    async with restarting(OWN, tmp_path) as daemon, own(daemon.endpoint) as engine:
        await stored(engine, "old")
        await daemon.killed(engine, generation="other")
        with pytest.raises(ConnectTimeout, match="its configuration was ''"):
            await engine.wait_ready(SERVED_S)
        assert code(await engine.submit(write("w", ["k"], [1]))) in ("generation_mismatch", "not_attached")
        await engine.set_generation("other")
        await engine.reattach(SERVED_S)
        assert await found(engine, "old", "r") == []


async def test_a_set_generation_that_no_daemon_answered_holds_for_the_next_one(tmp_path: Path) -> None:
    async with restarting(OWN, tmp_path) as daemon, own(daemon.endpoint) as engine:
        await stored(engine, "old")
        daemon.process.signal(signal.SIGSTOP)
        with contextlib.suppress(Exception):
            await wait_for(engine.set_generation("step 1"), 0.2)
        await daemon.killed(engine)
        await engine.reattach(SERVED_S)
        await stats_until(engine, lambda report: report["generation"] == "step 1", within=SERVED_S)
        assert await found(engine, "old", "r") == []


async def test_an_engine_that_says_its_generation_is_not_served_another_one(tmp_path: Path) -> None:
    async with restarting(OWN, tmp_path) as daemon:
        async with own(daemon.endpoint) as engine:
            await stored(engine, "old")
        await daemon.killed()
        async with own(daemon.endpoint, generation="mine") as engine:
            assert await found(engine, "old", "r") == []
            assert engine.generation == "mine"


async def test_a_client_that_only_looks_decides_nothing(tmp_path: Path) -> None:
    async with restarting(OWN, tmp_path) as daemon, Client(daemon.endpoint, connect_timeout=SERVED_S) as watcher:
        async with own(daemon.endpoint) as engine:
            await engine.set_generation("step 1")
            await until(lambda: watcher.generation == "step 1")
        await daemon.killed(watcher, generation="other")
        await watcher.wait_ready(SERVED_S)
        assert watcher.generation == "other"


async def test_a_node_of_a_group_that_restarts_catches_up(tmp_path: Path) -> None:
    """C9: also if it was down while the generation was set."""

    def node(number: int) -> dict[str, Any]:
        return OWN | {"cache": OWN["cache"] | {"first_rank": number, "group_ranks": 2}}

    directories = [tmp_path / "0", tmp_path / "1"]
    for directory in directories:
        directory.mkdir()
    async with (
        restarting(node(0), directories[0]) as zero,
        restarting(node(1), directories[1]) as one,
        GroupClient([zero.endpoint, one.endpoint], connect_timeout=SERVED_S) as group,
    ):
        for client in group.clients:
            client.on_new_boot = lambda: None
            await client.attach(0)
        assert (await group.submit(write("w", ["old"], [1]))).status is Status.OK
        await group.set_generation("step 1")
        await one.killed(group.clients[1])
        await group.clients[1].reattach(SERVED_S)
        await group.wait_ready(SERVED_S)
        result = await group.submit(read("r1", ["old"], [2]))
        assert (result.status, code(result)) == (Status.MISS, None)
        one.process.signal(signal.SIGSTOP)
        with contextlib.suppress(Exception):
            await wait_for(group.set_generation("step 2"), 0.5)
        await one.killed(group.clients[1])
        await group.clients[1].reattach(SERVED_S)
        await stats_until(group.clients[1], lambda report: report["generation"] == "step 2", within=SERVED_S)
        assert (await group.submit(write("w2", ["new"], [1]))).status is Status.OK
        assert (await group.submit(read("r2", ["new"], [2]))).block_ids == [2]


class Halves:
    """A worker and a scheduler of one engine, which have stored a block, and their daemon, which can be killed."""

    def __init__(self, directory: Path, stack: contextlib.ExitStack) -> None:
        self._directory = directory
        self.daemon = start(TREE, directory, wait=False)
        stack.callback(lambda: self.daemon.stop())
        self.worker = stack.enter_context(Half(self.daemon.endpoint, "llama", 0, token=TOKEN))
        self.scheduler = stack.enter_context(Half(self.daemon.endpoint, "llama", None, token=TOKEN))
        both = self.worker, self.scheduler
        wait_until(lambda: all(half.ask("ready") for half in both), "both halves are ready", within=SERVED_S)
        self.painted = self.worker.ask("paint", 1, 5)
        assert self.scheduler.ask("save", "old", 1)[0] == "ok"
        self._boot = self.worker.ask("boot")

    def restart(self) -> None:
        """Another daemon, and both halves are served by it."""
        self.daemon = start(TREE, self._directory, wait=False)
        both = self.worker, self.scheduler
        served = lambda: all(half.ask("boot") not in ("", self._boot) for half in both)  # noqa: E731
        wait_until(served, "the new daemon serves both halves", within=SERVED_S)


@pytest.fixture
def halves(tmp_path: Path) -> Iterator[Halves]:
    with contextlib.ExitStack() as stack:
        yield Halves(tmp_path, stack)


def test_a_reset_of_vllms_cache_ends_the_old_blocks_for_good(halves: Halves) -> None:
    """C5: in both halves, and over a killed daemon."""
    scheduler = halves.scheduler
    assert scheduler.ask("reset")
    assert scheduler.ask("exists", "old") == [False]
    assert scheduler.ask("load", "old", 2)[0] == "miss"
    assert scheduler.ask("save", "new", 1)[0] == "ok"
    halves.daemon.kill()
    halves.restart()
    assert scheduler.ask("exists", "old", "new") == [False, True]
    assert scheduler.ask("load", "new", 3)[0] == "ok"
    assert halves.worker.ask("digest", 3) == halves.painted


def test_a_reset_without_a_daemon_is_refused_and_still_ends_the_old_blocks(halves: Halves) -> None:
    halves.daemon.kill()
    assert not halves.scheduler.ask("reset"), "vLLM's call fails, and may be repeated"
    halves.restart()
    gone = lambda: halves.scheduler.ask("exists", "old") == [False]  # noqa: E731
    wait_until(gone, "the new daemon serves the new generation", within=SERVED_S)
    assert halves.scheduler.ask("load", "old", 2)[0] == "miss"


# --- generations that a clear has closed ------------------------------------------------------------


@pytest.mark.parametrize("by", ["the engine", "a trainer that is gone", "a registered engine"])
async def test_what_a_clear_has_closed_no_later_daemon_opens(tmp_path: Path, by: str) -> None:
    """Two lives of the daemon later, an operator who mistakes the name is still refused, and the old bytes are gone."""
    registered = by == "a registered engine"
    async with restarting(TREE if registered else OWN, tmp_path) as daemon, contextlib.AsyncExitStack() as stack:
        name = "e" if registered else ""
        if registered:
            machine = Engine(daemon.endpoint, name, 7)
            await machine.come()
            stack.push_async_callback(machine.leave)
            engine = machine.client
            await engine.wait_ready(SERVED_S)
        else:
            engine = await stack.enter_async_context(own(daemon.endpoint))
        before = engine.generation
        await stored(engine, "old")
        for generation in ("step 1", "step 2"):
            if by == "a trainer that is gone":
                async with Client(daemon.endpoint) as trainer:
                    await trainer.clear_cache()
                    await trainer.restore_cache(generation)
            else:
                await engine.clear_cache()
                await engine.restore_cache(generation)
            await (engine.offer(0, machine.memory.handle()) if registered else engine.reattach(SERVED_S))
            await stored(engine, generation)
        for life in range(2):
            await daemon.killed(engine)
            await (engine.wait_ready(SERVED_S) if registered else engine.reattach(SERVED_S))
            async with Client(daemon.endpoint, engine=name, await_ready=False) as operator:
                for closed in (before, "step 1"):
                    with pytest.raises(RequestError) as refused:
                        await operator.set_generation(closed)
                    assert refused.value.reason == "closed_generation"
            assert await found(engine, "old", f"old {life}") == []
            assert await found(engine, "step 2", f"new {life}") == [2]


async def test_a_generation_that_was_reopened_is_open_for_later_daemons(tmp_path: Path) -> None:
    """The engine slept, and serves the same weights: it may also go there again after a restart."""
    async with restarting(OWN, tmp_path) as daemon, own(daemon.endpoint) as engine, own(daemon.endpoint) as other:
        await stored(engine, "old")
        for client in (engine, other):
            await client.clear_cache()
            await client.restore_cache("", same_weights=True)
            await asyncio.gather(engine.reattach(SERVED_S), other.reattach(SERVED_S))
        await engine.set_generation("step 1")
        await daemon.killed(engine, other)
        await asyncio.gather(engine.reattach(SERVED_S), other.reattach(SERVED_S))
        await other.set_generation("")
        assert await found(engine, "old", "r") == [2]


async def test_a_command_sets_a_registered_engines_generation(tmp_path: Path) -> None:
    with running(TREE, tmp_path) as daemon:
        engine = Engine(daemon.endpoint, "e", 7)
        await engine.come()
        try:
            command = [sys.executable, "-m", "transferd", "generation", "set", "s1", "--endpoint", daemon.endpoint]
            run = asyncio.to_thread
            done = await run(subprocess.run, [*command, "--engine", "e"], capture_output=True, text=True, check=True)
            assert done.stdout == "engine e serves generation 's1'\n"
            assert (await engine.client.stats())["engines"]["e"]["generation"] == "s1"
            wrong = await run(subprocess.run, [*command, "--engine", "f"], capture_output=True, text=True)
            assert (wrong.returncode, wrong.stdout) == (1, "")
            assert "no engine 'f' is registered" in wrong.stderr
        finally:
            await engine.leave()
