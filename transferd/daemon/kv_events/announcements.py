"""Which block is in which medium, as far as transferd knows, and the events to publish when that changes.

Theory of operation
-------------------
An *announcement* tells routers: "this block is in this medium on this node". A wrong announcement sends requests
to a node that must recompute them; a missing one only loses an opportunity. So a block is announced only on proof
and retracted on doubt. Pure logic: task results and departures of objects go in, events come out, and nothing here
knows about sockets.

    GPU, CPU   are pools of slots. A slot's content is known from the task that named it. Blocks that transferd
               itself brought there are announced: read and swap_in for GPU, swap_out for CPU. A write
               announces nothing: it shows which block a device slot holds, for the events of a later swap.
               A swap is a move: the engine gives up the source. A flush announces for GPU what the engine
               reports, with or without slots, and retracts from both pools what the engine reports as gone.
    STORAGE    A block is announced when every rank has stored it (write), or when a read has found it.
    levels     While a block is announced for STORAGE, it is announced for each level that has it on every rank.

A slot's announcement is retracted whenever a task had the slot as its target, whatever the result. The announcement
of a stored block is retracted when its object leaves the storage of any rank, when a read misses it, or when it is the
oldest of more than `max_blocks`. All announcements are retracted when the generation changes.

A hash in several slots of a pool is announced once and retracted with the last of them, because consumers count
announcements.

Ambiguous results are not announced: those of an older generation, and those of a partial write that names one
device block twice.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from transferd.blocks.formats import ObjectFormat
from transferd.blocks.keys import partial_tokens
from transferd.tasks import (
    Lane,
    ReadStorageTask,
    Status,
    SwapOutTask,
    Task,
    TaskResult,
    TokenIds,
    WriteStorageTask,
)
from transferd.wire.kv_events import (
    MEDIUM_CPU,
    MEDIUM_GPU,
    MEDIUM_STORAGE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEvent,
    block_hash,
    medium_of_level,
)

LOOSE = -1  # in place of a slot
HASHES_PER_EVENT = 1024  # so that no single event grows without bound


class Block(NamedTuple):
    """One block as an event describes it."""

    hash: int
    parent: int | None  # hash of the block before it; None at the root, and unknown if `linked` is False
    linked: bool
    # its token ids, little-endian integers of 64 or 32 bits as bytes; None if unknown or not to be published
    tokens: bytes | None


class _Pool:
    """The known contents of one pool's slots, and the slots for which each block is announced.

    A block may also be announced LOOSE: an engine reported it without naming a slot. Each update ends with `changes`.
    """

    def __init__(self, medium: str) -> None:
        self.medium = medium
        self._held: dict[int, Block] = {}
        self._announced: dict[int, set[int]] = {}  # hash -> slots
        self._loose: OrderedDict[int, None] = OrderedDict()  # hashes, oldest first
        self._before: dict[int, bool] = {}  # of the hashes that this update touches: whether each was announced before
        self._arrived: dict[int, Block] = {}  # in this update

    def get(self, slot: int) -> Block | None:
        return self._held.get(slot)

    def changes(self) -> tuple[list[int], list[Block]]:
        """The hashes that are announced no more since the last call, and the blocks that are announced since then."""
        before, now = self._before, self._announced
        removed = [hash_ for hash_, was in before.items() if was and hash_ not in now]
        stored = [self._arrived[hash_] for hash_, was in before.items() if not was and hash_ in now]
        self._before, self._arrived = {}, {}
        return removed, stored

    def assign(self, cleared: Iterable[int], filled: Iterable[tuple[int, Block]], *, announce: bool) -> None:
        """Forget the contents of the cleared slots, then note the blocks of the filled ones."""
        for slot in cleared:
            self._clear(slot)
        for slot, block in filled:
            held = self._held.get(slot)
            known = held is not None and held.hash == block.hash
            if known and (not announce or slot in self._announced.get(block.hash, ())):
                continue
            self._clear(slot)
            self._held[slot] = block
            if announce:
                self._announce(slot, block)

    def announce_loose(self, blocks: Iterable[Block], limit: int) -> None:
        """Announce blocks without a slot; retract the oldest ones beyond `limit`."""
        for block in blocks:
            self._announce(LOOSE, block)
            self._loose[block.hash] = None
            self._loose.move_to_end(block.hash)
        while len(self._loose) > limit:
            self._retract(LOOSE, self._loose.popitem(last=False)[0])

    def remove(self, hashes: Iterable[int]) -> None:
        """Remove blocks from the pool, whatever slots they are in."""
        for hash_ in hashes:
            for slot in list(self._announced.get(hash_, ())):
                if slot == LOOSE:
                    del self._loose[hash_]
                    self._retract(slot, hash_)
                else:
                    self._clear(slot)

    @property
    def hashes(self) -> Collection[int]:
        """All announced hashes. A view."""
        return self._announced.keys()

    def blocks(self) -> list[Block]:
        """All announced blocks. Those without a slot have only their hashes."""
        held = ((hash_, self._held.get(next(iter(slots)))) for hash_, slots in self._announced.items())
        return [Block(hash_, None, False, None) if block is None else block for hash_, block in held]

    def _clear(self, slot: int) -> None:
        block = self._held.pop(slot, None)
        if block is not None and slot in self._announced.get(block.hash, ()):
            self._retract(slot, block.hash)

    def _announce(self, slot: int, block: Block) -> None:
        self._before.setdefault(block.hash, block.hash in self._announced)
        self._announced.setdefault(block.hash, set()).add(slot)
        self._arrived[block.hash] = block

    def _retract(self, slot: int, hash_: int) -> None:
        self._before.setdefault(hash_, True)
        slots = self._announced[hash_]
        slots.discard(slot)
        if not slots:
            del self._announced[hash_]


KeysOf = Callable[[ReadStorageTask | WriteStorageTask], Sequence[str]]


@dataclass(eq=False, repr=False)
class Residency:
    """Turns task results into events; see the module's theory of operation.

    keys_of: the keys under which a task's blocks are announced and stored.
    only_flush: write tasks are flushes.
    holds: whether every rank's storage has the object of this digest now (True if the backend cannot find out).
    reports_departures: whether the backend reports every object that leaves it.
    levels: the levels of storage to announce.
    levels_of: the levels that have the object of a digest on every rank: bit i for level i.
    changed: called when there are events to drain, once until `drain`.
    """

    objects: ObjectFormat
    block_size: int
    max_blocks: int
    token_ids: bool = True
    keys_of: KeysOf = operator.attrgetter("keys")
    only_flush: bool = False
    holds: Callable[[str], bool] = lambda _: True
    reports_departures: bool = False
    levels: Sequence[str] = ()
    levels_of: Callable[[str], int] = lambda _: 0
    changed: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self._device, self._host = _Pool(MEDIUM_GPU), _Pool(MEDIUM_CPU)
        self._stored: OrderedDict[str, Block] = OrderedDict()  # by digest, longest unused first
        self._at: dict[str, dict[str, Block]] = {medium_of_level(level): {} for level in self.levels}  # of those
        self._events: list[KvEvent] = []
        self._fresh: list[tuple[str, Block]] = []

    # --- what happens -------------------------------------------------------------------------------

    def task_ended(self, task: Task, result: TaskResult, generation: str) -> None:
        """Update the pools after an admitted task was answered. generation: the current one."""
        if not result.ranks:  # it never started, so it touched nothing
            return
        current = result.generation == generation
        if isinstance(task, WriteStorageTask):
            self._wrote(task, result, current=current)
        elif isinstance(task, ReadStorageTask):
            self._read(task, result, current=current)
        else:
            device, host = (task.gpu_block_ids, self._device), (task.cpu_block_ids, self._host)
            ends = (device, host) if isinstance(task, SwapOutTask) else (host, device)
            self._swapped(*ends, result, current=current)

    def object_left(self, digest: str) -> None:
        """Retract a block because a rank's object of the current generation has left storage."""
        block = self._stored.pop(digest, None)
        if block is None:
            return
        for medium, at in self._at.items():
            if at.pop(digest, None) is not None:
                self._emit_removed(medium, [block.hash])
        self._emit_removed(MEDIUM_STORAGE, [block.hash])

    def object_moved(self, digest: str) -> None:
        """Other levels may have a rank's object of the current generation now."""
        block = self._stored.get(digest)
        if block is None or not self._at:
            return
        there, bare = self.levels_of(digest), Block(block.hash, None, False, None)
        for number, (medium, at) in enumerate(self._at.items()):
            if there >> number & 1 and digest not in at:
                at[digest] = bare
                self._emit_stored(medium, [bare])
            elif not there >> number & 1 and at.pop(digest, None) is not None:
                self._emit_removed(medium, [block.hash])

    def clear(self) -> None:
        """Retract everything: at a change of the generation, at the start, and at the end."""
        self._device, self._host = _Pool(MEDIUM_GPU), _Pool(MEDIUM_CPU)
        self._stored.clear()
        for at in self._at.values():
            at.clear()
        self._emit([AllBlocksCleared()])

    def memory_gone(self) -> None:
        """Retract all blocks in device and host memory, which is gone; stored blocks are unaffected."""
        for pool in (self._device, self._host):
            self._emit_removed(pool.medium, pool.hashes)
        self._device, self._host = _Pool(MEDIUM_GPU), _Pool(MEDIUM_CPU)

    # --- events out ---------------------------------------------------------------------------------

    def drain(self) -> list[KvEvent]:
        """The events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def drain_stored(self) -> list[tuple[str, Block]]:
        """The stored blocks that were announced since the last call, and their digests."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def stored(self) -> list[tuple[str, Block]]:
        """All stored blocks that are announced, and their digests, longest unused first."""
        return list(self._stored.items())

    def digests(self) -> list[str]:
        """Those of the same blocks: a million of them take a tenth of the time."""
        return list(self._stored)

    def announced(self) -> dict[str, list[Block]]:
        """All announced blocks, by medium, as of now."""
        stored = {MEDIUM_STORAGE: self._stored} | self._at
        pools = {MEDIUM_GPU: self._device.blocks(), MEDIUM_CPU: self._host.blocks()}
        return pools | {medium: list(blocks.values()) for medium, blocks in stored.items()}

    def statistics(self) -> dict[str, int]:
        """Announced blocks, by medium."""
        pools = {MEDIUM_GPU: self._device.hashes, MEDIUM_CPU: self._host.hashes, MEDIUM_STORAGE: self._stored}
        return {medium: len(blocks) for medium, blocks in (pools | self._at).items()}

    # --- tasks --------------------------------------------------------------------------------------

    def _wrote(self, task: WriteStorageTask, result: TaskResult, *, current: bool) -> None:
        ids, keys = task.block_ids, self.keys_of(task)
        pool = self._tier_of(task)
        if not current:
            self._assign(pool, ids, [], announce=False)
            return
        blocks = self._describe(keys, _tokens_of(task), task.start_write_block_idx)
        if self.only_flush and task.lane is Lane.WRITE:
            self._flushed(task, result, blocks)
            return
        unambiguous = len(set(ids)) == len(ids)
        if unambiguous:
            self._assign(pool, [], zip(ids, blocks, strict=True), announce=False)
        if task.lane is not Lane.WRITE:  # the blocks were sent to another node
            return
        if result.status is Status.OK:
            self._announce_stored(keys, blocks)
        elif unambiguous:
            moved = set(result.block_ids)
            positions = [i for i, block in enumerate(ids) if block in moved]
            self._announce_stored([keys[i] for i in positions], [blocks[i] for i in positions])

    def _tier_of(self, task: WriteStorageTask | ReadStorageTask) -> _Pool:
        return self._host if task.cpu_block_ids else self._device

    def _flushed(self, task: WriteStorageTask, result: TaskResult, blocks: Sequence[Block]) -> None:
        if task.flush_cache_exists is False:  # the blocks are gone, even if the index could not be updated
            for pool in (self._device, self._host):
                pool.remove(block.hash for block in blocks)
                self._emit_changes(pool)
        elif result.status is not Status.OK:
            return
        elif task.gpu_block_ids:
            self._assign(self._device, [], zip(task.gpu_block_ids, blocks, strict=True), announce=True)
        else:
            self._device.announce_loose(blocks, self.max_blocks)
            self._emit_changes(self._device)

    def _read(self, task: ReadStorageTask, result: TaskResult, *, current: bool) -> None:
        targets, pool = task.block_ids[: len(task.keys)], self._tier_of(task)
        if not current:
            self._assign(pool, targets, [], announce=True)
            return
        keys, moved = self.keys_of(task), set(result.block_ids)
        loaded = [i for i, block in enumerate(targets) if block in moved]
        missed = [i for i, block in enumerate(targets) if block not in moved]
        if task.prefix:
            blocks = self._describe(keys[: len(loaded)], _tokens_of(task), task.start_read_block_idx)
        else:  # its keys need not be one sequence
            blocks = [Block(block_hash(keys[i]), None, False, None) for i in loaded]
        filled = zip((targets[i] for i in loaded), blocks, strict=True)
        self._assign(pool, [targets[i] for i in missed], filled, announce=True)
        if task.lane is not Lane.READ:  # the blocks came from another node
            return
        self._announce_stored([keys[i] for i in loaded], blocks)
        if result.error is None and missed and not self.reports_departures:
            known = missed[:1] if task.prefix else missed  # a prefix read does not look behind the first
            for digest in self.objects.ids([keys[i] for i in known]):
                self.object_left(digest)

    def _swapped(
        self, source: tuple[list[int], _Pool], target: tuple[list[int], _Pool], result: TaskResult, *, current: bool
    ) -> None:
        (left, before), (filled, now) = source, target
        moves = zip(left, filled, strict=True) if result.status is Status.OK and current else ()
        known = [(to, block) for at, to in moves if (block := before.get(at)) is not None]
        self._assign(now, filled, known, announce=True)
        if result.status is Status.OK:
            self._assign(before, left, [], announce=True)

    def _assign(
        self, pool: _Pool, cleared: Iterable[int], filled: Iterable[tuple[int, Block]], *, announce: bool
    ) -> None:
        pool.assign(cleared, filled, announce=announce)
        self._emit_changes(pool)

    def _emit_changes(self, pool: _Pool) -> None:
        removed, stored = pool.changes()
        self._emit_removed(pool.medium, removed)
        self._emit_stored(pool.medium, stored)

    def _announce_stored(self, keys: Sequence[str], blocks: Sequence[Block]) -> None:
        self._fresh += self.announce_stored(zip(self.objects.ids(keys), blocks, strict=True))

    def announce_stored(self, stored: Iterable[tuple[str, Block]]) -> list[tuple[str, Block]]:
        """Announce those of these (digest, block) that storage has. Returns those that were not announced yet."""
        fresh: list[tuple[str, Block]] = []
        for digest, block in stored:
            if digest in self._stored:
                self._stored.move_to_end(digest)
            elif self.holds(digest):  # a rank's object may have been evicted since it was stored
                self._stored[digest] = block
                fresh.append((digest, block))
        self._emit_stored(MEDIUM_STORAGE, [block for _, block in fresh])
        for digest, _ in fresh:
            self.object_moved(digest)
        while len(self._stored) > self.max_blocks:
            self.object_left(next(iter(self._stored)))
        return fresh

    # --- events -------------------------------------------------------------------------------------

    def _describe(self, keys: Sequence[str], token_ids: TokenIds | None, start: int) -> list[Block]:
        """Describe consecutive blocks of a sequence by their keys; the first is its block `start`."""
        size, blocks = self.block_size, []
        raw, width = _packed(token_ids) if self.token_ids and token_ids is not None else (b"", 1)
        parent: int | None = None
        for i, key in enumerate(keys):
            hash_, linked = block_hash(key), i > 0 or start == 0
            tokens = raw[(start + i) * size * width : (start + i + 1) * size * width]
            # Without its parent a block's tokens would look like the root of another sequence.
            whole = linked and len(tokens) == size * width and partial_tokens(key) is None
            blocks.append(Block(hash_, parent, linked, tokens if whole else None))
            parent = hash_
        return blocks

    def _emit_stored(self, medium: str, blocks: Sequence[Block]) -> None:
        if blocks:
            self._emit(stored_events(medium, blocks, self.block_size))

    def _emit_removed(self, medium: str, hashes: Iterable[int]) -> None:
        for hash_ in hashes:
            last = self._events[-1] if self._events else None
            if isinstance(last, BlockRemoved) and last.medium == medium and len(last.block_hashes) < HASHES_PER_EVENT:
                last.block_hashes.append(hash_)
            else:
                self._emit([BlockRemoved([hash_], medium)])

    def _emit(self, events: Sequence[KvEvent]) -> None:
        first = not self._events
        self._events.extend(events)
        if first:
            self.changed()


def _tokens_of(task: ReadStorageTask | WriteStorageTask) -> TokenIds | None:
    """The tokens to announce. None with a salt: a router would offer the blocks to requests that lack it."""
    return None if task.salt else task.token_ids


def stored_events(medium: str, blocks: Iterable[Block], block_size: int) -> list[BlockStored]:
    """The announcements of these blocks: one for each run of them in which each is the child of the one before it."""
    chains: list[list[Block]] = []
    for block in blocks:
        if not chains or not _follows(block, chains[-1]):
            chains.append([])
        chains[-1].append(block)
    return [_stored_event(medium, chain, block_size) for chain in chains]


def _packed(token_ids: TokenIds) -> tuple[bytes, int]:
    """Token ids as bytes, and how many each takes. They are kept while their block is announced, and most fit four."""
    small = token_ids.array.astype("<u4")
    if np.array_equal(small, token_ids.array):
        return small.tobytes(), 4
    return token_ids.array.astype("<i8").tobytes(), 8


def _follows(block: Block, chain: Sequence[Block]) -> bool:
    """Whether a block can be in the same event as those before it."""
    last = chain[-1]
    same_kind = len(block.tokens or b"") == len(last.tokens or b"")
    return block.linked and block.parent == last.hash and same_kind and len(chain) < HASHES_PER_EVENT


def _stored_event(medium: str, chain: Sequence[Block], block_size: int) -> BlockStored:
    raw = b"".join(block.tokens for block in chain if block.tokens is not None)
    tokens: list[int] = np.frombuffer(raw, "<u4" if len(raw) == 4 * block_size * len(chain) else "<i8").tolist()
    return BlockStored(
        block_hashes=[block.hash for block in chain],
        parent_block_hash=chain[0].parent,
        token_ids=tokens,
        block_size=block_size if tokens else 0,
        lora_id=None,
        medium=medium,
        lora_name=None,
    )
