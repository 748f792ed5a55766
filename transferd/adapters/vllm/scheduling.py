"""The scheduler's half of TransferdConnector: what to load and save, and when a transfer may start.

    found       we ask the daemon once for all blocks of a request; until it answers, we tell vLLM to ask again
    load        vLLM has allocated blocks for those found; the load starts once every rank's stream has passed this step
    save        for blocks that this step fills; the save starts once every rank's stream has passed this step
    ready word  with each step, each rank's worker reports which step it has passed; the lowest counts. On a GPU a
                step has passed once it was launched, and the task names the number that every rank's stream writes
                behind the step (`after`), so that the daemon waits on the device

A save holds a reference to its blocks in vLLM's pool until its result arrives. So if a request finishes, is aborted or
is preempted, no other request can get the blocks meanwhile, and nothing has to wait.
"""

from __future__ import annotations

import itertools
import logging
import queue
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from transferd.adapters.fingerprint import Adapters
from transferd.adapters.vllm.entry import Order, Point
from transferd.adapters.vllm.link import Link, StorageTask, failed
from transferd.client.timeline import Timeline
from transferd.tasks import ReadStorageTask, Status, TaskResult, WriteStorageTask

log = logging.getLogger("vllm.transferd")

PINNED_SHARE = 4  # saves hold at most a quarter of vLLM's blocks; others wait while their request lives


@dataclass(slots=True)
class Known:
    """The state of a request. found: for each of its first blocks, whether it can be loaded; None until answered.

    local: tokens that vLLM had when it last asked. saved: leading blocks that need no save (any more). full:
    leading blocks that have been computed. salt: what the request's keys contain besides vLLM's hashes; None: its
    blocks are neither loaded nor saved.
    """

    request: Any
    salt: str | None = ""
    asked: bool = False
    found: list[bool] | None = None
    local: int = 0
    saved: int | None = None
    full: int = 0


@dataclass(slots=True)
class PendingTransfer:
    """A task that waits for the ready word, or runs.

    step, after: the step after which it may start, and that step's point on the timeline. request_id: for a load.
    first: the index of its first block.
    """

    task: StorageTask
    step: int
    after: Point
    request_id: str = ""
    first: int = 0
    blocks: Sequence[Any] = ()
    stored: list[Callable[[], Any]] = field(default_factory=list)  # for each block, makes its event


@dataclass(frozen=True, slots=True)
class News:
    """What the workers must report to vLLM: requests whose load has ended, and blocks whose bytes did not arrive.

    step, after: this step's number and its point on the timeline.
    """

    step: int
    after: Point
    loaded: frozenset[str]
    bad_blocks: frozenset[int]


class Scheduling:
    """Decides what to load and save. For the scheduler's thread only; results arrive through a queue.

    tokens: tokens per block. event: creates vLLM's event for a stored block; None if events are off. adapters: tells
    LoRA adapters apart, of which vLLM's hashes cover name and path; None if there are none.
    """

    def __init__(
        self,
        link: Link,
        *,
        tokens: int,
        timeout: float,
        prefix: str,
        event: Callable[..., Any] | None,
        adapters: Adapters | None = None,
    ) -> None:
        self._link, self._tokens = link, tokens
        self._timeout, self._prefix, self._event = timeout, prefix, event
        self._adapters = adapters
        self._pool: Any = None
        self._block_ids: Callable[[str], Sequence[int]] = lambda _: ()
        self._requests: dict[str, Known] = {}
        self._numbers = itertools.count()
        self._timeline = Timeline()
        self._step = 0
        self._after = self._next = self._timeline.next()  # the points of this step, and of the step being planned
        self._waiting: list[PendingTransfer] = []
        self._running = 0
        self._ended: queue.SimpleQueue[tuple[PendingTransfer, TaskResult]] = queue.SimpleQueue()
        self._saving: set[str] = set()  # keys
        self._pinned = 0
        self._loaded: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._events: list[Any] = []
        self.counts: Counter[str] = Counter()

    def bind(self, manager: Any) -> None:
        """Set vLLM's KVCacheManager, which owns the pool of blocks and knows which blocks a request has."""
        self._pool = manager.block_pool
        self._block_ids = lambda request_id: manager.get_block_ids(request_id)[0]

    # --- looking up and loading ---------------------------------------------------------------------

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """How many tokens can be loaded after the first `computed`; None: ask again."""
        known = self._requests.get(request.request_id)
        if known is None:
            known = self._requests[request.request_id] = Known(request, self._salt(request))
        known.local = computed
        first, end = computed // self._tokens, min((request.num_tokens - 1) // self._tokens, len(request.block_hashes))
        if first >= end or known.salt is None:
            return 0, False
        if not known.asked:
            if not self._link.ready:
                return 0, False
            known.asked = True
            self._link.ask(self._keys(known, 0, end), lambda found: setattr(known, "found", found))
        if known.found is None:
            return None, False
        count = len(list(itertools.takewhile(bool, known.found[first:end])))
        return count * self._tokens, count > 0

    def allocated(self, request: Any, block_ids: Sequence[int], external: int) -> None:
        """Note that vLLM has allocated blocks for the `external` tokens that `matched` promised."""
        if external <= 0:
            return
        known = self._requests[request.request_id]
        first, count = known.local // self._tokens, external // self._tokens
        task = ReadStorageTask(
            task_id=self._name("load"),
            keys=self._keys(known, first, first + count),
            gpu_block_ids=list(block_ids[first : first + count]),
            timeout=self._timeout,
            prefix=False,
        )
        self._waiting.append(PendingTransfer(task, self._step + 1, self._next, request.request_id, first))

    # --- each step ----------------------------------------------------------------------------------

    def stepped(self, output: Any) -> News:
        """Plan transfers for vLLM's next step, whose work `output` describes."""
        self._step, self._after, self._next = self._step + 1, self._next, self._timeline.next()
        self.collect()
        self._save(output)
        news = News(self._step, self._after, frozenset(self._loaded), frozenset(self._bad_blocks))
        self._loaded.clear()
        self._bad_blocks.clear()
        return news

    def ready(self, word: int, order: Order = Order.HOST) -> None:
        """Start transfers: every rank has passed the steps up to `word`, in the sense of `order`."""
        due = [transfer for transfer in self._waiting if transfer.step <= word]
        self._waiting = [transfer for transfer in self._waiting if transfer.step > word]
        for transfer in due:
            self._running += 1
            if order is Order.NONE:  # blocks that we save or load now could have any bytes
                self._ended.put((transfer, failed(transfer.task, "no_timelines", "a rank cannot order its copies")))
                continue
            task = transfer.task
            if order is Order.STREAM:
                task = msgspec.structs.replace(task, after=transfer.after)
            self._link.submit(task, lambda result, it=transfer: self._ended.put((it, result)))  # type: ignore[misc]
        self.collect()

    def collect(self) -> None:
        """Process the results that have arrived."""
        while not self._ended.empty():
            transfer, result = self._ended.get_nowait()
            self._running -= 1
            moved = set(result.block_ids)
            self._count(transfer, result, len(moved))
            if transfer.request_id:
                self._load_ended(transfer, moved)
            else:
                self._save_ended(transfer, moved)

    def forget(self) -> None:
        """Give up what has been found and what has not begun: it belongs to weights that are no longer served."""
        for transfer in self._waiting:
            self._running += 1
            self._ended.put((transfer, failed(transfer.task, "cancelled", "vLLM has reset its caches")))
        self._waiting.clear()
        for known in self._requests.values():
            known.found = None if known.found is None else [False] * len(known.found)
        self.collect()

    def finished(self, request_id: str) -> None:
        known = self._requests.pop(request_id, None)
        if known is not None and known.saved is not None:
            self.counts["blocks_not_saved"] += max(0, known.full - known.saved)

    @property
    def busy(self) -> bool:
        """Whether vLLM must keep stepping even if it has nothing to compute."""
        return bool(self._waiting or self._running or self._loaded)

    def take_events(self) -> Iterable[Any]:
        events, self._events = self._events, []
        return events

    def release(self) -> None:
        """Release the blocks of saves that have not begun. Called when the engine ends."""
        for transfer in self._waiting:
            self._unpin(transfer)
        self._waiting.clear()
        self.collect()

    # --- parts --------------------------------------------------------------------------------------

    def _save(self, output: Any) -> None:
        keys: list[str] = []
        blocks: list[Any] = []
        stored: list[Callable[[], Any]] = []
        most = len(self._pool.blocks) // PINNED_SHARE
        for known, computed in self._scheduled(output):
            request = known.request
            if known.salt is None:
                continue
            if known.saved is None:
                known.saved = computed // self._tokens
            end = computed + output.num_scheduled_tokens[request.request_id]
            end = min(end // self._tokens, len(request.block_hashes))
            known.full = max(known.full, end)
            if end <= known.saved:
                continue
            ids = self._block_ids(request.request_id)
            for i, key in enumerate(self._keys(known, known.saved, end), known.saved):
                block = self._pool.blocks[ids[i]]
                if key in self._saving or block.is_null or not self._link.ready:
                    continue
                if self._pinned + len(blocks) >= most:
                    end = i  # a later step saves the rest
                    break
                self._saving.add(key)
                keys.append(key)
                blocks.append(block)
                if self._event is not None:
                    stored.append(lambda request=request, i=i: self._event(request, i))  # type: ignore[misc]
            known.saved = end
        if keys:
            self._pool.touch(blocks)
            self._pinned += len(blocks)
            ids = [block.block_id for block in blocks]
            task = WriteStorageTask(task_id=self._name("save"), keys=keys, gpu_block_ids=ids, timeout=self._timeout)
            self._waiting.append(PendingTransfer(task, self._step, self._after, blocks=blocks, stored=stored))

    def _scheduled(self, output: Any) -> Iterator[tuple[Known, int]]:
        """The requests of a step, and how many of their tokens were computed before it."""
        cached = output.scheduled_cached_reqs
        new = ((request.req_id, request.num_computed_tokens) for request in output.scheduled_new_reqs)
        for request_id, computed in itertools.chain(new, zip(cached.req_ids, cached.num_computed_tokens, strict=True)):
            if request_id in self._requests:
                yield self._requests[request_id], computed

    def _load_ended(self, transfer: PendingTransfer, moved: set[int]) -> None:
        self._loaded.add(transfer.request_id)
        known = self._requests.get(transfer.request_id)
        for i, block in enumerate(transfer.task.gpu_block_ids, transfer.first):
            if block in moved:
                continue
            self._bad_blocks.add(block)
            if known is not None and known.found is not None:
                known.found[i] = False  # otherwise vLLM would ask for it and load it for ever

    def _save_ended(self, transfer: PendingTransfer, moved: set[int]) -> None:
        if transfer.stored:
            told = zip(transfer.task.gpu_block_ids, transfer.stored, strict=True)
            self._events += [make() for block, make in told if block in moved]
        self._unpin(transfer)

    def _unpin(self, transfer: PendingTransfer) -> None:
        if transfer.blocks:
            self._pool.free_blocks(list(reversed(transfer.blocks)))
            self._pinned -= len(transfer.blocks)
            self._saving.difference_update(transfer.task.keys)

    def _count(self, transfer: PendingTransfer, result: TaskResult, moved: int) -> None:
        done, not_done = ("loaded", "not_loaded") if transfer.request_id else ("saved", "not_saved")
        self.counts[f"blocks_{done}"] += moved
        self.counts[f"bytes_{done}"] += result.bytes
        if result.status is not Status.OK:
            self.counts[f"blocks_{not_done}"] += len(transfer.task.keys) - moved

    def _keys(self, known: Known, first: int, end: int) -> list[str]:
        """The keys of a request's blocks: vLLM's hashes, each of which stands for all tokens up to the block's end."""
        salt = f"+{known.salt}" if known.salt else ""
        return [block_hash.hex() + salt for block_hash in known.request.block_hashes[first:end]]

    def _salt(self, request: Any) -> str | None:
        adapter = getattr(request, "lora_request", None)
        return "" if adapter is None or self._adapters is None else self._adapters.salt(adapter.lora_path)

    def _name(self, kind: str) -> str:
        return f"{kind}-{self._prefix}-{next(self._numbers)}"
