"""Baidu's AttentionStore through its SDK, as FastDeploy drives it.

The SDK moves bytes by itself, straight between the store and device memory: it is given the addresses
of each layer's key and value tensors and the block ids. So nothing is staged or sealed here, and what
is delivered is as good as the store.

One session for each rank, and in it four lines of calls, as FastDeploy has threads: loads, stores, what
the index is asked and what it is told. The last has no time limit in the SDK, so nothing else waits in
its line. A call cannot be taken back once it has begun, and it may touch device blocks until it returns;
so a transfer that is told to stop waits for the call that is under way, which has a time limit, and
begins no other. Transfers are cut into slices of `slice_blocks` for that.

A write ends at the first slice that is not taken whole, since later blocks would be out of reach. After
a read the index is told that the blocks are in device memory, after a write that they are not, by rank
0; nobody waits for that.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from transferd.blocks.layout import build_layout
from transferd.blocks.paths import PathKeys
from transferd.config import Config
from transferd.config.generation import configured_generation
from transferd.errors import Closed, ConfigError, RequestError, StillRunning, StorageError, StorageUnavailable
from transferd.runtime.aio import every
from transferd.runtime.clock import SYSTEM_CLOCK, Clock
from transferd.runtime.threads import CLOSE_S
from transferd.storage.attention_store.library import Library, Session, Shard, load_library
from transferd.storage.attention_store.lines import Line
from transferd.storage.attention_store.settings import settings
from transferd.storage.tokens import RankPort, TokenStorage, Transfer
from transferd.tasks import RankOutcome, TokenIds

log = structlog.get_logger(__name__)

MATCH_TIMEOUT_S = 10.0
READY_CALL_S = 5.0  # one question whether the SDK is ready
READY_PAUSE_S = 1.0
NOT_READY = "cuda memory not ready"  # what the SDK says until it has found the device memory
CLOSE_WAIT_S = 5.0
MANAGER = 0  # the rank that speaks for the node


class _Rank:
    """One rank's session and its lines."""

    def __init__(self, port: RankPort, session: Session, tensors: Callable[[], tuple[list[int], list[int]]]) -> None:
        self.port = port
        self.session = session
        self.tensors = tensors
        name = f"transferd-as-{port.rank}"
        self.loads, self.stores = Line(f"{name}-load"), Line(f"{name}-store")
        self.asking, self.telling = Line(f"{name}-ask"), Line(f"{name}-tell")

    def open(self) -> None:
        """Start the threads of all lines. Raises NoThreads."""
        for line in self._lines:
            line.open()

    def close(self, within: float = 0.0) -> list[str]:
        """Returns the calls that still run."""
        return [call for line in self._lines for call in line.close(within)]

    @property
    def _lines(self) -> tuple[Line, ...]:
        return self.loads, self.stores, self.asking, self.telling


class SdkTokenStorage(TokenStorage):
    """See the module. library: the SDK; default the one that is installed."""

    backend = "attention_store"

    def __init__(self, config: Config, *, clock: Clock = SYSTEM_CLOCK, library: Library | None = None) -> None:
        """Raises ConfigError: no SDK, or a layout that it cannot store."""
        self._settings = settings(config)
        self._section = config.storage.attention_store
        self._ranks_in_group = config.cache.ranks
        self._block_size = config.cache.block_size
        self.paths = PathKeys(config.cache.block_size)
        self._generation = configured_generation(config.storage)
        self._clock = clock
        self._layout = build_layout(config.cache)
        planes = [plane.name for plane in self._layout.planes]
        if planes != ["key", "value"]:
            what = f"the SDK stores key and value, this cache has {', '.join(planes)}"
            raise ConfigError("storage.attention_store.driver", what, "sdk")
        self._library = library or load_library()
        self._ranks: dict[int, _Rank] = {}
        self._detached: list[_Rank] = []  # whose calls had not all returned
        self._background: set[asyncio.Task[None]] = set()
        self._counts: Counter[str] = Counter()

    # --- life ---------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Nothing before there is device memory."""

    async def attach(self, port: RankPort) -> None:
        key, value = self._layout.planes
        shard = Shard(
            namespace=self._settings.namespace,
            pod_name=self._settings.pod_name,
            model_version=self._settings.model_version,
            rank=port.rank,
            ranks=self._ranks_in_group,
            layers=self._layout.layers + self._layout.mtp_layers,
            block_size=self._block_size,
            key_bytes=key.nbytes,
            value_bytes=value.nbytes,
            device=port.device.device,
            dp_id=self._section.dp_id,
        )
        starting = Line(f"transferd-as-{port.rank}-start")
        try:
            session = await starting.run(lambda: Session(self._library, shard), "opening of a session")
        finally:
            starting.close(0.0)
        rank = _Rank(port, session, functools.partial(self._tensors, port))
        rank.open()
        self._ranks[port.rank] = rank

    async def ready(self) -> None:
        await every(self._rank_ready(rank) for rank in self._ranks.values())

    async def _rank_ready(self, rank: _Rank) -> None:
        """Ask for blocks that nobody has until the answer is an answer."""
        nobodys = list(range(self._block_size + 1))
        give_up = self._clock.monotonic() + self._section.ready_timeout
        while True:
            try:
                await rank.asking.run(lambda: rank.session.match(nobodys, 0, READY_CALL_S))
                return
            except StorageError as error:
                if NOT_READY not in str(error):
                    raise
                if self._clock.monotonic() >= give_up:
                    waited = f"{self._section.ready_timeout:g} s"
                    what = f"rank {rank.port.rank}: AttentionStore was not ready within {waited}: {error}"
                    raise StorageUnavailable(what) from None
            await asyncio.sleep(READY_PAUSE_S)

    def detach(self, rank: int) -> None:
        attached = self._ranks.pop(rank, None)
        if attached is not None:
            self._detached = [left for left in [*self._detached, attached] if left.close()]

    async def close(self) -> None:
        """Raises StillRunning for calls that have not returned; their threads are left behind."""
        if self._background:
            await asyncio.wait(self._background, timeout=CLOSE_WAIT_S)
        for rank in list(self._ranks):
            self.detach(rank)
        end = time.monotonic() + CLOSE_S  # of the threads, whatever clock the tasks have
        if hanging := [call for left in self._detached for call in left.close(max(0.0, end - time.monotonic()))]:
            raise StillRunning(f"AttentionStore calls do not end: {', '.join(hanging)}")

    def check_generation(self, generation: str) -> None:
        if generation != self._generation:
            what = "AttentionStore's model version is fixed when a daemon starts: restart with another AS_MODEL_VERSION"
            raise RequestError(what, code="fixed_generation")

    def statistics(self) -> dict[str, Any]:
        counts = self._counts
        return {
            "objects": None,
            "bytes": None,
            "hits": counts["hits"],
            "misses": counts["misses"],
            "errors": counts["errors"],
            "stored": counts["stored"],
            "flushes": counts["flushes"],
            "flush_errors": counts["flush_errors"],
        }

    # --- the contract -------------------------------------------------------------------------------

    async def match(self, path: TokenIds, start: int, generation: str) -> int:  # noqa: ARG002 - fixed, see above
        tokens = path.array.tolist()
        return min(
            await every(
                rank.asking.run(functools.partial(rank.session.match, tokens, start, MATCH_TIMEOUT_S))
                for rank in self._ranks.values()
            )
        )

    async def read(self, transfer: Transfer) -> RankOutcome:
        rank = self._ranks[transfer.rank]
        outcome = await self._in_slices(transfer, rank.loads, rank.session.read, None, transfer.remaining_s)
        moved = len(outcome.moved)
        self._counts["hits"] += moved
        self._counts["misses"] += len(transfer.blocks) - moved
        self._tell_later(transfer, moved, resident=True)
        return outcome

    async def write(self, transfer: Transfer) -> RankOutcome:
        rank, total = self._ranks[transfer.rank], self._settings.total_timeout or transfer.remaining_s
        outcome = await self._in_slices(
            transfer, rank.stores, rank.session.write, self._settings.slice_timeout, total, whole=True
        )
        self._counts["stored"] += len(outcome.moved)
        self._tell_later(transfer, len(outcome.moved), resident=False)
        return outcome

    async def flush_token_index(self, path: TokenIds, start: int, *, resident: bool) -> None:
        rank = self._ranks.get(MANAGER)
        if rank is None:
            raise StorageError("AttentionStore: the device memory was taken away")
        tokens = path.array.tolist()
        self._counts["flushes"] += 1
        try:
            await rank.telling.run(lambda: rank.session.flush_token_index(tokens, start, resident=resident), "flush")
        except StorageError:
            self._counts["flush_errors"] += 1
            raise

    # --- inside -------------------------------------------------------------------------------------

    async def _in_slices(
        self,
        transfer: Transfer,
        line: Line,
        call: Callable[..., int],
        slice_timeout: float | None,
        total_timeout: float,
        *,
        whole: bool = False,
    ) -> RankOutcome:
        """Call for slice after slice while each moves all its blocks. whole: one that does not is an error."""
        began = self._clock.monotonic()
        end = began + total_timeout
        moved, error = 0, None
        while moved < len(transfer.blocks) and not transfer.stopped:
            blocks = list(transfer.blocks[moved : moved + self._settings.slice_blocks])
            first = transfer.start + moved
            try:
                count = await self._call(
                    transfer, line, functools.partial(self._slice, transfer, call, first, blocks, slice_timeout, end)
                )
                if not 0 <= count <= len(blocks):
                    raise StorageError(f"AttentionStore says {count} of {len(blocks)} blocks")
            except StorageError as problem:
                self._counts["errors"] += 1
                error = problem
                break
            moved += count
            if count < len(blocks):
                if whole and not transfer.stopped:
                    error = StorageError(f"AttentionStore took {moved} of {len(transfer.blocks)} blocks")
                break
        return transfer.ended(moved, error, self._clock.monotonic() - began)

    async def _call(self, transfer: Transfer, line: Line, call: Callable[[], int]) -> int:
        """Its answer; 0 when the task was told to stop before the call's turn came."""
        answer = line.run(call, "transfer")
        if not await transfer.race(answer) and answer.cancel():
            return 0
        return await answer

    def _slice(
        self,
        transfer: Transfer,
        call: Callable[..., int],
        first: int,
        blocks: list[int],
        slice_timeout: float | None,
        end: float,
    ) -> int:
        """In the line's thread, when its turn has come."""
        left = end - self._clock.monotonic()
        timeout = left if slice_timeout is None else min(slice_timeout, left)
        if timeout <= 0:
            raise StorageError("AttentionStore: the time for the whole transfer was used up", code="expired")
        tokens = transfer.path.array[: (first + len(blocks)) * self._block_size].tolist()
        keys, values = self._ranks[transfer.rank].tensors()
        return call(tokens, first, keys, values, blocks, timeout)

    def _tensors(self, port: RankPort) -> tuple[list[int], list[int]]:
        """The addresses of each layer's key and of each layer's value tensor."""
        arena = port.device.arena
        at: dict[str, list[int]] = {"key": [], "value": []}
        for segment, offset in zip(self._layout.segments, arena.geometry.offsets.tolist(), strict=True):
            at[segment.plane.name].append(arena.origin + offset)
        return at["key"], at["value"]

    def _tell_later(self, transfer: Transfer, moved: int, *, resident: bool) -> None:
        if transfer.rank == MANAGER and moved:
            path = TokenIds(transfer.path.array[: (transfer.start + moved) * self._block_size])
            self._spawn(self._tell(path, transfer.start, transfer.task_id, resident=resident))

    async def _tell(self, path: TokenIds, start: int, task_id: str, *, resident: bool) -> None:
        try:
            await self.flush_token_index(path, start, resident=resident)
        except (StorageError, Closed) as error:
            log.warning("the token index was not told", task_id=task_id, resident=resident, problem=str(error))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
