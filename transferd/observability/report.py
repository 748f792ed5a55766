"""The daemon's report: what `stats()`, `transferd stats --format json` and /status show, one struct for each section.

daemon/stats.py fills it, and `tree` turns it into plain data. Everything that reads a report (metrics, concerns, the
figures of `top` and of the page, doctor) reads these structs; a command gets them from a daemon's answer by `read`.
docs/report.md lists every field with the comment beside it (`python scripts/describe_report.py`).

Every field has a default: a command reads reports of older daemons, which lack newer fields. A field whose default is
UNSET is absent from the plain data where it does not apply.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType

from transferd.config import DEFAULT_ENGINE
from transferd.observability.figure import Count, Gauge, Sections
from transferd.runtime.compat import convert
from transferd.tasks import NOT_STORED, Status

# Keys that are always there, at 0: rate() would miss the first increment of a series that begins with 1.
STATUSES = [str(status) for status in Status]
REJECTS = (
    *("queue_full", "bytes_in_flight", "starting", "draining", "not_attached", "empty_block", "cleared", "cache_gone"),
    *("bad_value", "id_out_of_range", "task_id_conflict", "task_id_busy", "no_storage_tier", "no_host_tier"),
    *("rank_died", "malformed", "unsupported_version", "unknown_type", "too_large", "stale_session", "forbidden"),
    "too_often",
)
ERRORS = ("storage_full", "expired")
EFFECTS = ("Start", "StopTask", "ExpireRound", "Reply", "Publish", "WakeAt", "Unblock", "Again")
# Why the first missing block of a look-up was not there: it has left its last level, or was never in one.
MISSED_FOR = (
    *("never_stored", "evicted", "purged", "damaged", "gone"),
    *("other_identity", "level_out", "not_admitted", "incomplete"),
)
EVICTED_BY = (
    'its objects evicted, by the engine that needed their room; "" for one that is not here, or if the store shrank'
)
EVICTED_FOR = ("capacity", "medium_full", "shrink", "reserve")
NO_BACKEND = "none"


Counts = dict[str, int]
UNATTACHED = Gauge("seconds for which a client has needed memory that is not attached", "unattached_seconds", none=0.0)


class ReportSection(msgspec.Struct, kw_only=True):
    """A part of the report."""


class LaneReport(ReportSection):
    """The tasks of one kind on one rank."""

    queued: int = 0  # admitted and not running; the same for all ranks of an engine, which share the queue
    running: Annotated[int, Gauge("tasks running on a rank")] = 0
    done: Annotated[int, Count("tasks that a rank has completed")] = 0
    failed: Annotated[int, Count("tasks that failed on a rank")] = 0
    bytes: Annotated[int, Count("bytes that a rank has moved")] = 0


class KindReport(ReportSection):
    """The tasks of one kind, or of all kinds, of one engine or of all together. Engines that have left are included.

    A task runs on every rank of its engine: its counts are the highest of any rank, added over engines. Bytes are added
    over all ranks.
    """

    queued: int = 0  # admitted and not running
    running: int = 0  # tasks
    done: int = 0  # tasks that all ranks have completed
    failed: int = 0  # tasks that failed on a rank
    bytes: int = 0  # moved since the start
    tasks_per_s: float = 0.0  # tasks that ended in the last 10 seconds, per second
    bytes_per_s: float = 0.0  # of those tasks, per second
    tasks_per_s_1min: float = 0.0  # tasks that ended in the last minute, per second
    bytes_per_s_1min: float = 0.0  # of those tasks, per second
    p50_s: float | None = None  # half of the tasks of the last minute took at most this long; null without any
    p99_s: float | None = None  # the same for 99 of 100


class TasksReport(ReportSection):
    """The tasks and look-ups of one engine; or of all engines together, those that have left too."""

    tasks: Annotated[Counts, Count("tasks answered, by final status", "", "status", STATUSES)] = {}
    queued: Annotated[int, Gauge("tasks admitted and not running", "tasks_queued")] = 0
    running: Annotated[int, Gauge("tasks running", "tasks_running")] = 0
    straggling: Annotated[int, Gauge("answered tasks that a rank still works on", "tasks_straggling")] = 0
    hits: Annotated[int, Count("blocks that look-ups found; those of reads, of engines that ask none")] = 0
    misses: Annotated[int, Count("blocks that look-ups did not find; those of reads, of engines that ask none")] = 0
    lanes: dict[str, KindReport] = {}  # tasks by kind
    totals: KindReport = msgspec.field(default_factory=KindReport)  # tasks of all kinds


class RankReport(ReportSection):
    """One rank of one engine."""

    rank: int = 0  # its number within the engine
    device: int | str = 0  # the device's index, or its UUID
    tier: dict[str, Any] = {}  # the device tier's own figures: `bytes`, `open`, and more for some tiers
    lanes: Annotated[dict[str, LaneReport], Sections("lane_", {"lane": ""})] = {}  # by kind of task
    late_s: Annotated[float, Count("seconds after the first rank of its rounds", "barrier_skew_seconds")] = 0.0
    background: int = 0  # calls that still run for tasks that were answered
    engine: str = DEFAULT_ENGINE  # the engine's name


class HoldReport(ReportSection):
    """One pause or drain."""

    what: str = ""  # `pause` or `drain`
    holder: str = ""  # the client that requested it
    engine: str = ""  # whose tasks it holds
    for_s: float = 0.0  # seconds


class BarrierReport(ReportSection):
    """How the ranks of all engines meet."""

    open: Annotated[int, Gauge("rounds in which ranks have yet to arrive", "rounds_open")] = 0
    owing: Annotated[int, Gauge("arrivals still owed to rounds that have ended", "ranks_owing")] = 0
    completed: Annotated[int, Count("rounds that have ended, for whatever reason", "rounds")] = 0
    expired: Annotated[int, Count("rounds that a deadline ended without every rank", "rounds_expired")] = 0
    late: Annotated[int, Count("arrivals dropped because their round had ended", "late_arrivals")] = 0
    dead: list[int] = []  # ranks whose device is lost
    skew_s: list[float] = []  # of [cache]: for each rank, seconds by which it arrived after the first one, in total


class UsersReport(ReportSection):
    """Whether each user has a uid of its own for the daemon."""

    told_apart: bool = True  # each user has a uid of its own
    hidden_as: int | None = None  # the uid that all users beyond its user namespace appear as
    why: str = ""  # why several users may share a uid


class CacheReport(ReportSection):
    """The device memory of the engine of [cache]; empty without one."""

    creator: str = "engine"  # who creates it: `daemon` or `engine`
    epoch: int = 0  # counts clears and restores
    cleared: bool = False  # cleared, and not yet restored
    missing: list[int] = []  # ranks without memory
    owners: list[int | None] = []  # for each rank, the process that offered its memory
    unmapped: list[int] = []  # ranks whose memory no client has attached or offered
    mapped: list[int] = []  # for each rank, how many clients have it attached or offered
    outdated: list[int] = []  # for each rank, how many clients still have earlier memory attached


class BudgetReport(ReportSection):
    """Host memory for engines that register, in bytes."""

    most: int = 0  # for all of them together
    each: int = 0  # for one of them
    taken: int = 0  # booked now
    left: int = 0  # not booked


class HostReport(ReportSection):
    """The host pools."""

    blocks: int = 0  # of the engine of [cache], per rank
    bytes: Annotated[int, Gauge("host pools of all ranks of all engines")] = 0
    pinned: Annotated[bool, Gauge("whether every host pool is locked in memory")] = False
    budget: BudgetReport = msgspec.field(default_factory=BudgetReport)


class StagingReport(ReportSection):
    """Staging memory of all ranks, in bytes."""

    capacity: Annotated[int, Gauge("staging memory there is, all ranks", "capacity_bytes")] = 0
    used: Annotated[int, Gauge("staging memory leased now, all ranks", "used_bytes")] = 0
    peak: Annotated[int, Gauge("the sum of the staging memory that each rank has used at most", "peak_bytes")] = 0


class MemoryReport(ReportSection):
    """Bytes that the daemon holds, by purpose. Device memory that an engine created does not count."""

    device_cache: int = 0  # device memory, or what stands in for it
    host_pool: int = 0  # host blocks
    staging: int = 0  # for storage I/O
    peer_staging: int = 0  # for direct transfers
    stored_objects: int = 0  # storage.backend = "memory", or a memory level
    carried: int = 0  # for copies between levels of storage
    task_arguments: int = 0  # keys, ids and token ids of admitted tasks
    results: int = 0  # results kept for repeated pushes


class ScrubReport(ReportSection):
    """The background scrub: what it has read since the start."""

    rate: int = 0  # bytes a second that it may read; 0 if it is off
    passes: Annotated[int, Count("complete passes over the store")] = 0
    objects: Annotated[int, Count("objects that the background scrub has read")] = 0
    bytes: Annotated[int, Count("bytes that it has read")] = 0
    damaged: Annotated[int, Count("objects that it has set aside")] = 0
    unsealed: int = 0  # objects without a seal to verify
    errors: int = 0  # objects that could not be read


class HoldingReport(ReportSection):
    """The objects of one engine in storage."""

    engine: str = ""  # its name; "" for objects without an owner
    uid: int | None = None  # the user who registered it
    there: bool = False  # it is registered now
    objects: int = 0  # stored
    bytes: Annotated[int, Gauge("stored for it, or being stored")] = 0
    share: Annotated[int, Gauge("bytes kept for it: below that, others evict nothing of it", "share_bytes")] = 0
    pinned: Annotated[int, Gauge("bytes that it has pinned", "pinned_bytes")] = 0
    evicted: Annotated[Counts, Count(EVICTED_BY, label="by")] = {}

    @property
    def present(self) -> str:
        """Its name while it is here; "" for all others, whose names come and go for months."""
        return self.engine if self.there else ""


class DiskReport(ReportSection):
    """One directory of the file backend, and the file system that it is on."""

    path: str = ""  # storage.file.path
    total: Annotated[int, Gauge("bytes of the file system", "total_bytes")] = 0
    free: Annotated[int, Gauge("bytes of the file system that are free for this user", "free_bytes")] = 0
    reserve: Annotated[int, Gauge("bytes that the store leaves free (storage.file.reserve)", "reserve_bytes")] = 0
    room: Annotated[int, Gauge("bytes that it may hold: its capacity, or less if the disk has less", "room_bytes")] = 0
    files: int = 0  # inodes of the file system; 0 if they have no fixed number
    files_free: Annotated[int, Gauge("inodes that are free; 0 if they have no fixed number")] = 0
    read_only: Annotated[bool, Gauge("whether the file system is mounted read-only")] = False
    problem: str = ""  # why nothing can be stored or loaded here; empty if all is well
    journal_problem: str = ""  # why the order of use could not be written, the last time; empty if it was
    stuck: Annotated[int, Gauge("objects, files and directories that refuse, each set aside")] = 0
    stuck_bytes: int = 0  # of these objects; they count as stored
    stuck_why: str = ""  # what one of them raised, with its path; empty if there is none
    failed: str = ""  # of several disks: why this one is out of use; empty if it works
    objects: Annotated[int, Gauge("objects stored on it")] = 0
    bytes: Annotated[int, Gauge("bytes stored on it")] = 0
    capacity: Annotated[int, Gauge("bytes that may be stored on it", "capacity_bytes")] = 0
    errors: Annotated[int, Count("calls that failed on it")] = 0
    lost: Annotated[int, Count("objects that were on it when it failed")] = 0


class StoreFigures(ReportSection):
    """What the whole store reports, and each of its levels; not every backend all of it. Counts are since the start."""

    backend: str = "none"  # storage.backend, or that of the level; levels are joined by ">"
    objects: Annotated[int | None, Gauge("objects stored now; null if only the pool has that figure")] = 0
    bytes: Annotated[int | None, Gauge("bytes stored now; null if only the pool has that figure")] = 0
    capacity: Annotated[int | UnsetType | None, Gauge("bytes that may be stored", "capacity_bytes")] = UNSET
    hits: Annotated[int, Count("objects that loads found")] = 0
    misses: Annotated[int, Count("objects that loads did not find")] = 0
    errors: Annotated[int, Count("calls that failed")] = 0
    corrupt: Annotated[int, Count("damaged objects that were found")] = 0
    shared_loads: int = 0  # objects that one task loaded for another one as well
    shared_stores: int = 0  # objects that one engine stored for another one's task
    in_flight_bytes: int | UnsetType = UNSET  # being stored now
    wrong_length: Annotated[int | UnsetType, Count("objects of an unexpected length, made unreachable")] = UNSET
    gone: Annotated[int | UnsetType, Count("objects that something other than this daemon has removed")] = UNSET
    stored: Annotated[int | UnsetType, Count("objects stored")] = UNSET
    evictions: int | UnsetType = UNSET  # objects removed to make room
    evicted_for: Annotated[Counts | UnsetType, Count("evictions by cause", "evictions", "reason", EVICTED_FOR)] = UNSET
    scrub: Annotated[ScrubReport | UnsetType, Sections("storage_scrub_")] = UNSET  # of the file backend
    breaker: str | UnsetType = UNSET  # `closed`: calls go through; `open`, `half_open`: storage does not answer
    breaker_opened: Annotated[int | UnsetType, Count("how often storage did not answer")] = UNSET
    breaker_reason: str | UnsetType = UNSET  # why, the last time
    waited_for_room: Annotated[int | UnsetType, Count("objects retried because the pool was full")] = UNSET
    contested: Annotated[int | UnsetType, Count("objects not found yet: another client was writing them")] = UNSET
    taken_over: Annotated[int | UnsetType, Count("objects that replaced another's unfinished write")] = UNSET
    held: Annotated[int | UnsetType, Count("objects with buffers held, because a transfer did not end")] = UNSET
    under_replicated: Annotated[int | UnsetType, Count("objects stored with fewer copies than configured")] = UNSET
    copies_missing: Annotated[int | UnsetType, Gauge("objects without all copies that this node has to mend")] = UNSET
    copies_made: Annotated[int | UnsetType, Count("copies that drains and mends have made")] = UNSET
    copying_bytes: Annotated[int | UnsetType, Gauge("bytes that a drain or mend of a pool has yet to copy")] = UNSET
    peers_down: Annotated[dict[str, str] | UnsetType, Gauge("nodes that do not answer", "peer_down", "peer")] = UNSET
    peers_went_down: Annotated[int | UnsetType, Count("how often a node of the pool stopped answering")] = UNSET
    connections_cut: Annotated[int | UnsetType, Count("connections to such nodes that were ended")] = UNSET
    link_faults: Annotated[int, Count("objects that came damaged, and whole when they were read again")] = 0
    bad_link: str = ""  # why nothing is loaded for a while; empty if all is well
    other_layout: Annotated[int | UnsetType, Count("lookups that another layout of the model could answer")] = UNSET
    other_layouts: dict[str, Any] | UnsetType = UNSET  # those layouts
    batches_merged: int | UnsetType = UNSET  # batches that went into a call of another batch
    calls_under_way: int | UnsetType = UNSET  # native calls that run now


class LevelReport(StoreFigures):
    """One level of storage; a store of one backend is one level. Its own figures, besides those of every store."""

    name: str = ""  # as in storage.levels
    disks: Annotated[list[DiskReport], Sections("storage_disk_", {"path": "path"})] = []  # of the file backend
    capacity: Annotated[int | UnsetType | None, Gauge("bytes that may be stored", "capacity_bytes")] = None
    evictions: int = 0  # copies removed to make room
    scrub: Annotated[ScrubReport | UnsetType, Sections("storage_level_scrub_")] = UNSET  # of the file backend
    pending_bytes: Annotated[int, Gauge("bytes that wait to be copied there")] = 0
    copied: Annotated[int, Count("objects copied there from a level above")] = 0
    promoted: Annotated[int, Count("objects copied there from a level below, because they were used")] = 0
    prefetched: Annotated[int, Count("objects copied there from below by prefetches and warm-ups")] = 0
    kept_bytes: Annotated[int, Gauge("bytes not evicted, because a prefetch waits for their first use")] = 0
    lost: Annotated[int, Count("objects that were not copied there")] = 0
    lost_for: dict[str, int] = {}  # the same by reason
    slow_calls: Annotated[int, Count("calls that took much longer than others of this level")] = 0
    hanging: Annotated[int, Gauge("of these, those that have not ended")] = 0
    load_p99_s: Annotated[float | None, Gauge("that 99 of 100 of its last loads took, a MiB", "load_p99_seconds")] = (
        None
    )
    store_p99_s: Annotated[float | None, Gauge("the same of its last stores", "store_p99_seconds")] = None
    refuses: str = ""  # why it takes no copies now
    state: str = "used"  # used, draining (`transferd level drain`), drained
    draining_bytes: int = 0  # that have yet to be looked at, and copied if only this level has them
    available: Annotated[bool, Gauge("whether calls go there")] = True
    holdings: Annotated[
        list[HoldingReport], Sections("storage_level_engine_", {"engine": "present"})
    ] = []  # what it has of each engine, the most bytes first


class StorageReport(StoreFigures):
    """The whole store: the sums of its levels, and what belongs to none of them.

    Objects and bytes are those of the level with the most; capacity is that of the lowest level that has one.
    """

    levels: Annotated[
        list[LevelReport], Sections("storage_level_", {"level": "name"}, apart=True)
    ] = []  # fastest first
    disks: list[DiskReport] | UnsetType = UNSET  # those of all levels
    hit_share_1min: float | None = None  # the share of the last minute's lookups that found theirs; null without any
    holdings: Annotated[
        list[HoldingReport] | UnsetType, Sections("storage_engine_", {"engine": "present"}, apart=True)
    ] = UNSET  # the objects of each engine, the most bytes first
    disks_failed: Annotated[int | UnsetType, Gauge("disks of the store that are out of use")] = UNSET
    lost: Annotated[int | UnsetType, Count("objects that were on disks when they failed")] = UNSET
    not_admitted: Annotated[int | UnsetType, Count("objects not stored, as no second task had named them")] = UNSET
    remembered: int | UnsetType = UNSET  # blocks that a single task has tried to store
    purged: Annotated[int | UnsetType, Count("objects removed by purges")] = UNSET
    purging: Annotated[int | UnsetType, Gauge("objects that running purges have yet to look at")] = UNSET
    warming_bytes: int | UnsetType = UNSET  # bytes that running warm-ups have yet to bring up
    pinned: Annotated[int | UnsetType, Gauge("objects that are pinned")] = UNSET
    pinned_bytes: Annotated[int | UnsetType, Gauge("bytes that are pinned")] = UNSET
    pins_expired: Annotated[int | UnsetType, Count("objects that lost their last pin as its time was over")] = UNSET
    data: str | UnsetType = UNSET  # the backend that holds the blocks of an open token index
    node: str | UnsetType = UNSET  # the name of this node in an open token index
    index: dict[str, dict[str, int]] | UnsetType = UNSET  # blocks in an open token index, by node and medium
    flushes: int | UnsetType = UNSET  # flushes of a token index
    flush_errors: int | UnsetType = UNSET  # flushes that failed
    other: dict[str, Any] = {}  # what a backend of your own reports besides; in the plain data, beside the rest


class PdReport(ReportSection):
    """Handover from prefill to decode."""

    mode: str = "storage"  # pd.mode
    address: str | UnsetType = UNSET  # where other daemons reach this one
    sending: int | UnsetType = UNSET  # transfers, now
    receiving: int | UnsetType = UNSET  # transfers, now
    waiting: int | UnsetType = UNSET  # receivers whose sender has not come
    refused: dict[str, int] | UnsetType = UNSET  # by code


class FollowedReport(ReportSection):
    """The KV events of a peer that the open token index follows."""

    batches: int = 0  # received
    replays: int = 0  # requested
    snapshots: int = 0  # requested
    lost: int = 0  # batches that no replay had
    unreadable: int = 0  # batches that could not be decoded


class EventsReport(ReportSection):
    """KV events; empty without them."""

    announced: Annotated[Counts | UnsetType, Gauge("blocks announced now", "kv_blocks_announced", "medium")] = UNSET
    peers: dict[str, FollowedReport] | UnsetType = UNSET  # by node
    batches: int | UnsetType = UNSET  # published
    events: Annotated[int | UnsetType, Count("KV events published", "kv_events")] = UNSET
    kept: int | UnsetType = UNSET  # batches kept for replays
    kept_bytes: int | UnsetType = UNSET  # of these
    replays: Annotated[int | UnsetType, Count("replays sent to their end", "kv_event_replays")] = UNSET
    snapshots: Annotated[int | UnsetType, Count("snapshots requested by followers", "kv_event_snapshots")] = UNSET
    replays_broken_off: int | UnsetType = UNSET  # the subscriber went away or was too slow


class TracesReport(ReportSection):
    """Traces of tasks; empty without traces.endpoint."""

    exported: int | UnsetType = UNSET  # tasks that the collector accepted
    dropped: int | UnsetType = UNSET  # tasks that did not fit into the queue
    failed: int | UnsetType = UNSET  # tasks that the collector did not accept


class ServerReport(ReportSection):
    """The daemon's socket."""

    clients: Annotated[int, Gauge("clients connected now")] = 0
    clients_lost: Annotated[int, Count("clients that fell silent")] = 0
    waiting: int = 0  # requests that wait for something, such as match and pause
    waiting_bytes: int = 0  # of their arguments
    messages: Annotated[int, Count("messages received")] = 0
    undeliverable: Annotated[int, Count("answers whose client was gone")] = 0
    rejects: dict[str, int] = {}  # messages refused, by code
    turned_away: dict[str, int] = {}  # tasks that clients have refused themselves, by code
    not_stored: Annotated[
        Counts, Count("blocks not stored by adapters", "blocks_not_stored", "reason", NOT_STORED)
    ] = {}


class WhatIfReport(ReportSection):
    """How many of the blocks looked up lately a level would have with another size, from a sample of the keys."""

    level: str = ""  # as in storage.levels
    times: float = 1.0  # its size, in times of what it has
    capacity: int = 0  # bytes
    hit_share: Annotated[float, Gauge("share of blocks that a level so many times as large would have")] = 0.0


class LayoutReport(ReportSection):
    """The blocks of the engine of [cache]; empty without one."""

    attention: str | UnsetType = UNSET  # gqa, mla, dsa or pages
    planes: list[str] | UnsetType = UNSET  # their names
    layers: int | UnsetType = UNSET  # main layers
    mtp_layers: int | UnsetType = UNSET  # layers of multi-token prediction
    block_bytes: int | UnsetType = UNSET  # of one block of one rank
    device_blocks: int | UnsetType = UNSET  # per rank
    fingerprint: str | UnsetType = UNSET  # as in every object's name


class FingerprintReport(ReportSection):
    """What engines must have in common to read each other's blocks, besides model and generation."""

    digest: str = ""  # as in every object's name
    layout: str = ""  # the layout of a block
    facts: dict[str, Any] = {}  # about the model, from the engine


class EngineReport(TasksReport):
    """One engine that the daemon serves."""

    ready: Annotated[bool, Gauge("whether every rank has its memory, and tasks are admitted")] = False
    why: str = ""  # why tasks are not served
    registered: bool = False  # not the engine of [cache]
    registration: str = ""  # a digest of its token
    uid: int | None = None  # the only user who may speak for it
    ranks: int = 0  # how many
    first_rank: int = 0  # of these within a group of several nodes
    dp_rank: int = 0  # in its KV events
    clients: Annotated[int, Gauge("clients that speak for it")] = 0
    returns: bool | None = None  # whether it comes back by itself after a restart; null if its clients do not say
    model: str = ""  # part of every key
    generation: str = ""  # weight version
    fingerprint: FingerprintReport = msgspec.field(default_factory=FingerprintReport)
    epoch: int = 0  # counts clears and restores of its memory
    missing: list[int] = []  # ranks without memory
    owners: list[int | None] = []  # for each rank, the process that offered its memory
    unattached: list[int] = []  # ranks without attached or offered memory
    unattached_s: Annotated[float | None, UNATTACHED] = None  # null if no client needs memory that is not attached
    paused: Annotated[bool, Gauge("whether a pause is held")] = False
    draining: bool = False  # a drain is held, or it leaves
    rejects: Annotated[Counts, Count("its tasks refused, by code", label="code")] = {}
    errors: Annotated[Counts, Count("its admitted tasks that ended with an error", "task_errors", "code")] = {}
    missed_for: Annotated[
        Counts, Gauge("its look-ups of the last hour that missed, by why the first block was missing", "", "reason")
    ] = {}
    what_if: Annotated[
        list[WhatIfReport], Sections("engine_what_if_", {"level": "level", "times": "times"})
    ] = []  # for its look-ups, with other sizes of each level
    bytes: Annotated[int, Count("bytes that its ranks have moved")] = 0
    block_bytes: int = 0  # of one block of one rank
    device_blocks: int = 0  # per rank
    host_blocks: int = 0  # per rank
    host_bytes: Annotated[int, Gauge("host memory that it takes")] = 0


class ActReport(ReportSection):
    """Something that an operator or an engine has ordered, and that was done."""

    what: str = ""  # purge, pin, unpin, generation, pause, resume, drain, level, copies, clear cache, reload, …
    wanted: str = ""  # what exactly, in words
    engine: str = ""  # whose client has asked for it
    uid: int | None = None  # the user of that client; null if the kernel does not know, as on tcp
    pid: int | None = None  # its process
    client: str = ""  # its name, as `transferd clients` has it
    ago_s: float = 0.0  # seconds


class ConcernReport(ReportSection):
    """Something that is wrong, or slower than it should be. It ends by itself when it is over."""

    name: str = ""  # one of the concerns in metrics.md
    severity: str = "warning"  # critical: tasks fail or are not served; warning; info: somebody wishes it so
    about: str = ""  # the engine, level, disk or node that it concerns; empty for the daemon
    text: str = ""  # what is wrong, as last seen
    action: str = ""  # what to do
    for_s: float = 0.0  # for how many seconds it has lasted
    times: int = 0  # how often in the last 10 minutes: events, or how often it began


class Report(TasksReport):
    """The whole report. Counts, memory and ranks are those of all engines together.

    Fields that describe one engine (generation, cache, layout, configured) are those of [cache], or empty without it.
    """

    version: str = ""  # of the daemon
    pid: int | UnsetType = UNSET  # its process
    boot_id: str = ""  # one life of a daemon process
    uptime_s: Annotated[float, Gauge("seconds since the start", "uptime_seconds")] = 0.0
    loop_longest_s: Annotated[
        float, Gauge("the longest step of the event loop since the start, in CPU seconds", "loop_longest_step_seconds")
    ] = 0.0
    ready: bool = False  # tasks are served; without [cache], engines may register
    host_name: str = ""  # of the machine, or of the container
    endpoint: list[str] = []  # where it listens
    generation: str = ""  # weight version
    ranks: Annotated[list[RankReport], Sections("", {"engine": "engine", "rank": "rank"})] = []
    concerns: list[ConcernReport] = []  # the most urgent first; empty when all is well
    errors: Annotated[Counts, Count("admitted tasks that ended with an error", "task_errors", "code", ERRORS)] = {}
    paused: bool = False  # a pause of [cache] is held
    draining: bool = False  # it stops, or a drain of [cache] is held
    held: list[HoldReport] = []  # the longest first
    what_if: Annotated[
        list[WhatIfReport], Sections("what_if_", {"level": "level", "times": "times"})
    ] = []  # for all look-ups, with other sizes of each level
    acts: list[ActReport] = []  # the last that were done, the newest first
    reload_refused: str = ""  # why the last reload was refused; empty once one has succeeded
    argument_bytes: int = 0  # of keys, ids and token ids of admitted tasks
    results_kept: int = 0  # for repeated pushes
    result_bytes: int = 0  # of these
    rejects: Annotated[Counts, Count("requests refused, those of engines that have left too", "", "code", REJECTS)] = {}
    barrier: Annotated[BarrierReport, Sections("barrier_")] = msgspec.field(default_factory=BarrierReport)
    refused: Annotated[Counts, Count("connections and HTTP requests refused", "", "reason")] = {}
    users: UsersReport = msgspec.field(default_factory=UsersReport)
    cache: CacheReport = msgspec.field(default_factory=CacheReport)
    host: Annotated[HostReport, Sections("host_pool_")] = msgspec.field(default_factory=HostReport)
    degraded: list[str] = []  # why ranks are slower than they should be
    staging: Annotated[StagingReport, Sections("staging_")] = msgspec.field(default_factory=StagingReport)
    memory: Annotated[MemoryReport, Gauge("bytes that the daemon holds, by purpose", "memory_bytes", "owner")] = (
        msgspec.field(default_factory=MemoryReport)
    )
    storage: Annotated[StorageReport, Sections("storage_", {"backend": "backend"})] = msgspec.field(
        default_factory=StorageReport
    )
    pd: PdReport = msgspec.field(default_factory=PdReport)
    events: Annotated[EventsReport, Sections("")] = msgspec.field(default_factory=EventsReport)
    traces: Annotated[TracesReport, Count("traces of tasks, by outcome", label="outcome")] = msgspec.field(
        default_factory=TracesReport
    )
    server: Annotated[ServerReport, Sections("")] = msgspec.field(default_factory=ServerReport)
    effects_failed: Annotated[Counts, Count("instructions whose effect raised (a bug)", "", "effect", EFFECTS)] = {}
    log_dropped: Annotated[int, Count("log lines that did not fit or could not be written")] = 0
    log_left_out: Annotated[int, Count("log lines beyond their kind's rate limit")] = 0
    layout: LayoutReport = msgspec.field(default_factory=LayoutReport)
    configured: dict[str, Any] = {}  # the settings that an engine must share
    engines: Annotated[dict[str, EngineReport], Sections("engine_", {"engine": ""})] = {}  # by name
    engines_leaving: int = 0  # engines that have lost their name and wait for their last bytes


def tree(report: Report) -> dict[str, Any]:
    """The report as plain data."""
    data: dict[str, Any] = msgspec.to_builtins(parts_of(report), enc_hook=_plain)
    return data


def parts_of(report: Report) -> dict[str, Any]:
    """The sections of `tree`, still as structs: to be encoded in one go."""
    parts = {name: part for name in report.__struct_fields__ if (part := getattr(report, name)) is not UNSET}
    storage = msgspec.to_builtins(report.storage, enc_hook=_plain)
    parts["storage"] = storage | storage.pop("other")
    return parts


def _plain(value: Any) -> Any:
    """A Size of the configuration as a number."""
    if isinstance(value, int):
        return int(value)
    raise NotImplementedError(f"a report has no place for a {type(value).__name__}")


def read(data: Mapping[str, Any]) -> Report:
    """The report of a daemon, of this or another version, from its plain data."""
    report = convert(data, Report)
    if "hits" not in data:  # a daemon of 0.3.0 counts loads only
        report.hits, report.misses = report.storage.hits, report.storage.misses
    as_levels(report.storage)
    return report


def as_levels(storage: StorageReport) -> None:
    """Give a store of one backend its one level. Daemons of 0.3.0 have none for such a store."""
    if not storage.levels and storage.backend != NO_BACKEND:
        shared = {name: getattr(storage, name) for name in StoreFigures.__struct_fields__}
        shared |= {"evictions": storage.evictions or 0, "capacity": storage.capacity or None}
        level = LevelReport(name=storage.backend, disks=storage.disks or [], **shared)
        level.available = (level.breaker or "closed") == "closed"
        storage.levels = [level]
