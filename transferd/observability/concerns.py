"""What is wrong with a daemon, or slower than it should be: `stats`, `top`, `doctor`, the page and JSON show this list.

    report ─ find ─▶ findings ─▶ Watch ─▶ concerns: since when, how often in ten minutes, the latest text, what to do

`find` is pure. A finding is either there or not there, as long as its cause is; or it counts events, and is there until
ten minutes have passed without one. So a concern ends by itself. docs/metrics.md has a row for each.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import structlog

from transferd.config import DEFAULT_ENGINE
from transferd.errors import one_line
from transferd.observability.report import ConcernReport, DiskReport, LevelReport, Report, StorageReport
from transferd.observability.units import named_ranks, size, span

log = structlog.get_logger(__name__)

UNATTACHED_S = 10.0  # an engine that starts has offered its memory by then
SLOW_STORAGE_S = 1.0  # how long 99 of 100 tasks of the last minute may wait for storage
OLDEST_TASK_S = 10.0  # how long a task may run
LAG_S = 0.5  # how late the event loop may be
REMEMBERED_S = 600.0
EVERY_S = 1.0  # how often a watch looks, at most
LOGGED_AFTER_S = 10.0  # so that a start, or an engine that comes, leaves no line behind; events are logged at once
LOGGED_EVERY_S = 600.0  # how often the log repeats a concern that lasts
REFUSED = ("queue_full", "bytes_in_flight")  # codes of tasks that an engine may push, and that nobody had room for
GIVEN_UP = ("queue_full", "failed", "full", "down")  # reasons for which a copy to a level is a loss


class Concern(NamedTuple):
    severity: str  # critical: tasks fail, or are not served; warning: something is lost or slow; info: somebody's wish
    remedy: str


# Every concern and what to do about it, in the order of urgency. docs/metrics.md has this table.
_REMEDIES = {
    "rank_died": "Restart the daemon: the rank's device is lost to it.",
    "cache_cleared": "Call restore_cache: tasks are rejected until then.",
    "no_memory": "Start the engine, or wait for it: it has not offered its memory yet.",
    "not_ready": "See /readyz and the log.",
    "not_attached": "Restart the engine, or let it offer or attach its memory: its tasks are rejected (not_attached).",
    "engine_not_ready": "See the reason in `transferd stats`, and the engine's own log.",
    "held": "`transferd resume` ends it (with --engine NAME, if it is not that of [cache]).",
    "stopping": "Nothing: the daemon admits no new tasks, and ends when the running ones have ended.",
    "straggling": "Find the copy or call that hangs: `transferd explain ID` of those tasks, then restart the daemon.",
    "event_loop_late": "Give the daemon CPU time of its own, and look for swapping.",
    "reload_refused": "Correct the file (`transferd config check`) and reload: a restart would not start.",
    "tasks_refused": "See `transferd tasks --running` for what tasks wait for; server.max_queued_tasks is the bound.",
    "store_lost": "Mount the disk, or find out who removed the directory. It returns unless another daemon uses it.",
    "disk_failed": "Repair or mount the disk: it is tried now and then, and the others go on without it.",
    "storage_silent": "Repair the disk or the pool: tasks fail at once until it answers.",
    "level_silent": "Repair that level's disk, bucket or pool. No task fails for it: the other levels go on.",
    "link_spoils": "Check this node's link, network card and proxy: what it loads is damaged on the way.",
    "level_refuses": "See its reason: credentials, rights, room, or too many requests. Copies wait meanwhile.",
    "level_drained": "`transferd level use NAME` puts it back; until then it is neither read nor written.",
    "copies_given_up": "A faster lower level or more write_back_bytes keeps up (docs/levels.md). Later uses try again.",
    "node_down": "Repair that node or the network to it: its objects fail at once, all others are served.",
    "storage_slow": "Look at the disk or the network of the pool (`iostat -x 1`): tasks wait for it.",
    "task_hangs": "`transferd tasks --running` says what the task waits for.",
    "disk_read_only": "See `dmesg` for why, repair the disk, and mount it for writing: nothing is stored.",
    "disk_failing": "See `dmesg` and `smartctl -a`, and replace the disk. What cannot be read is a miss.",
    "disk_full": "Free space on the disk: others fill it. A larger storage.file.capacity does not help.",
    "store_full": "Raise storage.file.capacity, or lower shares and unpin blocks, if these fill the store.",
    "disk_nearly_full": "Free space on the disk, or lower storage.file.capacity to what it has room for.",
    "objects_gone": "Find out what removes files in the store (a cleaner of old files?), and exclude it.",
    "files_stuck": "Give them back to the daemon's user (chown, chmod, chattr -i). Until then each costs its own room.",
    "under_replicated": "Bring the missing nodes back, or add memory: these objects have fewer copies.",
    "copies_missing": "Run `transferd pool mend`, or set storage.mooncake.mend, once there are nodes with room.",
    "storage_corrupt": "Check the medium, and run `transferd verify`.",
    "storage_errors": "See the log for what the calls raised.",
    "degraded": "Raise the limit on locked memory (LimitMEMLOCK), or place the ranks' memory on their own node.",
    "deadlines_missed": "See `transferd tasks --failed`.",
    "internal_errors": "Please report them with the log.",
    "log_dropped": "Make the reader of stderr faster, or lower log.level.",
    "refused": "See the log for who was refused; a wrong key, user or address is the usual cause.",
}
_CRITICAL = [
    *("rank_died", "cache_cleared", "not_ready", "not_attached", "straggling", "store_lost", "storage_silent"),
    *("disk_read_only", "internal_errors"),
]
_INFO = ["no_memory", "held", "stopping", "level_drained"]
CONCERNS = {
    name: Concern("critical" if name in _CRITICAL else "info" if name in _INFO else "warning", remedy)
    for name, remedy in _REMEDIES.items()
}


class Trouble(NamedTuple):
    """One thing that is wrong. total: how many events there were since the start; None if it is simply there.

    about: the engine, level, disk or node that it concerns, such as "level object"; "" for the daemon.
    counter: what total counts, if other concerns count the same; an event is news to one of them only.
    """

    name: str
    text: str
    total: int | None = None
    about: str = ""
    counter: str = ""


class Measured(NamedTuple):
    """Measurements that a report does not contain."""

    not_ready: str = ""
    lag_s: float = 0.0  # by how much the event loop is late, again and again
    storage_p99_s: float | None = None  # of the last minute
    oldest_s: float = 0.0
    oldest: str = ""  # the task that runs longest, in words


def find(report: Report, health: Measured | None = None) -> list[Trouble]:
    """List what an operator should know, the most urgent first; empty when all is well."""
    health = health or Measured()
    found = [*_service(report, health), *_storage(report, health), *_quality(report, health)]
    order = {name: place for place, name in enumerate(CONCERNS)}
    return sorted(found, key=lambda one: order[one.name])


def _service(report: Report, health: Measured) -> Iterator[Trouble]:
    """Why no tasks are served, or only some."""
    cache, own = report.cache, report.engines.get(DEFAULT_ENGINE)
    needed = own is not None and own.unattached_s is not None  # an engine that has left is no problem
    if report.barrier.dead:
        yield Trouble("rank_died", f"{named_ranks(report.barrier.dead)} has died")
    if cache.cleared:
        yield Trouble("cache_cleared", "the cache is cleared")
    elif cache.missing:
        yield Trouble("no_memory", f"{named_ranks(cache.missing)} without memory")
    elif not report.ready:
        yield Trouble("not_ready", f"not ready: {health.not_ready or 'no reason was given'}")
    elif cache.unmapped and needed and report.rejects.get("not_attached"):
        yield Trouble("not_attached", f"no engine has attached {named_ranks(cache.unmapped)}")
    for name, engine in report.engines.items():
        for_s = engine.unattached_s or 0.0
        if engine.registered and for_s >= UNATTACHED_S:
            what = f"engine {name!r}: connected, but the memory of {named_ranks(engine.unattached)} is not attached"
            yield Trouble("not_attached", f"{what}, since {span(for_s)}", about=f"engine {name}")
        elif engine.registered and engine.clients and not engine.ready:
            text = f"engine {name!r} is connected and not ready: {engine.why}"
            yield Trouble("engine_not_ready", text, about=f"engine {name}")
    for hold in report.held:
        whose = f"engine {hold.engine}" if hold.engine else ""
        text = f"{hold.what}{f' of {whose}' if whose else ''} for {span(hold.for_s)}, held by {hold.holder}"
        yield Trouble("held", text, about=whose)
    if report.draining and not report.held:
        yield Trouble("stopping", "the daemon is stopping")
    if report.straggling:
        yield Trouble("straggling", f"{report.straggling} answered tasks still occupy blocks: a copy or a call hangs")


def _storage(report: Report, health: Measured) -> Iterator[Trouble]:
    storage, levels = report.storage, report.storage.levels
    if (storage.breaker or "closed") != "closed":
        why = f": {storage.breaker_reason}" if storage.breaker_reason else ""
        yield Trouble("storage_silent", f"storage {storage.backend} does not answer{why}")
    for level in levels:
        if len(levels) > 1:
            yield from _level(level)
        if level.bad_link:
            yield Trouble("link_spoils", f"{level.name}: {level.bad_link}", about=f"level {level.name}")
        for disk in level.disks:
            yield from _disk(disk, level)
    for node, why in (storage.peers_down or {}).items():
        yield Trouble("node_down", f"the node {node} of the pool does not answer: {why}", about=f"node {node}")
    if missing := storage.copies_missing or 0:
        yield Trouble("copies_missing", f"{missing} objects of the pool, with a copy here, have fewer than configured")
    if (waited := health.storage_p99_s or 0.0) > SLOW_STORAGE_S:
        yield Trouble("storage_slow", f"1 of 100 tasks of the last minute waited {span(waited)} or more for storage")
    if health.oldest_s > OLDEST_TASK_S:
        yield Trouble("task_hangs", f"a task was admitted {span(health.oldest_s)} ago and still runs: {health.oldest}")
    yield from _full(storage, report.errors.get("storage_full", 0))
    counted = {
        "disk_failing": (report.errors.get("storage_io", 0), "tasks met an input/output error of the disk", ""),
        "under_replicated": (storage.under_replicated, "objects were stored with fewer copies than configured", ""),
        "objects_gone": (storage.gone, "objects were removed from outside", "gone"),
        "storage_corrupt": (storage.corrupt, "damaged objects were found", "corrupt"),
        "storage_errors": (storage.errors, "storage calls failed", "errors"),
    }
    for name, (number, text, counter) in counted.items():
        if number:
            which = {level.name: getattr(level, counter, 0) for level in levels if len(levels) > 1}
            where = ", ".join(f"{level} {count}" for level, count in which.items() if count)
            yield Trouble(name, f"{number} {text}{f' ({where})' if where else ''}", number)


def _level(level: LevelReport) -> Iterator[Trouble]:
    """Of one level of several: tasks do not fail for it, unless the text says so."""
    about = f"level {level.name}"
    waiting = f"; {size(level.pending_bytes)} wait to be copied there" if level.pending_bytes else ""
    if level.state != "used":
        left = f", {size(level.draining_bytes)} left to look at" if level.draining_bytes else ""
        yield Trouble("level_drained", f"the level {level.name} is {level.state}{left}", about=about)
    elif not level.available:
        why = f"{level.hanging} calls to it have not ended" if level.hanging else "it is left out for now"
        why = level.breaker_reason or why
        yield Trouble("level_silent", f"the level {level.name} does not answer: {why}{waiting}", about=about)
    elif level.refuses:
        text = f"the level {level.name} takes no copies now: {level.refuses}{waiting}"
        yield Trouble("level_refuses", text, about=about)
    given_up = {reason: level.lost_for.get(reason, 0) for reason in GIVEN_UP if level.lost_for.get(reason)}
    if given_up:
        why = ", ".join(f"{reason} {number}" for reason, number in given_up.items())
        text = f"{sum(given_up.values())} objects were not copied to the level {level.name} ({why})"
        yield Trouble("copies_given_up", text, sum(given_up.values()), about)


def _full(storage: StorageReport, refused: int) -> Iterator[Trouble]:
    """refused: tasks that found no room. Blames the disk if it has less room than the store may take."""
    short = any(_short(disk, level) for level in storage.levels for disk in level.disks)
    gone = (storage.evicted_for or {}).get("medium_full", 0)
    if gone:
        yield Trouble("disk_full", f"the disk is fuller than the store: {gone} objects had to go", gone)
    if refused and short:
        text = f"the disk is fuller than the store: {refused} tasks found no room"
        yield Trouble("disk_full", text, refused, counter="storage_full")
    elif refused:
        shares, pinned = sum(one.share for one in storage.holdings or []), storage.pinned_bytes or 0
        held = [f"engines' shares keep {size(shares)}"] * bool(shares) + [f"{size(pinned)} are pinned"] * bool(pinned)
        text = f"{refused} tasks found no room in the store's {size(storage.capacity or 0)}"
        text = f"{text}: {' and '.join(held) or 'they need more'}"
        yield Trouble("store_full", text, refused, counter="storage_full")


def _short(disk: DiskReport, level: LevelReport) -> bool:
    """Whether the store may take more of this disk than there is."""
    return bool(disk.total) and disk.room < (disk.capacity or level.capacity or 0)


def _disk(disk: DiskReport, level: LevelReport) -> Iterator[Trouble]:
    about = f"disk {disk.path}"
    if disk.failed:
        yield Trouble("disk_failed", f"the disk of {disk.path} is out of use: {disk.failed}", about=about)
        return
    if disk.problem:
        yield Trouble("store_lost", disk.problem, about=about)
    if disk.read_only:
        yield Trouble("disk_read_only", f"the disk of {disk.path} is mounted read-only", about=about)
    if disk.stuck:
        text = f"{disk.stuck} files or directories of {disk.path} refuse and are set aside ({size(disk.stuck_bytes)})"
        yield Trouble("files_stuck", f"{text}: {disk.stuck_why}", about=about)
    if not disk.read_only and _short(disk, level):
        text = (
            f"the store in {disk.path} has room for {size(disk.room)}, less than its capacity "
            f"({size(disk.capacity or level.capacity or 0)}): {size(disk.free)} "
            f"of {size(disk.total)} are free on its disk, and {size(disk.reserve)} stay free"
        )
        yield Trouble("disk_nearly_full", text, about=about)


def _quality(report: Report, health: Measured) -> Iterator[Trouble]:
    if health.lag_s > LAG_S:
        yield Trouble("event_loop_late", f"the event loop is late again and again, by {span(health.lag_s)} and more")
    if report.reload_refused:
        yield Trouble("reload_refused", f"the last reload was refused: {report.reload_refused}")
    busy = {code: report.rejects[code] for code in REFUSED if report.rejects.get(code)}
    if busy:
        whose = [name for name, engine in report.engines.items() if any(engine.rejects.get(code) for code in REFUSED)]
        text = f"{sum(busy.values())} tasks were refused ({', '.join(f'{code} {n}' for code, n in busy.items())})"
        about = ", ".join(f"engine {name}" for name in whose)
        yield Trouble("tasks_refused", text + (f", of {about}" if about else ""), sum(busy.values()), about)
    for reason in _together(report.degraded):
        yield Trouble("degraded", reason)
    # A task that was late and had some blocks done has the status `partial`, and this error.
    if expired := max(report.tasks.get("expired", 0), report.errors.get("expired", 0)):
        yield Trouble("deadlines_missed", f"{expired} tasks missed their deadline", expired)
    if failed := sum(report.effects_failed.values()):
        yield Trouble("internal_errors", f"internal errors: {report.effects_failed}", failed)
    if report.log_dropped:
        yield Trouble("log_dropped", f"{report.log_dropped} log lines were lost", report.log_dropped)
    refused = {reason: number for reason, number in report.refused.items() if number}
    if refused:
        text = ", ".join(f"{reason} {number}" for reason, number in refused.items())
        yield Trouble("refused", f"refused connections: {text}", sum(refused.values()))


def _together(reasons: Iterable[str]) -> list[str]:
    """One sentence for all ranks that have the same reason."""
    ranks: dict[str, list[int]] = {}
    for reason in reasons:
        said = re.fullmatch(r"rank (\d+): (.*)", reason, re.DOTALL)
        ranks.setdefault(said[2] if said else reason, []).extend([int(said[1])] if said else [])
    return [f"{named_ranks(which)}: {reason}" if which else reason for reason, which in ranks.items()]


@dataclass(slots=True)
class _Spell:
    """One concern while it lasts."""

    since: float
    text: str
    about: str = ""
    logged_at: float | None = None


class Watch:
    """Remembers findings between looks. Each look compares the findings of that moment with the last one's."""

    def __init__(self) -> None:
        self._spells: dict[str, _Spell] = {}
        self._totals = Counter[str]()  # by counter
        # When events happened, or concerns that are simply there began, and how many; within REMEMBERED_S.
        self._events: defaultdict[str, deque[tuple[float, int]]] = defaultdict(deque)

    def look(self, findings: Iterable[Trouble], now: float) -> None:
        """Take up the findings of this moment, in monotonic seconds. Logs concerns that begin, last long, or end."""
        found: dict[str, list[Trouble]] = {}
        for finding in findings:
            found.setdefault(finding.name, []).append(finding)
        for name, troubles in found.items():
            self._take_up(name, troubles, now)
        for name, spell in list(self._spells.items()):
            events = self._events[name]
            while events and events[0][0] <= now - REMEMBERED_S:
                events.popleft()
            counts_events = name in found and found[name][0].total is not None
            if name not in found or (counts_events and not events):
                del self._spells[name]
                if spell.logged_at is not None:
                    log.info("concern over", concern=name, lasted_s=round(now - spell.since, 1))

    def _take_up(self, name: str, troubles: list[Trouble], now: float) -> None:
        text = one_line("; ".join(trouble.text for trouble in troubles))
        about = ", ".join(dict.fromkeys(trouble.about for trouble in troubles if trouble.about))
        counted, begins = troubles[0].total is not None, name not in self._spells
        totals = Counter[str]()
        for trouble in troubles:
            totals[trouble.counter or name] += trouble.total or 0
        more = sum(total - self._totals[counter] for counter, total in totals.items()) if counted else int(begins)
        for counter, total in totals.items():
            self._totals[counter] = total
        if more > 0:
            self._events[name].append((now, more))
        elif begins:
            return  # no event since the last look
        spell = self._spells.setdefault(name, _Spell(now, text, about))
        if not counted or more > 0:
            spell.text, spell.about = text, about
        self._log(name, spell, now, 0.0 if counted else LOGGED_AFTER_S)

    def _log(self, name: str, spell: _Spell, now: float, after_s: float) -> None:
        due = spell.since + after_s if spell.logged_at is None else spell.logged_at + LOGGED_EVERY_S
        if now >= due:
            spell.logged_at = now
            log.warning("concern", concern=name, problem=spell.text, action=CONCERNS[name].remedy)

    def concerns(self, now: float) -> list[ConcernReport]:
        """The concerns that last now, the most urgent first."""
        return [
            ConcernReport(
                name=name,
                severity=concern.severity,
                about=spell.about,
                text=spell.text,
                action=concern.remedy,
                for_s=now - spell.since,
                times=sum(number for _, number in self._events[name]),
            )
            for name, concern in CONCERNS.items()
            if (spell := self._spells.get(name)) is not None
        ]


def concerns(report: Report) -> list[str]:
    """The concerns of a report as lines for people."""
    return [_line(one) for one in report.concerns]


def _line(one: ConcernReport) -> str:
    lasts = [f"for {span(one.for_s)}"] * (one.for_s >= 1) + [f"{one.times} times in 10 min"] * (one.times > 1)
    since = f" ({', '.join(lasts)})" if lasts else ""
    return one_line(f"{one.text}{since}: {one.action}")
