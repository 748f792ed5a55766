"""A stand-in for FastDeploy's PrefixCacheManager: its order of calls, its way of waiting, its aggregation.

For one request after the other, as under FastDeploy's request_release_lock:

    match on the device → SWAP2GPU what the host has → STORAGE2GPU the rest → "prefill" what is left
    … finish: GPU2STORAGE of the whole chain → the blocks fall idle
    eviction, when blocks are needed: SWAP2CPU; blocks that leave host and device are told of by a flush

Answers arrive on a thread of their own. Those of a read or write are collected until there are as many as ranks, and
the shortest counts; a swap is over with its first answer. Unlike FastDeploy, it looks at what an answer names, and it
does not wait for ever: an answer that does not come within its timeout ends the test.

Every byte is checked when it has come and again when another request finds it on the device. What an answer
claims must be right; what it does not claim is not used. What storage has said to hold, it must deliver.
"""

from __future__ import annotations

import enum
import itertools
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from transferd.adapters.fastdeploy import EngineCacheQueue
from transferd.cli.replay.kvdata import KvData
from transferd.cli.replay.pool import BlockPool, PooledBlock
from transferd.tasks import Status

TIMEOUT_S = 20.0  # of a storage task
LATE_S = 20.0  # what an answer may need beyond its timeout: the daemon's slack, and a loaded machine
FETCH_S = 0.05  # how long the receiver waits for an answer before it looks whether it should stop


class CacheStatus(enum.Enum):
    """As FastDeploy has it; the storage events' numbers are not published."""

    GPU = 0
    SWAP2CPU = 1
    SWAP2GPU = 2
    CPU = 3
    STORAGE2GPU = 4
    GPU2STORAGE = 5


class Pool(BlockPool):
    """A BlockPool whose blocks can leave it otherwise than by eviction."""

    def drop(self, entry: PooledBlock) -> None:
        """Its only user says that the content is not needed here any more: the block is free."""
        assert entry.users == 1
        del self._entries[entry.content]
        self._free.append(entry.block)


@dataclass
class Waiting:
    """One call that waits for its answers."""

    parties: int
    answers: list[tuple[Any, ...]] = field(default_factory=list)
    event: threading.Event = field(default_factory=threading.Event)


class PrefixCacheManager:
    """Plays requests over an EngineCacheQueue. Borrows the queue and the attached memory behind `data`.

    block_tokens: tokens of a block where storage is token-indexed: tasks then carry their whole path; else 0.
    only_flush: FD_AS_ONLY_FLUSH is set, so writes move nothing.
    timeout: of storage tasks. sound: False while a rank is made to fail; then calls may fail and stored blocks be out
    of reach. counts, statuses, failures: what happened.
    """

    def __init__(
        self,
        queue: EngineCacheQueue,
        data: KvData,
        device_blocks: int,
        host_blocks: int,
        *,
        block_tokens: int = 0,
        only_flush: bool = False,
    ) -> None:
        self._queue = queue
        self._block_tokens = block_tokens
        self._only_flush = only_flush
        self._parents: dict[int, int | None] = {}  # content -> the one before it in every chain
        self._data = data
        self._device = Pool(device_blocks)
        self._host = Pool(host_blocks)
        self._ranks = queue.num_client
        self._stored: set[int] = set()  # every rank has said so
        self._waiting: dict[tuple[str, str], Waiting] = {}
        self._numbers = itertools.count()
        self.timeout = TIMEOUT_S
        self.sound = True
        self.counts: Counter[str] = Counter()
        self.statuses: Counter[tuple[str, Status]] = Counter()  # by event
        self.failures: Counter[tuple[str, Status]] = Counter()  # those that named an error
        self.flushed: Counter[Status] = Counter()
        self._closing = threading.Event()
        self._receiver = threading.Thread(target=self._receive, name="recv_data_transfer_result")
        self._receiver.start()

    def close(self) -> None:
        """Stop the receiver when nothing is unanswered any more. Again: nothing."""
        give_up = TIMEOUT_S + LATE_S
        while not self._queue.empty() and give_up > 0:  # flushes that nobody waited for
            self._receiver.join(FETCH_S)
            give_up -= FETCH_S
        self._closing.set()
        self._receiver.join()
        assert self._queue.empty()
        assert self._queue.result_queue_empty()

    def verify_all(self) -> None:
        """Every block the device is believed to hold, to the last byte."""
        self._verify([(entry.content, entry.block) for entry in self._device.entries])

    # --- one request --------------------------------------------------------------------------------

    def request(self, hash_ids: Sequence[int]) -> None:
        chain = list(dict.fromkeys(hash_ids))[: self._device.count - 1]  # one spare, see _read
        name = f"req-{next(self._numbers)}"
        self._parents.update(zip(chain, [None, *chain], strict=False))
        held = self._match(chain)
        held += self._swap_in(name, chain[len(held) :])
        held += self._read(name, chain[len(held) :])
        held += self._prefill(chain[len(held) :])
        self._write(name, held)
        for entry in reversed(held):
            self._device.release(entry)
        self.counts["requests"] += 1

    def _match(self, chain: Sequence[int]) -> list[PooledBlock]:
        entries = itertools.takewhile(lambda entry: entry is not None, map(self._device.find, chain))
        held = [entry for entry in entries if entry is not None]
        for entry in held:
            self._device.hold(entry)
        self._verify([(entry.content, entry.block) for entry in held])
        self.counts["device hits"] += len(held)
        return held

    def _swap_in(self, name: str, chain: Sequence[int]) -> list[PooledBlock]:
        """_prepare_cpu_cache: what the host has of the chain, from its start."""
        found = [e for e in itertools.takewhile(lambda e: e is not None, map(self._host.find, chain)) if e is not None]
        if not found:
            return []
        for entry in found:
            self._host.hold(entry)
        gpu = self._allocate(len(found))
        self._data.poison(gpu)
        nodes = [entry.content for entry in found]
        answer = self._issue(name, (CacheStatus.SWAP2GPU, name, nodes, gpu, [entry.block for entry in found]))
        brought = answer[3]
        assert brought in (gpu, []), "a swap is whole or nothing"
        for entry in reversed(found):
            if brought:  # a node of FastDeploy's tree is in one place
                self._host.drop(entry)
            else:
                self._host.release(entry)
        self._device.give_back(gpu[len(brought) :])
        self._verify(list(zip(nodes, brought, strict=False)))
        self.counts["host hits"] += len(brought)
        return [self._device.put(content, block) for content, block in zip(nodes, brought, strict=False)]

    def _read(self, name: str, chain: Sequence[int]) -> list[PooledBlock]:
        """issue_prefetch_storage_task: the rest, into one block more than there are keys, as FastDeploy does."""
        if not chain:
            return []
        gpu = self._allocate(len(chain) + (self._device.obtainable > len(chain)))
        self._data.poison(gpu)
        task = SimpleNamespace(
            task_id=name,
            keys=[_key(content) for content in chain],
            token_ids=self._tokens(chain[-1]),
            gpu_block_ids=gpu,
            start_read_block_idx=len(self._path(chain[0])) - 1,
            timeout=self.timeout,
        )
        brought = self._issue(name, (CacheStatus.STORAGE2GPU, task))[3]
        assert brought == gpu[: len(brought)]
        self._verify(list(zip(chain, brought, strict=False)))
        known = sum(1 for _ in itertools.takewhile(self._stored.__contains__, chain))
        assert len(brought) >= known or not self.sound, f"storage had {known} blocks and delivered {len(brought)}"
        if self.sound:
            for block in gpu[len(chain) :]:
                assert self._data.untouched(block, -1) is None, "a block beyond the keys was written"
        self._device.give_back(gpu[len(brought) :])
        self.counts["storage hits"] += len(brought)
        return [self._device.put(content, block) for content, block in zip(chain, brought, strict=False)]

    def _prefill(self, chain: Sequence[int]) -> list[PooledBlock]:
        blocks = self._allocate(len(chain))
        for content, block in zip(chain, blocks, strict=True):
            self._data.fill(block, content)
        self.counts["computed"] += len(chain)
        return [self._device.put(content, block) for content, block in zip(chain, blocks, strict=True)]

    def _write(self, name: str, held: Sequence[PooledBlock]) -> None:
        """write_cache_to_storage: the whole chain, at the request's end."""
        blocks = [entry.block for entry in held]
        keys = [_key(entry.content) for entry in held]
        task = SimpleNamespace(
            task_id=name,
            keys=keys,
            token_ids=self._tokens(held[-1].content),
            gpu_block_ids=blocks,
            timeout=self.timeout,
        )
        written = set(self._issue(name, (CacheStatus.GPU2STORAGE, task))[3])
        assert written <= set(blocks)
        assert len(written) == len(blocks) or not self.sound
        if not self._only_flush:
            self._stored.update(entry.content for entry in held if entry.block in written)
        self.counts["written"] += len(written)

    # --- eviction -----------------------------------------------------------------------------------

    def _allocate(self, count: int) -> list[int]:
        blocks, evicted = self._device.take(count)
        self._swap_out(evicted)
        return blocks

    def _swap_out(self, evicted: Sequence[PooledBlock]) -> None:
        """_evict_cache_async, to the host as far as it has room; the oldest there make room."""
        moving = [entry for entry in evicted if self._host.find(entry.content) is None]
        if not moving or len(moving) > self._host.obtainable:  # FastDeploy drops them all, then
            for entry in moving:
                self._flush(entry.content)
            return
        cpu, dropped = self._host.take(len(moving))
        for entry in dropped:
            if self._device.find(entry.content) is None:
                self._flush(entry.content)
        name = f"evict-{next(self._numbers)}"
        nodes, gpu = [entry.content for entry in moving], [entry.block for entry in moving]
        done = self._issue(name, (CacheStatus.SWAP2CPU, name, nodes, gpu, cpu))[4]
        assert done in (cpu, []), "a swap is whole or nothing"
        for entry, block in zip(moving, done, strict=False):
            self._host.release(self._host.put(entry.content, block))
        self._host.give_back(cpu[len(done) :])
        for entry in moving[len(done) :]:
            self._flush(entry.content)
        self.counts["swapped out"] += len(done)

    def _flush(self, content: int) -> None:
        """A block has left the node: the index is told, and nobody waits for it (is_sync False, no blocks)."""
        task = SimpleNamespace(
            task_id=f"flush-{next(self._numbers)}",
            keys=[_key(content)],
            token_ids=self._tokens(content),
            gpu_block_ids=[],
            timeout=self.timeout,
            start_write_block_idx=len(self._path(content)) - 1,
            flush_cache_exists=False,
        )
        self._queue.put_transfer_task((CacheStatus.GPU2STORAGE, task))
        self.counts["flushes"] += 1

    # --- the queue ----------------------------------------------------------------------------------

    def _issue(self, name: str, item: tuple[Any, ...]) -> tuple[Any, ...]:
        """Put, and wait for the answer; of a read's answers the one that names the fewest blocks."""
        event = item[0]
        waiting = Waiting(self._ranks if event.name in ("STORAGE2GPU", "GPU2STORAGE") else 1)
        self._waiting[event.name, name] = waiting
        self._queue.put_transfer_task(item)
        assert waiting.event.wait(self.timeout + LATE_S), f"{event.name} {name} was not answered in time"
        del self._waiting[event.name, name]
        answer = min(waiting.answers, key=lambda answer: len(answer[3]))
        assert answer[0] is event
        result = self._queue.transfer_result(name, event)
        assert result is not None
        assert result.block_ids == answer[3]
        self.statuses[event.name, result.status] += 1
        if result.error is not None:
            self.failures[event.name, result.status] += 1
            assert not self.sound, f"{event.name} {name}: {result.error}"
        return answer

    def _receive(self) -> None:
        told: set[str] = set()  # flushes, each answered once for each rank
        while (answer := self._queue.get_transfer_done_signal(timeout=FETCH_S)) or not self._closing.is_set():
            if answer is None:
                continue
            waiting = self._waiting.get((answer[0].name, answer[1]))
            if waiting is None:  # a flush: nobody waits
                if answer[1] in told:
                    continue
                told.add(answer[1])
                result = self._queue.transfer_result(answer[1])
                assert result is not None
                self.flushed[result.status] += 1
                continue
            waiting.answers.append(answer)
            if len(waiting.answers) == waiting.parties:
                waiting.event.set()

    # --- token paths --------------------------------------------------------------------------------

    def on_this_node(self, chain: Sequence[int]) -> int:
        """How many leading contents the device or the host has."""
        here = (c for c in chain if self._device.find(c) is not None or self._host.find(c) is not None)
        return sum(1 for one, other in zip(chain, here, strict=False) if one == other)

    def tokens(self, chain: Sequence[int]) -> list[int]:
        """The token ids of a chain from its root."""
        return [content * self._block_tokens + i for content in chain for i in range(self._block_tokens)]

    def _tokens(self, last: int) -> list[int] | None:
        return self.tokens(self._path(last)) if self._block_tokens else None

    def _path(self, content: int) -> list[int]:
        path = []
        step: int | None = content
        while step is not None:
            path.append(step)
            step = self._parents[step]
        return path[::-1]

    def _verify(self, blocks: Sequence[tuple[int, int]]) -> None:
        for content, block in blocks:
            mismatch = self._data.verify(block, content)
            assert mismatch is None, str(mismatch)
        self.counts["verified"] += len(blocks)


def _key(content: int) -> str:
    return f"{content:064x}"
