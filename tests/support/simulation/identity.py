"""A story of who is who, and of who computed which bytes.

Engines of one name, with other weights and generations, halves that do not belong, memory of
others, memory that vanishes, and a daemon that dies, is cleared, or is suspended until its clients have given it up.

    python -m tests.support.simulation.identity --seeds 2000

Every block's bytes follow from who computed them (replica.py). Whatever happens: a claimed block holds what its reader
would have computed; no block is written to without an unsettled task that names it; nobody acts for an engine that it
does not belong to; and at the end every engine that is there is served again, without any code of its own.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from contextvars import copy_context

from tests.support.simulation.campaign import command
from tests.support.simulation.clock import SimClock
from tests.support.simulation.faults import Latency, NetworkFaults, StorageFaults, ThreadFaults
from tests.support.simulation.loop import PROCESS, SimLoop, simulate
from tests.support.simulation.memory import MemoryWatch
from tests.support.simulation.network import SimNetwork
from tests.support.simulation.replica import OFFERING, Replica
from tests.support.simulation.storage import SimStorage
from tests.support.simulation.threads import SimThreads
from tests.support.simulation.world import daemon_of_engines
from transferd.errors import TransferError
from transferd.tasks import ReadStorageTask, WriteStorageTask

EVENTS = ("restart", "restart", "suspend", "suspend", "clear", "generation", "succeed", "vanish", "impostor", "thief")
NAMES = ("llama", "qwen")
WEIGHTS = ("w1", "w2")
MOST_REPLICAS = 5
# Longer than a client waits for a silent daemon, half of the time.
SUSPENDED_S = (1.0, 3.0, 6.0, 9.0)


class Story:
    """One seed. seen: how often what happened."""

    def __init__(self, loop: SimLoop) -> None:
        self.loop, self.clock = loop, SimClock(loop)
        self.chance = loop.stream("story")
        self.watch = MemoryWatch()
        self.network = SimNetwork(rng=loop.stream("network"), faults=NetworkFaults(Latency(0.0001, 0.01)))
        self.storage = SimStorage(rng=loop.stream("storage"), watch=self.watch)
        self.storage.faults = StorageFaults(latency=Latency(0.001, 0.05))
        self.seen: Counter[str] = Counter()
        self.replicas: list[Replica] = []
        self._numbers = 0
        self._lives = 0

    # --- the daemon ---------------------------------------------------------------------------------

    @property
    def process(self) -> str:
        return f"daemon {self._lives}"

    async def begin_daemon(self) -> None:
        """A daemon in a process of its own, which can be suspended."""
        self._lives += 1
        context = copy_context()
        context.run(PROCESS.set, self.process)
        await context.run(self.loop.create_task, self._open_daemon())

    async def _open_daemon(self) -> None:
        threads = SimThreads(
            rng=self.loop.stream(f"threads {self._lives}"), faults=ThreadFaults(latency=Latency(0.0, 0.01))
        )
        self.daemon = daemon_of_engines(OFFERING, self.network, threads, self.storage, self.clock)
        await self.daemon.open()

    async def end_daemon(self) -> None:
        end = self.loop.time() + 30
        hanging = await self.daemon.stop(lambda: max(0.0, end - self.loop.time()))
        assert not hanging, hanging

    # --- what happens -------------------------------------------------------------------------------

    async def run(self) -> Counter[str]:
        await self.begin_daemon()
        for _ in range(self.chance.randint(1, MOST_REPLICAS)):
            await self._new_replica()
        working = [self.loop.create_task(self._works(replica)) for replica in self.replicas]
        for _ in range(self.chance.randint(2, 6)):
            await asyncio.sleep(self.chance.uniform(0.05, 2.0))
            event = self.chance.choice(EVENTS)
            self.seen[event] += 1
            await getattr(self, f"_{event}")()
        await asyncio.gather(*working)
        await asyncio.sleep(15)  # the dead are given up, and everybody has heard of the newest daemon
        for replica in self.replicas:
            if any(self._took_the_name(other, replica) for other in self.replicas):
                await self._stays_out(replica)
            else:
                await replica.all_goes_well()
        for replica in self.replicas:
            await replica.leave("word")
        await asyncio.sleep(10)
        await self.daemon.engines.settled()
        assert self.daemon.stats()["engines"] == {}
        await self.end_daemon()
        assert self.watch.conflicts == [], self.watch.conflicts
        return self.seen

    async def _new_replica(self, name: str = "", weights: str = "") -> Replica | None:
        """Another engine, perhaps under a name that is taken: then it must stay out."""
        self._numbers += 1
        chance = self.chance
        replica = Replica(
            self,
            name or chance.choice((*NAMES, f"own {self._numbers}".replace(" ", "-"))),
            f"r{self._numbers}",
            weights or chance.choice(WEIGHTS),
            ranks=chance.randint(1, 2),
            generation=chance.choice(("", "g1")),
        )
        if await replica.join(patience=chance.choice((0.0, 12.0))):
            self.replicas.append(replica)
            return replica
        self.seen["stays out"] += 1
        await self._refused(replica)
        await replica.leave("bye")
        return None

    def _took_the_name(self, other: Replica, replica: Replica) -> bool:
        """Whether another engine of this name registered first with a restarted daemon. Then that one has the name."""
        there = self.daemon.engines.get(replica.name)
        return other is not replica and there is not None and bool(other.token) and there.token == other.token

    async def _stays_out(self, replica: Replica) -> None:
        """It does not use the daemon, and its error says why."""
        self.seen["name taken"] += 1
        why = ""
        try:
            await replica.scheduler.wait_ready(1)
        except TransferError as error:
            why = str(error)
        assert "is another one" in why, f"{replica.link}, and another engine has its name: {why or 'ready'}"
        replica.check_own("by an engine of its name")

    async def _works(self, replica: Replica) -> None:
        await replica.work(replica.chance.randint(4, 12), "work")

    async def _restart(self) -> None:
        """kill -9 and a start, sooner or later."""
        self.network.crash()
        await self.end_daemon()
        await asyncio.sleep(self.chance.choice((0.0, 0.5, 7.0)))
        await self.begin_daemon()

    async def _suspend(self) -> None:
        process = self.process
        self.loop.suspend(process)
        await asyncio.sleep(self.chance.choice(SUSPENDED_S))
        self.loop.resume(process)

    async def _clear(self) -> None:
        """An engine clears and restores its cache, under a generation of its own; perhaps twice."""
        replica = self._any()
        if replica is None:
            return
        for _ in range(self.chance.randint(1, 2)):
            self._numbers += 1
            async with replica.changing():
                try:
                    await replica.worker.clear_cache()
                    await asyncio.sleep(self.chance.choice((0.0, 1.0)))
                    await replica.worker.restore_cache(f"cleared {self._numbers}")
                    replica.generation = f"cleared {self._numbers}"
                    await replica.offer()
                except TransferError as error:
                    self.note_failed(error)

    async def _generation(self) -> None:
        """New weights, in place: nothing of the old ones may be loaded from now on, whatever restarts."""
        replica = self._any()
        if replica is None:
            return
        self._numbers += 1
        async with replica.changing():
            try:
                await replica.scheduler.set_generation(f"step {self._numbers}")
            except TransferError as error:
                self.note_failed(error)
            else:
                replica.generation = f"step {self._numbers}"

    async def _succeed(self) -> None:
        """A rolling restart under a fixed name: the successor begins while the old one may still be there."""
        old = self._any()
        if old is None or self.chance.random() < 0.5:
            await self._new_replica(old.name if old else "")
            return
        how = self.chance.choice(("word", "bye", "death"))
        async with old.changing():
            old.over = True
            self.replicas.remove(old)
            await old.leave(how)
        new = await self._new_replica(old.name, self.chance.choice(WEIGHTS))
        if new is not None:
            await new.work(3, "succeeds")

    async def _vanish(self) -> None:
        """An engine's memory is truncated under the daemon, and the engine offers other memory."""
        replica = self._any()
        if replica is None:
            return
        for memory in replica.memories:
            memory.gone = True
        await asyncio.sleep(self.chance.uniform(0, 1))
        async with replica.changing():
            try:
                await replica.offer()
            except TransferError as error:  # the daemon has not noticed yet that the old memory is gone
                self.note_failed(error)
                await self._begin_again(replica)

    async def _begin_again(self, replica: Replica) -> None:
        """An engine registers anew, as often as it takes while the daemon is away, starts, or is suspended."""
        for _ in range(60):
            try:
                await replica.worker.unregister()
            except TransferError as error:
                self.note_failed(error)
            try:
                replica.token = await replica.worker.register(replica.engine)
                await replica.offer()
                await replica.new_scheduler()
            except TransferError as error:
                self.note_failed(error)
                await asyncio.sleep(0.5)
            else:
                return
        raise AssertionError(f"{replica.link} cannot begin again")

    async def _impostor(self) -> None:
        replica = self._any()
        if replica is not None:
            await self._refused(replica)

    async def _thief(self) -> None:
        """An engine offers memory that is another one's."""
        victim = self._any()
        if victim is None:
            return
        self._numbers += 1
        thief = Replica(self, f"thief-{self._numbers}", f"t{self._numbers}", "w1", ranks=victim.ranks)
        await thief.worker.connect()
        try:
            await thief.worker.register(thief.engine)
            handle = victim.memories[0].handle
            await thief.worker.offer(0, {"kind": handle.kind, "data": handle.data})
        except TransferError as error:
            self.seen[f"thief {error.reason}"] += 1
        else:
            mapped = self._mapped_by_others(victim, thief.name)
            assert not mapped, f"{thief.link} has got the memory of {victim.link}"
        await thief.leave("word")

    def _mapped_by_others(self, victim: Replica, thief: str) -> bool:
        there = self.daemon.engines.get(victim.name)
        return there is not None and not there.cache.missing and self.daemon.engines.get(thief) is not None

    async def _refused(self, replica: Replica) -> None:
        """A half that does not belong: without the token, or with that of another life."""
        for token in ("", "0" * 32):
            client = replica._client("impostor", token)
            await client.connect()
            try:
                await client.wait_ready(0.5)
            except TransferError:
                pass
            else:
                raise AssertionError(f"a half that does not belong to {replica.name} is ready")
            block = self.chance.randrange(12)
            tasks = (
                ReadStorageTask(task_id=f"i{block}", keys=["1-1"], gpu_block_ids=[block], timeout=5.0),
                WriteStorageTask(task_id=f"j{block}", keys=["1-2"], gpu_block_ids=[block], timeout=5.0),
            )
            for task in tasks:
                result = await client.submit(task)
                assert not result.block_ids, f"a half that does not belong to {replica.name} moved blocks: {result}"
                assert not result.ranks, f"a half that does not belong to {replica.name} ran a task: {result}"
                self.seen[f"impostor {result.error.code if result.error else result.status}"] += 1
            await client.close()

    def _any(self) -> Replica | None:
        return self.chance.choice(self.replicas) if self.replicas else None

    def note_failed(self, error: Exception) -> None:
        reason = getattr(error, "reason", type(error).__name__)
        self.seen[f"failed {reason}"] += 1
        self.loop.note(f"failed: {error}")


def live(seed: int) -> Counter[str]:
    """Live one seed. Raises what it finds."""
    return simulate(lambda loop: Story(loop).run(), seed)


if __name__ == "__main__":
    sys.exit(command("tests.support.simulation.identity", __doc__, live))
