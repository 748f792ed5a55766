"""The daemon's report: what `stats()`, `transferd stats --format json` and /status show, one struct for each section.

daemon/stats.py fills it, and `tree` turns it into plain data. Everything that reads a report (metrics, concerns, the
figures of `top` and of the page, doctor) reads these structs; a command gets them from a daemon's answer by `read`.
docs/report.md lists every field with the comment beside it (`python scripts/describe_report.py`).

Every field has a default: a command reads reports of older daemons, which lack newer fields. A field whose default is
UNSET is absent from the plain data where it does not apply.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from transferd.config import DEFAULT_ENGINE
from transferd.runtime.compat import convert


class ReportSection(msgspec.Struct, kw_only=True):
    """A part of the report."""


class LaneReport(ReportSection):
    """The tasks of one kind on one rank."""

    queued: int = 0  # admitted and not running; the same for all ranks of an engine, which share the queue
    running: int = 0  # tasks
    done: int = 0  # tasks that this rank has completed
    failed: int = 0  # tasks that failed on this rank
    bytes: int = 0  # moved by this rank


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


class RankReport(ReportSection):
    """One rank of one engine."""

    rank: int = 0  # its number within the engine
    device: int = 0  # the device's index
    tier: dict[str, Any] = {}  # the device tier's own figures: `bytes`, `open`, and more for some tiers
    lanes: dict[str, LaneReport] = {}  # by kind of task
    background: int = 0  # calls that still run for tasks that were answered
    engine: str = DEFAULT_ENGINE  # the engine's name


class HoldReport(ReportSection):
    """One pause or drain."""

    what: str = ""  # `pause` or `drain`
    holder: str = ""  # the client that requested it
    for_s: float = 0.0  # seconds


class BarrierReport(ReportSection):
    """How the ranks of all engines meet."""

    open: int = 0  # rounds in which ranks have yet to arrive
    owing: int = 0  # arrivals still owed to rounds that have ended
    completed: int = 0  # rounds that have ended, for whatever reason
    expired: int = 0  # rounds that a deadline ended without every rank
    late: int = 0  # arrivals dropped because their round had ended
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
    bytes: int = 0  # of all ranks of all engines
    pinned: bool = False  # every pool is locked in memory
    budget: BudgetReport = msgspec.field(default_factory=BudgetReport)


class StagingReport(ReportSection):
    """Staging memory of all ranks, in bytes."""

    capacity: int = 0  # all of it
    used: int = 0  # leased now
    peak: int = 0  # the sum of what each rank has used at most


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
    passes: int = 0  # complete passes over the store
    objects: int = 0  # objects read
    bytes: int = 0  # bytes read
    damaged: int = 0  # objects set aside
    unsealed: int = 0  # objects without a seal to verify
    errors: int = 0  # objects that could not be read


class HoldingReport(ReportSection):
    """The objects of one engine in storage."""

    engine: str = ""  # its name; "" for objects without an owner
    uid: int | None = None  # the user who registered it
    there: bool = False  # it is registered now
    objects: int = 0  # stored
    bytes: int = 0  # of these, and of those being stored
    share: int = 0  # bytes kept for it: while it has less, others evict nothing of it
    pinned: int = 0  # bytes that it has pinned


class DiskReport(ReportSection):
    """One directory of the file backend, and the file system that it is on."""

    path: str = ""  # storage.file.path
    total: int = 0  # bytes of the file system
    free: int = 0  # of these, free for this user
    reserve: int = 0  # bytes that the store leaves free (storage.file.reserve)
    room: int = 0  # bytes that the store may hold: its capacity, or less if the disk has less room
    files: int = 0  # inodes of the file system; 0 if they have no fixed number
    files_free: int = 0  # of these, free
    read_only: bool = False  # whether the file system is mounted read-only
    problem: str = ""  # why nothing can be stored or loaded here; empty if all is well
    journal_problem: str = ""  # why the order of use could not be written, the last time; empty if it was
    stuck: int = 0  # objects, files and directories that can be neither removed nor read, each set aside
    stuck_bytes: int = 0  # of these objects; they count as stored
    stuck_why: str = ""  # what one of them raised, with its path; empty if there is none
    failed: str = ""  # of several disks: why this one is out of use; empty if it works
    objects: int = 0  # of several disks: stored on this one
    bytes: int = 0  # of these
    capacity: int = 0  # of several disks: bytes that may be stored on this one
    errors: int = 0  # of several disks: calls that failed on this one


class LevelReport(ReportSection):
    """One level of storage. Counts are since the start."""

    name: str = ""  # as in storage.levels
    backend: str = ""  # of this level
    objects: int | None = 0  # stored now; null if only the level's server has that figure
    bytes: int | None = 0  # of these; null if only the level's server has that figure
    capacity: int | None = None  # bytes that may be stored; null without a bound
    hits: int = 0  # objects that loads found here
    misses: int = 0  # objects that loads looked for here and did not find
    corrupt: int = 0  # damaged copies of this level that were set aside
    errors: int = 0  # calls that failed
    evictions: int = 0  # copies removed to make room
    pending_bytes: int = 0  # wait to be copied here
    copied: int = 0  # objects copied here from a level above
    promoted: int = 0  # objects copied here from a level below, because they were used
    prefetched: int = 0  # objects copied here from a level below by prefetches and warm-ups
    kept_bytes: int = 0  # not evicted, because a prefetch waits for their first use
    lost: int = 0  # objects that were not copied here
    lost_for: dict[str, int] = {}  # the same by reason
    slow_calls: int = 0  # calls that took much longer than others of this level
    hanging: int = 0  # of these, those that have not ended
    refuses: str = ""  # why it takes no copies now
    link_faults: int = 0  # objects that came damaged, and whole when they were read again
    bad_link: str = ""  # why nothing is loaded from it for a while
    state: str = "used"  # used, draining (`transferd level drain`), drained
    draining_bytes: int = 0  # that have yet to be looked at, and copied if only this level has them
    available: bool = True  # whether calls go there


class StorageReport(ReportSection):
    """The storage backend. Counts are since the start; some backends do not have all of these."""

    backend: str = "none"  # storage.backend
    objects: int | None = 0  # stored now; null if only the pool has that figure
    bytes: int | None = 0  # stored now; null if only the pool has that figure
    hits: int = 0  # objects that a lookup or a load found
    misses: int = 0  # objects that it did not find
    hit_share_1min: float | None = None  # the share of the last minute's lookups that found theirs; null without any
    errors: int = 0  # calls that failed
    shared_loads: int = 0  # objects that one task loaded for another one as well
    shared_stores: int = 0  # objects that one engine stored for another one's task
    corrupt: int = 0  # damaged objects that were set aside
    capacity: int | UnsetType = UNSET  # bytes that may be stored (storage.*.capacity); a file store counts whole blocks
    in_flight_bytes: int | UnsetType = UNSET  # being stored now
    wrong_length: int | UnsetType = UNSET  # objects of another length than expected, made unreachable
    gone: int | UnsetType = UNSET  # objects that something other than this daemon has removed
    stored: int | UnsetType = UNSET  # objects stored
    evictions: int | UnsetType = UNSET  # objects removed to make room
    evicted_for: dict[str, int] | UnsetType = UNSET  # the same by cause: `capacity`, `medium_full`, `shrink`, `reserve`
    levels: list[LevelReport] | UnsetType = UNSET  # with storage.levels, the fastest first
    disks: list[DiskReport] | UnsetType = UNSET  # of the file backend
    scrub: ScrubReport | UnsetType = UNSET  # of the file backend
    holdings: list[HoldingReport] | UnsetType = UNSET  # the objects of each engine, the most bytes first
    disks_failed: int | UnsetType = UNSET  # of these, out of use
    lost: int | UnsetType = UNSET  # objects that were on disks when they failed
    not_admitted: int | UnsetType = UNSET  # objects that were not stored, because no second task had named them
    remembered: int | UnsetType = UNSET  # blocks that a single task has tried to store
    purged: int | UnsetType = UNSET  # objects removed by purges
    purging: int | UnsetType = UNSET  # objects that running purges have yet to look at
    warming_bytes: int | UnsetType = UNSET  # bytes that running warm-ups have yet to bring up
    pinned: int | UnsetType = UNSET  # objects that are pinned now
    pinned_bytes: int | UnsetType = UNSET  # of these
    pins_expired: int | UnsetType = UNSET  # objects that lost their last pin because its time was over
    breaker: str | UnsetType = UNSET  # `closed`: calls go through; `open`, `half_open`: storage does not answer
    breaker_opened: int | UnsetType = UNSET  # how often storage did not answer
    breaker_reason: str | UnsetType = UNSET  # why, the last time
    waited_for_room: int | UnsetType = UNSET  # objects that were retried because the pool was full
    contested: int | UnsetType = UNSET  # stored objects that could not be found yet: another client was writing them
    taken_over: int | UnsetType = UNSET  # objects that replaced another client's unfinished write
    held: int | UnsetType = UNSET  # objects whose buffers were held because a transfer did not end
    under_replicated: int | UnsetType = UNSET  # objects stored with fewer copies than storage.mooncake.replica_num
    copies_missing: int | UnsetType = UNSET  # objects that lack a copy now, and that this node has to mend
    copies_made: int | UnsetType = UNSET  # copies that drains and mends have made
    copying_bytes: int | UnsetType = UNSET  # bytes that a running drain or mend of a pool has yet to copy
    peers_down: dict[str, str] | UnsetType = UNSET  # nodes of the pool that do not answer, and why
    peers_went_down: int | UnsetType = UNSET  # how often one stopped answering
    connections_cut: int | UnsetType = UNSET  # connections to such nodes that were ended
    link_faults: int | UnsetType = UNSET  # objects that came damaged, and whole when they were read again
    bad_link: str | UnsetType = UNSET  # why nothing is loaded for a while; empty if all is well
    other_layout: int | UnsetType = UNSET  # lookups whose first absent key is stored in another layout of the model
    other_layouts: dict[str, Any] | UnsetType = UNSET  # those layouts
    batches_merged: int | UnsetType = UNSET  # batches that went into a call of another batch
    calls_under_way: int | UnsetType = UNSET  # native calls that run now
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

    announced: dict[str, int] | UnsetType = UNSET  # blocks announced now, by medium
    peers: dict[str, FollowedReport] | UnsetType = UNSET  # by node
    batches: int | UnsetType = UNSET  # published
    events: int | UnsetType = UNSET  # published
    kept: int | UnsetType = UNSET  # batches kept for replays
    kept_bytes: int | UnsetType = UNSET  # of these
    replays: int | UnsetType = UNSET  # sent to their end
    snapshots: int | UnsetType = UNSET  # requested by followers
    replays_broken_off: int | UnsetType = UNSET  # the subscriber went away or was too slow


class TracesReport(ReportSection):
    """Traces of tasks; empty without traces.endpoint."""

    exported: int | UnsetType = UNSET  # tasks that the collector accepted
    dropped: int | UnsetType = UNSET  # tasks that did not fit into the queue
    failed: int | UnsetType = UNSET  # tasks that the collector did not accept


class ServerReport(ReportSection):
    """The daemon's socket."""

    clients: int = 0  # connected now
    clients_lost: int = 0  # that fell silent
    waiting: int = 0  # requests that wait for something, such as match and pause
    waiting_bytes: int = 0  # of their arguments
    messages: int = 0  # received
    undeliverable: int = 0  # answers whose client was gone
    rejects: dict[str, int] = {}  # messages refused, by code
    turned_away: dict[str, int] = {}  # tasks that clients have refused themselves, by code
    not_stored: dict[str, int] = {}  # blocks that adapters did not store, by reason (tasks.NOT_STORED)


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


class EngineReport(ReportSection):
    """One engine that the daemon serves."""

    ready: bool = False  # every rank has its memory, and tasks are admitted
    why: str = ""  # why tasks are not served
    registered: bool = False  # not the engine of [cache]
    registration: str = ""  # a digest of its token
    uid: int | None = None  # the only user who may speak for it
    ranks: int = 0  # how many
    first_rank: int = 0  # of these within a group of several nodes
    dp_rank: int = 0  # in its KV events
    clients: int = 0  # that speak for it
    model: str = ""  # part of every key
    generation: str = ""  # weight version
    fingerprint: FingerprintReport | str = msgspec.field(default_factory=FingerprintReport)
    epoch: int = 0  # counts clears and restores of its memory
    missing: list[int] = []  # ranks without memory
    owners: list[int | None] = []  # for each rank, the process that offered its memory
    unattached: list[int] = []  # ranks without attached or offered memory
    unattached_s: float | None = None  # for how many seconds a client has needed that memory; null if none does
    tasks: dict[str, int] = {}  # answered, by final status
    queued: int = 0  # tasks
    running: int = 0  # tasks
    straggling: int = 0  # answered tasks that a rank still works on
    paused: bool = False  # a pause is held
    draining: bool = False  # a drain is held, or it leaves
    rejects: dict[str, int] = {}  # tasks refused, by code
    bytes: int = 0  # moved by all of its ranks
    block_bytes: int = 0  # of one block of one rank
    device_blocks: int = 0  # per rank
    host_blocks: int = 0  # per rank
    host_bytes: int = 0  # host memory that it takes
    lanes: dict[str, KindReport] = {}  # its tasks by kind
    totals: KindReport = msgspec.field(default_factory=KindReport)  # its tasks of all kinds


class ConcernReport(ReportSection):
    """Something that is wrong, or slower than it should be. It ends by itself when it is over."""

    name: str = ""  # one of the concerns in metrics.md
    text: str = ""  # what is wrong, as last seen
    action: str = ""  # what to do
    for_s: float = 0.0  # for how many seconds it has lasted
    times: int = 0  # how often in the last 10 minutes: events, or how often it began


class Report(ReportSection):
    """The whole report. Counts, memory and ranks are those of all engines together.

    Fields that describe one engine (generation, cache, layout, configured) are those of [cache], or empty without it.
    """

    version: str = ""  # of the daemon
    pid: int | UnsetType = UNSET  # its process
    boot_id: str = ""  # one life of a daemon process
    uptime_s: float = 0.0  # seconds since the start
    ready: bool = False  # tasks are served; without [cache], engines may register
    host_name: str = ""  # of the machine, or of the container
    endpoint: list[str] = []  # where it listens
    generation: str = ""  # weight version
    ranks: list[RankReport] = []
    lanes: dict[str, KindReport] = {}  # the tasks of all engines together, by kind
    totals: KindReport = msgspec.field(default_factory=KindReport)  # the tasks of all kinds and engines
    tasks: dict[str, int] = {}  # answered, by final status; includes engines that have left
    concerns: list[ConcernReport] | UnsetType = UNSET  # the most urgent first; empty when all is well
    errors: dict[str, int] = {}  # admitted tasks that ended with an error, by code
    queued: int = 0  # tasks
    running: int = 0  # tasks
    straggling: int = 0  # answered tasks that a rank still works on
    paused: bool = False  # a pause of [cache] is held
    draining: bool = False  # it stops, or a drain of [cache] is held
    held: list[HoldReport] = []  # the longest first
    argument_bytes: int = 0  # of keys, ids and token ids of admitted tasks
    results_kept: int = 0  # for repeated pushes
    result_bytes: int = 0  # of these
    rejects: dict[str, int] = {}  # requests refused, by code; includes engines that have left
    barrier: BarrierReport = msgspec.field(default_factory=BarrierReport)
    refused: dict[str, int] = {}  # connections and HTTP requests refused, by reason
    users: UsersReport = msgspec.field(default_factory=UsersReport)
    cache: CacheReport = msgspec.field(default_factory=CacheReport)
    host: HostReport = msgspec.field(default_factory=HostReport)
    degraded: list[str] = []  # why ranks are slower than they should be
    staging: StagingReport = msgspec.field(default_factory=StagingReport)
    memory: MemoryReport = msgspec.field(default_factory=MemoryReport)
    storage: StorageReport = msgspec.field(default_factory=StorageReport)
    pd: PdReport = msgspec.field(default_factory=PdReport)
    events: EventsReport = msgspec.field(default_factory=EventsReport)
    traces: TracesReport = msgspec.field(default_factory=TracesReport)
    server: ServerReport = msgspec.field(default_factory=ServerReport)
    effects_failed: dict[str, int] = {}  # instructions whose effect raised (a bug), by kind
    log_dropped: int = 0  # log lines that did not fit or could not be written
    log_left_out: int = 0  # log lines beyond their kind's rate limit
    layout: LayoutReport = msgspec.field(default_factory=LayoutReport)
    configured: dict[str, Any] = {}  # the settings that an engine must share
    engines: dict[str, EngineReport] = {}  # by name
    engines_leaving: int = 0  # engines that have lost their name and wait for their last bytes


def tree(report: Report) -> dict[str, Any]:
    """The report as plain data."""
    data: dict[str, Any] = msgspec.to_builtins(report, enc_hook=_plain)
    storage = data["storage"]
    storage |= storage.pop("other")
    return data


def _plain(value: Any) -> Any:
    """A Size of the configuration as a number."""
    if isinstance(value, int):
        return int(value)
    raise NotImplementedError(f"a report has no place for a {type(value).__name__}")


def read(data: Mapping[str, Any]) -> Report:
    """The report of a daemon, of this or another version, from its plain data."""
    return convert(data, Report)
