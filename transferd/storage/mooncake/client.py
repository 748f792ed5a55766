"""The library's client behind plain blocking functions: lists of codes in, lists of codes out.

Bounds. The library reads its limits from the environment, once, so they are set here before it is
imported, and only where the operator has not set them:

* MC_RPC_TIMEOUT_MS: how long a call waits for a master that hangs (30 s otherwise);
* MC_TCP_STATUS_TIMEOUT_SEC, MC_TCP_PROGRESS_TIMEOUT_SEC: how long a transfer waits for a peer that hangs.
  Without them a call gives up after 60 s *and leaves its transfers queued*: when the peer comes back,
  they run, in memory that has long been used for something else (docs/adr/0010-mooncake-limits.md);
* MC_STORE_CLIENT_SETUP_RETRIES: `setup` tries 20 times otherwise, 90 s with an absent master.

The interpreter lock. Data, lookup and remove calls release it. `setup` and `close` do not: in whatever
thread they run, everything stands still meanwhile. With a master that listens, `setup` takes 20 ms; the
caller dials first, so that minutes without a master are not spent inside it. `close` takes 2 s, and up
to twice MC_RPC_TIMEOUT_MS more when the master is gone or hangs.

Fork. The library's threads do not survive fork(): a child's calls hang. The daemon never forks.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import structlog

from transferd.config import MooncakeStorageSection
from transferd.errors import ConfigError, StorageError, StorageUnavailable
from transferd.storage.mooncake import glog
from transferd.storage.mooncake.error_codes import describe
from transferd.storage.mooncake.membership import Membership

log = structlog.get_logger(__name__)

STALL_S = 3  # without a byte moved, a TCP transfer has failed
STALL_LIMITS = ("MC_TCP_STATUS_TIMEOUT_SEC", "MC_TCP_PROGRESS_TIMEOUT_SEC")


@dataclass(frozen=True, slots=True)
class KeyBatch:
    """Keys, each once, with the registered memory their objects are read from or written to."""

    keys: list[str]
    addresses: list[int]
    sizes: list[int]

    @classmethod
    def joined(cls, batches: Iterable[KeyBatch]) -> KeyBatch:
        """One after the other. No key may be in two of them."""
        whole = cls([], [], [])
        for batch in batches:
            whole.keys.extend(batch.keys)
            whole.addresses.extend(batch.addresses)
            whole.sizes.extend(batch.sizes)
        return whole

    def only(self, keys: Sequence[str]) -> KeyBatch:
        """The part of it that these keys name, in its own order."""
        wanted = set(keys)
        kept = [i for i, key in enumerate(self.keys) if key in wanted]
        return KeyBatch([self.keys[i] for i in kept], [self.addresses[i] for i in kept], [self.sizes[i] for i in kept])


class PoolClient(Protocol):
    """What the backend asks of a connected client. Every method blocks; any thread, `close` when no call runs.

    Lists of codes answer key by key (error_codes.py). Raises StorageError when the library itself fails.
    """

    def register(self, address: int, nbytes: int) -> int:
        """0 or a code. Announces memory that batches point into."""

    def unregister(self, address: int) -> int:
        """0 or a code."""

    def exists(self, keys: Sequence[str]) -> list[int]:
        """1, 0 or a code. What is there is leased: not evicted for the master's lease time."""

    def put(self, batch: KeyBatch) -> list[int]:
        """0 or a code. 0 is also the answer for a key that another client is still writing, or never finished."""

    @property
    def can_replace(self) -> bool:
        """Whether `replace` may be called."""

    def replace(self, batch: KeyBatch) -> list[int]:
        """As put, but takes the place of what is there; memory of a write in progress is kept until that has ended."""

    def get(self, batch: KeyBatch) -> list[int]:
        """The object's length, or a code."""

    def lengths(self, keys: Sequence[str]) -> list[int]:
        """The objects' lengths, or codes. One question each."""

    def remove(self, keys: Sequence[str]) -> list[int]:
        """0 or a code. Leased and pinned objects too."""

    def close(self) -> None:
        """Leave the pool; what this node lent it is gone. Holds the interpreter lock for seconds."""


class NativeClient:
    """The library's client of one pool, connected: a PoolClient."""

    _failed = 0  # set-ups in a row that failed; the library may say why once, at the second

    def __init__(self, section: MooncakeStorageSection, joining: Membership) -> None:
        """Join the pool. Raises StorageUnavailable, or ConfigError where no waiting can help."""
        _set_limits(section)
        try:
            from mooncake import store as library
        except ImportError as error:
            raise ConfigError("storage.backend", f"mooncake cannot be loaded: {error}", "mooncake") from error
        quiet = section.native_log == "off"
        if quiet and not (glog.show_errors() if NativeClient._failed == 1 else glog.silence()):
            log.info("this build of Mooncake cannot be silenced: its error lines stay on stderr")
        self._replicate = _replicate_config(library, section)
        self._store: Any = library.MooncakeDistributedStore()
        with _translated():
            code = self._store.setup(
                joining.local_hostname,
                joining.metadata_server,
                int(joining.global_segment_size),
                int(joining.local_buffer_size),
                joining.protocol,
                joining.rdma_devices,
                joining.master_server_addr,
            )
        NativeClient._failed = 0 if code == 0 else NativeClient._failed + 1
        if code != 0:
            raise StorageUnavailable(
                f"the Mooncake master at {joining.master_server_addr} let nobody in ({describe(code)})"
            )
        if quiet:
            glog.silence()

    def register(self, address: int, nbytes: int) -> int:
        code: int = self._store.register_buffer(address, nbytes)
        return code

    def unregister(self, address: int) -> int:
        code: int = self._store.unregister_buffer(address)
        return code

    def exists(self, keys: Sequence[str]) -> list[int]:
        return _per_key(keys, lambda: self._store.batch_is_exist(list(keys)))

    def put(self, batch: KeyBatch) -> list[int]:
        return _per_key(
            batch.keys,
            lambda: self._store.batch_put_from(batch.keys, batch.addresses, batch.sizes, self._replicate),
        )

    @property
    def can_replace(self) -> bool:
        return hasattr(self._store, "batch_upsert_from")

    def replace(self, batch: KeyBatch) -> list[int]:
        return _per_key(
            batch.keys,
            lambda: self._store.batch_upsert_from(batch.keys, batch.addresses, batch.sizes, self._replicate),
        )

    def get(self, batch: KeyBatch) -> list[int]:
        return _per_key(batch.keys, lambda: self._store.batch_get_into(batch.keys, batch.addresses, batch.sizes))

    def lengths(self, keys: Sequence[str]) -> list[int]:
        return _per_key(keys, lambda: [self._store.get_size(key) for key in keys])

    def remove(self, keys: Sequence[str]) -> list[int]:
        return _per_key(keys, lambda: self._store.batch_remove(list(keys), True))

    def close(self) -> None:
        store, self._store = self._store, None  # a call on a closed one would crash the process
        store.close()


def stall_limit() -> float:
    """Seconds after which the transport lets go of a transfer that does not move."""
    limits = [os.environ.get(name, "") for name in STALL_LIMITS]
    return float(max((int(text) for text in limits if text.isdigit()), default=STALL_S))


def _set_limits(section: MooncakeStorageSection) -> None:
    limits = {
        "MC_LOG_LEVEL": glog.LEVELS[section.native_log],
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
        if hasattr(library, "SoftPinAction"):
            config.soft_pin_action = library.SoftPinAction.ENABLE
        elif hasattr(config, "with_soft_pin"):
            config.with_soft_pin = True
        else:
            raise ConfigError("storage.mooncake.soft_pin", "this version of Mooncake knows no soft pins", True)
    if section.hard_pin:
        if not hasattr(config, "with_hard_pin"):
            raise ConfigError("storage.mooncake.hard_pin", "this version of Mooncake knows no hard pins", True)
        config.with_hard_pin = True
    return config


def _per_key(keys: Sequence[str], call: Callable[[], Sequence[int]]) -> list[int]:
    with _translated():
        codes = [int(code) for code in call()]
    if len(codes) != len(keys):
        raise StorageError(f"Mooncake gave {len(codes)} answers for {len(keys)} keys")
    return codes


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """C++ exceptions arrive as RuntimeError."""
    try:
        yield
    except RuntimeError as error:
        raise StorageError(f"Mooncake failed: {error}") from error
