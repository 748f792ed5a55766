"""The memory that a client has offered: checked with a canary first, and offered again in each new session."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, cast

from transferd.client.calls import CONTROL_TIMEOUT_S
from transferd.client.pending import changed_nothing
from transferd.client.session import UNSAYABLE, Conversation
from transferd.client.weights import Repeating
from transferd.errors import ProtocolError, RequestError, TierError, TransferError
from transferd.runtime.aio import Background
from transferd.tiers.offered import PASSED, inodes_of, own_descriptors, with_inodes
from transferd.wire import protocol as wire
from transferd.wire.canary import KEY, digest
from transferd.wire.passing import pass_descriptors

if TYPE_CHECKING:
    import numpy.typing as npt

log = logging.getLogger(__name__)


class HandleLike(Protocol):
    """A device tier's handle (tiers/base.py), or anything of that shape."""

    @property
    def kind(self) -> str: ...
    @property
    def data(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class _KeptOffer:
    """An offer for a rank, and the boot and cache epoch under which the daemon took it, or was last asked to.

    inodes: of each shared memory to which it led when it was made; empty for other memory. A name or a descriptor's
    number may lead to other memory later.
    """

    rank: int
    kind: str
    data: dict[str, Any]
    boot_id: str
    epoch: int
    inodes: tuple[tuple[int, int] | None, ...] = ()

    @property
    def outdated(self) -> bool:
        return any(one not in (None, now) for one, now in zip(self.inodes, inodes_of(self.data), strict=False))

    def said(self, to: Conversation) -> wire.Offer:
        """The request, once the memory's descriptors are passed, where the daemon takes them. Raises TransferError."""
        data = with_inodes(self.data, self.inodes)
        if to.session.passing and self.kind == "shm" and to.endpoint.startswith("ipc://"):
            with own_descriptors(self.data) as descriptors:
                data |= {PASSED: pass_descriptors(to.endpoint, descriptors)} if descriptors else {}
        try:
            return wire.offer(self.rank, self.kind, data, self.epoch)
        except UNSAYABLE as error:
            raise ProtocolError(f"cannot encode the handle: {error}", code="bad_value") from error

    def ended_before(self, now: wire.Welcome) -> bool:
        """Whether the cache was cleared since, which ends the offers of earlier epochs: that memory may be gone.

        Epochs of one boot can be compared. A registration begins one, and the same engine's offers continue in it; each
        clear begins one. In another boot, we have not heard of a clear after the engine's registration.
        """
        if self.boot_id == now.boot_id:
            return now.registered <= self.epoch < now.epoch
        return 0 < now.registered < now.epoch


class Offers:
    """A client's offers by rank, to the daemon at the conversation's endpoint."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._made: dict[int, _KeptOffer] = {}
        self._repeating: dict[int, Repeating] = {}

    async def make(
        self,
        rank: int,
        handle: HandleLike | Mapping[str, Any],
        caches: Mapping[str, Sequence[Any]] | None,
        block: int | None,
    ) -> None:
        """See Client.offer."""
        session = self._conversation.session
        kind, data = (handle["kind"], handle["data"]) if isinstance(handle, Mapping) else (handle.kind, handle.data)
        inodes = inodes_of(data) if kind == "shm" else ()
        offer = _KeptOffer(rank, kind, data, session.boot_id, session.epoch, inodes)
        known = self._made.get(rank) == offer  # then its blocks may be in use, so no canary
        before = None if known else self._made.pop(rank, None)  # it must not be repeated meanwhile
        try:
            if caches is not None and not known:
                with laid(caches, block) as canary:
                    checked = replace(offer, data=data | {KEY: canary})
                    await self._conversation.request(checked.said(self._conversation), CONTROL_TIMEOUT_S)
            await self._conversation.request(offer.said(self._conversation), CONTROL_TIMEOUT_S)
        except TransferError as error:
            if before is not None and changed_nothing(error):  # the daemon still has that memory
                self._made.setdefault(rank, before)
            raise
        self._made[rank] = offer
        self._repeating[rank] = Repeating((session.boot_id, session.session, session.epoch))

    def keep(self, epoch: int) -> None:
        """Drop the offers of other epochs: this client has cleared or restored the cache."""
        self._made = {rank: offer for rank, offer in self._made.items() if offer.epoch == epoch}

    def again(self) -> list[wire.ControlRequest]:
        """The offers to repeat after a Welcome that names an engine.

        Drops an offer if its name or descriptor leads to other memory now: the engine offers that memory itself.
        """
        session, now = self._conversation.session, self._conversation.now
        life = session.boot_id, session.session, session.epoch
        requests: list[wire.ControlRequest] = []
        for rank, offer in list(self._made.items()):
            if offer.ended_before(session):
                del self._made[rank]
            elif offer.outdated:
                log.warning("the memory offered for rank %d is gone, or was made anew; offer it again", rank)
                del self._made[rank]
            elif self._repeating[rank].due(life, now, known=rank not in session.missing):
                self._made[rank] = replace(offer, boot_id=session.boot_id, epoch=session.epoch)
                try:
                    requests.append(self._made[rank].said(self._conversation))
                except TierError as error:  # it is due again
                    log.warning("the memory of rank %d is not offered now: %s", rank, error)
        return requests

    def clear(self) -> None:
        self._made.clear()


Ask = Callable[[wire.ControlRequest, float], Awaitable[Any]]
QUIET_TIMEOUT_S = 24 * 3600.0  # a pause, a drain and an unregister wait for tasks, which have their own deadlines


class Holds:
    """A client's pause and drain. ask: sends a request and returns its value, or raises TransferError.

    A client that was created before a fork is a different holder in each process: one process must not end the pause
    of another.
    """

    def __init__(self, name: str, fresh_id: Callable[[], str], ask: Ask) -> None:
        self._name = name[:64]
        self._fresh_id = fresh_id
        self._known_as: tuple[int, str, str] = 0, "", ""  # process id; the holder's name and proof in that process
        self._ask = ask
        self._held: set[wire.ControlRequest] = set()
        self._resumes = 0

    async def pause(self) -> None:
        await self._hold(wire.Pause(*self._holder()))

    async def drain(self) -> None:
        await self._hold(wire.Drain(*self._holder()))

    async def _hold(self, hold: wire.Pause | wire.Drain) -> None:
        held, resumes = True, self._resumes
        try:
            await self._ask(hold, QUIET_TIMEOUT_S)
        except TransferError:
            held = False
            raise
        finally:
            if held and resumes == self._resumes:  # else `resume` was called meanwhile
                self._held.add(hold)

    async def resume(self, timeout: float) -> None:
        held = self._held.copy()
        self.clear()
        resumes = self._resumes
        try:
            await self._ask(wire.Resume(*self._holder()), timeout)
        except TransferError as error:
            if changed_nothing(error) and resumes == self._resumes:
                self._held |= held
            raise

    def clear(self) -> None:
        """Forget the pause and the drain: they were resumed, or the client is closed."""
        self._resumes += 1
        self._held.clear()

    def again(self) -> list[wire.ControlRequest]:
        """The requests to repeat in a new session."""
        return list(self._held)

    def _holder(self) -> tuple[str, str]:
        process = os.getpid()
        if self._known_as[0] != process:
            name = f"{self._name or f'pid {process}'} ({self._fresh_id()[:8]})"
            self._known_as = process, name, self._fresh_id()
        return self._known_as[1:]


def arrays(handle: dict[str, Any]) -> dict[str, list[Any]]:
    """Map the memory that a handle names; see Client.attach. Raises TierError."""
    if handle["kind"] == "cuda_ipc":
        from transferd.tiers.cuda.engine import attach  # imported here because it needs CUDA

        return dict(attach(handle["data"]).caches)
    from transferd.tiers.segment import attach_arrays

    if handle["kind"] != "shm":
        raise TierError(f"cannot attach device memory of kind {handle['kind']!r} here; use its adapter")
    return attach_arrays(handle["data"])


def timelines(handle: dict[str, Any]) -> Any:
    """Map the timelines that a handle names; see Client.timelines. Raises TierError."""
    if handle["kind"] != "cuda_ipc":
        return None
    from transferd.tiers.cuda.engine import timelines as mapped  # imported here because it needs CUDA

    return mapped(handle["data"])


class Attachments:
    """The memory that a client has attached, and when that memory is gone. Changed by one client, on its loop.

    Another boot_id means another daemon, with its own memory; another epoch means that the cache was cleared.

    outdated: attached ranks whose memory is gone, ascending.
    orphaned: those outdated ranks whose memory belonged to an earlier daemon. Only the client knows these; a daemon
        itself knows what was attached before its own clears.
    changing: how many clears and restores by this client are in progress; these cause no notification.
    """

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._mapped: dict[int, tuple[str, int]] = {}  # rank: boot_id and epoch of the memory
        self._known: tuple[str, int] | None = None  # boot_id and epoch of the last Welcome
        self._reactions = Background()  # coroutines that on_new_boot has returned
        self.outdated: list[int] = []
        self.orphaned: list[int] = []
        self.changing = 0

    @property
    def attached(self) -> list[int]:
        """Ranks that are attached, or were attached before a restart."""
        return sorted(self._mapped)

    def attach(self, rank: int, handle: dict[str, Any]) -> None:
        """Record a handle from the daemon. A handle without boot_id and epoch means the current ones."""
        now = self._conversation.session
        self._mapped[rank] = handle.get("boot_id", now.boot_id), handle.get("epoch", now.epoch)
        self._look()

    def refusal(self) -> RequestError:
        """The error for a task that names device blocks while there are orphaned ranks."""
        what = f"rank {self.orphaned[0]}: its attached memory is gone with the daemon that created it"
        return RequestError(f"{what}; call reattach() first", code="not_attached")

    def detach(self, rank: int) -> None:
        self._mapped.pop(rank, None)
        self._look()

    def epoch_began(self, epoch: int) -> None:
        """Note that this client itself has cleared or restored the cache."""
        self._known = self._conversation.session.boot_id, epoch
        self._look()

    def again(self) -> list[wire.ControlRequest]:
        """The requests to repeat in a new session: one for each rank that is mapped, current or outdated."""
        boot_id = self._conversation.session.boot_id
        return [wire.Attach(rank, epoch) for rank, (boot, epoch) in self._mapped.items() if boot == boot_id]

    def renewed(self) -> None:
        """A session or an epoch has begun; notify the engine if another daemon or another client's clear caused it."""
        self._look()
        known, self._known = self._known, (self._conversation.session.boot_id, self._conversation.session.epoch)
        if known not in (None, self._known) and not self.changing:
            self._notify(self._why(known))

    def engine_ended(self) -> None:
        """The engine was unregistered; notify this process of it."""
        self._notify(self._why(None))

    def _why(self, before: tuple[str, int] | None) -> str:
        """What ended the life in which this client knew the engine's memory."""
        now = self._conversation.session
        if before is not None and before[0] != now.boot_id:
            return "the daemon was restarted"
        if before is not None and now.registered <= before[1]:
            return "the cache was cleared"
        return "the daemon ended the engine's registration" if now.ended is None else now.ended.message

    def _look(self) -> None:
        boot_id, epoch = self._conversation.session.boot_id, self._conversation.session.epoch
        # Memory of a later epoch than that of the last Welcome is current, and our knowledge is old.
        self.outdated = [rank for rank, (boot, of) in sorted(self._mapped.items()) if boot != boot_id or of < epoch]
        self.orphaned = [rank for rank in self.outdated if self._mapped[rank][0] != boot_id]

    def _notify(self, why: str) -> None:
        gone = f"; attach rank {', '.join(map(str, self.outdated))} again" if self.outdated else ""
        hear = self._conversation.on_new_boot
        if hear is None:
            gone += " (set Client.on_new_boot to hear of this)"
        log.warning("%s: %s, so all of its blocks are empty%s", self._conversation.endpoint, why, gone)
        try:
            reaction = None if hear is None else hear()
        except Exception:
            log.exception("on_new_boot failed")
            return
        if asyncio.iscoroutine(reaction):
            self._reactions.begin(reaction).add_done_callback(_reacted)


def _reacted(reaction: asyncio.Future[Any]) -> None:
    if not reaction.cancelled() and (error := reaction.exception()) is not None:
        log.error("on_new_boot failed: %r", error)


class Rows(Protocol):
    """One array of a cache in memory that numpy cannot access. Blocks lie along its first axis.

    tiers/cuda/engine.py implements it for GPU memory, adapters/paddle.py for Paddle tensors.
    """

    @property
    def blocks(self) -> int: ...
    def read_block(self, block: int) -> bytes:
        """Wait for all work on the block, then return its bytes."""
        ...

    def write_block(self, block: int, data: bytes) -> None:
        """Write the block. Returns once every other process sees the new bytes."""
        ...


class _NumpyRows:
    def __init__(self, array: npt.NDArray[Any]) -> None:
        self._array = array
        self.blocks = len(array)

    def read_block(self, block: int) -> bytes:
        data: bytes = self._array[block].tobytes()
        return data

    def write_block(self, block: int, data: bytes) -> None:
        import numpy as np

        row = self._array[block]
        row[...] = np.frombuffer(data, dtype=row.dtype).reshape(row.shape)


@contextlib.contextmanager
def laid(caches: Mapping[str, Sequence[Any]], block: int | None = None) -> Iterator[dict[str, Any]]:
    """Fill one block of every array with random bytes while this is open; yield the canary for the handle.

    caches: {plane: [one array per layer]}, numpy arrays or Rows, over the memory that the handle names.
    block: 1 by default, which also reveals a wrong block stride; 0 if there is only one block. At the end, the
    original bytes are restored, even after an error. Do not use the block until then; the daemon only reads it.
    """
    rows = {plane: [_rows_of(array) for array in layers] for plane, layers in caches.items()}
    fewest = min((array.blocks for layers in rows.values() for array in layers), default=0)
    chosen = min(1, fewest - 1) if block is None else block
    if not 0 <= chosen < fewest:
        what = f"canary block {chosen} is out of range: the caches have {fewest} blocks"
        raise RequestError(what, code="id_out_of_range")
    former: list[tuple[Rows, bytes]] = []
    try:
        sums: dict[str, list[str]] = {}
        for plane, layers in rows.items():
            for array in layers:
                held = array.read_block(chosen)
                former.append((array, held))
                pattern = os.urandom(len(held))
                array.write_block(chosen, pattern)
                sums.setdefault(plane, []).append(digest(pattern))
        yield {"block": chosen, "sums": sums}
    finally:
        for array, held in reversed(former):
            array.write_block(chosen, held)


def _rows_of(array: Any) -> Rows:
    import numpy as np

    if isinstance(array, np.ndarray):
        return _NumpyRows(array)
    if hasattr(array, "read_block") and hasattr(array, "write_block"):
        return cast("Rows", array)
    what = f"a canary needs numpy arrays, or rows(...) over GPU or Paddle memory, not {type(array).__name__}"
    raise RequestError(what, code="bad_value")
