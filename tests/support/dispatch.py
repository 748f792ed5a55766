"""What must hold of a dispatcher between any two events, for tests and the simulation."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import msgspec

from transferd.config import ServerSection
from transferd.control.admission import Limits, argument_bytes, footprint_of
from transferd.control.dispatcher import Dispatcher
from transferd.control.order import AT_WORK, HazardTable, State, TaskState
from transferd.tasks import Footprint, Task


def limits(**more: Any) -> Limits:
    """What the configuration's defaults give for two ranks of 64 blocks of 4 KiB, but for `more`."""
    usual: dict[str, Any] = {
        "ranks": 2,
        "device_blocks": 64,
        "host_blocks": 64,
        "block_bytes": 4096,
        "storage": True,
        "direct": False,
        "token_block": 0,
        "only_flush": False,
        "server": ServerSection(),
    }
    return limits_but(Limits(**usual), **more)


def limits_but(base: Limits, **more: Any) -> Limits:
    """`base`, but for these fields of it or of its `server`."""
    server = {name: more.pop(name) for name in ServerSection.__struct_fields__ if name in more}
    return dataclasses.replace(base, server=msgspec.structs.replace(base.server, **server), **more)


def touching(**uses: Sequence[object]) -> Footprint:
    """Footprint of uses such as device_reads=[1], paths_writes=["p"]."""
    reads = {name.removesuffix("_reads"): ids for name, ids in uses.items() if name.endswith("_reads")}
    writes = {name.removesuffix("_writes"): ids for name, ids in uses.items() if name.endswith("_writes")}
    return Footprint(reads, writes)


def record_of(task: Task, **more: Any) -> TaskState:
    """A task that was just admitted at time 0 for one client, but for `more`."""
    usual: dict[str, Any] = {
        "task": task,
        "task_id": task.task_id,
        "lane": task.lane,
        "content": 0,
        "generation": "g1",
        "memory_epoch": 0,
        "admitted_at": 0.0,
        "nbytes": 0,
        "arguments": 0,
        "flush": False,
        "waiters": [(b"engine", 1)],
    }
    return TaskState(**usual | more)


def state_of(dispatcher: Dispatcher, task_id: str) -> State | None:
    """A task's state; None if it was never admitted, or its result is no longer kept."""
    record = dispatcher.records.get(task_id)
    if record is not None:
        return record.state
    return State.DONE if task_id in dispatcher.results._kept or task_id in dispatcher.stragglers else None


def claims_in(table: HazardTable) -> int:
    """How many claims a table has on blocks, abandoned ones included. Windows are not in it."""
    uses = [use for place in table._uses.values() for use in place.values()]
    return len({id(claim) for use in uses for claim in (use.writer, *use.readers) if claim is not None})


def is_idle(table: HazardTable) -> bool:
    """Whether no claim is left in a table, not even an abandoned one."""
    return not (table.nbytes or any(table._uses.values()))


def check_dispatcher(dispatcher: Dispatcher) -> None:
    """Assert that its books agree with each other and with the tasks. Linear in all that is held."""
    records, lanes, limits = dispatcher.records.values(), dispatcher.lanes, dispatcher.limits
    assert sum(record.state is State.QUEUED for record in records) == lanes.queued <= limits.server.max_queued_tasks
    for name, load in lanes.loads.items():
        mine = [record for record in records if record.lane is name]
        assert load.tasks == len(mine)
        assert load.nbytes == sum(record.nbytes for record in mine)
        assert load.running == sum(record.state in AT_WORK for record in mine)
        assert load.running <= limits.server.lane_depth
        assert (
            load.tasks <= 1 or load.nbytes <= limits.server.max_inflight_bytes
        )  # one alone may be larger than the bound
        assert all(r.claim is not None and r.claim.ready for r in load.ready if r.state is State.QUEUED)
    assert len(dispatcher.results) <= limits.server.max_results
    assert dispatcher.results.nbytes <= limits.server.max_result_bytes
    held = [argument_bytes(record.task) for record in records if record.task is not None]
    assert len(held) == len(records), "what is admitted has its arguments"
    assert all(record.task is None for record in dispatcher.stragglers.values()), "what is answered lets them go"
    assert sum(held) <= dispatcher.hazards.nbytes, "claims that have not left count, too"
    assert dispatcher.hazards.nbytes <= limits.server.max_queued_bytes or claims_in(dispatcher.hazards) == 1
    assert dispatcher.empty is (not records and not dispatcher.stragglers)
    assert not dispatcher.empty or is_idle(dispatcher.hazards)
    _check_blocks(dispatcher)


def blocks_to_write(dispatcher: Dispatcher, tier: str) -> set[int]:
    """The blocks of a tier ("device" or "host") that tasks at work may change now."""
    working = (record.task for record in dispatcher.records.values() if record.state in AT_WORK)
    footprints = (footprint_of(task, dispatcher.limits) for task in working if task is not None)
    return {block for footprint in footprints for block in footprint.writes.get(tier, ())}


def _check_blocks(dispatcher: Dispatcher) -> None:
    """No block that one task at work changes is touched by another: asked of the tasks, not of the hazard table."""
    working = [record for record in dispatcher.records.values() if record.state in AT_WORK]
    users: dict[tuple[str, int], str] = {}
    for writes in (True, False):
        for record in (*working, *dispatcher.stragglers.values()):
            assert record.claim is not None
            task_id, footprint = record.task_id, record.claim.footprint
            assert record.task is None or footprint == footprint_of(record.task, dispatcher.limits)
            for tier in ("device", "host"):
                for block in (footprint.writes if writes else footprint.reads).get(tier, ()):
                    use = tier, block
                    other = users.setdefault(use, task_id) if writes else users.get(use, task_id)
                    assert other == task_id, f"{task_id!r} and {other!r} are at work on {tier} block {block}"
