"""The scheduler's half of TransferdConnector: what to load and save, and when a transfer may start.

    look-up     we ask the daemon for all blocks of a request; until it answers, vLLM must ask us again
    load        vLLM has allocated blocks for those found; the load starts once every rank's stream has passed this step
    save        for computed blocks that the look-up did not find, those of this step and those that the GPU still has
                from earlier requests; the save starts once every rank's stream has passed this step
    ready word  with each step, each rank's worker reports which step it has passed; the lowest counts. On a GPU a
                step has passed once it was launched, and the task names the number that every rank's stream writes
                behind the step (`after`), so that the daemon waits on the device

A save holds a reference to its blocks in vLLM's pool until its result arrives. So if a request finishes, is aborted or
is preempted, no other request can get the blocks meanwhile, and nothing has to wait. Only a reset of vLLM's prefix
cache needs all blocks free: it waits for running saves, and cancels those that take too long (docs/adr/0082).
"""

from __future__ import annotations

import itertools
import logging
import queue
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from transferd.adapters.common.entry import Order, Point
from transferd.adapters.common.fingerprint import Adapters
from transferd.adapters.common.link import Link, StorageTask, failed, why_not_stored
from transferd.adapters.vllm.groups import KvGroups
from transferd.adapters.vllm.known import Known, LookUp, Place, limit
from transferd.adapters.vllm.router_events import RouterEvents, StoredBlock
from transferd.adapters.vllm.saving import UNREACHABLE, Choice, Saving
from transferd.client.timeline import Timeline
from transferd.tasks import ReadStorageTask, Status, TaskResult, WriteStorageTask

log = logging.getLogger("vllm.transferd")

SAVES_END_S = 2.0  # how long a reset of the prefix cache waits for running saves,
SAVES_CANCELLED_S = 3.0  # and then for those that it has cancelled
SKIPPED = "blocks_not_saved"


@dataclass(slots=True)
class PendingTransfer:
    """A task that waits for the ready word, or runs."""

    task: StorageTask
    step: int  # the step after which it may start
    after: Point  # that step's point on the timeline
    request_id: str = ""  # of a load
    places: Sequence[Place] = ()  # of a load: where its blocks are in the request, in the task's order
    blocks: Sequence[Any] = ()
    stored: list[StoredBlock] = field(default_factory=list)  # for each block, if events are on
    by_layer: bool = False  # the step itself loads it
    left_behind: Sequence[int] = ()  # the request's blocks, if it ended first


@dataclass(frozen=True, slots=True)
class News:
    """What the workers must report to vLLM: requests whose load has ended, and what did not arrive."""

    step: int  # this step's number
    after: Point  # this step's point on the timeline
    loaded: frozenset[str]
    bad_blocks: frozenset[int]  # those whose bytes did not arrive, where vLLM keeps what is before them
    # requests that vLLM must compute from the start: a window may have nothing before its first bad block, and several
    # groups have blocks of the same number
    failed: frozenset[str] = frozenset()
    loads: tuple[ReadStorageTask, ...] = ()  # what the step itself loads


class Forms(Protocol):
    """Creates vLLM's events.

    name: a block's name in a removal.
    removed: the events that retract blocks.
    """

    def name(self, request: Any, group: int, i: int) -> Any: ...
    def stored(self, request: Any, group: int, i: int) -> Any: ...
    def removed(self, names: Sequence[Any]) -> list[Any]: ...


class Scheduling:
    """Decides what to load and save. For the scheduler's thread only; results arrive through a queue.

    model: its KV groups.
    loads, saves: whether the engine does.
    events: creates vLLM's; None if they are off.
    adapters: tells LoRA adapters apart by more than name and path, which vLLM's hashes cover; None if there are none.
    """

    def __init__(
        self,
        link: Link,
        *,
        model: KvGroups,
        timeout: float,
        prefix: str,
        loads: bool = True,
        saves: bool = True,
        by_layer: bool = False,
        events: Forms | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        self._link, self._model = link, model
        self._timeout, self._prefix = timeout, prefix
        self._loads, self._saves, self._by_layer = loads, saves, by_layer
        self._may_load = False  # whether the worker can load, by its last report
        self._now: list[PendingTransfer] = []  # the loads of the step that is being planned
        self._adapters = adapters
        self._pool: Any = None
        self._saving = Saving(model, link, self._look_up, self._skip)
        self._requests: dict[str, Known] = {}
        self._numbers = itertools.count()
        self._timeline = Timeline()
        self._step = 0
        self._after = self._next = self._timeline.next()  # the points of this step, and of the step being planned
        self._waiting: list[PendingTransfer] = []
        self._running: dict[str, PendingTransfer] = {}
        self._ended: queue.SimpleQueue[tuple[PendingTransfer, TaskResult]] = queue.SimpleQueue()
        self._loaded: set[str] = set()
        self._failed: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._forms = events
        self._events = None if events is None else RouterEvents(link, events.removed)
        self.counts: Counter[str] = Counter()

    def bind(self, manager: Any) -> None:
        """Set vLLM's KVCacheManager, which owns the pool of blocks and knows which blocks a request has.

        vLLM resets its prefix cache only if all blocks are free, and does not call its connector first.
        """
        self._pool = pool = manager.block_pool
        self._saving.bind(manager)
        reset = pool.reset_prefix_cache

        def reset_once_saved() -> bool:
            self.end_saves()
            done = bool(reset())
            if done and self._events is not None:
                self._events.forgotten()
            return done

        pool.reset_prefix_cache = reset_once_saved

    # --- looking up and loading ---------------------------------------------------------------------

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """How many tokens after the first `computed` can be loaded, and whether their load is asynchronous.

        Returns None instead of a number if vLLM must ask again.
        """
        known = self._requests.get(request.request_id)
        if known is None:
            known = self._requests[request.request_id] = self._known(request)
        known.local = computed
        if known.salt is None:
            return 0, False
        self._look_up(known)
        end = self._model.aligned(request.num_tokens - 1)
        if computed >= end or not self._loads or known.look_up is None:
            return 0, False
        if known.look_up.found is None:
            return None, False
        known.look_up.used = True
        count = known.loadable(computed, end)
        # With others, their steps would wait for this load.
        known.by_layer = self._by_layer and self._may_load and len(self._requests) == 1
        return count, count > 0 and not known.by_layer

    def allocated(self, request: Any, block_ids: Sequence[Sequence[int]], external: int) -> None:
        """Note that vLLM has allocated blocks for the `external` tokens that `matched` promised.

        block_ids: all of the request's blocks, for each group.
        """
        if external <= 0:
            return
        known = self._requests[request.request_id]
        places = [
            (group, i)
            for group, (one, ids) in enumerate(zip(self._model.groups, block_ids, strict=True))
            for i in range(known.local // one.tokens, (known.local + external) // one.tokens)
            if not self._pool.blocks[ids[i]].is_null
        ]
        if not places:  # no window reaches back to them
            self._loaded.add(request.request_id)
            return
        task = ReadStorageTask(
            task_id=self._name("load"),
            keys=[known.key(*place) for place in places],
            gpu_block_ids=[block_ids[group][i] for group, i in places],
            timeout=self._timeout,
            prefix=False,
            by_parts=known.by_layer or msgspec.UNSET,
            chains=[
                (at, self._model.before(place), known.key_before(place))
                for at, place in enumerate(places)
                if not at or places[at - 1][0] != place[0]
            ],
        )
        due = self._now if known.by_layer else self._waiting
        due.append(
            PendingTransfer(task, self._step + 1, self._next, request.request_id, places, by_layer=known.by_layer)
        )

    # --- each step ----------------------------------------------------------------------------------

    def stepped(self, output: Any) -> News:
        """Plan transfers for vLLM's next step; `output` describes its work."""
        self._step, self._after, self._next = self._step + 1, self._next, self._timeline.next()
        self.collect()
        for request_id in output.preempted_req_ids or ():
            if request_id in self._requests:
                self._begin_again(self._requests[request_id])
        if self._saves:
            self._save(output)
        if self._events is not None:
            self._events.ask()
        loaded, failed_ = frozenset(self._loaded), frozenset(self._failed)
        loads = tuple(transfer.task for transfer in self._now if isinstance(transfer.task, ReadStorageTask))
        self._running |= {transfer.task.task_id: transfer for transfer in self._now}
        self._now = []
        news = News(self._step, self._after, loaded, frozenset(self._bad_blocks), failed_, loads)
        for reported in (self._loaded, self._failed, self._bad_blocks):
            reported.clear()
        return news

    def loaded(self, results: Mapping[str, TaskResult], *, may_load: bool) -> None:
        """Process the loads of the step that has just been computed. Call it before `ready`.

        may_load: whether its worker knows the daemon.
        """
        self._may_load = may_load
        for task_id, result in results.items():
            transfer = self._running.get(task_id)
            if transfer is not None and len(result.block_ids) < len(transfer.task.gpu_block_ids):
                self._take_back(transfer)
            if transfer is not None:
                self._end(transfer, result)

    def _take_back(self, transfer: PendingTransfer) -> None:
        """Forget what a step has computed: some blocks that it read were not there."""
        for save in self._waiting:
            if save.step == transfer.step and not save.request_id:
                self._unpin(save)
        self._waiting = [one for one in self._waiting if one.step != transfer.step or one.request_id]
        for known in self._requests.values():  # their blocks are computed, and saved, again
            self._begin_again(known)
        if transfer.left_behind:  # vLLM found no request to take the step back for
            self._pool.evict_blocks(set(transfer.left_behind))

    def ready(self, word: int, order: Order = Order.HOST) -> None:
        """Start transfers: every rank has passed the steps up to `word`, in the sense of `order`."""
        due = [transfer for transfer in self._waiting if transfer.step <= word]
        self._waiting = [transfer for transfer in self._waiting if transfer.step > word]
        for transfer in due:
            task = transfer.task
            self._running[task.task_id] = transfer
            if order is Order.NONE:  # blocks that we save or load now could have any bytes
                self._ended.put((transfer, failed(task, "no_timelines", "a rank cannot order its copies")))
                continue
            if order is Order.STREAM:
                task = msgspec.structs.replace(task, after=transfer.after)
            self._link.submit(task, lambda result, it=transfer: self._ended.put((it, result)))  # type: ignore[misc]
        self.collect()

    def collect(self) -> None:
        """Process the results that have arrived."""
        while not self._ended.empty():
            self._end(*self._ended.get_nowait())

    def forget(self) -> None:
        """Give up found blocks and waiting transfers: they belong to weights that are no longer served."""
        for transfer in self._waiting:
            self._give_up(transfer)
        self._waiting.clear()
        for known in self._requests.values():
            known.look_up = None
        self.collect()
        if self._events is not None:
            self._events.clear()

    def end_saves(self) -> None:
        """Wait until no save holds a block, in a bounded time: then those that run are cancelled, and waited for."""
        for transfer in self._waiting:
            if not transfer.request_id:  # it would begin with a step to come
                self._give_up(transfer)
        self._waiting = [transfer for transfer in self._waiting if transfer.request_id]
        for known in self._requests.values():
            self._saving.release(known)
        self._await_saves(SAVES_END_S)
        if self._saving.pinned:
            self._link.cancel([name for name, transfer in self._running.items() if not transfer.request_id])
            self._await_saves(SAVES_CANCELLED_S)

    def finished(self, request_id: str, block_ids: Sequence[Sequence[int]] = ()) -> None:
        for transfer in self._running.values():
            if transfer.by_layer and transfer.request_id == request_id:
                transfer.left_behind = [block for ids in block_ids for block in ids]
        known = self._requests.pop(request_id, None)
        if known is None or not self._saves:
            return
        self._begin_save(self._saving.of_end(known, block_ids))
        self._saving.release(known)

    @property
    def busy(self) -> bool:
        """Whether vLLM must keep stepping even if it has nothing to compute."""
        return bool(self._waiting or self._running or self._loaded)

    def take_events(self) -> Iterable[Any]:
        return [] if self._events is None else self._events.take()

    def release(self) -> None:
        """Release the blocks of saves that have not begun. Called when the engine ends."""
        for transfer in self._waiting:
            self._unpin(transfer)
        self._waiting.clear()
        self.collect()

    # --- parts --------------------------------------------------------------------------------------

    def _known(self, request: Any) -> Known:
        params = getattr(request, "kv_transfer_params", None)
        return Known(
            request,
            self._model,
            self._salt(request),
            most_loaded=limit(params, "max_load_tokens"),
            most_saved=limit(params, "max_offload_tokens"),
        )

    def _look_up(self, known: Known) -> None:
        """Ask the daemon which of a request's blocks it has, unless it has said so lately."""
        named = [known.named(group) for group in range(len(self._model.groups))]
        if not any(named) or not self._link.ready or not known.must_ask(time.monotonic()):
            return
        asked = known.look_up = LookUp()
        everything = self._model.places(len(known.request.block_hashes) * self._model.hashed)
        places = [place for place in everything if place[1] < named[place[0]]]  # the store takes them for one chain
        keys = [known.key(*place) for place in places]

        began = time.monotonic()

        def answer(found: list[bool] | None) -> None:
            there = found or [False] * len(keys)
            if self._events is not None and found is not None:
                missing = [key for key, is_there in zip(keys, found, strict=True) if not is_there]
                blocks = zip(keys, places, found, strict=True)
                told = [self._described(key, known.request, place) for key, place, is_there in blocks if is_there]
                self._events.found(began, missing, told)
            asked.arrived = time.monotonic()
            by_group: list[list[bool]] = [[] for _ in named]
            for (group, _), is_there in zip(places, there, strict=True):
                by_group[group].append(is_there)
            asked.junction = self._model.junction(by_group)
            asked.found = by_group

        self._link.ask(keys, answer)

    def _save(self, output: Any) -> None:
        scheduled = list(self._scheduled(output))
        for known, computed in scheduled:
            known.computed(computed, computed + output.num_scheduled_tokens[known.request.request_id])
        self._begin_save(self._saving.of_step([known for known, _ in scheduled], self._states(output)))

    def _states(self, output: Any) -> Iterator[tuple[Known, Place, int]]:
        """The states that vLLM hands over, where a later request can go on, with their blocks' numbers."""
        handed = output.kv_connector_block_state
        for request_id, states in () if handed is None else handed.boundary_state_offloads.items():
            known = self._requests.get(request_id)
            if known is None or known.salt is None:
                continue
            for group, block, end in states:
                place = group, end // self._model.groups[group].tokens - 1
                if end == self._model.aligned(end) and place[1] < known.ended(group):
                    yield known, place, block

    def _begin_save(self, choice: Choice) -> None:
        """Hold blocks, and save them once this step is computed."""
        if not choice.blocks:
            return
        chains, ordered = choice.chains(self._model)
        self._saving.pin(choice)
        task = WriteStorageTask(
            task_id=self._name("save"),
            keys=[one.key for one in ordered],
            gpu_block_ids=[one.block.block_id for one in ordered],
            timeout=self._timeout,
            start_write_block_idx=chains[0][1] if len(chains) == 1 else 0,
            chains=chains,
        )
        told = ordered if self._events is not None else []
        stored = [self._described(one.key, one.known.request, one.place) for one in told]
        blocks = [one.block for one in ordered]
        self._waiting.append(PendingTransfer(task, self._step, self._after, blocks=blocks, stored=stored))

    def _begin_again(self, known: Known) -> None:
        self._saving.release(known)
        known.begin_again()

    def _scheduled(self, output: Any) -> Iterator[tuple[Known, int]]:
        """The requests of a step, and how many of their tokens were computed before it."""
        cached = output.scheduled_cached_reqs
        new = ((request.req_id, request.num_computed_tokens) for request in output.scheduled_new_reqs)
        for request_id, computed in itertools.chain(new, zip(cached.req_ids, cached.num_computed_tokens, strict=True)):
            if request_id in self._requests:
                yield self._requests[request_id], computed

    def _await_saves(self, seconds: float) -> None:
        give_up = time.monotonic() + seconds
        while self._saving.pinned and (left := give_up - time.monotonic()) > 0:
            try:
                self._end(*self._ended.get(timeout=left))
            except queue.Empty:
                return

    def _give_up(self, transfer: PendingTransfer) -> None:
        self._running[transfer.task.task_id] = transfer
        self._ended.put((transfer, failed(transfer.task, "cancelled", "vLLM has reset its caches")))

    def _end(self, transfer: PendingTransfer, result: TaskResult) -> None:
        self._running.pop(transfer.task.task_id, None)
        moved = set(result.block_ids)
        self._count(transfer, result, len(moved))
        if transfer.request_id:
            self._load_ended(transfer, moved)
        else:
            self._save_ended(transfer, moved)

    def _load_ended(self, transfer: PendingTransfer, moved: set[int]) -> None:
        if not transfer.by_layer:
            self._loaded.add(transfer.request_id)
        known = self._requests.get(transfer.request_id)
        lost = [
            (place, block)
            for place, block in zip(transfer.places, transfer.task.gpu_block_ids, strict=True)
            if block not in moved
        ]
        if known is not None:
            known.lost.update(place for place, _ in lost)
        if transfer.by_layer:
            return
        if self._model.whole:
            self._bad_blocks.update(block for _, block in lost)
        elif lost:
            self._failed.add(transfer.request_id)

    def _save_ended(self, transfer: PendingTransfer, moved: set[int]) -> None:
        for block, described in zip(transfer.task.gpu_block_ids, transfer.stored, strict=False):
            if block in moved and self._events is not None:
                self._events.stored(described)
        self._unpin(transfer)

    def _unpin(self, transfer: PendingTransfer) -> None:
        if transfer.blocks:
            self._saving.unpin(transfer.task.keys, transfer.blocks)

    def _count(self, transfer: PendingTransfer, result: TaskResult, moved: int) -> None:
        done = "loaded" if transfer.request_id else "saved"
        self.counts[f"blocks_{done}"] += moved
        self.counts[f"bytes_{done}"] += result.bytes
        if result.status is Status.OK:
            return
        missing = len(transfer.task.keys) - moved
        if transfer.request_id:
            self.counts["blocks_not_loaded"] += missing
        else:
            self._skip(why_not_stored(result), missing)

    def _skip(self, reason: str, count: int) -> None:
        if count:
            self.counts[f"{SKIPPED}/{reason}"] += count
            if reason != UNREACHABLE:
                self._link.count_not_stored(reason, count)

    def _described(self, key: str, request: Any, place: Place) -> StoredBlock:
        forms = self._forms
        assert forms is not None
        return StoredBlock(key, forms.name(request, *place), lambda: forms.stored(request, *place))

    def _salt(self, request: Any) -> str | None:
        adapter = getattr(request, "lora_request", None)
        return "" if adapter is None or self._adapters is None else self._adapters.salt(adapter.lora_path)

    def _name(self, kind: str) -> str:
        return f"{kind}-{self._prefix}-{next(self._numbers)}"
