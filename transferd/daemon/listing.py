"""Lists tasks and clients, for `transferd tasks`, `clients` and `top`: bounded answers, plain data.

A row of `tasks` is an active task, one that has ended, or one that was refused:

    task_id, kind     kind is "" for a task that was refused
    status            queued, running, cancelling; else the final one
    blocks, done      blocks that the task names; blocks moved on every rank
    bytes             moved, on all ranks together
    seconds           since its admission, or from its admission to its answer
    ended_s           how long ago it was answered; None while it is active
    queue_s, copy_s, storage_s   for each, the longest time of any rank; 0 while it is active
    waits_for         what it waits for, in words; "" once it has ended
    ranks             [{rank, step}]: ranks that it waits for, and what each does; empty once it has ended
    code, problem     of its error, or ""
    engine            the name of its engine
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from typing import Any

from transferd.config import DEFAULT_ENGINE
from transferd.control.order import State, TaskState
from transferd.daemon.engine import HostedEngine
from transferd.daemon.engines import Engines
from transferd.observability.task_log import Ended


class Listing:
    """Reads the daemon's parts; changes nothing. An answer costs a few milliseconds at most."""

    def __init__(self, engines: Engines) -> None:
        self._engines, self._clients = engines, engines.clients
        shared = engines.shared
        self._now, self._recorder, self._ended = shared.clock.monotonic, shared.recorder, shared.tasks

    def tasks(self, which: str, limit: int, engine: str = "") -> list[dict[str, Any]]:
        """At most `limit` rows, of all engines or only of the named one.

        which: "running" (and queued; the oldest first), "slow" (active or ended; the longest first), "failed" (and
        refused; the newest first) or "recent" (active ones, then ended ones, the newest first).
        """
        if which == "failed":
            return self._failed(limit, engine)
        under_way = self._admitted(limit, engine)
        if which == "running":
            return self._under_way(under_way)
        now, recent = self._now(), _only(engine, self._ended.recent)
        if which == "slow":
            rows = self._under_way(under_way)
            slowest = sorted(recent, key=lambda ended: ended.seconds, reverse=True)
            rows += [_ended(one, now) for one in slowest[:limit]]
            return sorted(rows, key=lambda row: row["seconds"], reverse=True)[:limit]
        rows = self._under_way(under_way[: (limit + 1) // 2])
        return rows + [_ended(one, now) for one in itertools.islice(reversed(recent), limit - len(rows))]

    def oldest_running(self, at_least_s: float) -> tuple[float, str]:
        """For how long the oldest running task has been admitted, and what it waits for; (0, "") if not that long."""
        running = (
            (engine, record)
            for engine in self._engines.all
            for task_id in engine.barrier.rounds
            if (record := engine.dispatcher.records.get(task_id)) is not None
        )
        oldest = min(running, key=_since, default=None)
        if oldest is None or (for_s := self._now() - oldest[1].admitted_at) < at_least_s:
            return 0.0, ""
        (row,) = self._under_way([oldest])
        return for_s, f"{row['task_id']!r} of engine {row['engine']!r} waits for {row['waits_for']}"

    def timeline(self, limit: int, engine: str = "") -> list[dict[str, Any]]:
        """The running and the latest ended tasks, with `stages`: [{queue_s, copy_s, storage_s}] of each rank."""
        now, recent = self._now(), _only(engine, self._ended.recent)
        rows = [row | {"stages": []} for row in self._under_way(self._admitted(limit // 2, engine))]
        for one in itertools.islice(reversed(recent), limit - len(rows)):
            stages = [{"queue_s": r.queue_s, "copy_s": r.copy_s, "storage_s": r.storage_s} for r in one.ranks]
            rows.append(_ended(one, now) | {"stages": stages})
        return rows

    def clients(self, limit: int, engine: str = "") -> list[dict[str, Any]]:
        """At most `limit` clients, the oldest first. engine: as in `tasks`.

        Each with how long it is connected and how many tasks it waits for; its uid and pid, but None on tcp.
        """
        rows, now = [], self._now()
        for client in itertools.islice(self._clients.of(engine), limit):
            uid, pid = client.who
            where = self._clients.where(client.peer)
            row = {"client": client.peer.decode(), "engine": client.engine_name, "peer": where}
            times = {"connected_s": now - client.came_at, "silent_s": now - client.seen_at}
            tasks = sum(one.dispatcher.waits(client.peer) for one in self._engines.all)
            rows.append(row | {"uid": uid, "pid": pid, "observer": client.observer} | times | {"tasks": tasks})
        return rows

    def _admitted(self, limit: int, engine: str = "") -> list[tuple[HostedEngine, TaskState]]:
        """At most `limit` admitted tasks with their engines, the oldest first."""
        engines = [one for one in self._engines.all if one.dispatcher.records and engine in ("", one.name)]
        each = (zip(itertools.repeat(one), one.dispatcher.records.values()) for one in engines)
        return list(itertools.islice(heapq.merge(*each, key=_since), limit))

    def _failed(self, limit: int, engine: str) -> list[dict[str, Any]]:
        now = self._now()
        rows = [_ended(one, now) for one in _only(engine, self._ended.failed)[-limit:]]
        for at, whose, task_id, status, code, problem in self._recorder.refusals(limit):
            if engine in ("", whose):
                known = {"code": code, "problem": problem, "engine": whose}
                rows.append(_row(task_id, "", status, ended_s=now - at, **known))
        return sorted(rows, key=lambda row: row["ended_s"])[:limit]

    def _under_way(self, found: list[tuple[HostedEngine, TaskState]]) -> list[dict[str, Any]]:
        """Rows of active tasks, with the newest step of each rank, from one pass through the recorder if any runs."""
        running = {(engine.name, record.task_id) for engine, record in found if record.state is not State.QUEUED}
        steps = self._recorder.last_steps(running)
        return [self._waiting(engine, record, steps.get((engine.name, record.task_id), {})) for engine, record in found]

    def _waiting(self, engine: HostedEngine, record: TaskState, steps: dict[int, str]) -> dict[str, Any]:
        assert record.task is not None
        now = self._now()
        ranks: list[dict[str, Any]] = []
        if record.state is State.QUEUED:
            before = 0 if record.claim is None else record.claim.blockers
            waits = "a place in its lane"
            if before:
                waits = f"{before} tasks before it on its blocks"
            elif engine.dispatcher.gate.paused:
                waits = "resume"
        else:
            missing = engine.barrier.missing(record.task_id)
            ranks = [{"rank": rank, "step": steps.get(rank, "")} for rank in missing]
            waits = ", ".join(f"rank {one['rank']} {one['step']}".rstrip() for one in ranks) or "its answer"
        return _row(
            record.task_id,
            str(record.lane),
            str(record.state),
            blocks=record.task.blocks,
            seconds=now - record.admitted_at,
            waits_for=waits,
            ranks=ranks,
            engine=engine.name,
        )


def _since(pair: tuple[HostedEngine, TaskState]) -> float:
    return pair[1].admitted_at


def _only(engine: str, ended: Iterable[Ended]) -> list[Ended]:
    return [one for one in ended if engine in ("", one.engine)]


def _ended(ended: Ended, now: float) -> dict[str, Any]:
    ranks = ended.ranks
    return _row(
        ended.task_id,
        str(ended.kind),
        str(ended.status),
        blocks=ended.blocks,
        done=ended.done,
        bytes=ended.nbytes,
        seconds=ended.seconds,
        engine=ended.engine,
        ended_s=now - ended.at,
        queue_s=max((rank.queue_s for rank in ranks), default=0.0),
        copy_s=max((rank.copy_s for rank in ranks), default=0.0),
        storage_s=max((rank.storage_s for rank in ranks), default=0.0),
        code="" if ended.error is None else ended.error.code,
        problem="" if ended.error is None else ended.error.message,
    )


def _row(task_id: str, kind: str, status: str, **known: Any) -> dict[str, Any]:
    row = {"task_id": task_id, "kind": kind, "status": status, "blocks": 0, "done": 0, "bytes": 0, "seconds": 0.0}
    row |= {"ended_s": None, "queue_s": 0.0, "copy_s": 0.0, "storage_s": 0.0, "waits_for": "", "ranks": []}
    return row | {"code": "", "problem": "", "engine": DEFAULT_ENGINE} | known
