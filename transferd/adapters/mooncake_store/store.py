"""MooncakeDistributedStore: Mooncake's keys, buffers and return codes, over this node's daemon.

It never raises into an engine: what fails is a negative number, as Mooncake's is. Keys are the engine's; they name
everything that an object's bytes depend on, because Mooncake knows nothing else either.
"""

from __future__ import annotations

import bisect
import ctypes
import itertools
import mmap
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transferd.adapters.common.companion import OneDaemon
from transferd.adapters.common.copied import Pieces
from transferd.adapters.common.memory import mappings
from transferd.adapters.common.settings import engine_name
from transferd.adapters.mooncake_store.settings import MOONCAKE, StoreSettings, settings
from transferd.adapters.mooncake_store.sizes import AttachedSize, KnownSizes
from transferd.errors import TransferError
from transferd.runtime.clock import SYSTEM_CLOCK

OK, INTERNAL_ERROR, INVALID_PARAMS, OBJECT_NOT_FOUND, TRANSFER_FAIL = 0, -1, -600, -704, -800  # Mooncake's codes
MOST_SIZES = 16  # the daemon also bounds its engines
LEAVE_S = 5.0
ENGINES = itertools.count()  # of this process, which may have several stores

Lists = Sequence[Sequence[int]]  # addresses or sizes of each object's pieces
Move = Callable[[AttachedSize, Sequence[str], Sequence[Pieces]], list[bool]]


class ReplicateConfig:
    """What an engine asks of Mooncake's copies. The daemon's own settings decide, so nothing of it is read."""

    def __init__(self) -> None:
        self.replica_num = 1
        self.with_soft_pin = self.with_hard_pin = self.prefer_alloc_in_same_node = False
        self.preferred_segment = ""
        self.preferred_segments: list[str] = []


class MooncakeHostMemAllocator:
    """Memory of this process for an engine's host pool."""

    def __init__(self) -> None:
        self._memory: dict[int, mmap.mmap] = {}

    def alloc(self, size: int) -> int:
        """The address of `size` bytes; 0 if there is no memory."""
        try:
            memory = mmap.mmap(-1, size)
        except (OSError, ValueError):
            return 0
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._memory[address] = memory
        return address

    def free(self, address: int) -> int:
        """Forget memory that `alloc` gave; it ends with the last tensor on it."""
        return OK if self._memory.pop(address, None) is not None else INVALID_PARAMS


class MooncakeDistributedStore:
    """Thread-safe. Usable after `setup`; before and after `close`, everything is missing and nothing is stored."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chosen = StoreSettings()
        self._model = ""
        self._finder: OneDaemon | None = None
        self._sizes: KnownSizes | None = None
        self._attached: dict[int, AttachedSize] = {}
        self._used: set[int] = set()  # of these, the sizes whose objects were found or moved here
        self._refused: set[int] = set()
        self._buffers: list[tuple[int, int]] = []  # registered memory: address, end; sorted

    def setup(self, *given: Any, tenant_id: str = "default", **more: Any) -> int:
        """Find or start the daemon. What is for Mooncake's own network and memory is not used.

        The tenant becomes part of the model's name, so tenants have objects of their own. Settings are those of
        TRANSFERD_MOONCAKE_STORE.
        """
        if given and isinstance(given[0], Mapping):
            tenant_id = str(given[0].get("tenant_id", tenant_id))
        elif len(given) > 10:  # its place in Mooncake's signature
            tenant_id = str(given[10])
        del more
        try:
            self._chosen = settings()
            self._finder = self._chosen.one_daemon(MOONCAKE)
        except TransferError as error:
            MOONCAKE.log.error("transferd: %s", error)
            return INVALID_PARAMS
        self._model = f"mooncake-store/{tenant_id}"
        self._sizes = KnownSizes(self._chosen.file_of_store(MOONCAKE, "sizes-{}", tenant_id))
        if not self._finder.listens_within(self._chosen.start_timeout):
            MOONCAKE.log.warning("transferd: no daemon after %g s; nothing is stored", self._chosen.start_timeout)
        return OK

    def setup_dummy(self, mem_pool_size: int, local_buffer_size: int, server_address: str) -> int:
        """As `setup`: the daemon is the process that Mooncake has as a client of its own here."""
        del mem_pool_size, local_buffer_size, server_address
        return self.setup()

    def close(self) -> int:
        """Leave the daemon, which ends if engines have started it and this was the last. Idempotent."""
        with self._lock:
            attached, self._attached = list(self._attached.values()), {}
            finder, self._finder = self._finder, None
        for one in attached:
            one.close()
        if finder is not None:
            finder.end(LEAVE_S)
        return OK

    # --- memory -------------------------------------------------------------------------------------

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        """Memory of the host that objects are moved from and to. A GPU's memory is refused."""
        if size <= 0 or not _on_host(buffer_ptr, size):
            what = "transferd: %d bytes at %#x are no memory of the host: use a host pool, or vLLM's TransferdConnector"
            MOONCAKE.log.error(what, size, buffer_ptr)
            return INVALID_PARAMS
        with self._lock:
            self._buffers = sorted({*self._buffers, (buffer_ptr, buffer_ptr + size)})
        return OK

    def unregister_buffer(self, buffer_ptr: int) -> int:
        with self._lock:
            self._buffers = [one for one in self._buffers if one[0] != buffer_ptr]
        return OK

    def _registered(self, pieces: Pieces) -> bool:
        buffers = self._buffers
        for address, size in pieces:
            place = bisect.bisect_right(buffers, (address, 1 << 64)) - 1
            if size <= 0 or place < 0 or buffers[place][1] < address + size:
                return False
        return bool(pieces)

    # --- questions ----------------------------------------------------------------------------------

    def is_exist(self, key: str) -> int:
        return self.batch_is_exist([key])[0]

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        """1 for each key whose object can be loaded, else 0."""
        return [int(one is not None) for one in self._where(keys)]

    def get_size(self, key: str) -> int:
        """The object's bytes, or OBJECT_NOT_FOUND."""
        (one,) = self._where([key])
        return OBJECT_NOT_FOUND if one is None else one.nbytes

    def get_hostname(self) -> str:
        return socket.gethostname()

    def batch_get_replica_desc(self, keys: Sequence[str]) -> dict[str, list[Any]]:
        """Empty: the daemon's levels are not Mooncake's segments."""
        del keys
        return {}

    def _where(self, keys: Sequence[str]) -> list[AttachedSize | None]:
        """For each key the size that has it."""
        found: list[AttachedSize | None] = [None] * len(keys)
        for nbytes in self._sizes.all() if self._sizes else []:
            open_ = [i for i, one in enumerate(found) if one is None]
            if not open_ or (size := self._of(nbytes)) is None:
                continue
            there = size.exists([keys[i] for i in open_])
            if any(there) and self._of(nbytes, use=True) is not size:
                continue  # it gave way meanwhile
            for i, one in zip(open_, there, strict=True):
                if one:
                    found[i] = size
        return found

    # --- objects in registered memory ---------------------------------------------------------------

    def put_from(self, key: str, buffer_ptr: int, size: int, config: Any = None) -> int:
        return self.batch_put_from([key], [buffer_ptr], [size], config)[0]

    def batch_put_from(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int], config: Any = None
    ) -> list[int]:
        """0 for each object that is stored. One that is there already stays as it is."""
        return self.batch_put_from_multi_buffers(keys, [[one] for one in buffer_ptrs], [[one] for one in sizes], config)

    def batch_put_from_multi_buffers(
        self, keys: Sequence[str], all_buffer_ptrs: Lists, all_sizes: Lists, config: Any = None
    ) -> list[int]:
        """The same, each object in several pieces of memory, in this order."""
        del config
        moved = self._moved(keys, all_buffer_ptrs, all_sizes, AttachedSize.store)
        return [code if code < 0 else OK for code in moved]

    def get_into(self, key: str, buffer_ptr: int, size: int) -> int:
        return self.batch_get_into([key], [buffer_ptr], [size])[0]

    def batch_get_into(self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """The bytes of each object that was loaded. `sizes` are those of the objects."""
        return self.batch_get_into_multi_buffers(keys, [[one] for one in buffer_ptrs], [[one] for one in sizes])

    def batch_get_into_multi_buffers(
        self, keys: Sequence[str], all_buffer_ptrs: Lists, all_sizes: Lists, prefer_alloc_in_same_node: bool = False
    ) -> list[int]:
        """The same, each object into several pieces of memory, in this order."""
        del prefer_alloc_in_same_node
        return self._moved(keys, all_buffer_ptrs, all_sizes, AttachedSize.load)

    def _moved(self, keys: Sequence[str], pointers: Lists, sizes: Lists, move: Move) -> list[int]:
        """The bytes of each object that was moved, else a code."""
        if not len(keys) == len(pointers) == len(sizes) or any(map(_uneven, pointers, sizes)):
            MOONCAKE.log.error("transferd: %d keys for %d buffers and %d sizes", len(keys), len(pointers), len(sizes))
            return [INVALID_PARAMS] * len(keys)
        objects = [
            list(zip(map(int, some), map(int, lengths), strict=True))
            for some, lengths in zip(pointers, sizes, strict=True)
        ]
        codes = [INVALID_PARAMS] * len(keys)
        by_size: dict[int, list[int]] = {}
        for i, pieces in enumerate(objects):
            if self._registered(pieces):
                by_size.setdefault(sum(size for _, size in pieces), []).append(i)
        missing = OBJECT_NOT_FOUND if move is AttachedSize.load else TRANSFER_FAIL
        for nbytes, which in by_size.items():
            done = self._by(move, nbytes, [keys[i] for i in which], [objects[i] for i in which])
            for i, one in zip(which, done, strict=True):
                codes[i] = nbytes if one else missing
        return codes

    def _by(self, move: Move, nbytes: int, keys: Sequence[str], objects: Sequence[Pieces]) -> list[bool]:
        size = self._of(nbytes, use=True)
        if size is None:
            return [False] * len(keys)
        if self._sizes is not None and move is AttachedSize.store:
            self._sizes.add(nbytes)
        return move(size, keys, objects)

    # --- objects by value ---------------------------------------------------------------------------

    def put(self, key: str, value: Any, config: Any = None) -> int:
        return self.put_batch([key], [value], config)

    def put_batch(self, keys: Sequence[str], values: Sequence[Any], config: Any = None) -> int:
        """0 if all are stored."""
        del config
        stored = True
        for key, value in zip(keys, values, strict=True):
            content = bytes(value)
            kept = ctypes.create_string_buffer(content, len(content))
            pieces = [(ctypes.addressof(kept), len(content))]
            stored &= bool(content) and self._by(AttachedSize.store, len(content), [key], [pieces]) == [True]
        return OK if stored else TRANSFER_FAIL

    def get(self, key: str) -> bytes:
        """The object's bytes; empty if there is none."""
        (size,) = self._where([key])
        if size is None:
            return b""
        content = ctypes.create_string_buffer(size.nbytes)
        return content.raw if size.load([key], [[(ctypes.addressof(content), size.nbytes)]]) == [True] else b""

    def get_batch(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    # --- removal ------------------------------------------------------------------------------------

    def remove(self, key: str, force: bool = False) -> int:
        return self.batch_remove([key], force)[0]

    def batch_remove(self, keys: Sequence[str], force: bool = False) -> list[int]:
        """0 for each object that was there and is removed, also of those in use: a load then misses."""
        del force
        codes = [OBJECT_NOT_FOUND] * len(keys)
        for i, size in enumerate(self._where(keys)):
            if size is not None:
                try:
                    codes[i] = OK if size.link.remove([keys[i]]).objects else OBJECT_NOT_FOUND
                except TransferError as error:
                    MOONCAKE.log.warning("transferd: %s", error)
                    codes[i] = INTERNAL_ERROR
        return codes

    def remove_all(self, force: bool = False) -> int:
        """Remove this tenant's objects that this user may remove. Their number, or INTERNAL_ERROR."""
        del force
        try:
            size = next((one for one in map(self._of, self._sizes.all() if self._sizes else []) if one), None)
            return 0 if size is None else size.link.purge(self._model, self._chosen.generation).objects
        except TransferError as error:
            MOONCAKE.log.warning("transferd: %s", error)
            return INTERNAL_ERROR

    def _of(self, nbytes: int, *, use: bool = False) -> AttachedSize | None:
        """use: if all places are taken, it gets that of a size which was only asked for: an earlier model's."""
        with self._lock:
            if self._finder is None or nbytes in self._refused:
                return None
            if nbytes not in self._attached:
                full = len(self._attached) >= MOST_SIZES
                if full and not use:
                    return None
                label = self._chosen.name or f"mooncake-store-{os.getpid()}-{SYSTEM_CLOCK.fresh_id()[:4]}"
                name = engine_name(label, f"-{next(ENGINES)}")
                try:
                    if full:
                        self._give_way()
                    self._attached[nbytes] = AttachedSize(nbytes, name, self._model, self._chosen, self._finder)
                except TransferError as error:
                    MOONCAKE.log.warning("transferd: objects of %d bytes are not stored: %s", nbytes, error)
                    self._refused.add(nbytes)
                    return None
            if use:
                self._used.add(nbytes)
            return self._attached[nbytes]

    def _give_way(self) -> None:
        """Leave a size that is not in use. Raises TransferError if all are."""
        unused = next((one for one in self._attached if one not in self._used), None)
        if unused is None:
            raise TransferError(f"{MOST_SIZES} sizes of objects are served already")
        leaving = self._attached.pop(unused)
        threading.Thread(target=leaving.close, daemon=True).start()  # it waits for the daemon, and others for our lock


def _uneven(pointers: Sequence[int], sizes: Sequence[int]) -> bool:
    return len(pointers) != len(sizes)


def _on_host(address: int, nbytes: int) -> bool:
    """Whether this process can read and write these bytes. A GPU's memory has addresses, too."""
    reached = address
    for part in mappings():
        if part.end > reached:
            if part.start > reached or not part.writable:
                return False
            reached = part.end
            if reached >= address + nbytes:
                return True
    return False
