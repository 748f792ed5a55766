"""Storage in a Mooncake Store pool: objects on every machine of the pool, written and read without a copy.

Facts this is built on (Mooncake 0.3.13, checked on loopback; see docs/mooncake.md):

* Calls block and release the GIL. With the master gone each one blocks for seconds and returns -900; with
  the master stopped it blocks for `MC_RPC_TIMEOUT_MS` and returns -901. `health_check` does not notice.
* A running call cannot be taken back, and holds on to its buffers. So `put` and `get` return when the
  native call has returned, never before; what gives a task its answer in time is the worker, which
  stops waiting and leaves the buffers lent. What keeps the *next* call from waiting is the breaker: it
  opens when a call is overdue or says that nobody answers, and then every call fails at once.
* `setup` without a master retries for minutes inside one call. So the master is dialled first.
* A put of an existing key answers 0 and keeps what is there, which is what content keys want.

glog writes to stderr from C++; it is limited to errors unless GLOG_minloglevel is set. Importing the
library installs C signal handlers and fork() after `setup` hangs the child: the daemon never forks.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import structlog

from transferd.clock import SYSTEM_CLOCK, Clock
from transferd.config import Config
from transferd.errors import ConfigError, StorageError, StorageFull, StorageUnavailable
from transferd.storage.base import FOUND, MISSING, STORED, Blob, Found, Outcome, Storage
from transferd.storage.breaker import CircuitBreaker
from transferd.storage.mooncake_environment import section_from_environment
from transferd.storage.uncancelled import uncancelled
from transferd.tiers.base import HostMemory

log = structlog.get_logger(__name__)

T = TypeVar("T")

CALL_THREADS = 8  # native calls at once; past it calls wait for a thread, within their own timeout
DIAL_INTERVAL_S = 0.2
CLOSE_TIMEOUT_S = 15.0  # close() takes 11 s with a dead master
PROBE_NAME = "transferd/probe"

# Mooncake's ErrorCode values that mean something else than "this object failed" (types.h).
OBJECT_NOT_FOUND = -704
NO_AVAILABLE_HANDLE = -200
RPC_FAIL = -900
RPC_TIMEOUT = -901
INVALID_PARAMS = -600  # of a get: the object is longer than the buffer
REPLICA_NOT_READY = -703  # being written at this moment
_NOT_THERE = frozenset({OBJECT_NOT_FOUND, REPLICA_NOT_READY})
_NOBODY_ANSWERS = frozenset({RPC_FAIL, RPC_TIMEOUT})
_COUNTED_AS = {Found.FOUND: "hits", Found.MISSING: "misses", Found.FAILED: "errors"}
_ENVIRONMENT = {
    "GLOG_minloglevel": "2",
    "GLOG_logtostderr": "1",
    "MC_STORE_CLIENT_METRIC": "0",
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
}


class MooncakeStorage(Storage):
    """A client of one pool, for all ranks of this daemon. Owns the client and its threads from `open` to `close`."""

    backend = "mooncake"

    def __init__(self, config: Config, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._section = section_from_environment(config.storage.mooncake)
        self._clock = clock
        self._store: Any = None
        self._replicate: Any = None
        self._threads: ThreadPoolExecutor | None = None
        self._probe_thread: ThreadPoolExecutor | None = None
        self._breaker = CircuitBreaker("mooncake", self._probe, self._section.probe_interval)
        self._counts: Counter[str] = Counter()

    # --- life ---------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Connect, retrying until `connect_timeout`. Raises StorageUnavailable, ConfigError."""
        if not self._section.master_server_addr:
            raise ConfigError("storage.mooncake.master_server_addr", "is needed, e.g. 127.0.0.1:50051")
        await self._dial()
        self._threads = ThreadPoolExecutor(CALL_THREADS, thread_name_prefix="transferd-mooncake")
        self._probe_thread = ThreadPoolExecutor(1, thread_name_prefix="transferd-mooncake-probe")
        await asyncio.get_running_loop().run_in_executor(self._threads, self._set_up)

    async def _dial(self) -> None:
        host, _, port = self._section.master_server_addr.removeprefix("etcd://").rpartition(":")
        if self._section.master_server_addr.startswith("etcd://"):
            return  # the library asks etcd who the master is
        give_up = self._clock.monotonic() + self._section.connect_timeout
        told = False
        while True:
            try:
                _, writer = await asyncio.wait_for(asyncio.open_connection(host, int(port)), 2.0)
            except (OSError, TimeoutError, ValueError) as error:
                if self._clock.monotonic() >= give_up:
                    waited = f"after {self._section.connect_timeout:g} s"
                    what = f"no Mooncake master at {self._section.master_server_addr} {waited}: {error}"
                    raise StorageUnavailable(what) from None
                if not told:
                    told = True
                    log.warning("waiting for the Mooncake master", address=self._section.master_server_addr)
                await asyncio.sleep(DIAL_INTERVAL_S)
            else:
                writer.close()
                return

    def _set_up(self) -> None:
        section = self._section
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        os.environ.setdefault("MC_RPC_TIMEOUT_MS", str(int(section.timeout * 1000)))
        try:
            from mooncake.store import MooncakeDistributedStore, ReplicateConfig
        except ImportError as error:
            raise ConfigError("storage.backend", f"mooncake needs its extra: {error}", "mooncake") from error
        store = MooncakeDistributedStore()
        code = store.setup(
            section.local_hostname,
            section.metadata_server,
            int(section.global_segment_size),
            int(section.local_buffer_size),
            section.protocol,
            section.rdma_devices,
            section.master_server_addr,
        )
        if code != 0:
            raise StorageUnavailable(
                f"Mooncake client could not be set up ({_told(code)}): {section.master_server_addr}"
            )
        replicate = ReplicateConfig()
        replicate.replica_num = section.replica_num
        for pin in ("with_soft_pin", "with_hard_pin"):
            if hasattr(replicate, pin):
                setattr(replicate, pin, getattr(section, pin.removeprefix("with_")))
        self._store, self._replicate = store, replicate

    def register(self, memory: HostMemory) -> None:
        code = self._opened.register_buffer(memory.address, memory.nbytes)
        if code != 0:
            raise StorageError(f"Mooncake refused to register {memory.nbytes} bytes of staging ({_told(code)})")

    def unregister(self, memory: HostMemory) -> None:
        if self._store is not None:
            self._store.unregister_buffer(memory.address)

    async def close(self) -> None:
        self._breaker.close()
        store, self._store = self._store, None
        if store is not None and self._threads is not None:
            closing = asyncio.get_running_loop().run_in_executor(self._threads, store.close)
            done, _ = await asyncio.wait({closing}, timeout=CLOSE_TIMEOUT_S)
            if not done:
                log.warning("the Mooncake client did not close in time and is left behind")
        for threads in (self._threads, self._probe_thread):
            if threads is not None:
                threads.shutdown(wait=False, cancel_futures=True)
        self._threads = self._probe_thread = None

    @property
    def _opened(self) -> Any:
        if self._store is None:
            raise StorageError("mooncake storage is not open")
        return self._store

    # --- objects ------------------------------------------------------------------------------------

    async def exists(self, names: Sequence[str]) -> list[bool]:
        if not names:
            return []
        store = self._opened
        keys = [_key(name) for name in names]
        codes = await self._call(lambda: store.batch_is_exist(keys))
        wrong = next((code for code in codes if code not in (0, 1)), None)
        if wrong is not None:
            self._counts["errors"] += 1
            raise StorageError(f"Mooncake cannot say what it has ({_told(wrong)})")
        return [code == 1 for code in codes]

    async def put(self, blobs: Sequence[Blob]) -> list[Outcome]:
        store, first = self._opened, _first_of_each(blobs)
        keys, addresses, sizes = _arguments(list(first.values()))
        if not keys:
            return []
        codes = await self._call(lambda: store.batch_put_from(keys, addresses, sizes, self._replicate))
        outcomes = {name: self._put_outcome(first[name], code) for name, code in zip(first, codes, strict=True)}
        return [outcomes[blob.name] for blob in blobs]

    def _put_outcome(self, blob: Blob, code: int) -> Outcome:
        if code == 0:
            return STORED
        self._counts["errors"] += 1
        if code == NO_AVAILABLE_HANDLE:
            what = f"no segment of the pool has room for {blob.data.nbytes} bytes ({_told(code)})"
            return Outcome(Found.FAILED, StorageFull(what))
        return Outcome(Found.FAILED, StorageError(f"Mooncake did not store an object ({_told(code)})"))

    async def get(self, blobs: Sequence[Blob]) -> list[Outcome]:
        store, first = self._opened, _first_of_each(blobs)
        keys, addresses, sizes = _arguments(list(first.values()))
        if not keys:
            return []
        codes = await self._call(lambda: store.batch_get_into(keys, addresses, sizes))
        outcomes = {name: self._get_outcome(first[name], code) for name, code in zip(first, codes, strict=True)}
        misfits = [_key(name) for name, code in zip(first, codes, strict=True) if _misfit(first[name], code)]
        if misfits:  # nobody can load them under this name; left there, they would never be stored anew
            await self._call(lambda: store.batch_remove(misfits, True))
        for blob in blobs:
            if outcomes[blob.name] is FOUND and blob is not first[blob.name]:
                blob.data[:] = first[blob.name].data  # the library fills one buffer a key
            self._counts[_COUNTED_AS[outcomes[blob.name].found]] += 1
        return [outcomes[blob.name] for blob in blobs]

    def _get_outcome(self, blob: Blob, code: int) -> Outcome:
        if code == blob.data.nbytes:
            return FOUND
        if _misfit(blob, code):
            self._counts["wrong_length"] += 1
            return MISSING
        if code in _NOT_THERE:
            return MISSING
        return Outcome(Found.FAILED, StorageError(f"Mooncake did not load an object ({_told(code)})"))

    async def quarantine(self, name: str) -> None:
        self._counts["corrupt"] += 1
        store = self._opened
        await self._call(lambda: store.batch_remove([_key(name)], True))

    def statistics(self) -> dict[str, Any]:
        """objects and bytes are None: only the master knows, for the whole pool (`transferd pool status`)."""
        counts = {name: self._counts[name] for name in ("hits", "misses", "wrong_length", "corrupt", "errors")}
        return counts | {
            "objects": None,
            "bytes": None,
            "breaker": str(self._breaker.state),
            "breaker_opened": self._breaker.opened,
        }

    # --- native calls -------------------------------------------------------------------------------

    async def _call(self, native: Callable[[], list[int]]) -> list[int]:
        """Run a native call in a thread, to its end. Raises StorageUnavailable when nobody answered.

        While the breaker is not closed, raises it without calling.
        """
        self._breaker.check()
        loop = asyncio.get_running_loop()
        overdue = f"a call took longer than {self._section.timeout:g} s"
        alarm = loop.call_later(self._section.timeout, self._breaker.failed, overdue)
        try:
            codes = await uncancelled(self._in_thread(native))
        finally:
            alarm.cancel()
        nobody = next((code for code in codes if code in _NOBODY_ANSWERS), None)
        if nobody is not None:
            self._counts["errors"] += 1
            self._breaker.failed(_told(nobody))
            raise StorageUnavailable(f"Mooncake does not answer ({_told(nobody)})")
        return codes

    async def _in_thread(self, native: Callable[[], list[int]]) -> list[int]:
        return await asyncio.get_running_loop().run_in_executor(self._threads, native)

    async def _probe(self) -> bool:
        """Whether the master answers. In a thread of its own: the others may all be stuck."""
        store = self._store
        if store is None or self._probe_thread is None:
            return False
        codes = await asyncio.get_running_loop().run_in_executor(
            self._probe_thread, lambda: store.batch_is_exist([PROBE_NAME])
        )
        return all(code in (0, 1) for code in codes)


def _misfit(blob: Blob, code: int) -> bool:
    """What is stored has another length than the buffer."""
    return code == INVALID_PARAMS or 0 <= code != blob.data.nbytes


def _first_of_each(blobs: Sequence[Blob]) -> dict[str, Blob]:
    """The library takes a key once per batch."""
    first: dict[str, Blob] = {}
    for blob in blobs:
        first.setdefault(blob.name, blob)
    return first


def _key(name: str) -> str:
    """A name as a Mooncake key: itself, or hex behind a tilde where C++ or a shell could not take it."""
    if name.isascii() and name.isprintable() and not name.startswith("~"):
        return name
    return f"~{name.encode('utf-8', 'surrogatepass').hex()}"


def _arguments(blobs: Sequence[Blob]) -> tuple[list[str], list[int], list[int]]:
    names = [_key(blob.name) for blob in blobs]
    addresses = [ctypes.addressof(ctypes.c_char.from_buffer(blob.data)) for blob in blobs]
    return names, addresses, [blob.data.nbytes for blob in blobs]


_NAMES = {
    -1: "INTERNAL_ERROR",
    INVALID_PARAMS: "INVALID_PARAMS",
    REPLICA_NOT_READY: "REPLICA_IS_NOT_READY",
    NO_AVAILABLE_HANDLE: "NO_AVAILABLE_HANDLE",
    OBJECT_NOT_FOUND: "OBJECT_NOT_FOUND",
    -706: "OBJECT_HAS_LEASE",
    RPC_FAIL: "RPC_FAIL",
    RPC_TIMEOUT: "RPC_TIMEOUT",
}


def _told(code: int) -> str:
    name = _NAMES.get(code)
    return f"code {code}" if name is None else f"{name}, {code}"
