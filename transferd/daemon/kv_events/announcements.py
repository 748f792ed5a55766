"""Which block is where, as far as transferd knows, and what there is to tell when that changes.

Theory of operation
-------------------
A *claim* is a statement to routers: "this block is in this medium on this node". A wrong claim sends
requests to a node that has to compute them again; a missing one costs a chance. So a claim is made
only on proof and withdrawn on doubt. Pure logic: results of tasks and departures of objects go in,
events come out, and nothing here knows of sockets.

    GPU, CPU   are pools of slots. A slot's content is known from the task that named it. What transferd
               itself brought there is claimed: read and swap_in for GPU, swap_out for CPU. A write only
               teaches which block a device slot holds, so that a later swap can say what it moves.
               A swap is a move: an engine that swaps gives the source away. A flush claims for GPU what the
    engine says, in the slots it names or in none, and withdraws from both pools what it says is gone.
    STORAGE    is claimed when every rank has stored a block (write), or when a read has found it.

Withdrawn is a claim on a slot whenever a task had the slot as its target, whatever came of it; on a
stored block when its object leaves the storage of any rank, when a read misses it, or when it is the
oldest of more than `max_blocks` claims; and everything when the generation changes.

A hash that is in several slots of a pool is announced once and withdrawn with the last of them:
consumers count announcements.

What cannot be told apart is not claimed: results of an older generation, and blocks of a partly done
write that names one device block twice.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
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
)

LOOSE = -1  # in place of a slot
TOKEN_BYTES = 8
HASHES_PER_EVENT = 1024  # so that no single event grows without bound


class Block(NamedTuple):
    """One block as an event tells of it.

    parent: hash of the block before it; None at the root, and where `linked` is False: not known.
    tokens: its token ids, little-endian 64-bit integers as bytes; None where they are not known (or not to be told).
    """

    hash: int
    parent: int | None
    linked: bool
    tokens: bytes | memoryview | None


class _Pool:
    """The blocks that are known to lie in the slots of one pool, and who claims that a block is there.

    A claim is a slot's, or LOOSE: somebody said so and named no slot.
    """

    def __init__(self) -> None:
        self._held: dict[int, Block] = {}
        self._claims: dict[int, set[int]] = {}  # hash -> slots
        self._loose: OrderedDict[int, None] = OrderedDict()  # hashes, oldest first

    def get(self, slot: int) -> Block | None:
        return self._held.get(slot)

    def update(self, dropped: Iterable[int], put: Iterable[tuple[int, Block]], *, claim: bool) -> _Change:
        """Forget what the dropped slots held, then take over what was put. Returns what that means outside."""
        before: dict[int, bool] = {}
        for slot in dropped:
            self._drop(slot, before)
        arrived: dict[int, Block] = {}
        for slot, block in put:
            held = self._held.get(slot)
            if held is not None and held.hash == block.hash and (not claim or slot in self._claims.get(held.hash, ())):
                continue
            self._drop(slot, before)
            # A copy: the slice would keep the token ids of the whole sequence alive.
            self._held[slot] = block if block.tokens is None else block._replace(tokens=bytes(block.tokens))
            if claim:
                self._claim(slot, block.hash, before)
                arrived[block.hash] = block
        return self._change(before, arrived)

    def say(self, blocks: Iterable[Block], limit: int) -> _Change:
        """Loose claims; beyond `limit` the oldest are given up."""
        before: dict[int, bool] = {}
        arrived = {block.hash: block for block in blocks}
        for hash_ in arrived:
            self._claim(LOOSE, hash_, before)
            self._loose[hash_] = None
            self._loose.move_to_end(hash_)
        while len(self._loose) > limit:
            self._give_up(LOOSE, self._loose.popitem(last=False)[0], before)
        return self._change(before, arrived)

    def withdraw(self, hashes: Iterable[int]) -> _Change:
        """These blocks are not in the pool any more, in whatever slot they were."""
        before: dict[int, bool] = {}
        for hash_ in hashes:
            for slot in list(self._claims.get(hash_, ())):
                if slot == LOOSE:
                    del self._loose[hash_]
                    self._give_up(slot, hash_, before)
                else:
                    self._drop(slot, before)
        return self._change(before, {})

    @property
    def hashes(self) -> list[int]:
        """All that is claimed."""
        return list(self._claims)

    # `before` notes of every hash whether it was claimed when the change began.

    def _drop(self, slot: int, before: dict[int, bool]) -> None:
        block = self._held.pop(slot, None)
        if block is not None and slot in self._claims.get(block.hash, ()):
            self._give_up(slot, block.hash, before)

    def _claim(self, slot: int, hash_: int, before: dict[int, bool]) -> None:
        before.setdefault(hash_, hash_ in self._claims)
        self._claims.setdefault(hash_, set()).add(slot)

    def _give_up(self, slot: int, hash_: int, before: dict[int, bool]) -> None:
        before.setdefault(hash_, True)
        claims = self._claims[hash_]
        claims.discard(slot)
        if not claims:
            del self._claims[hash_]

    def _change(self, before: dict[int, bool], arrived: dict[int, Block]) -> _Change:
        removed = [hash_ for hash_, there in before.items() if there and hash_ not in self._claims]
        stored = [block for hash_, block in arrived.items() if not before[hash_] and hash_ in self._claims]
        return _Change(removed, stored)


KeysOf = Callable[[ReadStorageTask | WriteStorageTask], Sequence[str]]


class _Change(NamedTuple):
    removed: list[int]
    stored: list[Block]


class Residency:
    """Turns results of tasks into events; see the module's theory of operation.

    keys_of: the keys under which a task's blocks are announced and stored. only_flush: write tasks are
    flushes. holds: whether the object of this digest is in the storage of every rank now (True where the
    backend cannot tell). tells: the backend reports every object that leaves it. changed: called when
    there is something to take, once until `take`.
    """

    def __init__(
        self,
        objects: ObjectFormat,
        *,
        block_size: int,
        max_blocks: int,
        token_ids: bool = True,
        keys_of: KeysOf = lambda task: task.keys,
        only_flush: bool = False,
        holds: Callable[[str], bool] = lambda _: True,
        tells: bool = False,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._objects = objects
        self._block_size = block_size
        self._max_blocks = max_blocks
        self._token_ids = token_ids
        self._keys_of = keys_of
        self._only_flush = only_flush
        self._holds = holds
        self._tells = tells
        self._changed = changed
        self._device, self._host = _Pool(), _Pool()
        self._stored: OrderedDict[str, int] = OrderedDict()  # digest -> hash, longest unused first
        self._out: list[KvEvent] = []

    # --- what happens -------------------------------------------------------------------------------

    def task_ended(self, task: Task, result: TaskResult, generation: str) -> None:
        """An admitted task was answered. generation: the current one."""
        if not result.ranks:  # it never started, so it touched nothing
            return
        current = result.generation == generation
        if isinstance(task, WriteStorageTask):
            self._wrote(task, result, current=current)
        elif isinstance(task, ReadStorageTask):
            self._read(task, result, current=current)
        elif isinstance(task, SwapOutTask):
            moves = zip(task.gpu_block_ids, task.cpu_block_ids, strict=True)
            self._swapped(list(moves), self._device, self._host, MEDIUM_GPU, MEDIUM_CPU, result, current=current)
        else:
            moves = zip(task.cpu_block_ids, task.gpu_block_ids, strict=True)
            self._swapped(list(moves), self._host, self._device, MEDIUM_CPU, MEDIUM_GPU, result, current=current)

    def object_left(self, digest: str) -> None:
        """A rank's object of the current generation is not in storage any more."""
        hash_ = self._stored.pop(digest, None)
        if hash_ is not None:
            self._tell_removed(MEDIUM_STORAGE, [hash_])

    def clear(self) -> None:
        """Nothing that was announced holds any more: another generation, or the beginning, or the end."""
        self._device, self._host = _Pool(), _Pool()
        self._stored.clear()
        self._tell([AllBlocksCleared()])

    def memory_gone(self) -> None:
        """Device and host memory hold no block any more; what is stored is untouched."""
        for medium, pool in ((MEDIUM_GPU, self._device), (MEDIUM_CPU, self._host)):
            self._tell_removed(medium, pool.hashes)
        self._device, self._host = _Pool(), _Pool()

    # --- what there is to tell ----------------------------------------------------------------------

    def take(self) -> list[KvEvent]:
        """The events since the last call, in order."""
        events, self._out = self._out, []
        return events

    def statistics(self) -> dict[str, int]:
        """Blocks announced and not withdrawn, by medium."""
        counts = (len(self._device.hashes), len(self._host.hashes), len(self._stored))
        return dict(zip((MEDIUM_GPU, MEDIUM_CPU, MEDIUM_STORAGE), counts, strict=True))

    # --- tasks --------------------------------------------------------------------------------------

    def _wrote(self, task: WriteStorageTask, result: TaskResult, *, current: bool) -> None:
        ids, keys = task.gpu_block_ids, self._keys_of(task)
        if not current:
            self._update(self._device, MEDIUM_GPU, ids, [], claim=False)
            return
        blocks = self._describe(keys, task.token_ids, task.start_write_block_idx)
        if self._only_flush and task.lane is Lane.WRITE:
            self._flushed(task, result, blocks)
            return
        unambiguous = len(set(ids)) == len(ids)
        if unambiguous:
            self._update(self._device, MEDIUM_GPU, [], zip(ids, blocks, strict=True), claim=False)
        if task.lane is not Lane.WRITE:  # sent to another node
            return
        if result.status is Status.OK:
            self._claim_stored(keys, blocks)
        elif unambiguous:
            moved = set(result.block_ids)
            positions = [i for i, block in enumerate(ids) if block in moved]
            self._claim_stored([keys[i] for i in positions], [blocks[i] for i in positions])

    def _flushed(self, task: WriteStorageTask, result: TaskResult, blocks: Sequence[Block]) -> None:
        if task.flush_cache_exists is False:  # they are gone, whether the index could be told or not
            hashes = [block.hash for block in blocks]
            self._changed_in(MEDIUM_GPU, self._device.withdraw(hashes))
            self._changed_in(MEDIUM_CPU, self._host.withdraw(hashes))
        elif result.status is not Status.OK:
            return
        elif task.gpu_block_ids:
            self._update(self._device, MEDIUM_GPU, [], zip(task.gpu_block_ids, blocks, strict=True), claim=True)
        else:
            self._changed_in(MEDIUM_GPU, self._device.say(blocks, self._max_blocks))

    def _read(self, task: ReadStorageTask, result: TaskResult, *, current: bool) -> None:
        targets = task.gpu_block_ids[: len(task.keys)]
        count = len(result.block_ids)
        if not current:
            self._update(self._device, MEDIUM_GPU, targets, [], claim=True)
            return
        keys = self._keys_of(task)
        blocks = self._describe(keys[:count], task.token_ids, task.start_read_block_idx)
        self._update(self._device, MEDIUM_GPU, targets[count:], zip(targets[:count], blocks, strict=True), claim=True)
        if task.lane is not Lane.READ:  # received from another node
            return
        self._claim_stored(keys[:count], blocks)
        if result.error is None and count < len(keys) and not self._tells:
            self.object_left(self._objects.ids(keys[count : count + 1])[0])

    def _swapped(
        self,
        moves: list[tuple[int, int]],
        source: _Pool,
        target: _Pool,
        source_medium: str,
        target_medium: str,
        result: TaskResult,
        *,
        current: bool,
    ) -> None:
        done = result.status is Status.OK and current
        known = [(to, block) for at, to in moves if (block := source.get(at)) is not None] if done else []
        self._update(target, target_medium, [to for _, to in moves], known, claim=True)
        if result.status is Status.OK:
            self._update(source, source_medium, [at for at, _ in moves], [], claim=True)

    def _update(
        self, pool: _Pool, medium: str, dropped: Iterable[int], put: Iterable[tuple[int, Block]], *, claim: bool
    ) -> None:
        self._changed_in(medium, pool.update(dropped, put, claim=claim))

    def _changed_in(self, medium: str, change: _Change) -> None:
        self._tell_removed(medium, change.removed)
        self._tell_stored(medium, change.stored)

    def _claim_stored(self, keys: Sequence[str], blocks: Sequence[Block]) -> None:
        fresh = []
        for digest, block in zip(self._objects.ids(keys), blocks, strict=True):
            if digest in self._stored:
                self._stored.move_to_end(digest)
            elif self._holds(digest):  # it may have been evicted since this rank or that one stored it
                self._stored[digest] = block.hash
                fresh.append(block)
        self._tell_stored(MEDIUM_STORAGE, fresh)
        while len(self._stored) > self._max_blocks:
            _, oldest = self._stored.popitem(last=False)
            self._tell_removed(MEDIUM_STORAGE, [oldest])

    # --- events -------------------------------------------------------------------------------------

    def _describe(self, keys: Sequence[str], token_ids: TokenIds | None, start: int) -> list[Block]:
        """Keys of consecutive blocks of a sequence, the first of them its block `start`."""
        size, blocks = self._block_size, []
        told = token_ids.array.astype("<i8").data.cast("B") if self._token_ids and token_ids is not None else b""
        parent: int | None = None
        for i, key in enumerate(keys):
            hash_, linked = block_hash(key), i > 0 or start == 0
            tokens = told[(start + i) * size * TOKEN_BYTES : (start + i + 1) * size * TOKEN_BYTES]
            # Without its parent a block's tokens would look like the root of another sequence.
            whole = linked and len(tokens) == size * TOKEN_BYTES and partial_tokens(key) is None
            blocks.append(Block(hash_, parent, linked, tokens if whole else None))
            parent = hash_
        return blocks

    def _tell_stored(self, medium: str, blocks: Sequence[Block]) -> None:
        chain: list[Block] = []
        for block in blocks:
            if chain and not _follows(block, chain):
                self._tell([_stored_event(medium, chain, self._block_size)])
                chain = []
            chain.append(block)
        if chain:
            self._tell([_stored_event(medium, chain, self._block_size)])

    def _tell_removed(self, medium: str, hashes: Sequence[int]) -> None:
        for hash_ in hashes:
            last = self._out[-1] if self._out else None
            if isinstance(last, BlockRemoved) and last.medium == medium and len(last.block_hashes) < HASHES_PER_EVENT:
                last.block_hashes.append(hash_)
            else:
                self._tell([BlockRemoved([hash_], medium)])

    def _tell(self, events: Sequence[KvEvent]) -> None:
        first = not self._out
        self._out.extend(events)
        if first:
            self._changed()


def _follows(block: Block, chain: Sequence[Block]) -> bool:
    """Whether a block can stand in one event with those before it."""
    last = chain[-1]
    same_kind = (block.tokens is None) == (last.tokens is None)
    return block.linked and block.parent == last.hash and same_kind and len(chain) < HASHES_PER_EVENT


def _stored_event(medium: str, chain: Sequence[Block], block_size: int) -> BlockStored:
    raw = b"".join(block.tokens for block in chain if block.tokens is not None)
    tokens: list[int] = np.frombuffer(raw, "<i8").tolist()
    return BlockStored(
        block_hashes=[block.hash for block in chain],
        parent_block_hash=chain[0].parent,
        token_ids=tokens,
        block_size=block_size if tokens else 0,
        lora_id=None,
        medium=medium,
        lora_name=None,
    )
