"""The library's client behind plain blocking functions: keys in, the code of each key out.

Limits. The library reads its limits from the environment once. So we set them before importing it, unless
the operator has set them:

* MC_RPC_TIMEOUT_MS: how long a call waits for a master that hangs (default 30 s);
* MC_TCP_STATUS_TIMEOUT_SEC, MC_TCP_PROGRESS_TIMEOUT_SEC: how long a transfer waits for a peer that hangs.
  Without them a call fails after 60 s *and leaves its transfers queued*: they run when the peer comes back,
  in memory that is by then in use for something else (docs/adr/0010-mooncake-limits.md);
* MC_STORE_CLIENT_SETUP_RETRIES: by default `setup` tries 20 times, which takes 90 s without a master.

The interpreter lock. Data, lookup and remove calls release it. `setup` and `close` do not: they freeze the whole
process, whatever thread they run in. `setup` takes 20 ms with a listening master; the caller dials first, so that
`setup` never has to wait for a master. `close` takes 2 s, plus up to twice MC_RPC_TIMEOUT_MS if the master is gone or
hangs.

Fork. The library's threads do not survive fork(): calls in a child hang. The daemon never forks.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import structlog

from transferd.config import MooncakeStorageSection, Size
from transferd.errors import ConfigError, InvariantError, StorageError, StorageUnavailable
from transferd.runtime.limits import connect_limit
from transferd.storage.base import Blob
from transferd.storage.mooncake import connections
from transferd.storage.mooncake.error_codes import NO_ANSWER, OK, describe
from transferd.tiers.base import HostMemory

log = structlog.get_logger(__name__)

LEAST_VERSION = "0.3.13"  # with SoftPinAction
STALL_S = 3  # a TCP transfer that moves no byte for this long has failed
LANES = 4  # connections to a node, by default
STALL_LIMITS = ("MC_TCP_STATUS_TIMEOUT_SEC", "MC_TCP_PROGRESS_TIMEOUT_SEC")


class Buffer(NamedTuple):
    """The registered memory that an object is read from or written to. rank: which it was registered for."""

    address: int
    nbytes: int
    rank: int = 0


Batch = Mapping[str, Buffer]
"""The objects of a call, by key."""


_Columns = tuple[list[str], list[int], list[int]]
"""Keys, addresses and lengths, as the library takes them."""


CopyTask = tuple[int, int]
"""The id of a copy that a node makes."""


class PoolClient:
    """The library's client of one pool, connected. Every method blocks and may be called from any thread.

    Call `close` only when no other call runs. Codes are those of error_codes.py. Raises StorageError if the library
    itself fails.

    Of a list of RDMA devices, rank N uses number N modulo the list's length, as in FastDeploy's transfer processes. The
    library gives a client one list and chooses from it for each transfer. So with `segment_per_rank` each device that a
    rank uses has a client of its own, made when the first such rank is served: its memory is registered there, and its
    objects move there, at the same time as others'.
    """

    _failed = 0  # consecutive failed set-ups; the library may log why once, at the second

    def __init__(self, section: MooncakeStorageSection) -> None:
        """Join the pool. Raises StorageUnavailable, or ConfigError if retrying cannot help."""
        _set_limits(section)
        try:
            from mooncake import store as library
        except ImportError as error:
            raise ConfigError("storage.backend", f"mooncake cannot be loaded: {error}", "mooncake") from error
        if not hasattr(library, "SoftPinAction"):
            raise ConfigError("storage.backend", f"needs Mooncake {LEAST_VERSION} or newer", "mooncake")
        self._library, self._quiet = library, section.native_log == "off"
        devices = section.rdma_devices.split(",") if section.segment_per_rank else [section.rdma_devices]
        self._sections = [msgspec.structs.replace(section, rdma_devices=device.strip()) for device in devices]
        self._clients = {0: self._joined(self._sections[0])}
        self._store = self._clients[0].store  # answers what moves no bytes
        self.own: frozenset[str] = frozenset()  # its names among the holders; empty if it lends no memory
        self._complete = library.ReplicaStatus.COMPLETE
        status = library.TaskStatus
        self._copying = {status.PENDING: None, status.PROCESSING: None, status.SUCCESS: True}
        if section.lender:
            self._clients[0].prefer(section.lender)
        elif section.global_segment_size:
            self.own = self._clients[0].prefer_own()

    def _joined(self, section: MooncakeStorageSection) -> _LibraryClient:
        if self._quiet and not silence(but_errors=PoolClient._failed == 1):
            log.info("cannot silence this build of Mooncake: it writes error lines to stderr")
        client = _LibraryClient(self._library, section)
        PoolClient._failed = 0 if client.code == 0 else PoolClient._failed + 1
        if client.code != 0:
            where, code = section.master_server_addr, describe(client.code)
            raise StorageUnavailable(f"the Mooncake master at {where} rejected this client ({code})")
        if self._quiet:
            silence()
        return client

    def _of(self, rank: int) -> _LibraryClient:
        """The client of a rank's device."""
        place = rank % len(self._sections)
        if place not in self._clients:
            section = self._sections[place]
            # It lends nothing yet: that takes seconds, in which a set-up would hold the interpreter lock.
            made = self._joined(msgspec.structs.replace(section, global_segment_size=Size(0)))
            if section.global_segment_size:
                self.own |= made.prefer_own()
            self._clients[place] = made
        return self._clients[place]

    def _moved(self, batch: Batch, move: Callable[[_LibraryClient, _Columns], Sequence[int]]) -> dict[str, int]:
        """`move` for each device's objects, at the same time."""
        parts: defaultdict[int, dict[str, Buffer]] = defaultdict(dict)
        for key, buffer in batch.items():
            parts[buffer.rank % len(self._sections)][key] = buffer

        def moved(place: int) -> dict[str, int]:
            keys, buffers = list(parts[place]), parts[place].values()
            columns = keys, [buffer.address for buffer in buffers], [buffer.nbytes for buffer in buffers]
            return _per_key(keys, lambda: move(self._clients[place], columns))

        if len(parts) < 2:
            return moved(next(iter(parts), 0))
        with ThreadPoolExecutor(len(parts)) as threads:
            return {key: code for some in threads.map(moved, parts) for key, code in some.items()}

    def register(self, address: int, nbytes: int, rank: int = 0) -> int:
        """Register memory of a rank that batches point into. Returns 0 or a code. Raises StorageUnavailable."""
        code: int = self._of(rank).store.register_buffer(address, nbytes)
        return code

    def unregister(self, address: int, rank: int = 0) -> None:
        """Undo `register`."""
        self._of(rank).store.unregister_buffer(address)

    def exists(self, keys: Collection[str]) -> dict[str, int]:
        """1, 0 or a code for each key. Leases existing objects: the master does not evict them for its lease time."""
        return _per_key(keys, lambda: self._store.batch_is_exist(list(keys)))

    def put(self, batch: Batch, *, alone: bool = False) -> dict[str, int]:
        """Store objects; 0 or a code for each. alone: one copy, and that on this node if it lends memory.

        Also 0 for a key that another client is writing, or never finished.
        """
        return self._moved(batch, lambda one, columns: one.store.batch_put_from(*columns, one.how[alone]))

    def replace(self, batch: Batch) -> dict[str, int]:
        """Like put, but replaces an existing object. The pool keeps the memory of a running write until it ends."""
        return self._moved(batch, lambda one, columns: one.store.batch_upsert_from(*columns, one.how[False]))

    def holders(self, keys: Collection[str]) -> dict[str, list[str]]:
        """For each key, the nodes (host:port) that have the whole object, first the one that a get reads from.

        "" stands for this node, and for a medium that is no node's memory. The list is empty if there is no such
        object, or the master does not answer. Leases existing objects, as `exists` does.
        """
        with _translated():
            found = self._store.batch_get_replica_desc(list(keys))
        held = {key: [_holder(r, self.own) for r in found.get(key, ()) if r.status == self._complete] for key in keys}
        return {key: sorted(each, key=bool) if len(each) > 1 else each for key, each in held.items()}

    def copy(self, copies: Sequence[tuple[str, str]]) -> list[CopyTask | int]:
        """Request a further copy of each object (key) in a segment (name). Returns a task or a code for each.

        A node that has the object makes it from its own memory; it begins 16 copies a second. Raises
        StorageUnavailable if the master does not answer.
        """
        answers: list[CopyTask | int] = []
        with _translated():
            for key, segment in copies:
                task, code = self._store.create_copy_task(key, [segment])
                _raise_if_silent(code)
                answers.append(task if code == OK else int(code))
        return answers

    def copied(self, tasks: Sequence[CopyTask]) -> list[bool | None]:
        """Whether each task has made its copy; None while it runs. Raises StorageUnavailable, as `copy` does."""
        ended: list[bool | None] = []
        with _translated():
            for task in tasks:
                answer, code = self._store.query_task(task)
                _raise_if_silent(code)
                ended.append(False if answer is None else self._copying.get(answer.status, False))
        return ended

    def get(self, batch: Batch) -> dict[str, int]:
        """Load objects; each object's length, or a code."""
        return self._moved(batch, lambda one, columns: one.store.batch_get_into(*columns))

    def lengths(self, keys: Collection[str]) -> dict[str, int]:
        """The objects' lengths, or codes. Takes one request per key."""
        return _per_key(keys, lambda: [self._store.get_size(key) for key in keys])

    def remove(self, keys: Collection[str]) -> dict[str, int]:
        """Remove objects, even leased and pinned ones; 0 or a code for each."""
        return _per_key(keys, lambda: self._store.batch_remove(list(keys), True))

    def lend(self, nbytes: int, rank: int = 0) -> int:
        """Lend the pool a further segment, for a rank; the client owns it. Returns 0 or a code. Takes seconds."""
        with _translated():
            answer = self._of(rank).store.allocate_and_mount_segment(nbytes, protocol=self._sections[0].protocol)
            code: int = answer["ret"]
        return code

    def close(self) -> None:
        """Leave the pool, which loses this node's segment. Holds the interpreter lock for seconds."""
        clients, self._clients, self._store = self._clients, {}, None  # a call on a closed one would crash the process
        for client in list(clients.values())[::-1]:
            client.store.close()


class _LibraryClient:
    """The library's client for one list of devices. code: of its set-up. how: to store, not alone and alone."""

    def __init__(self, library: Any, section: MooncakeStorageSection) -> None:
        self.how = _replicate_config(library, section), _replicate_config(library, section)
        self.how[True].replica_num = 1
        self.store: Any = library.MooncakeDistributedStore()
        with _translated():
            self.code: int = self.store.setup(
                section.local_hostname,
                section.metadata_server,
                int(section.global_segment_size),
                int(section.local_buffer_size),
                section.protocol,
                section.rdma_devices,
                section.master_server_addr,
            )

    def prefer(self, segment: str) -> None:
        """Place the first copy in this segment if it has room, so that a chain lies with one node and not with all."""
        for how in self.how:
            how.preferred_segments = [segment]

    def prefer_own(self) -> frozenset[str]:
        """Place the first copy in the segment that this client lends, or will lend. Returns its names."""
        name = self.store.get_hostname()
        self.prefer(name)
        # A segment has one port in its name and listens on another, which the library does not report.
        host = name.rpartition(":")[0]
        return frozenset(f"{host}:{port}" for port in connections.listening())


def key_of(name: str) -> str:
    """A name as a Mooncake key: the name itself, or a tilde and hex if C++ or a shell could not take it."""
    if name.isascii() and name.isprintable() and not name.startswith("~"):
        return name
    return f"~{name.encode('utf-8', 'surrogatepass').hex()}"


def first_of_each(blobs: Sequence[Blob]) -> dict[str, Blob]:
    """The first blob of each name: the library accepts a key only once per batch."""
    first: dict[str, Blob] = {}
    for blob in blobs:
        first.setdefault(blob.name, blob)
    return first


def buffer_of(blob: Blob, registered: Mapping[int, HostMemory]) -> Buffer:
    """A blob's buffer. registered: memory by its address. Raises InvariantError if the buffer lies in none of it."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(blob.data))
    for start, memory in registered.items():
        if start <= address and address + blob.data.nbytes <= start + memory.nbytes:
            return Buffer(address, blob.data.nbytes, memory.rank)
    raise InvariantError(f"the buffer of {blob.name} is not in memory registered with Mooncake")


def stall_limit() -> float:
    """Seconds after which the transport fails a transfer that moves no bytes."""
    limits = [os.environ.get(name, "") for name in STALL_LIMITS]
    return float(max((int(text) for text in limits if text.isdecimal()), default=STALL_S))


def longest_transfer(objects: int) -> float:
    """Seconds after which transfers that the library has left queued can touch no buffer any more.

    They wait for a connection to their node. The library tries its LANES one after the other, and gives up the queue
    when all have failed (tcp_transport_lane_impl.h: one probe at a time). Only the kernel ends a try. Until then
    the node may come back, and the queue runs, LANES at a time, each until it moves no byte for the limit.
    """
    lanes = int(os.environ.get("MC_TCP_LANES_PER_PEER", "") or LANES)
    return lanes * connect_limit() + -(-objects // lanes) * stall_limit()


def _set_limits(section: MooncakeStorageSection) -> None:
    limits = {
        "MC_LOG_LEVEL": LEVELS[section.native_log],
        "MC_STORE_CLIENT_METRIC": "0",
        "MC_STORE_CLIENT_SETUP_RETRIES": "1",
        "MC_RPC_TIMEOUT_MS": str(max(1, int(section.timeout * 1000))),
    } | dict.fromkeys(STALL_LIMITS, str(STALL_S))
    for name, value in limits.items():
        os.environ.setdefault(name, value)


def _replicate_config(library: Any, section: MooncakeStorageSection) -> Any:
    config = library.ReplicateConfig()
    config.replica_num = section.replica_num
    if section.soft_pin:
        config.soft_pin_action = library.SoftPinAction.ENABLE
    config.with_hard_pin = section.hard_pin
    return config


def _holder(replica: Any, own: frozenset[str]) -> str:
    if not replica.is_memory_replica():
        return ""
    endpoint: str = replica.get_memory_descriptor().buffer_descriptor.transport_endpoint
    return "" if endpoint in own else endpoint


def part_of(batch: Batch, keys: Iterable[str]) -> Batch:
    """The part of a batch with these keys."""
    return {key: batch[key] for key in keys}


def _per_key(keys: Collection[str], call: Callable[[], Sequence[int]]) -> dict[str, int]:
    with _translated():
        codes = [int(code) for code in call()]
    if len(codes) != len(keys):
        raise StorageError(f"Mooncake returned {len(codes)} codes for {len(keys)} keys")
    return dict(zip(keys, codes, strict=True))


def _raise_if_silent(code: int) -> None:
    """Each further call would wait for the master again."""
    if code in NO_ANSWER:
        raise StorageUnavailable(f"Mooncake does not answer ({describe(code)})")


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Turns the library's C++ exceptions, which arrive as RuntimeError, into StorageError."""
    try:
        yield
    except RuntimeError as error:
        raise StorageError(f"Mooncake failed: {error}") from error


LEVELS = {"off": "ERROR", "error": "ERROR", "warning": "WARNING", "info": "INFO"}
_MIN_LEVEL_FLAG = "_ZN3fLI17FLAGS_minloglevelE"  # int32 fLI::FLAGS_minloglevel
_ERROR, _FATAL = 2, 3


# The library's log lines (glog, to stderr) are not JSON and would corrupt a structured log; each call also returns its
# problem as a code. MC_LOG_LEVEL has no "off", and this glog ignores GLOG_* variables: so we set the flag in memory. A
# failed set-up is the exception, because only the log explains a missing RDMA device: the second attempt shows errors.
def silence(*, but_errors: bool = False) -> bool:
    """Log only fatal errors from now on, or errors too. Returns False, with nothing changed, if the flag is hidden."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        if "libglog" in line:
            path = line[line.index("/") :]
            try:
                ctypes.c_int32.in_dll(ctypes.CDLL(path), _MIN_LEVEL_FLAG).value = _ERROR if but_errors else _FATAL
            except (OSError, ValueError):
                return False
            return True
    return False
