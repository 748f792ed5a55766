"""Storage in a Mooncake Store pool: objects on every machine of the pool, written and read without a copy.

Theory of operation
-------------------
The library blocks, cannot be interrupted, and uses the buffers of a call until the call returns. `put` and `get` are
answered as soon as we know that the call hangs because of the master, `get` also because of a node (`LeftRunning`);
their `Outcomes` say when the buffers are free. A put that was left counts as failed, whatever becomes of it. Otherwise
the worker makes sure that a task is answered in time: it stops waiting and leaves the buffers leased. The breaker opens
if a call reports that the master does not answer, or if a call is overdue. Then the next calls fail at once, and so do
those that wait for a thread or are overdue. We do not use `health_check`: it answers "healthy" with the master dead.

**One data call at a time**, made of all that has arrived meanwhile (native_calls.py), and its lookup in that thread.

**A put counts only after a lookup.** The library also answers 0 for a key that another client is writing at
this moment, or never finished writing; it then transfers nothing, and a get finds nothing. So the backend looks up
the keys of every put. It keeps looking for a missing one for a second, in case another writer needs that time,
and then overwrites whatever is there. The lookup has a welcome side effect: it leases the new object. So a pool
under pressure evicts older objects first, and a decode node that reads right after a prefill node has stored
finds the object.

**A node that does not answer** is left to peers.py: calls to it end, and further ones fail at once with its name.
Loads are made by holder (loads.py), so that they wait for no other node.

**Memory of a transfer that never ended.** If a peer hangs, the transport's own timers or peers.py fail its transfers,
and the returned code means that the buffer is free. Only a call that ran into the library's limit of 60 s may leave
transfers queued. The backend holds their buffers until every queued transfer must have ended (`longest_transfer`); the
task was answered long before, and no other load joins its loads.

**A full pool** evicts in the background and answers "no room" meanwhile, so a put is tried again for up to a second.
With each refusal the master evicts a twentieth of its objects, the oldest first and whatever their size. So where
the oldest ones are small, one large object may need twenty rounds.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

import msgspec
import structlog

from transferd.blocks.layout import BlockLayout, build_layout
from transferd.config import Config, MooncakeStorageSection, Size
from transferd.errors import StillRunning, StorageError, StorageUnavailable, TransferError
from transferd.runtime.aio import Background, answered, uncancelled
from transferd.runtime.clock import SYSTEM_CLOCK, Clock
from transferd.runtime.compat import Self
from transferd.storage.base import FOUND, MISSING, STORED, Blob, Found, Index, Outcome, Outcomes, PoolNode, SlotStorage
from transferd.storage.breaker import BreakerState, CircuitBreaker
from transferd.storage.mooncake import error_codes
from transferd.storage.mooncake.client import (
    Batch,
    PoolClient,
    buffer_of,
    first_of_each,
    key_of,
    longest_transfer,
    part_of,
)
from transferd.storage.mooncake.copies import Copies
from transferd.storage.mooncake.fullness import Looks, PoolState, failed, not_stored, read_state
from transferd.storage.mooncake.handshake import ask
from transferd.storage.mooncake.join import SetUp, join
from transferd.storage.mooncake.layout_records import LayoutRecords
from transferd.storage.mooncake.loads import Loads
from transferd.storage.mooncake.native_calls import MOST_BYTES, CallKind, LeftRunning, Merger, NativeCalls
from transferd.storage.mooncake.peers import Asker, Call, Peers
from transferd.storage.selection import Selection, check_shared
from transferd.storage.suspects import Suspects
from transferd.tasks import CopiesMade
from transferd.tiers.base import HostMemory
from transferd.wire.answers import Purged

log = structlog.get_logger(__name__)

T = TypeVar("T")
Code = TypeVar("Code", bound=int | str)

CLOSE_TIMEOUT_S = 5.0  # how long `close` waits for running calls
LIBRARY_GIVES_UP_S = 60.0  # hard-coded in the library: a call this long may leave transfers behind
HEARTBEAT_S = 10.0  # how long a pool that has died may go unnoticed while no task needs it
PROBE_KEY = "transferd/probe"
# The first is longer than the master's own; each is drawn from its half upward, so that the nodes of a pool come apart.
ROOM_PAUSES_S = (0.012, 0.018, 0.027, 0.04, *(0.05,) * 16)
CONTEST_PAUSES_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.4)  # gives another writer a second

_COUNTED_AS = {Found.FOUND: "hits", Found.MISSING: "misses", Found.FAILED: "errors"}
_COUNTS = ("hits", "misses", "wrong_length", "corrupt", "errors", "waited_for_room", "contested", "taken_over", "held",
           "under_replicated", "batches_merged")  # fmt: skip


class MooncakeStorage(SlotStorage, PoolNode, Index):
    """A client of one pool, for all ranks of this daemon. Owns the client and its threads from `open` to `close`.

    layout: the layout of `model`'s blocks, to record in the pool and compare with others; None to record nothing.
    set_up: creates a connected client, and blocks meanwhile.
    asker: probes another node. Tests pass `set_up` and `asker` from a simulated pool.
    """

    backend = "mooncake"
    packages = ("mooncake",)
    chunk_bytes = MOST_BYTES
    shared = True
    tries = 2  # a damaged object is read once more

    def __init__(
        self,
        section: MooncakeStorageSection,
        *,
        model: str = "",
        layout: BlockLayout | None = None,
        clock: Clock = SYSTEM_CLOCK,
        set_up: SetUp = PoolClient,
        asker: Asker = ask,
    ) -> None:
        if section.lender:  # that process lends it
            section = msgspec.structs.replace(section, global_segment_size=Size(0))
        self._section = section
        self._clock = clock
        self._set_up = set_up
        self._client: PoolClient | None = None
        self._calls = NativeCalls(section.timeout)
        self._breaker = CircuitBreaker("mooncake", self._probe, self._section.probe_interval, self._leave_stuck)
        self._stuck: set[Call] = set()  # calls that wait for a thread, or are overdue
        self._registered: dict[int, HostMemory] = {}  # by address
        self._lent = 1  # segments that are lent, or being lent
        self._lending = Background(awaited=False)
        self._counts: Counter[str] = Counter()
        self._suspects = Suspects(clock.monotonic)
        self._peers = Peers(clock, lambda work: self._calls.call(CallKind.LOOK, work), asker)
        self._puts = Merger(self._put_together, self._counts)
        native = functools.partial(self._native, CallKind.LOAD)
        self._loads = Loads(native, self._peers, self._counts)
        self._copies = Copies(section, self._copying_call, self._peers, clock, self._counts)
        self._looks = Looks(lambda: self._copying_call(lambda _: read_state(self._copies.pages)), clock)
        self._left: Callable[[str], object] = lambda _: None
        self._moving = 0  # objects in native calls
        self._doubt: asyncio.Task[None] | None = None  # asks whether the master answers
        own = Loads(native, self._peers, self._counts)  # a record joins no other load: it may wait for a node
        self._layouts = None if layout is None else LayoutRecords(model, layout, self._ask, clock, own)

    @classmethod
    def from_config(cls, config: Config, *, clock: Clock = SYSTEM_CLOCK, set_up: SetUp = PoolClient) -> Self:
        storage, layout = config.storage, None
        # No records with FastDeploy's key schema, whose names have no layout, or before engines register theirs.
        if storage.key_schema == "transferd" and config.cache is not None:
            layout = build_layout(config.cache)
        return cls(storage.mooncake, model=storage.model, layout=layout, clock=clock, set_up=set_up)

    @classmethod
    def memory_of(cls, config: Config) -> int:
        section = config.storage.mooncake
        segments = config.cache.ranks if section.segment_per_rank and config.cache is not None else 1
        return (0 if section.lender else segments * section.global_segment_size) + section.local_buffer_size

    # --- life ---------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Join the pool, trying until `connect_timeout`. Raises StorageUnavailable, ConfigError."""
        self._calls.open()
        try:
            self._client = await join(self._section, self._calls, self._clock, self._set_up)
        except BaseException:
            self._calls.close(0.0)
            raise
        if self._layouts is not None:
            self._register(self._layouts.address, self._layouts.nbytes)
            with contextlib.suppress(StorageError):  # the next miss looks again
                await self._layouts.look()
        self._breaker.watch(self._beat, HEARTBEAT_S)
        self._copies.start()

    def register(self, memory: HostMemory) -> None:
        """Besides, with segment_per_rank, lend a segment for each rank beyond the first that is served at a time.

        So does each of FastDeploy's transfer processes. Engines that one process registers for the same rank count
        once, as for objects of several sizes. Segments stay until the daemon ends: an engine that starts again finds
        the room, and what is in it, as before.
        """
        self._register(memory.address, memory.nbytes, memory.rank)
        self._registered[memory.address] = memory
        lenders = {one.lender for one in self._registered.values()} - {None}
        if self._section.segment_per_rank and self._section.global_segment_size and len(lenders) > self._lent:
            self._lent += 1
            self._lending.begin(self._lend(memory.rank))

    async def _lend(self, rank: int) -> None:
        nbytes = int(self._section.global_segment_size)
        try:
            code = await self._copying_call(lambda client: client.lend(nbytes, rank))
            problem = error_codes.describe(code) if code else ""
        except StorageError as error:
            problem = str(error)
        if problem:
            self._lent -= 1  # the next rank that begins tries again
            log.warning("the pool gets no segment for a further rank", bytes=nbytes, problem=problem)

    def unregister(self, memory: HostMemory) -> None:
        if self._registered.pop(memory.address, None) is not None and self._client is not None:
            self._client.unregister(memory.address, memory.rank)

    def _register(self, address: int, nbytes: int, rank: int = 0) -> None:
        code = self._opened().register(address, nbytes, rank)
        if code != 0:
            raise StorageError(f"Mooncake refused to register {nbytes} bytes of memory ({error_codes.describe(code)})")

    async def close(self) -> None:
        """Leave the pool. This freezes the whole process for seconds (client.py), so it comes last."""
        if self._layouts is not None:
            await self._layouts.settled(CLOSE_TIMEOUT_S)
        await self._copies.close()
        await self._breaker.close()
        await self._peers.close()
        client, self._client = self._client, None
        if client is not None:
            if await self._calls.idle(CLOSE_TIMEOUT_S):
                if self._layouts is not None:
                    client.unregister(self._layouts.address)
                await uncancelled(self._calls.call(CallKind.PROBE, client.close))
            else:
                # Closing during a call crashes the process, and so does finalizing the interpreter: do neither.
                raise StillRunning(f"Mooncake calls are still running: {', '.join(self._calls.close(0.0))}")
            self._calls.close(0.0)

    async def make_copies(self, *, leaves: bool) -> CopiesMade:
        return await (self._copies.drain() if leaves else self._copies.mend())

    def tell_departures(self, left: Callable[[str], None]) -> bool:
        """Reports what `report_lost` does not find."""
        self._left = left
        return False

    async def losses(self) -> int:
        return await self._looks.losses()

    async def report_lost(self, names: Sequence[str]) -> None:
        there = {held.key for held in await self._copies.named([key_of(name) for name in names])}
        for name in names:
            if key_of(name) not in there:
                self._left(name)

    async def alone(self) -> dict[str, int]:
        return {} if self._section.lender else await self._copies.alone()

    async def leave(self, within_s: float) -> None:
        try:
            made = await self._copies.leave(within_s)
        except TransferError as error:  # the stop goes on
            log.warning("cannot copy to other nodes what only this one has", problem=str(error))
        else:
            log.info("copied to other nodes what only this one had", **msgspec.structs.asdict(made))

    def _opened(self) -> PoolClient:
        if self._client is None:
            raise StorageError("mooncake storage is not open")
        return self._client

    # --- objects ------------------------------------------------------------------------------------

    async def exists(self, names: Sequence[str]) -> list[bool]:
        if not names:
            return []
        keys = [key_of(name) for name in names]
        self._copies.recent.used(keys)
        found = await self._counted(self._native(CallKind.LOAD, lambda client: client.exists(keys)))
        for key, code in found.items():
            if code not in (0, 1):
                self._counts["errors"] += 1
                raise error_codes.error("look up", key, code)
        there = [found[key] == 1 for key in keys]
        if self._layouts is not None and not all(there):
            self._layouts.absent(names[there.index(False)])
        return [is_there and not self._suspects.avoided(key) for key, is_there in zip(keys, there, strict=True)]

    async def put(self, blobs: Sequence[Blob]) -> list[Outcome]:
        first = first_of_each(blobs)
        if not first:
            return []
        try:
            outcomes = await self._counted(self._put(self._batch(first)))
        except LeftRunning as error:  # nobody knows what is stored, and the library may still read the slots
            return Outcomes.after([Outcome(Found.FAILED, error)] * len(blobs), {error.ended})
        self._counts["errors"] += sum(outcome.found is Found.FAILED for outcome in outcomes.values())
        return [outcomes[key_of(blob.name)] for blob in blobs]

    async def get(self, blobs: Sequence[Blob]) -> list[Outcome]:
        first = first_of_each(blobs)
        if not first:
            return []
        self._suspects.check_link("pool")
        outcomes = await self._counted(self._get(self._batch(first)))
        answers = [outcomes[key_of(blob.name)] for blob in blobs]
        for blob, outcome in zip(blobs, answers, strict=True):
            self._counts[_COUNTED_AS[outcome.found]] += 1
            if outcome is FOUND and blob is not first[blob.name]:
                blob.data[:] = first[blob.name].data  # the library fills one buffer per key
        running = {outcome.error.ended for outcome in answers if isinstance(outcome.error, LeftRunning)}
        return Outcomes.after(answers, running)

    def quarantine(self, name: str) -> Awaitable[None]:
        """Read it once more, or avoid it (suspects.py). The object stays: others may be able to read it."""
        self._counts["corrupt"] += 1
        self._suspects.damaged(key_of(name))
        return answered(None)

    def overwrite(self, name: str) -> None:
        self._suspects.doubt(key_of(name))

    async def purge_shared(self, selection: Selection, *, dry_run: bool = False) -> Purged:
        check_shared(selection)
        return await self._copies.purge(selection, key_of, dry_run=dry_run)

    async def _counted(self, call: Coroutine[Any, Any, T]) -> T:
        """Await a call to its end. Counts one error if the whole call fails."""
        try:
            return await uncancelled(call)
        except StorageError:
            self._counts["errors"] += 1
            raise

    def statistics(self) -> dict[str, Any]:
        """objects and bytes are None: only the master has them, for the whole pool (`transferd pool status`)."""
        return (
            {name: self._counts[name] for name in _COUNTS}
            | {
                "other_layout": 0 if self._layouts is None else self._layouts.misses,
                "other_layouts": {} if self._layouts is None else dict(self._layouts.others),
                "objects": None,
                "bytes": None,
                "peers_down": dict(self._peers.down),
                "peers_went_down": self._peers.opened,
                "connections_cut": self._peers.cut,
                "calls_under_way": len(self._calls),
            }
            | self._suspects.statistics()
            | self._breaker.statistics()
            | self._copies.statistics()
        )

    def _batch(self, first: dict[str, Blob]) -> Batch:
        return {key_of(name): buffer_of(blob, self._registered) for name, blob in first.items()}

    # --- put ----------------------------------------------------------------------------------------

    async def _put(self, batch: Batch) -> dict[str, Outcome]:
        self._breaker.check()  # fail before waiting in the merger
        doubted = [key for key in batch if key in self._suspects]
        replaced = await self._replace(part_of(batch, doubted)) if doubted else {}
        usual = part_of(batch, [key for key in batch if key not in replaced])
        answers = await self._puts.run(usual) if usual else {}
        before: PoolState | None = None
        for number, pause in enumerate(ROOM_PAUSES_S):
            full = [key for key, code in answers.items() if code == error_codes.NO_AVAILABLE_HANDLE]
            if not full:
                break
            self._counts["waited_for_room"] += len(full)
            if number == len(ROOM_PAUSES_S) // 2:
                before = await self._looks.look()
            await asyncio.sleep(random.uniform(pause / 2, pause))
            answers |= await self._puts.run(part_of(batch, full))
        # A copy was for a node that is silent or dead, and the master may choose it again. So one copy here has to do.
        broken = [key for key, code in answers.items() if code == error_codes.TRANSFER_FAIL]
        if broken and (self._section.replica_num > 1 or self._peers.down):
            self._peers.put_failed()
            answers |= await self._put_together(part_of(batch, broken), alone=True)
        unseen = [key for key, code in answers.items() if code == error_codes.UNSEEN]
        answers |= await self._settle(part_of(batch, unseen)) if unseen else {}
        answers |= replaced
        self._suspects.stored(key for key in doubted if answers[key] == error_codes.OK)
        after = await self._looks.look() if error_codes.NO_AVAILABLE_HANDLE in answers.values() else None
        return {
            key: STORED if code == error_codes.OK else not_stored(key, code, batch[key].nbytes, before, after)
            for key, code in answers.items()
        }

    async def _replace(self, batch: Batch) -> dict[str, int]:
        """Overwrite objects. Returns their codes."""
        return await self._native(CallKind.STORE, lambda client: client.replace(batch), Call(moves=len(batch)))

    async def _put_together(self, batch: Batch, *, alone: bool = False) -> dict[str, int]:
        """One call of the merger's. alone: store one copy, on this node."""
        held: dict[str, list[str]] = {}

        def put(client: PoolClient) -> dict[str, int]:
            # While a node is down, the master may still choose it for a second copy, and the put would fail for it.
            answers = client.put(batch, alone=alone or self._peers.in_the_way())
            doubtful = [key for key, code in answers.items() if code == error_codes.OK or code in error_codes.OVERTAKEN]
            held.update(client.holders(doubtful) if doubtful else {})
            return answers | {key: error_codes.OK if nodes else error_codes.UNSEEN for key, nodes in held.items()}

        answers = await self._native(CallKind.STORE, put, Call(moves=len(batch)))
        stored = [holders for holders in held.values() if holders]
        self._counts["under_replicated"] += sum(len(holders) < self._section.replica_num for holders in stored)
        self._peers.met({holder for holders in stored for holder in holders} - {""})
        return answers

    async def _settle(self, unseen: Batch) -> dict[str, int]:
        """Settle keys that should be stored but are not found: the final code of each."""
        missing = unseen
        self._counts["contested"] += len(missing)
        try:
            for pause in CONTEST_PAUSES_S:
                await asyncio.sleep(pause)
                missing = await self._absent(missing)
                if not missing:
                    return dict.fromkeys(unseen, error_codes.OK)
            # The other writer does not finish, or there is none: a full pool may evict an object before our lookup
            # has leased it. So overwrite what is there.
            self._counts["taken_over"] += len(missing)
            answers = await self._replace(missing)
            absent = await self._absent(missing)
        except LeftRunning:
            raise
        except StorageUnavailable:
            return dict.fromkeys(unseen, error_codes.RPC_FAIL)
        seen = {error_codes.OK, *error_codes.OVERTAKEN}
        still = {key: error_codes.UNSEEN if answers[key] in seen else answers[key] for key in absent}
        return dict.fromkeys(unseen, error_codes.OK) | still

    async def _absent(self, batch: Batch) -> Batch:
        """The part of a batch that a get would miss now."""
        found = await self._native(CallKind.STORE, lambda client: client.exists(batch))
        return part_of(batch, [key for key, code in found.items() if code != 1])

    # --- get ----------------------------------------------------------------------------------------

    async def _get(self, batch: Batch) -> dict[str, Outcome]:
        self._breaker.check()
        outcomes: dict[str, Outcome] = {key: MISSING for key in batch if self._suspects.avoided(key)}
        batch, odd = part_of(batch, [key for key in batch if key not in outcomes]), []
        doubted = [key for key in batch if self._suspects.doubted(key)]
        try:
            answers = await self._loads.run(batch) if batch else {}
        except LeftRunning as error:
            answers = dict.fromkeys(batch, error)
        for key, code in answers.items():
            assert not isinstance(code, str), key
            if code == batch[key].nbytes:
                outcomes[key] = FOUND
            elif isinstance(code, StorageError):
                outcomes[key] = Outcome(Found.FAILED, code)
            elif code >= 0 or code == error_codes.INVALID_PARAMS:
                odd.append(key)
            else:
                outcomes[key] = MISSING if code in error_codes.NOT_THERE else failed("load", key, code)
        self._suspects.came(key for key in doubted if outcomes.get(key) is FOUND)
        return outcomes | (await self._misfits(part_of(batch, odd)) if odd else {})

    async def _misfits(self, batch: Batch) -> dict[str, Outcome]:
        """Objects of another length than their buffers: report them as missing. The next put replaces them."""
        try:
            lengths = await self._native(CallKind.LOAD, lambda client: client.lengths(batch))
        except StorageError as error:
            return dict.fromkeys(batch, Outcome(Found.FAILED, error))
        outcomes = {}
        for key, length in lengths.items():
            if length >= 0 and length != batch[key].nbytes:
                self._counts["wrong_length"] += 1
                self._suspects.avoid(key)
            outcomes[key] = MISSING if length >= 0 or length in error_codes.NOT_THERE else failed("load", key, length)
        return outcomes

    # --- native calls -------------------------------------------------------------------------------

    async def _native(
        self, kind: CallKind, work: Callable[[PoolClient], dict[str, Code]], call: Call | None = None
    ) -> dict[str, Code]:
        """Make a native call, and wait for its end, and until the library cannot touch its buffers. Do not cancel it.

        Raises StorageUnavailable without calling if the breaker is not closed, and after the call if no key was
        answered. Raises LeftRunning if it hangs because of the master or a node: then the library may still touch the
        buffers.
        """
        self._breaker.check()
        client, call = self._opened(), call or Call()
        made = asyncio.ensure_future(self._to_its_end(kind, lambda: work(client), call))
        await call.over.wait()
        if call.left is not None and not made.done():
            raise LeftRunning(call.left, made)
        answers = await made
        self._judge(answers.values())
        return answers

    async def _to_its_end(self, kind: CallKind, work: Callable[[], dict[str, Code]], call: Call) -> dict[str, Code]:
        before = self._clock.monotonic(), self._clock.wall()
        self._moving += call.moves
        self._stuck.add(call)

        def begun() -> None:
            self._breaker.check()  # it may have opened while the call waited for a thread
            self._stuck.discard(call)
            call.timers.append(asyncio.get_running_loop().call_later(self._section.timeout, self._overdue, call))
            if call.moves:
                self._peers.watch(call)

        try:
            try:
                answers = await self._calls.call(kind, work, begun)
            finally:
                call.end()
                self._stuck.discard(call)
            await self._hold_buffers(call.moves, answers.values(), before)
        finally:
            self._moving -= call.moves
        return answers

    def _judge(self, answers: Collection[int | str]) -> None:
        """Open the breaker if the master did not answer. Raises StorageUnavailable if it answered for no key."""
        nobody = next((code for code in answers if code in error_codes.NO_ANSWER), None)
        if isinstance(nobody, int):
            self._breaker.failed(error_codes.describe(nobody))
            if all(code in error_codes.NO_ANSWER for code in answers):
                raise StorageUnavailable(f"Mooncake does not answer ({error_codes.describe(nobody)})")

    def _overdue(self, call: Call) -> None:
        """A call has been running for `timeout`. If it moves objects, perhaps because of a node: ask the master."""
        self._stuck.add(call)
        if not call.moves:
            self._breaker.failed(f"a call has been running for more than {self._section.timeout:g} s")
        elif self._breaker.state is not BreakerState.CLOSED:
            self._leave_stuck()
        elif self._doubt is None or self._doubt.done():
            self._doubt = asyncio.get_running_loop().create_task(self._beat())

    def _leave_stuck(self) -> None:
        """The master does not answer: answer those that wait for a thread, or for a call that is overdue."""
        for call in list(self._stuck):
            call.leave(self._breaker.refusal())

    async def _beat(self) -> None:
        """Ask the master, which opens the breaker if it does not answer."""
        with contextlib.suppress(StorageError):
            await self._ask(lambda client: client.exists([PROBE_KEY]))

    async def _copying_call(self, work: Callable[[PoolClient], T]) -> T:
        self._breaker.check()
        client = self._opened()
        return await uncancelled(self._calls.call(CallKind.COPY, lambda: work(client)))

    async def _hold_buffers(self, moves: int, answers: Iterable[int | str], before: tuple[float, float]) -> None:
        """Return once no transfer of this call can touch its buffers any more (see the module).

        The library measures its limit by the wall clock, which may be changed meanwhile.
        """
        seconds = max(self._clock.monotonic() - before[0], self._clock.wall() - before[1])
        codes = [code for code in answers if isinstance(code, int)]
        unsettled = [code for code in codes if code < 0 and code not in error_codes.SETTLED]
        if not moves or not unsettled or seconds < LIBRARY_GIVES_UP_S:
            return
        hold = longest_transfer(self._moving)
        self._counts["held"] += moves
        log.warning(
            "a Mooncake transfer did not end: holding its buffers",
            objects=moves,
            hold_s=hold,
            code=error_codes.describe(unsettled[0]),
        )
        await asyncio.sleep(hold)

    async def _ask(self, call: Callable[[PoolClient], dict[str, int]], moves: int = 0) -> dict[str, int]:
        """Make a small call that no task waits for. One that moves objects may wait for a node, so it is no probe."""
        kind = CallKind.STORE if moves else CallKind.PROBE
        return await uncancelled(self._native(kind, call, Call(moves=moves)))

    async def _probe(self) -> None:
        """Raises StorageError if the master does not answer."""
        client = self._opened()
        found = await self._calls.call(CallKind.PROBE, lambda: client.exists([PROBE_KEY]))
        if (code := found[PROBE_KEY]) not in (0, 1):
            raise StorageUnavailable(error_codes.describe(code))
