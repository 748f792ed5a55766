"""Story: one plan, lived through by a whole daemon and its engines.

begin       a daemon opens, engines connect
bad times   every deed of the plan at its moment, in the plan's weather
good times  liveness: the weather is calm, everything that was begun must end, the daemon must be idle
            without using the processor, and new work must go well
afterwards  in some plans the daemon is restarted or its cache cleared under engines that go on (succession.py)
end         engines leave, the daemon stops, and everything given out must have come back
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Awaitable, Callable

from tests.support.simulation.engine import Act, SimEngine
from tests.support.simulation.judge import Judge
from tests.support.simulation.loop import SimLoop, simulate
from tests.support.simulation.oracle import Oracle
from tests.support.simulation.plan import BLOCKS_OF_AN_ENGINE, BY_HOST, DIE_PAUSED, SPARSE_READ, Deed, Plan
from tests.support.simulation.succession import succeed
from tests.support.simulation.weather import CALM
from tests.support.simulation.world import SimWorld, small_config
from transferd.errors import ConnectTimeout, TransferError
from transferd.runtime.compat import TaskGroup, wait_for
from transferd.tasks import WriteStorageTask
from transferd.wire.protocol import STALE_SESSION, Match, encode_request

OPERATOR = b"operator-"  # begins the names of operators' connections
SLOWEST_S = 13.0  # of anything that was begun in bad times and is only slow
IDLE_S = 5.0
# Steps of the loop that an idle daemon and one client may take in a second: a heartbeat, its way there and
# back, and the reaper's look at who is silent.
IDLE_STEPS = 12


class Story:
    """One run of a plan on a loop. `seen`: how often what happened."""

    def __init__(self, loop: SimLoop, plan: Plan) -> None:
        self.loop = loop
        self.plan = plan
        server = {"max_queued_tasks": plan.max_queued_tasks, "lane_depth": plan.lane_depth}
        self.world = SimWorld(
            loop,
            small_config(plan.ranks, plan.staging, key_schema=plan.key_schema, wide=plan.wide, **server),
            capacity=plan.capacity,
        )
        self.judge = Judge(self.world)
        self.oracle = Oracle(self.world)
        self.engines: list[SimEngine] = []
        self.seen: Counter[str] = Counter()
        self.garbage = 0  # messages that were none
        self._events: dict[str, Callable[[SimEngine, Deed, random.Random], Awaitable[None]]] = {
            "vanish": self._vanish,
            "cut": self._cut,
            "look": self._look,
            "garbage": self._garbage,
            "set_generation": self._set_generation,
            "jump_wall": self._jump_wall,
            "stand_still": self._stand_still,
            "pause": self._pause,
            "drain": self._drain,
            DIE_PAUSED: self._die_paused,
        }

    async def run(self) -> Counter[str]:
        with self.world.log.installed() if self.plan.weather.log.refuse else contextlib.nullcontext():
            try:
                await self.begin()
                await self.bad_times()
                await self.good_times()
                if self.plan.after and not self.dead:
                    self.seen[self.plan.after] += 1
                    await succeed(self, self.plan.after)
                await self.end()
            except BaseException:  # the story is dropped as it stands; its clients would warn of that one by one
                for engine in self.engines:
                    for client in engine.clients:
                        await client.close()
                raise
        return self._all_seen()

    # --- the four parts -----------------------------------------------------------------------------

    async def begin(self) -> None:
        await self.world.open()
        for number in range(self.plan.engines):
            first = number * BLOCKS_OF_AN_ENGINE
            blocks = range(first, first + BLOCKS_OF_AN_ENGINE)
            line = number if self.plan.behind else None
            engine = SimEngine(self.world, f"engine-{number}", blocks, self.judge, apart=self.plan.apart, line=line)
            await engine.connect()
            self.engines.append(engine)

    async def bad_times(self) -> None:
        self.world.weather = self.plan.weather
        async with TaskGroup() as group:
            for deed in self.plan.deeds:
                group.create_task(self._do(deed), name=f"deed {deed.number}")

    async def good_times(self) -> None:
        """Faults stop. Everything that was begun must come to its end, and new work must go well."""
        self.world.weather = CALM
        daemon, client = self.world.daemon, self.engines[0].client
        if self.dead:  # not ready any more, so no client is sure to be connected
            await asyncio.sleep(SLOWEST_S)
        else:
            try:
                await wait_for(self._everybody_is_connected(), SLOWEST_S)
                await self._the_dead_are_given_up()
                await wait_for(client.drain(), SLOWEST_S)
            except TimeoutError:
                if not self.dead:  # memory that was just being made anew, in vain
                    raise
        assert daemon.default.dispatcher.empty, "faults have stopped, and yet something has not ended"
        await self._idle()
        if self.dead:
            return
        await client.resume()
        await client.set_generation("next")
        for engine in self.engines:
            await engine.client.resume()  # one that was asked for in bad times may have failed
            await engine.attach()
            await self.all_goes_well(engine, "calm")
        await self._pause_and_resume(self.engines[0])

    async def all_goes_well(self, engine: SimEngine, when: str) -> None:
        before = engine.errors.copy()
        for what in ("write", "read", SPARSE_READ, BY_HOST, "swap_out", "swap_in", "chain"):
            name = f"{when}-{engine.name}-{what}"
            await engine.act(what, Act(name, self.loop.stream(name), patient=True))
        assert engine.errors == before, f"{when}: {engine.errors - before}"

    async def _pause_and_resume(self, engine: SimEngine) -> None:
        """What is pushed during a pause starts with the resume, also when nothing else happens."""
        await engine.client.pause()
        act = Act("calm-paused", self.loop.stream("calm paused"), patient=True)
        working = self.loop.create_task(engine.act("write", act))
        await asyncio.sleep(1)
        assert not working.done(), "a task was started during a pause"
        await engine.client.resume()
        await wait_for(working, SLOWEST_S)

    async def end(self) -> None:
        for engine in self.engines:
            await engine.leave()
        await self.daemon_ends()

    async def daemon_ends(self) -> None:
        """It stops, and everything given out has come back."""
        rejects = Counter(self.world.daemon.server.statistics().rejects)
        del rejects[STALE_SESSION]  # these are echoes of good messages
        assert rejects.total() == self.garbage, f"{self.garbage} messages were none, refused: {rejects}"
        self.garbage = 0
        await self.world.close()
        self.oracle.stop()
        self.oracle.at_end()

    async def daemon_begins(self) -> None:
        """Another one, on what storage holds."""
        self.world.build(self.world.storage)
        self.world.weather = CALM
        self.oracle = Oracle(self.world)
        await self.world.open()

    # --- deeds --------------------------------------------------------------------------------------

    async def _do(self, deed: Deed) -> None:
        await asyncio.sleep(deed.at)
        engine, chance = self.engines[deed.engine], self.loop.stream(f"deed {deed.number}")
        event = self._events.get(deed.what)
        if event is None:
            await engine.act(deed.what, Act(f"{deed.what}-{deed.number}", chance))
            return
        self.seen[deed.what] += 1
        self.loop.note(f"event: {deed}")
        try:
            await event(engine, deed, chance)
        except (TransferError, TimeoutError) as error:  # it is storming: the client may be cut off, or closed
            self.loop.note(f"deed {deed.number}: {error!r}")

    async def _vanish(self, engine: SimEngine, deed: Deed, _: random.Random) -> None:
        for attempt in range(3):
            try:
                await engine.vanish(f"{deed.number}-{attempt}")
            except ConnectTimeout:  # everybody stood still meanwhile, or the daemon has lost a rank for good
                continue
            return
        stuck = any(device.stuck.held for device in self.world.devices)  # lost memory waits for such a copy's end
        assert self.dead or stuck, "nobody let the engine in again"

    async def _cut(self, engine: SimEngine, _: Deed, chance: random.Random) -> None:
        await engine.lose_connection(chance.choice([0.01, 0.5, 3.0, 8.0]))

    async def _look(self, engine: SimEngine, _: Deed, chance: random.Random) -> None:
        report = await engine.client.stats()
        assert report["queued"] <= self.plan.max_queued_tasks
        keys = chance.sample(engine.stored, min(4, len(engine.stored)))
        assert await engine.client.match([*keys, "nobody stored this"]) <= len(keys)
        there = await engine.client.exists(["nobody stored this", *keys])
        assert len(there) == 1 + len(keys)
        assert there[0] is False

    async def _garbage(self, _: SimEngine, deed: Deed, chance: random.Random) -> None:
        """Somebody sends what is no message."""
        vandal = self.world.network.client(f"vandal-{deed.number}")
        vandal.start(lambda _: None)
        whole = encode_request(1, WriteStorageTask(task_id="vandal", keys=["k"], gpu_block_ids=[0]))
        for _number in range(10):
            cut = whole[: chance.randrange(len(whole))]  # no prefix of a message is one
            noise = chance.randbytes(chance.randrange(64))
            odd = encode_request(2, Match(["k" * 9000]))  # a message, if one that no engine would send
            sent = chance.choice((cut, b"\x01" + noise, noise, odd))
            self.garbage += vandal.send(sent) and sent != odd
        await asyncio.sleep(1)
        vandal.close()

    async def _set_generation(self, engine: SimEngine, deed: Deed, _: random.Random) -> None:
        await engine.client.set_generation(f"generation-{deed.number}")

    async def _jump_wall(self, _: SimEngine, __: Deed, chance: random.Random) -> None:
        self.world.clock.jump_wall(chance.choice((-86_400.0, -1.0, 1.0, 3600.0)))

    async def _stand_still(self, _: SimEngine, __: Deed, chance: random.Random) -> None:
        self.world.stand_still(chance.choice((0.2, 2.0, 10.0)))

    async def _pause(self, engine: SimEngine, _: Deed, chance: random.Random) -> None:
        try:
            await wait_for(engine.client.pause(), chance.uniform(0, 5))
            await asyncio.sleep(chance.uniform(0, 1))
        finally:
            await engine.client.resume()

    async def _drain(self, engine: SimEngine, _: Deed, chance: random.Random) -> None:
        try:
            await wait_for(engine.client.drain(), chance.uniform(0, 5))
            dispatcher = self.world.daemon.default.dispatcher
            assert dispatcher.empty or dispatcher.gate.refusal is None
        finally:
            await engine.client.resume()

    async def _die_paused(self, _: SimEngine, deed: Deed, chance: random.Random) -> None:
        """An operator pauses or drains and is never heard of again: nobody resumes, and yet all goes on."""
        link = f"{OPERATOR.decode()}{deed.number}"
        operator = self.world.client(link)
        await operator.connect()  # closes it again if nobody answers
        try:
            hold = operator.pause if chance.random() < 0.5 else operator.drain
            await wait_for(hold(), chance.uniform(0, 2))
        finally:
            self.world.network.cut(link)  # not even its Bye arrives
            await operator.close()

    # --- helpers ------------------------------------------------------------------------------------

    @property
    def dead(self) -> bool:
        """Whether a rank, or lost memory that a stuck copy still holds, serves nobody until the daemon is restarted."""
        daemon = self.world.daemon
        return bool(daemon.default.barrier.dead) or "cannot be made again" in daemon.not_ready

    async def _everybody_is_connected(self) -> None:
        for engine in self.engines:
            while not all(client.connected for client in engine.clients):  # noqa: ASYNC110 - a client has no event to wait for
                await asyncio.sleep(0.1)

    async def _the_dead_are_given_up(self) -> None:
        """Operators that paused and died are silent; once the daemon has noticed, nothing is held by them."""
        if self.seen[DIE_PAUSED]:
            await asyncio.sleep(SLOWEST_S)
            held = self.world.daemon.default.dispatcher.gate.held  # an engine's, too, if its resume has failed
            assert not [one for one in held if one.client.startswith(OPERATOR)], "a pause has outlived its client"

    async def _idle(self) -> None:
        """Nothing is under way: nothing may be done."""
        before = self.loop.steps
        await asyncio.sleep(IDLE_S)
        per_client = IDLE_STEPS * (10 if self.dead else 1)  # a client asks more often whether a daemon became ready
        clients = sum(len(engine.clients) for engine in self.engines)
        steps, allowed = self.loop.steps - before, IDLE_S * per_client * (clients + 1)
        assert steps <= allowed, f"{steps} steps in {IDLE_S} idle seconds"

    def _all_seen(self) -> Counter[str]:
        seen = self.seen.copy()
        for engine in self.engines:
            seen += engine.outcomes + engine.errors
        seen.update(self.world.storage.dice.drawn)
        for device in self.world.devices:
            seen.update(device.dice.drawn)
        seen.update(self.world.effects.dice.drawn)
        seen.update(self.world.log.dice.drawn)
        network = self.world.network
        seen["lose"], seen["duplicate"], seen["not_taken"] = network.lost, network.duplicated, network.refused
        seen["late"] = self.world.daemon.default.barrier.statistics()["late"]
        seen["rejects"] = sum(self.world.daemon.server.statistics().rejects.values())
        return seen


def live(plan: Plan) -> Counter[str]:
    """Run a plan's story. Returns what happened in it; raises what it found, with the loop's story as a note."""

    async def main(loop: SimLoop) -> Counter[str]:
        return await Story(loop, plan).run()

    return simulate(main, plan.seed)
