"""Baidu's AttentionStore through its SDK, driven the way FastDeploy drives it.

The SDK moves bytes itself, straight between the store and device memory: we pass it the addresses of each
layer's key and value tensors and the block ids. So nothing is staged or sealed here.

Each rank has one session and four serial executors, one for each thread that FastDeploy has: loads, stores, index
queries and index updates, which have no time limit in the SDK. A call cannot be cancelled once it has begun, and it may
touch device blocks until it returns. So a stopped transfer waits for its running call, which has a time limit; to keep
that short, transfers are cut into slices of `slice_blocks`.

A write ends at the first slice that the store does not take completely, because later blocks would be unreachable.
Rank 0 then updates the index: after a read the blocks are in device memory, after a write they are not.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import structlog

from transferd.blocks.layout import BlockLayout, build_layout
from transferd.config import CacheSection, StorageSection
from transferd.config.generation import configured_generation
from transferd.config.sections import AttentionStoreSection
from transferd.errors import (
    Closed,
    ConfigError,
    RequestError,
    StillRunning,
    StorageError,
    StorageUnavailable,
    TierError,
)
from transferd.runtime.aio import Background, every
from transferd.runtime.clock import SYSTEM_CLOCK, Clock
from transferd.runtime.threads import CLOSE_S, Crew, Work
from transferd.storage.attention_store.own_blocks import OwnBlocks, Tensors, tensors_of
from transferd.storage.tokens import RankPort, TokenStorage, Transfer
from transferd.tasks import RankOutcome, TokenIds

log = structlog.get_logger(__name__)

MATCH_TIMEOUT_S = 10.0
READY_CALL_S = 5.0  # time limit of one readiness check
READY_PAUSE_S = 1.0
NOT_READY = "cuda memory not ready"  # the SDK's answer until it has found the device memory
CLOSE_WAIT_S = 5.0
MANAGER = 0  # the rank that updates the index for the whole node


class SdkTokenStorage(TokenStorage):
    """See the module."""

    backend = "attention_store"

    def __init__(self, storage: StorageSection, cache: CacheSection, *, clock: Clock = SYSTEM_CLOCK) -> None:
        """Raises ConfigError without an SDK, or for a layout that the SDK cannot store."""
        self._settings = storage.attention_store
        self._cache = cache
        self.block_size = cache.block_size
        self._generation = configured_generation(storage)
        self._clock = clock
        self._layout = build_layout(cache)
        planes = [plane.name for plane in self._layout.planes]
        self._moves = planes == ["key", "value"]
        if not self._moves and not self._settings.only_flush:
            what = f"the SDK stores only the planes key and value; this cache has {', '.join(planes)}"
            raise ConfigError("storage.attention_store.driver", what, "sdk")
        self._library = load_library()
        self._ranks: dict[int, SdkSession] = {}
        self._detached: list[SdkSession] = []  # ranks that were detached while some of their calls still ran
        self._background = Background(awaited=False)
        self._counts: Counter[str] = Counter()

    # --- life ---------------------------------------------------------------------------------------

    async def attach(self, port: RankPort) -> None:
        """Open a session: the SDK needs the device memory for it."""
        given = self._library, self._settings, self._layout, self._cache, port
        starting = SerialExecutor(f"transferd-as-{port.rank}-start")
        try:
            session = await starting.run(lambda: SdkSession(*given), "opening of a session")
        finally:
            starting.close(0.0)
        for executor in session.executors:
            executor.open()
        self._ranks[port.rank] = session

    async def ready(self) -> None:
        await every(self._rank_ready(rank) for rank in self._ranks.values())

    async def _rank_ready(self, rank: SdkSession) -> None:
        """Query blocks that do not exist until the SDK gives a real answer."""
        absent = list(range(self.block_size + 1))
        give_up = self._clock.monotonic() + self._settings.ready_timeout
        while True:
            try:
                await rank.queries.run(lambda: rank.match(absent, 0, READY_CALL_S))
                return
            except StorageError as error:
                if NOT_READY not in str(error):
                    raise
                if self._clock.monotonic() >= give_up:
                    waited = f"{self._settings.ready_timeout:g} s"
                    what = f"rank {rank.port.rank}: AttentionStore was not ready within {waited}: {error}"
                    raise StorageUnavailable(what) from None
            await asyncio.sleep(READY_PAUSE_S)

    def detach(self, rank: int) -> None:
        attached = self._ranks.pop(rank, None)
        if attached is not None:
            self._detached = [left for left in [*self._detached, attached] if left.close()]

    async def close(self) -> None:
        """Close every session. Raises StillRunning if calls have not returned, and leaves their threads behind."""
        await self._background.settled(CLOSE_WAIT_S)
        for rank in list(self._ranks):
            self.detach(rank)
        end = time.monotonic() + CLOSE_S  # real time, because it waits for real threads
        if hanging := [call for left in self._detached for call in left.close(max(0.0, end - time.monotonic()))]:
            raise StillRunning(f"AttentionStore calls are still running: {', '.join(hanging)}")

    def check_generation(self, generation: str) -> None:
        if generation != self._generation:
            what = "AttentionStore fixes its model version at start: restart the daemon with another AS_MODEL_VERSION"
            raise RequestError(what, code="fixed_generation")

    def statistics(self) -> dict[str, Any]:
        names = ("hits", "misses", "errors", "stored", "flushes", "flush_errors")
        return {"objects": None, "bytes": None} | {name: self._counts[name] for name in names}

    # --- the contract -------------------------------------------------------------------------------

    async def match(self, path: TokenIds, start: int, generation: str, salt: str = "") -> int:
        del generation, salt  # fixed, see above; always "", the SDK has none
        tokens = path.array.tolist()
        return min(
            await every(
                rank.queries.run(functools.partial(rank.match, tokens, start, MATCH_TIMEOUT_S))
                for rank in self._ranks.values()
            )
        )

    async def read(self, transfer: Transfer) -> RankOutcome:
        if not self._moves:
            return transfer.ended(0, StorageError("AttentionStore: flush-only, no bytes of this layout move"), 0.0)
        outcome = await self._in_slices(transfer, write=False)
        moved = len(outcome.moved)
        self._counts["hits"] += moved
        self._counts["misses"] += len(transfer.blocks) - moved
        self._update_index_later(transfer, moved, resident=True)
        return outcome

    async def write(self, transfer: Transfer) -> RankOutcome:
        outcome = await self._in_slices(transfer, write=True)
        self._counts["stored"] += len(outcome.moved)
        self._update_index_later(transfer, len(outcome.moved), resident=False)
        return outcome

    async def flush_token_index(self, path: TokenIds, start: int, *, resident: bool, salt: str = "") -> None:
        del salt  # always "", as above
        rank = self._ranks.get(MANAGER)
        if rank is None:
            raise StorageError("AttentionStore: rank 0 has no device memory (it was cleared or detached)")
        tokens = path.array.tolist()
        self._counts["flushes"] += 1
        try:
            await rank.index_updates.run(lambda: rank.flush_token_index(tokens, start, resident=resident), "flush")
        except StorageError:
            self._counts["flush_errors"] += 1
            raise

    # --- inside -------------------------------------------------------------------------------------

    async def _in_slices(self, transfer: Transfer, *, write: bool) -> RankOutcome:
        """Call once per slice, until one moves fewer than all its blocks. A write treats that as an error."""
        began, rank = self._clock.monotonic(), self._ranks[transfer.rank]
        total_timeout = self._settings.total_timeout if write else 0.0
        end = began + (total_timeout or transfer.remaining_s)
        executor = rank.stores if write else rank.loads
        moved, error = 0, None
        while moved < len(transfer.blocks) and not transfer.stopped:
            blocks = list(transfer.blocks[moved : moved + self._settings.slice_blocks])
            first = transfer.start + moved
            try:
                slice_ = functools.partial(self._slice, rank, transfer, first, blocks, end, write=write)
                moving = executor.run(slice_, "transfer")
                withdrawn = not await transfer.race(moving) and moving.cancel()  # the task was stopped before it began
                count = 0 if withdrawn else await moving
                if not 0 <= count <= len(blocks):
                    raise StorageError(f"AttentionStore reports {count} blocks for a slice of {len(blocks)}")
            except (StorageError, TierError) as problem:
                self._counts["errors"] += 1
                error = problem
                break
            moved += count
            if count < len(blocks):
                if write and not transfer.stopped:
                    error = StorageError(f"AttentionStore stored only {moved} of {len(transfer.blocks)} blocks")
                break
        return transfer.ended(moved, error, self._clock.monotonic() - began)

    def _slice(
        self, rank: SdkSession, transfer: Transfer, first: int, blocks: list[int], end: float, *, write: bool
    ) -> int:
        """Runs in the executor's thread."""
        left = end - self._clock.monotonic()
        limit = min(self._settings.slice_timeout, left) if write else left
        if limit <= 0:
            raise StorageError("AttentionStore: the transfer's time limit has passed", code="expired")
        device = rank.port.device
        tokens = transfer.path.array[: (first + len(blocks)) * self.block_size].tolist()
        move = functools.partial(rank.move, "write" if write else "read", tokens, first)
        if not device.addressable:
            return move(tensors_of(self._layout, device.arena), blocks, limit)
        own = OwnBlocks(self._layout, device.arena, blocks)
        if write:
            own.copy_out()
        count = move(own.tensors, list(range(len(blocks))), limit)
        if not write:
            own.copy_in(max(0, count))
        return count

    def _update_index_later(self, transfer: Transfer, moved: int, *, resident: bool) -> None:
        if transfer.rank == MANAGER and moved:
            path = TokenIds(transfer.path.array[: (transfer.start + moved) * self.block_size])
            self._background.begin(self._update_index(path, transfer.start, transfer.task_id, resident=resident))

    async def _update_index(self, path: TokenIds, start: int, task_id: str, *, resident: bool) -> None:
        try:
            await self.flush_token_index(path, start, resident=resident)
        except (StorageError, Closed) as error:
            log.warning("token index update failed", task_id=task_id, resident=resident, problem=str(error))


PACKAGE = "attentionstore_sdk"


class Library(NamedTuple):
    """The parts of the package that we use. attention_type: None in builds for devices other than CUDA."""

    sdk: type
    tokens: type
    error: type[Exception]
    in_device_memory: Any
    attention_type: Any


def load_library() -> Library:
    """Import the package. Raises ConfigError if it is missing or of an unknown version."""
    try:
        sdk = importlib.import_module(f"{PACKAGE}.sdk")
        media = importlib.import_module(f"{PACKAGE}.api.common.common_pb2")
        error = importlib.import_module(f"{PACKAGE}.utils.err")
        return Library(
            sdk.AttentionStoreSDK, sdk.Tokens, error.AttentionStoreSDKError, media.MEDIA_HBM, _attention_type()
        )
    except ImportError as problem:
        what = f"needs the Python package {PACKAGE}, which is not installed or fails to load: {problem}"
        raise ConfigError("storage.attention_store.driver", what, "sdk") from problem
    except AttributeError as problem:
        what = f"the installed {PACKAGE} has an unsupported version: {problem}"
        raise ConfigError("storage.attention_store.driver", what, "sdk") from problem


def _attention_type() -> Any:
    try:
        return importlib.import_module(f"{PACKAGE}.client.client").AttentionType
    except (ImportError, AttributeError):
        return None


class SdkSession:
    """One rank's SDK object, called as FastDeploy does, and its executors, which make the calls: they block.

    The SDK's builds differ: that for CUDA has an AttentionType and takes more arguments. Raises StorageError.
    """

    def __init__(
        self, library: Library, section: AttentionStoreSection, layout: BlockLayout, cache: CacheSection, port: RankPort
    ) -> None:
        self.port = port
        uses = [f"transferd-as-{port.rank}-{use}" for use in ("load", "store", "query", "index")]
        self.executors = self.loads, self.stores, self.queries, self.index_updates = [*map(SerialExecutor, uses)]
        self._library = library
        self._layer_ids = list(range(layout.layers + layout.mtp_layers))
        self._block_size = cache.block_size
        # MLA and DSA have no values: FastDeploy names the size of the keys twice, too.
        sizes = [plane.nbytes for plane in layout.planes if plane.name in ("key", "value")]
        names = (section.namespace, section.pod_name, section.model_version)
        args = (*names, port.rank, cache.ranks, len(self._layer_ids), cache.block_size, sizes[0])
        device = port.device.device
        with _translated(library, "initialisation"):
            if library.attention_type is not None:
                how = {"attention_type": library.attention_type.MHA, "enable_as_kv_rw": True, "gpu_count": 0}
                self._sdk = library.sdk(*args, sizes[-1], device, section.dp_id, **how)
            else:
                self._sdk = library.sdk(*args, device, section.dp_id)

    def close(self, within: float = 0.0) -> list[str]:
        """Close the executors. Returns the calls that still run."""
        return [call for executor in self.executors for call in executor.close(within)]

    def match(self, tokens: Sequence[int], start: int, timeout: float) -> int:
        with _translated(self._library, "match"):
            return int(self._sdk.match(self._tokens(tokens), start, timeout))

    def move(
        self, call: str, tokens: Sequence[int], start: int, tensors: Tensors, blocks: list[int], timeout: float
    ) -> int:
        """Make a call, `read` or `write`. Returns how many blocks arrived, or how many the store took."""
        more: dict[str, Any] = {}
        if self._library.attention_type is not None:
            more = {"remote_addrs": None} if call == "read" else {"h2h_copy": False, "params": None}
        with _translated(self._library, call):
            args = (self._layer_ids, self._tokens(tokens), start, *tensors, blocks, timeout)
            return int(getattr(self._sdk, call)(*args, **more))

    def flush_token_index(self, tokens: Sequence[int], start: int, *, resident: bool) -> None:
        here = self._library.in_device_memory
        old, new = (None, here) if resident else (here, None)
        with _translated(self._library, "flush_token_index"):
            self._sdk.flush_token_index(self._layer_ids, self._tokens(tokens), start, old, new)

    def _tokens(self, tokens: Sequence[int]) -> Any:
        return self._library.tokens(list(tokens), self._block_size)


@contextlib.contextmanager
def _translated(library: Library, call: str) -> Iterator[None]:
    """Turns the library's exceptions into StorageError."""
    try:
        yield
    except Exception as error:
        what = "" if isinstance(error, library.error) else f"{type(error).__name__}: "
        raise StorageError(f"AttentionStore, {call}: {what}{error}") from error


T = TypeVar("T")

MOST_WAITING = 256  # far more than there are tasks, so a full queue means that the running call hangs


class SerialExecutor(Crew):
    """A crew of one thread, which runs calls in the order of their arrival, with a bound on those that wait."""

    def __init__(self, name: str) -> None:
        super().__init__(name, 1)

    def run(self, function: Callable[[], T], what: object = None) -> Work[T]:
        """Like Crew.run. Raises StorageUnavailable if MOST_WAITING calls already wait: the running one must hang."""
        if self._queue.qsize() >= MOST_WAITING:
            raise StorageUnavailable(f"{self.name}: a call hangs and {MOST_WAITING} more wait behind it")
        return super().run(function, what)
