"""TransferdL2: transferd as the L2 of LMCache's multi-process server (`--l2-adapter '{"type": "plugin", …}'`).

LMCache's controllers submit batches and return at once; an eventfd says that there is a result to fetch. Everything
here runs on one event loop in a thread of its own. Objects of several sizes and models may be in one batch: each kind
is an engine of its own at the daemon.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

from transferd.adapters.common.link import ANSWER_S, LOOKUP_TIMEOUT_S, UNANSWERED
from transferd.adapters.common.read_leases import WarmOrder, WarmReaders
from transferd.adapters.common.settings import engine_name
from transferd.adapters.lmcache.attached import AttachedKind, ObjectTransfer
from transferd.adapters.lmcache.books import Books
from transferd.adapters.lmcache.in_place import InPlaceKind, shared_l1
from transferd.adapters.lmcache.kinds import ObjectKind, key_of, kind_of_layout, kind_of_object
from transferd.adapters.lmcache.settings import LMCACHE, settings
from transferd.client.sync_client import SyncClient
from transferd.errors import TransferError
from transferd.runtime.aio import Background, every, run_until_stopped
from transferd.runtime.clock import SYSTEM_CLOCK

MOST_KINDS = 16  # models and layouts of one server; the daemon also bounds its engines
STORE, LOOKUP, LOAD = "store", "lookup", "load"
LEAVE_S = 5.0
ENGINES = itertools.count()  # of this process, which may have several adapters
MOST_COMPARED = 1024  # keys in one question
DELETE_AGAIN_S = 1.0  # between two tries to have the daemon remove objects


class TransferdL2(L2AdapterInterface):  # type: ignore[misc] # LMCache is not installed where mypy runs
    """An L2 that stores in a transferd daemon. See docs/lmcache.md for its parameters."""

    def __init__(self, params: Mapping[str, Any], l1_memory_desc: object = None) -> None:
        """Find or start the daemon; wait for it, at most start_timeout seconds. Raises ConfigError.

        l1_memory_desc: where LMCache's memory is; needed only with in_place, because else objects are copied.
        """
        super().__init__()  # without a capacity: the daemon evicts, and LMCache does not
        self._chosen = settings(params)
        self._l1 = shared_l1(l1_memory_desc) if self._chosen.in_place else None
        self._life = SYSTEM_CLOCK.fresh_id()
        self._finder = self._chosen.one_daemon(LMCACHE)
        self._attached: dict[ObjectKind, AttachedKind] = {}
        self._groups: dict[tuple[str, int], set[ObjectKind]] = {}  # of a model's object group
        self._books = Books(self._chosen.file_of_store(LMCACHE, "books-{}.jsonl", self._chosen.weights), ObjectKey)
        self._left: list[Any] | None = None  # the daemon's counts of what left the store, when the books were compared
        self._comparing = asyncio.Lock()
        self._deleting: set[Any] = set()  # keys that the daemon has not removed yet
        self._reported: dict[str, Any] = {}
        self._refused: set[ObjectKind | None] = set()
        self._tasks = itertools.count()
        self._events = {what: create_event_notifier() for what in (STORE, LOOKUP, LOAD)}
        self._results: dict[str, dict[int, Any]] = {what: {} for what in self._events}
        self._lock = threading.Lock()  # of the results
        self._running = Background(awaited=False)
        self._pool = concurrent.futures.ThreadPoolExecutor(self._chosen.threads, "transferd-copy")
        self._readers = WarmReaders(self._chosen.threads, LMCACHE.log)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=run_until_stopped, args=(self._loop,), name="transferd-lmcache", daemon=True
        )
        self._thread.start()
        if not self._finder.listens_within(self._chosen.start_timeout):
            LMCACHE.log.warning(
                "transferd: no daemon after %g s; LMCache starts without it", self._chosen.start_timeout
            )

    # --- what LMCache calls -------------------------------------------------------------------------

    def get_store_event_fd(self) -> int:
        return int(self._events[STORE].fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        return int(self._events[LOOKUP].fileno())

    def get_load_event_fd(self) -> int:
        return int(self._events[LOAD].fileno())

    def submit_store_task(self, keys: Sequence[Any], objects: Sequence[Any]) -> int:
        return self._begin(STORE, self._stored(list(keys), list(objects)), L2StoreResult(False, 0))

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        with self._lock:
            done, self._results[STORE] = self._results[STORE], {}
        return done

    def submit_lookup_and_lock_task(self, keys: Sequence[Any], group_layout_descs: Mapping[int, Any]) -> int:
        return self._begin(LOOKUP, self._found(list(keys), dict(group_layout_descs)), Bitmap(len(keys)))

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        with self._lock:
            return self._results[LOOKUP].pop(task_id, None)

    def submit_unlock(self, keys: Sequence[Any]) -> None:
        self._loop.call_soon_threadsafe(self._unlock, list(keys))

    def submit_load_task(self, keys: Sequence[Any], objects: Sequence[Any]) -> int:
        """Read what is leased and cached; the daemon loads the rest."""
        keys, objects, number = list(keys), list(objects), next(self._tasks)

        def ended(read: list[bool]) -> None:
            if all(read):
                self._answer(LOAD, number, _bitmap(read))
                self._notify_keys_accessed(keys)
            else:
                self._begin(LOAD, self._loaded(keys, objects, read), Bitmap(len(keys)), number)

        if any(one.leases for one in list(self._attached.values())):
            self._readers.begin(self._orders(keys, objects), ended)
        else:
            ended([False] * len(keys))
        return number

    def query_load_result(self, task_id: int) -> Bitmap | None:
        with self._lock:
            return self._results[LOAD].pop(task_id, None)

    def delete(self, keys: Sequence[Any]) -> None:
        """Remove objects from storage, also those that are locked. They are found no more from now on.

        Without an answer of the daemon they are removed once one answers: LMCache's loop would end with an exception.
        """
        deleting = asyncio.run_coroutine_threadsafe(self._deleted(list(keys)), self._loop)
        with contextlib.suppress(*UNANSWERED):
            deleting.result(ANSWER_S)

    def get_usage(self) -> AdapterUsage:
        """What the daemon stores for everybody, and its capacity; of each salt, what this server has stored."""
        storage = self._report().get("storage", {})
        left = [storage.get(one) for one in ("evictions", "purged", "gone")]
        if left != self._left:
            self._left = left
            self._loop.call_soon_threadsafe(self._running.begin, self._compared())
        return AdapterUsage(
            total_bytes_used=int(storage.get("bytes") or 0),
            total_capacity_bytes=int(storage.get("capacity") or 0),
            bytes_by_cache_salt=self._books.bytes_by_salt(),
        )

    def register_listener(self, listener: Any) -> None:
        """Also tells it what an earlier process has stored."""
        super().register_listener(listener)
        keys, sizes = self._books.sizes()
        if keys:
            listener.on_l2_keys_stored(keys, sizes)

    def report_status(self) -> dict[str, Any]:
        """Healthy: a daemon answers, or has not been needed yet."""
        links = [one.link for one in list(self._attached.values())]
        return {
            "is_healthy": all(link.ready for link in links),
            "type": type(self).__name__,
            "endpoint": next((link.endpoint for link in links), ""),
            "engines": [one.link.name for one in list(self._attached.values())],
            "storage": self._report().get("storage", {}),
        }

    def _report(self) -> dict[str, Any]:
        """The daemon's last report; from before, if it does not answer now."""
        link = next((one.link for one in list(self._attached.values()) if one.link.ready), None)
        try:
            if link is not None:
                self._reported = link.stats()
            elif not self._attached and self._finder.listening:  # nothing was stored or looked up yet
                with SyncClient(self._finder.find(), await_ready=False, connect_timeout=LOOKUP_TIMEOUT_S) as client:
                    self._reported = client.stats()
        except (TransferError, OSError, TimeoutError) as error:
            LMCACHE.log.info("transferd: no report of the daemon: %s", error)
        return self._reported

    def close(self) -> None:
        """Leave the daemon; one that was started here ends. Idempotent."""
        if not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._pool.shutdown(cancel_futures=True)  # waits for copies that run
        self._readers.close()
        for one in self._attached.values():
            one.close()
        self._finder.end(LEAVE_S)
        self._books.close()
        for event in self._events.values():
            event.close()

    # --- on the event loop --------------------------------------------------------------------------

    def _begin(self, what: str, work: Coroutine[Any, Any, Any], nothing: Any, number: int | None = None) -> int:
        """Start a task. nothing: its result after an error of ours, as LMCache waits for one."""
        number = next(self._tasks) if number is None else number

        async def run() -> None:
            result = nothing
            try:
                result = await work
            except Exception:  # noqa: BLE001 - LMCache waits for every task without a limit
                LMCACHE.log.exception("transferd: an error of the adapter, not of the daemon")
            self._answer(what, number, result)

        self._loop.call_soon_threadsafe(self._running.begin, run())
        return number

    def _answer(self, what: str, number: int, result: Any) -> None:
        """Have LMCache fetch a result. From any thread."""
        with self._lock:
            self._results[what][number] = result
        self._events[what].notify()

    def _orders(self, keys: Sequence[Any], objects: Sequence[Any]) -> list[WarmOrder | None]:
        """How the objects that are leased are read without the daemon. From any thread."""
        orders: list[WarmOrder | None] = []
        kinds = [
            None if key in self._deleting else kind_of_object(key, one) for key, one in zip(keys, objects, strict=True)
        ]
        for kind, some in itertools.groupby(range(len(keys)), kinds.__getitem__):
            alike = list(some)
            if (one := self._attached.get(kind)) is None:  # type: ignore[arg-type]
                orders += [None] * len(alike)
                continue
            memory = [[memoryview(objects[i].byte_array)] for i in alike]
            orders += one.leases.orders([key_of(keys[i]) for i in alike], memory)
        return orders

    async def _stored(self, keys: list[Any], objects: list[Any]) -> L2StoreResult:
        kinds = [kind_of_object(key, one) for key, one in zip(keys, objects, strict=True)]
        moved = await self._moved(keys, objects, kinds, AttachedKind.store)
        done = [i for i, one in enumerate(moved) if one]
        sizes = [kind.nbytes for kind in kinds if kind is not None]
        self._deleting.difference_update(keys[i] for i in done)
        self._noted([keys[i] for i in done], [kinds[i] for i in done])
        return L2StoreResult(len(done) == len(keys), sum(sizes))

    async def _loaded(self, keys: list[Any], objects: list[Any], read: list[bool]) -> Bitmap:
        """read: those that have their bytes already."""
        rest = [i for i, one in enumerate(read) if not one]
        kinds = [kind_of_object(keys[i], objects[i]) for i in rest]
        moved = await self._moved([keys[i] for i in rest], [objects[i] for i in rest], kinds, AttachedKind.load)
        for i, one in zip(rest, moved, strict=True):
            read[i] = one
        self._notify_keys_accessed([key for key, one in zip(keys, read, strict=True) if one])
        return _bitmap(read)

    async def _found(self, keys: list[Any], layouts: Mapping[int, Any]) -> Bitmap:
        there = [False] * len(keys)

        async def ask(one: AttachedKind, which: list[int]) -> None:
            which = [i for i in which if keys[i] not in self._deleting]
            found = await one.find([key_of(keys[i]) for i in which])
            for i, yes in zip(which, found, strict=True):
                there[i] = yes

        kinds = [
            kind_of_layout(key, layouts[key.object_group_id]) if key.object_group_id in layouts else None
            for key in keys
        ]
        await self._of_each_kind(keys, kinds, ask)
        found = [i for i, yes in enumerate(there) if yes]
        self._noted([keys[i] for i in found], [kinds[i] for i in found])  # others store there, too
        return _bitmap(there)

    def _noted(self, keys: list[Any], kinds: list[Any]) -> None:
        """Write into the books that the store has these objects, and tell LMCache."""
        fresh = self._books.add(keys, kinds)
        if fresh:
            self._notify_keys_stored([key for key, _ in fresh], [nbytes for _, nbytes in fresh])
        known = set(keys).difference(key for key, _ in fresh)
        if known:
            self._notify_keys_accessed([key for key in keys if key in known])

    def _gone(self, keys: list[Any]) -> None:
        """Write into the books that the store has lost these objects, and tell LMCache."""
        gone = self._books.drop(keys)
        if gone:
            self._notify_keys_deleted([key for key, _ in gone], [nbytes for _, nbytes in gone])

    async def _compared(self) -> None:
        """Compare the books with the store: it evicts, and others delete."""
        async with self._comparing:
            for kind, keys in self._books.by_kind().items():
                if not self._serves(kind, instead=False):
                    continue
                one = self._attached[kind]
                for start in range(0, len(keys), MOST_COMPARED):
                    some = keys[start : start + MOST_COMPARED]
                    there = await one.look([key_of(key) for key in some])
                    if there is None:
                        self._left = None  # no answer: again at the next question
                        return
                    self._gone([key for key, yes in zip(some, there, strict=True) if not yes])

    async def _deleted(self, keys: list[Any]) -> None:
        fresh = [key for key in keys if key not in self._deleting]
        self._deleting.update(fresh)
        while fresh := [key for key in fresh if key in self._deleting]:
            for kind, mine in self._kinds_of(fresh).items():
                if kind is not None and not (self._serves(kind) and await self._attached[kind].remove(mine)):
                    break
            else:
                self._deleting.difference_update(fresh)
                self._gone(fresh)
                return
            await asyncio.sleep(DELETE_AGAIN_S)

    def _kinds_of(self, keys: list[Any]) -> dict[ObjectKind | None, list[Any]]:
        """By their kind, or by every kind of their group if they are not in the books."""
        found: dict[ObjectKind | None, list[Any]] = {}
        for key in keys:
            kind = self._books.kind_of(key)
            for one in [kind] if kind else self._groups.get((key.model_name, key.object_group_id), ()):
                found.setdefault(one, []).append(key)
        return found

    def _unlock(self, keys: list[Any]) -> None:
        for kind, mine in self._kinds_of(keys).items():  # one request for each: the daemon takes only so many at once
            if kind in self._attached:
                self._attached[kind].unlock(list(map(key_of, mine)))

    async def _moved(
        self,
        keys: list[Any],
        objects: list[Any],
        kinds: list[ObjectKind | None],
        move: Callable[[AttachedKind, ObjectTransfer], Coroutine[Any, Any, None]],
    ) -> list[bool]:
        moved = [False] * len(keys)

        async def go(one: AttachedKind, which: list[int]) -> None:
            transfer = ObjectTransfer([key_of(keys[i]) for i in which], [objects[i] for i in which])
            await move(one, transfer)
            for i, yes in zip(which, transfer.moved, strict=True):
                moved[i] = yes

        await self._of_each_kind(keys, kinds, go)
        return moved

    async def _of_each_kind(
        self,
        keys: list[Any],
        kinds: list[ObjectKind | None],
        do: Callable[[AttachedKind, list[int]], Coroutine[Any, Any, None]],
    ) -> None:
        """Do something with the positions of each kind, all at once. Kinds that are not served are left out."""
        which: dict[ObjectKind, list[int]] = {}
        alike = [(kind, key.model_name, key.object_group_id) for key, kind in zip(keys, kinds, strict=True)]
        for (kind, model, group), positions in itertools.groupby(range(len(keys)), alike.__getitem__):
            if kind is None or not self._serves(kind):
                self._refuse(kind)
                continue
            which.setdefault(kind, []).extend(positions)
            self._groups.setdefault((model, group), set()).add(kind)
        await every(do(self._attached[kind], some) for kind, some in which.items())

    def _serves(self, kind: ObjectKind, *, instead: bool = True) -> bool:
        """instead: if all places are taken, one that is only in the books, as an earlier model's, gives its own."""
        if kind in self._attached:
            return True
        if kind in self._refused:
            return False
        if len(self._attached) >= MOST_KINDS:
            used = set().union(*self._groups.values())
            unused = next((one for one in self._attached if instead and one not in used), None)
            if unused is None:
                return False
            self._loop.run_in_executor(None, self._attached.pop(unused).close)  # which waits for the daemon
        label = self._chosen.name or f"lmcache-{os.getpid()}-{self._life[:4]}"
        name = engine_name(label, f"-{next(ENGINES)}")
        try:
            given = kind, name, self._chosen, self._finder, self._pool, self._life
            one = AttachedKind(*given) if self._l1 is None else InPlaceKind(self._l1, *given)
        except TransferError as error:
            LMCACHE.log.warning("transferd: objects of %s are not stored: %s", kind, error)
            self._refused.add(kind)
            return False
        self._attached[kind] = one
        return True

    def _refuse(self, kind: ObjectKind | None) -> None:
        if kind not in self._refused:
            self._refused.add(kind)
            why = (
                "objects without bytes of their layout on the host (serde, or an L1 on a device)"
                if kind is None
                else f"{kind}, because {MOST_KINDS} models and layouts are served already"
            )
            LMCACHE.log.warning("transferd: not stored and not loaded: %s", why)


def _bitmap(bits: Sequence[bool]) -> Bitmap:
    found = Bitmap(len(bits))
    found.batched_set([i for i, one in enumerate(bits) if one])
    return found
