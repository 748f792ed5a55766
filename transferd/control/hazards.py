"""Orders tasks that touch the same block.

Two tasks that touch the same block of the same tier, at least one of them writing, run in the order
of their submission; all others may overlap. Each task enters the table once with its footprint and
becomes a `Claim`. A claim waits for

* the last claim that writes a block it reads or writes (read after write, write after write);
* every claim that reads a block it writes, since that block's last writer (write after read).

A claim waits only for earlier claims, so there is no cycle and no deadlock.

A claim may leave before its turn: its task is cancelled while queued, and earlier tasks still run. The
waiter gets an answer at once, but the claim stays in the table as an abandoned one until its own
blockers have left, because later claims were ordered behind it instead of behind them. Then it
leaves by itself.

Windows are device blocks that may share bytes, also with those of other engines. Where an engine has windows, its
claims on the device are ordered by bytes, among those of all engines (byte_ranges.py): everything else stays the same.

A storage block never changes under its key, so a write need not wait for a read of the same key. A write
waits for an earlier write (it then finds the object stored, so one transfer serves both), and a read waits
for an earlier write (which will store the block that the read asks for).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from transferd.control.byte_ranges import ByteRanges, WindowGrid
from transferd.errors import RequestError
from transferd.tasks import Footprint

MANY = 8  # blocks from which on it is quicker to look first whether none is in use
EDGE_BYTES = 8  # memory of one claim that another one waits for


class Claim:
    """One task's place in the order. `owner` is any value of the caller's; `ready` once nothing blocks the claim.

    table: the one that it has entered. grids: where its device blocks lie, if they are windows.
    """

    __slots__ = ("abandoned", "blockers", "dependents", "footprint", "grids", "nbytes", "owner", "table")

    def __init__(
        self, owner: object, footprint: Footprint, nbytes: int, table: HazardTable, grids: Sequence[WindowGrid] = ()
    ) -> None:
        self.owner = owner
        self.table = table
        self.grids = grids
        self.footprint = footprint
        self.nbytes = nbytes
        self.blockers = 0  # claims before this one that have not left
        self.dependents: list[Claim] = []  # claims that count this one among their blockers
        self.abandoned = False

    @property
    def ready(self) -> bool:
        return not self.blockers


class _BlockUse:
    """The claims on one block that a new claim may have to wait for: the last writer and the readers since.

    sole: the only claim so far; None once a second one came. All blocks that only this claim uses share the object.
    """

    __slots__ = ("readers", "sole", "writer")

    def __init__(self, claim: Claim, writes: bool) -> None:
        self.sole: Claim | None = claim
        self.writer = claim if writes else None
        self.readers = {} if writes else {claim: None}  # a dict for its order: same blockers order in every run

    def shared(self) -> _BlockUse:
        """A use of its own for one block, which a second claim now uses as well."""
        use = _BlockUse.__new__(_BlockUse)
        use.sole, use.writer, use.readers = None, self.writer, dict(self.readers)
        return use


class HazardTable:
    """All claims that have not left. Mutated by `enter` and `leave` only; cost is linear in blocks.

    grids: where each rank's device blocks lie, if they are windows. Change it only while no task is admitted.
    notify: called by the user of another table when a claim of this one has become ready there.
    """

    def __init__(self, ranges: ByteRanges[Claim] | None = None) -> None:
        """ranges: shared with other tables, whose claims are on the same memory."""
        self.grids: Sequence[WindowGrid] = ()
        self.notify: Callable[[Claim], None] | None = None
        self._ranges: ByteRanges[Claim] = ByteRanges() if ranges is None else ranges
        self._device: dict[Hashable, _BlockUse] = {}
        self._host: dict[Hashable, _BlockUse] = {}
        self._storage: dict[Hashable, _BlockUse] = {}
        self._paths: dict[Hashable, _BlockUse] = {}
        self._claims = 0
        self.nbytes = 0  # of all claims, abandoned ones included

    def enter(self, owner: object, footprint: Footprint, nbytes: int = 0) -> Claim:
        """Add a claim behind all claims it conflicts with. nbytes: added to the table's `nbytes` until it has left."""
        claim = Claim(owner, footprint, nbytes, self, self.grids)
        blockers: dict[Claim, None] = {}
        if claim.grids:
            for windows, writes in ((footprint.device_reads, False), (footprint.device_writes, True)):
                if windows:
                    before = self._ranges.enter(claim, claim.grids, windows, writes=writes)
                    blockers.update(dict.fromkeys(before))
            claim.nbytes += EDGE_BYTES * len(blockers)  # one window may be in the way of any number of others
        for uses, ids, writes in self._touched(claim):
            # The usual case: no block is in use. One object for all of them saves most of the cost of a long task.
            if len(ids) >= MANY and uses.keys().isdisjoint(ids):
                uses.update(dict.fromkeys(ids, _BlockUse(claim, writes)))
                continue
            for block in ids:
                use = uses.get(block)
                if use is None:
                    uses[block] = _BlockUse(claim, writes)
                    continue
                # The first claim's object stands for all of its blocks: this block needs its own from now on.
                if use.sole is not None:
                    use = uses[block] = use.shared()
                if use.writer is not None:
                    blockers[use.writer] = None
                if writes:
                    # A stored object never changes under its key, so its readers do not delay a writer.
                    if uses is not self._storage:
                        blockers.update(use.readers)
                        use.readers = {}
                    use.writer = claim
                else:
                    use.readers[claim] = None
        blockers.pop(claim, None)  # a block named twice by one task
        claim.blockers = len(blockers)
        for blocker in blockers:
            blocker.dependents.append(claim)
        self._claims += 1
        self.nbytes += claim.nbytes
        return claim

    def leave(self, claim: Claim) -> list[Claim]:
        """The task is over, or was cancelled while queued. Returns the claims that became ready, in order.

        Some may be another table's: see `notify`.
        """
        # Later claims are ordered behind this one instead of behind its blockers, so it must outlive them.
        if claim.blockers:
            claim.abandoned = True
            return []
        became_ready: list[Claim] = []
        leaving = [claim]
        while leaving:
            gone = leaving.pop()
            gone.table.forget(gone)
            for dependent in gone.dependents:
                dependent.blockers -= 1
                if dependent.blockers == 0:
                    # An abandoned claim has no task to start: it leaves as well, and may release others.
                    (leaving if dependent.abandoned else became_ready).append(dependent)
            gone.dependents = []
        return became_ready

    def host_writer(self, block: int) -> Claim | None:
        """The last claim that writes this host block, if it has not left."""
        use = self._host.get(block)
        return None if use is None else use.writer

    def check_targets(self, ids: Sequence[int]) -> None:
        """Raise RequestError if two of these device blocks share a byte: both would be written, in either order."""
        for grid in self.grids:
            if (both := grid.overlapping(ids)) is not None:
                what = f"blocks {both[0]} and {both[1]} share bytes: windows of {grid.nbytes}, {grid.stride} apart"
                raise RequestError(f"gpu_block_ids: {what}", code="duplicate_id")

    def __len__(self) -> int:
        return self._claims

    @property
    def idle(self) -> bool:
        """No claim is left, not even an abandoned one."""
        return not (self._claims or self.nbytes or self._device or self._host or self._storage or self._paths)

    def _touched(self, claim: Claim) -> list[tuple[dict[Hashable, _BlockUse], Sequence[Hashable], bool]]:
        """Return for each kind of blocks, but windows: their uses, their ids, and whether the claim writes them."""
        footprint, by_id = claim.footprint, not claim.grids
        touched: list[tuple[dict[Hashable, _BlockUse], Sequence[Hashable], bool]] = []
        # A loop over the eight would be shorter, and twice as slow. Reads come before writes: a task that reads and
        # writes one block does not wait for itself.
        if footprint.device_reads and by_id:
            touched.append((self._device, footprint.device_reads, False))
        if footprint.host_reads:
            touched.append((self._host, footprint.host_reads, False))
        if footprint.storage_reads:
            touched.append((self._storage, footprint.storage_reads, False))
        if footprint.paths_read:
            touched.append((self._paths, footprint.paths_read, False))
        if footprint.device_writes and by_id:
            touched.append((self._device, footprint.device_writes, True))
        if footprint.host_writes:
            touched.append((self._host, footprint.host_writes, True))
        if footprint.storage_writes:
            touched.append((self._storage, footprint.storage_writes, True))
        if footprint.paths_written:
            touched.append((self._paths, footprint.paths_written, True))
        return touched

    def forget(self, claim: Claim) -> None:
        """Take out a claim of this table whose blockers have left. Only `leave` calls it, of any table."""
        if claim.grids:
            self._ranges.leave(claim, claim.grids)
        for uses, ids, _ in self._touched(claim):
            for block in ids:
                use = uses.get(block)
                if use is None:  # the footprint names the block twice
                    continue
                if use.sole is claim:
                    del uses[block]
                    continue
                if use.writer is claim:  # else a later writer has come: it keeps the entry
                    use.writer = None
                use.readers.pop(claim, None)
                if use.writer is None and not use.readers:
                    del uses[block]
        self._claims -= 1
        self.nbytes -= claim.nbytes
